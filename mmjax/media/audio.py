# SPDX-License-Identifier: Apache-2.0
"""Sounds: files and arrays become float32 samples at a known rate (the `audio` extra)."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32

from mmjax.errors import MediaError
from mmjax.media.encoded import is_encoded, read_bytes
from mmjax.media.options import MediaOptions


@dataclass(frozen=True, eq=False)
class DecodedSound:
    """One channel of samples in [-1, 1], `rate` of them a second."""

    samples: Float32[np.ndarray, "samples"]
    rate: int


@dataclass(frozen=True, eq=False)
class SoundSource:
    """One sound, kept so that it can be decoded again and again, from any thread.

    Attributes:
      encoded: the file; None if the caller gave samples.
      sound: a private, read-only copy of the caller's samples; None if the caller gave a file.
    """

    encoded: bytes | None
    sound: DecodedSound | None
    item: int | None = None

    @classmethod
    def open(cls, value: object, options: MediaOptions, item: int | None = None) -> SoundSource:
        """Takes a path, URL, data URL, bytes or a pair (float array [samples] or [samples, channels], rate).

        Raises MediaError, naming `item`: nothing there, not samples, a rate that is not a positive integer.
        """
        if is_encoded(value):
            return cls(read_bytes(value, options, item), None, item)
        if not isinstance(value, tuple) or len(value) != 2:
            raise MediaError(
                f"expected a path, URL, bytes or a pair (samples, rate), got {type(value).__name__}", item=item
            )
        samples, rate = np.asarray(value[0]), value[1]
        if isinstance(rate, bool) or not isinstance(rate, int | np.integer) or rate < 1:
            raise MediaError(f"the rate must be a positive number of samples a second, got {rate!r}", item=item)
        if samples.dtype.kind != "f":
            raise MediaError(f"samples must be floats in [-1, 1], got {samples.dtype}", item=item)
        return cls(None, DecodedSound(_mono(samples.astype(np.float32), item), int(rate)), item)

    def decode(self, rate: int | None = None) -> DecodedSound:
        """The mean of all channels, at `rate` samples a second if that is given, else at the source's own rate."""
        sound = self._read() if self.sound is None else self.sound
        if rate is None or rate == sound.rate:
            return sound
        soxr = _extra("soxr", self.item)
        return DecodedSound(soxr.resample(sound.samples, sound.rate, rate).astype(np.float32, copy=False), rate)

    def _read(self) -> DecodedSound:
        soundfile = _extra("soundfile", self.item)
        try:
            samples, rate = soundfile.read(io.BytesIO(self.encoded), dtype="float32", always_2d=True)
        except (soundfile.SoundFileError, OSError, ValueError) as error:
            raise MediaError(f"the sound can't be decoded: {error}", item=self.item) from error
        return DecodedSound(_mono(samples, self.item), int(rate))


def _mono(samples: np.ndarray, item: int | None) -> Float32[np.ndarray, "samples"]:
    if samples.ndim not in (1, 2) or samples.size == 0:
        raise MediaError(
            f"samples are [samples] or [samples, channels] and not empty, got {list(samples.shape)}", item=item
        )
    if not np.isfinite(samples).all():
        raise MediaError("samples must be finite", item=item)
    mono = samples if samples.ndim == 1 else samples.mean(axis=1, dtype=np.float32)
    mono = np.array(mono, np.float32)
    mono.flags.writeable = False
    return mono


def _extra(name: str, item: int | None) -> Any:
    try:
        return __import__(name)
    except (ImportError, OSError) as error:  # OSError: the C library behind it is missing
        raise MediaError(f"sounds need {name}: pip install 'mmjax[audio]'", item=item) from error
