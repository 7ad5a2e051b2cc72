# SPDX-License-Identifier: Apache-2.0
"""Claim: sounds become one channel of float32 samples at the rate that is asked for."""

from __future__ import annotations

import io

import numpy as np
import pytest
from tolerances import RESAMPLED, ROUNDING

from mmjax.errors import MediaError
from mmjax.inputs.items import Modality
from mmjax.media import MediaOptions, SoundSource, open_media

OPTIONS = MediaOptions()
TONE = np.sin(np.arange(4800) * 2 * np.pi * 440 / 48000).astype(np.float32) / 2


def wav(samples: np.ndarray, rate: int = 48000) -> bytes:
    soundfile = pytest.importorskip("soundfile", reason="needs soundfile, the audio extra")
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="FLOAT")
    return file.getvalue()


def test_file():
    sound = open_media(Modality.AUDIO, wav(TONE), OPTIONS).decode()
    assert sound.rate == 48000
    np.testing.assert_array_equal(sound.samples, TONE)


def test_channels_are_averaged():
    stereo = np.stack([TONE, -TONE / 2], axis=1)
    np.testing.assert_allclose(SoundSource.open(wav(stereo), OPTIONS).decode().samples, TONE / 4, atol=ROUNDING)
    np.testing.assert_allclose(SoundSource.open((stereo, 48000), OPTIONS).decode().samples, TONE / 4, atol=ROUNDING)


def test_samples_are_copied():
    samples = TONE.copy()
    source = SoundSource.open((samples, 48000), OPTIONS)
    samples[:] = 0
    np.testing.assert_array_equal(source.decode().samples, TONE)


def test_resampling():
    pytest.importorskip("soxr", reason="needs soxr, the audio extra")
    sound = SoundSource.open((TONE, 48000), OPTIONS).decode(16000)
    assert (sound.rate, sound.samples.dtype, sound.samples.size) == (16000, np.float32, 1600)
    expected = np.sin(np.arange(1600) * 2 * np.pi * 440 / 16000) / 2
    np.testing.assert_allclose(sound.samples[200:-200], expected[200:-200], atol=RESAMPLED)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((TONE, 0), "rate must be a positive number"),
        ((TONE, 16000.0), "rate must be a positive number"),
        (((TONE * 9).astype(np.int16), 16000), "samples must be floats"),
        ((TONE[:0], 16000), "not empty"),
        ((TONE[None, None], 16000), r"\[1, 1, 4800\]"),
        ((TONE * np.nan, 16000), "finite"),
        (TONE, "pair"),
    ],
    ids=["zero", "float", "ints", "empty", "axes", "nan", "bare"],
)
def test_unusable_samples(value, message):
    with pytest.raises(MediaError, match=f"item 3: .*{message}"):
        SoundSource.open(value, OPTIONS, 3)


def test_broken_file():
    pytest.importorskip("soundfile", reason="needs soundfile, the audio extra")
    with pytest.raises(MediaError, match="item 1: the sound can't be decoded"):
        SoundSource.open(b"RIFF nonsense", OPTIONS, 1).decode()
