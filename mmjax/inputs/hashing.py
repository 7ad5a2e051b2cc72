# SPDX-License-Identifier: Apache-2.0
"""Content digests of items: a canonical, injective byte form of values, hashed with BLAKE3.

The byte form and the digests are those of TensorRT-LLM, so both systems give one picture one name. Everything has a
type tag and a length, so that no two different values share a form. Data is streamed; large arrays are not copied.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from blake3 import blake3
from jaxtyping import Num, UInt8, UInt32
from PIL import Image

from mmjax.inputs.items import VideoMetadata

ITEM_TAG = b"trtllm.mm.hash.v1"
SALT_CONTEXT = "mmjax tenant salt of item digests, version 1"
STRIP_PIXELS = 1 << 16  # pixels converted to RGBA at a time: the only copy an image needs
CHANNELS = 3
OPAQUE = np.uint32(0xFF000000)  # the highest byte of a little-endian word is the alpha of its pixel
VIDEO_KEYS = ("frames_indices", "fps", "duration", "total_num_frames")
INT_WORDS = 8  # a 256-bit digest as signed 32-bit words

Write = Callable[[Any], object]


@dataclass(frozen=True, eq=False)
class ImageData:
    """A still as the model sees it: RGB after orientation and compositing. Hashes like the equal PIL image."""

    pixels: UInt8[np.ndarray, "H W 3"]


@dataclass(frozen=True, eq=False)
class AudioData:
    """A sound: samples and their rate in Hz."""

    samples: Num[np.ndarray, "..."]
    sample_rate: int


@dataclass(frozen=True, eq=False)
class VideoData:
    """A clip: which frames of which source, and their pixels or the digest of the source file.

    With `source_digest` (64 hex characters) the frames themselves are not read.
    """

    frames: Sequence[Any] | UInt8[np.ndarray, "F H W 3"]
    metadata: VideoMetadata | Mapping[str, Any]
    source_digest: str | None = None
    audio: AudioData | None = None

    def key_metadata(self) -> dict[str, Any]:
        """The metadata that is part of the digest; unknown values are left out."""
        if isinstance(self.metadata, VideoMetadata):
            meta = self.metadata
            values = {
                "frames_indices": list(meta.frames_indices),
                "fps": None if meta.fps is None else float(meta.fps),
                "duration": None if meta.duration is None else float(meta.duration),
                "total_num_frames": meta.total_num_frames,
            }
            return {key: value for key, value in values.items() if value is not None}
        return {key: self.metadata[key] for key in VIDEO_KEYS if key in self.metadata}


def canonical_bytes(value: Any) -> bytes:
    """The canonical form of a value; ValueError for what has none."""
    out = bytearray()
    _write_value(out.extend, value)
    return bytes(out)


def item_digest(item: Any, uuid: str | None = None, salt: str | None = None) -> str:
    """BLAKE3-256 of an item, in hex.

    Args:
      item: ImageData, VideoData, AudioData, or any value with a canonical form (such as an array of embedding rows).
      uuid: a caller's name for the item; it separates equal contents, the content still counts.
      salt: a tenant's secret; digests under different salts never meet. None is TensorRT-LLM's digest.

    Raises:
      ValueError: the item has no canonical form.
    """
    hasher = blake3() if salt is None else blake3(key=derive_key(salt, SALT_CONTEXT))
    write = hasher.update
    if uuid is not None:
        write(b"<uuid>" + uuid.encode() + b"</uuid><content>")
    write(ITEM_TAG)
    _write_item(write, item)
    if uuid is not None:
        write(b"</content>")
    return hasher.hexdigest()


def derive_key(salt: str, context: str) -> bytes:
    """32 bytes for one use of a tenant's salt."""
    return blake3(salt.encode(), derive_key_context=context).digest()


def mm_processor_kwargs_hash(kwargs: Mapping[str, Any] | None) -> str | None:
    """BLAKE3 hex of processor options, whatever their order; None if a value has no canonical form."""
    try:
        return blake3(canonical_bytes(dict(kwargs or {}))).hexdigest()
    except ValueError:
        return None


def hexdigest_to_int32(digest: str) -> list[int]:
    """A 64-character hex digest as 8 signed 32-bit integers."""
    if len(digest) != 8 * INT_WORDS:
        raise ValueError(f"a digest has {8 * INT_WORDS} hex characters, got {len(digest)}")
    return list(struct.unpack(f">{INT_WORDS}i", bytes.fromhex(digest)))


def int32_to_hexdigest(words: Sequence[int]) -> str:
    """Inverse of `hexdigest_to_int32`."""
    return int32_to_bytes(words).hex()


def int32_to_bytes(words: Sequence[int]) -> bytes:
    """8 signed 32-bit integers as the 32 bytes of the digest; ValueError for anything else."""
    if isinstance(words, str | bytes) or len(words) != INT_WORDS:
        raise ValueError(f"a hash has {INT_WORDS} int32 words, got {words!r}")
    try:
        return struct.pack(f">{INT_WORDS}i", *words)
    except struct.error as error:
        raise ValueError(f"hash words must be signed 32-bit integers: {error}") from error


def _write_item(write: Write, item: Any) -> None:
    if isinstance(item, AudioData):
        _write_audio(write, item)
    elif isinstance(item, VideoData):
        write(b"<video>")
        _write_value(write, item.key_metadata())
        if item.source_digest is not None:
            write(b"<raw_bytes>" + item.source_digest.encode())
        else:
            for frame in item.frames:
                write(b"<frame>")
                _write_value(write, frame)
        if item.audio is not None:
            _write_audio(write, item.audio)
    else:
        _write_value(write, item)


