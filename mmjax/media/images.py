# SPDX-License-Identifier: Apache-2.0
"""Pictures: files, Pillow images and arrays become uint8 RGB, upright and opaque."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import ExifTags, Image, UnidentifiedImageError

from mmjax.errors import MediaError
from mmjax.media.encoded import is_encoded, read_bytes
from mmjax.media.options import MediaOptions

# What each EXIF orientation asks for; any other value leaves the picture as it is.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_LYING = (5, 6, 7, 8)  # orientations that swap height and width
# Chunks of a PNG that may hold its orientation, before the pixels or behind them.
_PNG_ORIENTATION = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")


@dataclass(frozen=True, eq=False)
class ImageSource:
    """One picture, kept so that it can be decoded again and again, from any thread.

    Attributes:
      size: (height, width) in pixels after orientation, from the header alone.
      encoded: the file; None if the caller gave pixels.
      pixels: a private uint8 RGB copy of the caller's pixels; None if the caller gave a file.
    """

    size: tuple[int, int]
    encoded: bytes | None
    pixels: UInt8[np.ndarray, "height width 3"] | None
    options: MediaOptions
    item: int | None = None

    @classmethod
    def open(
        cls, value: object, options: MediaOptions, item: int | None = None, *, channels_first: bool = False
    ) -> ImageSource:
        """Takes a path, URL, data URL, bytes, Pillow image or uint8 array; of an animation, the first frame.

        Arrays are height x width x channels (1, 2, 3 or 4; the last one of 2 or 4 is opacity) or height x width,
        unless `channels_first` says otherwise: axes are never guessed. Pixels are copied, files only looked into.
        Raises MediaError, naming `item`: nothing there, not a picture, too many pixels.
        """
        if is_encoded(value):
            encoded = read_bytes(value, options, item)
            image = open_image_file(encoded, options, item)
            return cls(upright_size(image, encoded, item), encoded, None, options, item)
        if isinstance(value, Image.Image):
            options.check_size(value.height, value.width, item)
            pixels = decode_image(value, options, item)
        else:
            pixels = rgb_array(value, options, item, channels_first=channels_first)
        return cls(pixels.shape[:2], None, pixels, options, item)

    def decode(self) -> UInt8[np.ndarray, "height width 3"]:
        """The pixels, read-only. Raises MediaError if the file is broken."""
        if self.pixels is not None:
            return self.pixels
        image = open_image_file(self.encoded, self.options, self.item)
        if image.format == "PNG":
            # Pillow skips the checksums of pixel data when it decodes. An image is of no use after `verify`.
            _decoding(image.verify, self.item)
            image = open_image_file(self.encoded, self.options, self.item)
        return decode_image(image, self.options, self.item)


def open_image_file(encoded: bytes, options: MediaOptions, item: int | None) -> Image.Image:
    """A Pillow image whose size was checked, nothing decoded yet."""
    try:
        image = Image.open(io.BytesIO(encoded))
    except UnidentifiedImageError as error:
        raise MediaError("not a picture in a known format", item=item) from error
    except Exception as error:
        raise _undecodable(error, item) from error
    options.check_size(image.height, image.width, item)
    return image


def upright_size(image: Image.Image, encoded: bytes, item: int | None) -> tuple[int, int]:
    """(height, width) after orientation of the picture in the file `encoded`, which `image` has open."""
    lying = False
    # Asked for its orientation, a PNG may decode all pixels to look behind them.
    if image.format != "PNG" or any(mark in encoded for mark in _PNG_ORIENTATION):
        lying = _decoding(lambda: _orientation(image), item) in _LYING
    return (image.width, image.height) if lying else (image.height, image.width)


def decode_image(image: Image.Image, options: MediaOptions, item: int | None) -> UInt8[np.ndarray, "height width 3"]:
    """Pixels of the current frame of a Pillow image, upright and opaque, read-only."""
    pixels = _decoding(lambda: np.asarray(to_rgb(_upright(image), options.image_background)), item)
    return _read_only(pixels)


def rgb_array(
    array: object, options: MediaOptions, item: int | None = None, *, channels_first: bool = False
) -> UInt8[np.ndarray, "height width 3"]:
    """A private, read-only RGB copy of a uint8 array. Raises MediaError for other types and shapes."""
    pixels = array if isinstance(array, np.ndarray) or not hasattr(array, "__array__") else np.asarray(array)
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8:
        found = f"{pixels.dtype} array" if isinstance(pixels, np.ndarray) else type(array).__name__
        raise MediaError(f"expected a path, URL, bytes, Pillow image or uint8 array, got {found}", item=item)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    elif channels_first and pixels.ndim == 3:
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 2, 3, 4) or 0 in pixels.shape:
        raise MediaError(
            f"a picture is height x width x 1, 2, 3 or 4 channels, got {' x '.join(map(str, pixels.shape))}"
            f"{' as height x width x channels' if channels_first else ''}",
            item=item,
        )
    options.check_size(*pixels.shape[:2], item)
    channels = pixels.shape[2]
    if channels in (2, 4):
        image = Image.fromarray(np.ascontiguousarray(pixels), {2: "LA", 4: "RGBA"}[channels])
        pixels = np.asarray(to_rgb(image, options.image_background))
    return _read_only(np.array(np.broadcast_to(pixels, (*pixels.shape[:2], 3)), order="C"))


def to_rgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """Any mode to RGB: transparency over `background`, grey repeated, 16-bit grey cut to its upper 8 bits.

    Raises ValueError for modes whose range of values is unknown.
    """
    if image.mode.startswith("I;16"):
        values = np.asarray(image).astype(np.uint16)
        image, clear = Image.fromarray((values >> 8).astype(np.uint8)), image.info.get("transparency")
        if clear is not None:
            image.putalpha(Image.fromarray(np.where(values == clear, 0, 255).astype(np.uint8)))
    elif image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} have no fixed range; convert them to 8 bits")
    if image.has_transparency_data:
        if image.mode == "La":
            image = image.convert("LA")
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (*background, 255)), image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _upright(image: Image.Image) -> Image.Image:
    """The picture turned and mirrored as its EXIF orientation asks."""
    image.load()
    turn = _UPRIGHT.get(_orientation(image))
    return image if turn is None else image.transpose(turn)


def _orientation(image: Image.Image) -> int:
    return image.getexif().get(ExifTags.Base.Orientation, 1)


def _decoding(step: Callable[[], Any], item: int | None) -> Any:
    try:
        return step()
    except Exception as error:
        raise _undecodable(error, item) from error


def _undecodable(error: Exception, item: int | None) -> MediaError:
    """Pillow's plug-ins raise almost anything on broken files, all of it the file's fault."""
    return MediaError(f"the picture can't be decoded: {error or type(error).__name__}", item=item)


def _read_only(pixels: np.ndarray) -> np.ndarray:
    pixels.flags.writeable = False
    return pixels
