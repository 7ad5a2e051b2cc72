# SPDX-License-Identifier: Apache-2.0
"""Claim: any way to hand over a picture gives upright, opaque RGB bytes; a bad one gives an error with its index."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image
from tolerances import JPEG_CMYK_LEVELS, JPEG_LEVELS

from mmjax.errors import MediaError
from mmjax.media import ImageSource, MediaOptions

OPTIONS = MediaOptions()


def encode(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def decode(value, options: MediaOptions = OPTIONS, **kwargs) -> np.ndarray:
    source = ImageSource.open(value, options, **kwargs)
    pixels = source.decode()
    assert pixels.dtype == np.uint8
    assert pixels.shape == (*source.size, 3)  # the header told the truth
    return pixels


def picture(height: int = 8, width: int = 8) -> np.ndarray:
    """Few colours, so that a palette holds them all."""
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows % 4 * 80, columns % 4 * 80, (rows + columns) % 2 * 255], axis=-1).astype(np.uint8)


class TestDoors:
    def test_every_door_gives_the_same_pixels(self, tmp_path):
        rgb = picture(5, 7)
        data = encode(Image.fromarray(rgb))
        path = tmp_path / "a picture.png"
        path.write_bytes(data)
        url = "data:image/png;base64," + base64.b64encode(data).decode()
        doors = [
            path,
            str(path),
            path.as_uri(),
            url,
            data,
            bytearray(data),
            memoryview(data),
            Image.fromarray(rgb),
            rgb,
        ]
        for door in doors:
            np.testing.assert_array_equal(decode(door), rgb)

    def test_sources_keep_private_copies(self, tmp_path):
        rgb = picture()
        path = tmp_path / "a.png"
        path.write_bytes(encode(Image.fromarray(rgb)))
        pil, array, buffer = Image.fromarray(rgb), rgb.copy(), bytearray(path.read_bytes())
        sources = [ImageSource.open(value, OPTIONS) for value in (pil, array, buffer, path)]
        pil.putpixel((0, 0), (1, 2, 3))
        array[:] = 9
        buffer[:] = bytes(len(buffer))
        path.unlink()
        for source in sources:
            for _ in range(2):  # decoding again is what a source is for
                np.testing.assert_array_equal(source.decode(), rgb)

    def test_many_threads_decode_one_source(self):
        source = ImageSource.open(encode(Image.fromarray(picture(64, 64))), OPTIONS)
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda _: source.decode(), range(16)))
        assert all((pixels == picture(64, 64)).all() for pixels in results)

    def test_animation_as_a_picture_is_its_first_frame(self):
        frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
        data = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
        assert decode(data)[0, 0].tolist() == [255, 0, 0]


class TestOrientation:
    @staticmethod
    def stored() -> np.ndarray:
        pixels = np.zeros((16, 24, 3), np.uint8)
        pixels[:8, :8] = (255, 0, 0)
        return pixels

    @pytest.mark.parametrize(
        ("orientation", "turn"),
        [
            (0, lambda a: a),
            (1, lambda a: a),
            (2, lambda a: a[:, ::-1]),
            (3, lambda a: a[::-1, ::-1]),
            (4, lambda a: a[::-1]),
            (5, lambda a: a.transpose(1, 0, 2)),
            (6, lambda a: np.rot90(a, -1)),
            (7, lambda a: a[::-1, ::-1].transpose(1, 0, 2)),
            (8, lambda a: np.rot90(a, 1)),
            (9, lambda a: a),
        ],
        ids=lambda value: str(value) if isinstance(value, int) else "",
    )
    def test_all_values(self, orientation, turn):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = encode(Image.fromarray(self.stored()), "JPEG", quality=95, subsampling=0, exif=exif)
        np.testing.assert_allclose(decode(data).astype(int), turn(self.stored()), atol=JPEG_LEVELS)
        np.testing.assert_array_equal(decode(Image.open(io.BytesIO(data))), decode(data))

    def test_portrait_photo(self):
        exif = Image.Exif()
        exif[0x0112] = 6
        data = encode(Image.fromarray(self.stored()), "JPEG", quality=95, subsampling=0, exif=exif)
        source = ImageSource.open(data, OPTIONS)
        pixels = source.decode()
        assert source.size == pixels.shape[:2] == (24, 16)
        assert pixels[4, 12, 0] > 250
        assert pixels[4, 3].max() < 5

    def test_png_that_tells_it_behind_the_pixels(self):
        exif = Image.Exif()
        exif[0x0112] = 6
        data = encode(Image.fromarray(self.stored()), exif=exif)
        start = data.index(b"eXIf") - 4
        end = start + 12 + struct.unpack(">I", data[start : start + 4])[0]
        tail = data.index(b"IEND") - 4
        late = data[:start] + data[end:tail] + data[start:end] + data[tail:]
        assert ImageSource.open(late, OPTIONS).size == (24, 16)
        np.testing.assert_array_equal(decode(late), np.rot90(self.stored(), -1))


class TestColourModes:
    def test_lossless_modes_equal_rgb(self):
        rgb = picture()
        palette = Image.fromarray(rgb).quantize(256, dither=Image.Dither.NONE)
        np.testing.assert_array_equal(decode(encode(palette)), rgb)
        opaque = Image.fromarray(rgb).convert("RGBA")
        np.testing.assert_array_equal(decode(encode(opaque)), rgb)

    def test_grey_is_repeated(self):
        grey = picture()[..., 0]
        expected = np.repeat(grey[..., None], 3, axis=2)
        for image in (Image.fromarray(grey), Image.fromarray(grey).convert("LA")):
            np.testing.assert_array_equal(decode(encode(image)), expected)
            np.testing.assert_array_equal(decode(image), expected)
        for array in (grey, grey[..., None]):
            np.testing.assert_array_equal(decode(array), expected)

    def test_one_bit(self):
        bits = picture()[..., 2] > 0
        expected = np.repeat(bits[..., None] * np.uint8(255), 3, axis=2)
        np.testing.assert_array_equal(decode(encode(Image.fromarray(bits))), expected)

    def test_sixteen_bit_grey_keeps_its_upper_bits(self):
        deep = (picture()[..., 0].astype(np.uint16) << 8) + 77
        expected = np.repeat(picture()[..., :1], 3, axis=2)
        np.testing.assert_array_equal(decode(encode(Image.fromarray(deep))), expected)

    def test_values_without_a_range_are_refused(self):
        floats = Image.fromarray(np.zeros((4, 4), np.float32))
        with pytest.raises(MediaError, match="mode F have no fixed range"):
            decode(encode(floats, "TIFF"))

    def test_cmyk(self):
        jpeg = encode(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=95)
        np.testing.assert_allclose(decode(jpeg).astype(int), np.full((8, 8, 3), (255, 0, 0)), atol=JPEG_CMYK_LEVELS)

    @pytest.mark.parametrize(("background", "expected"), [((255, 255, 255), 255), ((0, 0, 0), 0), ((9, 9, 9), 9)])
    def test_transparency_shows_the_background(self, background, expected):
        options = MediaOptions(image_background=background)
        clear = np.zeros((4, 4, 4), np.uint8)
        clear[0, 0] = (10, 20, 30, 255)
        rgba = Image.fromarray(clear)
        palette = Image.new("P", (4, 4), 1)
        palette.putpalette([10, 20, 30, 200, 100, 0])
        palette.putpixel((0, 0), 0)
        for value in (
            encode(rgba),
            rgba,
            clear,
            encode(palette, transparency=1),
            encode(palette, "GIF", transparency=1),
        ):
            pixels = decode(value, options)
            assert pixels[0, 0].tolist() == [10, 20, 30]
            assert (pixels[1:] == expected).all()

    def test_half_transparent_grey(self):
        array = np.array([[[0, 128]]], np.uint8)
        assert decode(array)[0, 0].tolist() == [127, 127, 127]


class TestRawArrays:
    @pytest.mark.parametrize("shape", [(1, 1, 3), (3, 22, 3), (22, 3, 3), (3, 3, 3), (1, 3, 3), (499, 1, 3)], ids=str)
    def test_channels_come_last_by_contract(self, shape):
        array = np.arange(np.prod(shape), dtype=np.uint32).astype(np.uint8).reshape(shape)
        np.testing.assert_array_equal(decode(array), array)
        np.testing.assert_array_equal(decode(array.transpose(2, 0, 1), channels_first=True), array)

    def test_memory_layout_does_not_matter(self):
        rgb = picture(6, 10)
        for array in (np.asfortranarray(rgb), np.repeat(rgb, 2, axis=1)[:, ::2]):
            np.testing.assert_array_equal(decode(array), rgb)

    @pytest.mark.parametrize(
        ("array", "message"),
        [
            (np.zeros((4, 4, 3), np.float32), "float32 array"),
            (np.zeros((4, 4, 3), np.int8), "int8 array"),
            (np.zeros((4, 4, 5), np.uint8), "4 x 4 x 5"),
            (np.zeros((3, 4, 9), np.uint8), "3 x 4 x 9"),
            (np.zeros((2, 4, 4, 3), np.uint8), "2 x 4 x 4 x 3"),
            (np.zeros((0, 4, 3), np.uint8), "0 x 4 x 3"),
            (3, "int"),
            (None, "NoneType"),
            ([], "list"),
        ],
        ids=lambda value: "" if isinstance(value, str) else str(getattr(value, "shape", value)),
    )
    def test_everything_else_is_refused(self, array, message):
        with pytest.raises(MediaError, match=f"item 2: .*{message}"):
            ImageSource.open(array, OPTIONS, 2)


def _broken_png() -> bytes:
    data = bytearray(encode(Image.fromarray(picture(32, 32))))
    chunk = data.index(b"IDAT")
    length = struct.unpack(">I", data[chunk - 4 : chunk])[0]
    data[chunk + 4 + length] ^= 1  # a checksum that Pillow's decoder does not look at
    return bytes(data)


class TestBrokenFiles:
    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (encode(Image.fromarray(picture(64, 64)), "JPEG")[:-300], "truncated"),
            (b"", "empty"),
            (b"<html><body>404</body></html>", "not a picture"),
            ("data:image/png;base64,@@@@", "base64"),
            ("data:image/png,plain", "must be base64"),
            ("data:image/png;base64,", "empty"),
            (_broken_png(), "checksum"),
            ("/nowhere/cat.jpg", "can't be read"),
            ("/tmp", "can't be read"),
            ("bad\0name", "can't be read"),
            ("ftp://host/cat.jpg", "scheme ftp"),
            ("file://host/cat.jpg", "host"),
        ],
        ids=[
            "cut",
            "empty",
            "html",
            "base64",
            "plain",
            "no data",
            "sum",
            "missing",
            "folder",
            "nul",
            "scheme",
            "remote",
        ],
    )
    def test_error_names_the_item(self, value, message):
        """A cut JPEG opens well and fails only when it is decoded."""
        with pytest.raises(MediaError, match=f"item 5: .*{message}") as caught:
            ImageSource.open(value, OPTIONS, 5).decode()
        assert caught.value.item == 5

    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"])
    def test_files_cut_anywhere_never_raise_anything_else(self, kind):
        data = encode(Image.fromarray(picture(16, 16)), kind)
        ends = range(1, len(data), max(1, len(data) // 60))
        refused = 0
        for end in ends:
            try:
                ImageSource.open(data[:end], OPTIONS, 0).decode()
            except MediaError:
                refused += 1
        assert refused > len(ends) / 2


class TestLimits:
    def test_size_is_checked_before_decoding(self):
        """A PNG that claims 20,000 x 20,000 pixels in a few bytes."""
        header = struct.pack(">IIBBBBB", 20000, 20000, 8, 2, 0, 0, 0)
        chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")]
        bomb = b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
            for kind, body in chunks
        )
        with pytest.raises(MediaError, match="item 1"):
            ImageSource.open(bomb, OPTIONS, 1)

    @pytest.mark.parametrize("door", [lambda a: encode(Image.fromarray(a)), Image.fromarray, lambda a: a])
    def test_both_numbers_are_named(self, door):
        options = MediaOptions(max_image_pixels=63)
        with pytest.raises(MediaError, match=r"8 x 8 = 64 pixels, more than max_image_pixels=63"):
            ImageSource.open(door(picture()), options)

    def test_encoded_size(self, tmp_path):
        options = MediaOptions(max_bytes=50)
        data = encode(Image.fromarray(picture()))
        path = tmp_path / "a.png"
        path.write_bytes(data)
        for value in (data, path):
            with pytest.raises(MediaError, match="more than the limit of 50"):
                ImageSource.open(value, options)

    def test_local_files_can_be_shut_off(self, tmp_path):
        path = tmp_path / "a.png"
        path.write_bytes(encode(Image.fromarray(picture())))
        options = MediaOptions(allowed_local_media=False)
        for value in (path, str(path), path.as_uri()):
            with pytest.raises(MediaError, match="local files are not allowed"):
                ImageSource.open(value, options)