def _write_audio(write: Write, audio: AudioData) -> None:
    write(b"<audio>")
    _write_value(write, (audio.samples, audio.sample_rate))


def _write_prefixed(write: Write, tag: bytes, raw: bytes) -> None:
    write(tag + struct.pack(">Q", len(raw)))
    write(raw)


def _write_value(write: Write, value: Any) -> None:
    """Feeds the canonical form of `value` to `write`, piece by piece."""
    if isinstance(value, np.generic):
        if value.dtype.kind not in "biufUS":
            raise ValueError(f"a scalar of {value.dtype} has no canonical byte form")
        value = value.item()
    if value is None:
        write(b"\x00")  # refused by the original; here an option left unset can be part of a key
    elif isinstance(value, bool):
        write(b"\x05\x01" if value else b"\x05\x00")
    elif isinstance(value, int):
        size = (value.bit_length() + 8) // 8
        write(b"\x03" + bytes([size]) + value.to_bytes(size, "big", signed=True))
    elif isinstance(value, float):
        write(b"\x04" + struct.pack(">d", value))
    elif isinstance(value, str):
        _write_prefixed(write, b"\x01", value.encode())
    elif isinstance(value, bytes):
        _write_prefixed(write, b"\x02", value)
    elif isinstance(value, ImageData):
        _write_image(write, "RGB", value.pixels.shape[1::-1], _pixel_strips(value.pixels))
    elif isinstance(value, Image.Image):
        _write_image(write, value.mode, value.size, _image_strips(value))
    elif isinstance(value, list | tuple):
        write(b"\x20" + struct.pack(">Q", len(value)))
        for entry in value:
            _write_value(write, entry)
    elif isinstance(value, Mapping):
        _write_mapping(write, value)
    elif hasattr(value, "__array__"):
        _write_array(write, _as_numpy(value))
    else:
        raise ValueError(f"{type(value).__name__} has no canonical byte form")


def _write_mapping(write: Write, value: Mapping[Any, Any]) -> None:
    try:
        keys = sorted(value)
    except TypeError as error:
        raise ValueError(f"keys of a mapping must be sortable: {error}") from error
    write(b"\x22" + struct.pack(">Q", len(keys)))
    for key in keys:
        _write_value(write, key)
        _write_value(write, value[key])


def _as_numpy(value: Any) -> np.ndarray:
    """Any array (numpy, torch, jax) as a native-order numpy array."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{type(value).__name__} can't be read as an array: {error}") from error
    if array.dtype.hasobject or array.dtype.fields is not None:
        raise ValueError(f"arrays of {array.dtype} have no canonical byte form")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _write_array(write: Write, array: Num[np.ndarray, "..."]) -> None:
    # Types that numpy does not know (bfloat16) all print as raw bytes of a size; their names tell them apart.
    name = array.dtype.name if array.dtype.kind == "V" else array.dtype.str
    _write_prefixed(write, b"\x11", name.encode())
    write(struct.pack(f">B{array.ndim}Q", array.ndim, *array.shape))
    write(struct.pack(">Q", array.nbytes))
    if array.flags.c_contiguous:
        write(memoryview(array.reshape(-1).view(np.uint8)))
    else:
        for part in array:
            write(memoryview(np.ascontiguousarray(part).reshape(-1).view(np.uint8)))


def _write_image(write: Write, mode: str, size: tuple[int, int], strips: Iterator[Any]) -> None:
    """An image of `mode` and (width, height), its pixels as RGBA bytes."""
    width, height = size
    _write_prefixed(write, b"\x10", mode.encode())
    write(struct.pack(">IIQ", width, height, 4 * width * height))
    for strip in strips:
        write(strip)


def _strip_rows(width: int) -> int:
    return max(1, STRIP_PIXELS // max(1, width))


def _pixel_strips(pixels: UInt8[np.ndarray, "H W 3"]) -> Iterator[memoryview]:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(f"an image is uint8 [height, width, 3], got {pixels.dtype} {list(pixels.shape)}")
    height, width, _ = pixels.shape
    rows = _strip_rows(width)
    words = np.empty(min(rows, height) * width, "<u4")
    for top in range(0, height, rows):
        strip = np.ascontiguousarray(pixels[top : top + rows])
        yield memoryview(_opaque_words(strip, words[: strip.shape[0] * width]).view(np.uint8))


def _opaque_words(strip: UInt8[np.ndarray, "H W 3"], out: UInt32[np.ndarray, "pixels"]) -> UInt32[np.ndarray, "pixels"]:
    """The pixels as words of red, green, blue and 255, read as overlapping words of four bytes, three bytes apart."""
    overlapping = np.ndarray(out.size - 1, "<u4", strip, strides=(CHANNELS,))  # the last pixel has no fourth byte
    np.bitwise_or(overlapping, OPAQUE, out=out[:-1])
    out[-1] = int.from_bytes(strip[-1, -1].tobytes() + b"\xff", "little")
    return out


def _image_strips(image: Image.Image) -> Iterator[bytes]:
    width, height = image.size
    rows = _strip_rows(width)
    for top in range(0, height, rows):
        yield image.crop((0, top, width, min(height, top + rows))).convert("RGBA").tobytes()
