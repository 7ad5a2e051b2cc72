# SPDX-License-Identifier: Apache-2.0
"""Claim: clips of any origin give RGB frames, and what is there wins over what is claimed."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image
from tolerances import CLIP_EDGE_LEVELS, CLIP_LEVELS

from mmjax.errors import MediaError
from mmjax.inputs.items import VideoMetadata
from mmjax.media import ClipSource, MediaOptions

OPTIONS = MediaOptions()


def grey_frames(count: int, height: int = 12, width: int = 16) -> np.ndarray:
    return np.repeat(np.arange(count, dtype=np.uint8) * 15, height * width * 3).reshape(count, height, width, 3)


def animation(kind: str, frames: np.ndarray, duration: int = 40) -> bytes:
    pictures = [Image.fromarray(frame) for frame in frames]
    file = io.BytesIO()
    extra = {"lossless": True} if kind == "WEBP" else {}
    pictures[0].save(file, kind, save_all=True, append_images=pictures[1:], duration=duration, **extra)
    return file.getvalue()


def video_file(frames: np.ndarray, fps: int = 10, container: str = "mp4") -> bytes:
    av = pytest.importorskip("av", reason="needs PyAV, the video extra")
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream("mpeg4", rate=fps)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt, stream.bit_rate = "yuv420p", 4_000_000
        for frame in frames:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        output.mux(stream.encode())
    return file.getvalue()


class TestFrames:
    def test_arrays_and_lists_agree(self, tmp_path):
        frames = grey_frames(3)
        path = tmp_path / "frame.png"
        Image.fromarray(frames[2]).save(path)
        mixed = [frames[0], Image.fromarray(frames[1]), path]
        for value in (frames, list(frames), mixed, (frames, {"fps": 5})):
            clip = ClipSource.open(value, OPTIONS).decode()
            np.testing.assert_array_equal(clip.frames, frames)
            assert clip.metadata.frames_indices == (0, 1, 2)
        first = ClipSource.open(frames.transpose(0, 3, 1, 2), OPTIONS, channels_first=True)
        np.testing.assert_array_equal(first.decode().frames, frames)

    def test_copies_are_private(self):
        frames = grey_frames(2)
        source = ClipSource.open(frames, OPTIONS)
        frames[:] = 99
        np.testing.assert_array_equal(source.decode().frames, grey_frames(2))

    @pytest.mark.parametrize(
        ("metadata", "expected"),
        [
            (None, VideoMetadata(7, None, tuple(range(7)))),
            ({"fps": None}, VideoMetadata(7, None, tuple(range(7)))),
            ({"fps": 14}, VideoMetadata(7, 14.0, tuple(range(7)), 0.5)),
            ({"fps": 14, "total_num_frames": 100}, VideoMetadata(7, 14.0, tuple(range(7)), 0.5)),
            (
                {"fps": 25, "total_num_frames": 100, "frames_indices": list(range(0, 70, 10))},
                VideoMetadata(100, 25.0, tuple(range(0, 70, 10)), 4.0),
            ),
            ({"fps": 7, "frames_indices": range(7)}, VideoMetadata(7, 7.0, tuple(range(7)), 1.0)),
        ],
        ids=str,
    )
    def test_metadata(self, metadata, expected):
        """Of 100 frames claimed, the 7 that are there count, unless their indices say that they are a choice."""
        source = ClipSource.open(grey_frames(7), OPTIONS, metadata=metadata)
        assert source.metadata == expected
        claimed = metadata and metadata.get("total_num_frames") == 100 and "frames_indices" not in metadata
        assert bool(source.warnings) == bool(claimed)

    @pytest.mark.parametrize(
        ("metadata", "message"),
        [
            ({"fps": 0}, "fps must be a positive number"),
            ({"fps": -1}, "fps must be a positive number"),
            ({"fps": float("nan")}, "fps must be a positive number"),
            ({"fps": float("inf")}, "fps must be a positive number"),
            ({"fps": "fast"}, "fps must be a positive number"),
            ({"fps": True}, "fps must be a positive number"),
            ({"total_num_frames": 0}, "total_num_frames must be a positive integer"),
            ({"frames_indices": []}, "frames_indices names 0 frames; the video has 3"),
            ({"frames_indices": [0, 1]}, "frames_indices names 2 frames; the video has 3"),
            ({"frames_indices": [0, 1, 9], "total_num_frames": 5}, "must ascend within 0..4"),
            ({"frames_indices": [2, 1, 0]}, "must ascend"),
        ],
        ids=str,
    )
    def test_unusable_metadata(self, metadata, message):
        with pytest.raises(MediaError, match=f"item 2: .*{message}"):
            ClipSource.open(grey_frames(3), OPTIONS, 2, metadata=metadata)

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ([], "a video of 0 frames"),
            (np.zeros((0, 4, 4, 3), np.uint8), "a video of 0 frames"),
            (np.zeros((4, 4, 3), np.uint8), "a video array is frames x"),
            (
                [np.zeros((4, 4, 3), np.uint8), np.zeros((4, 5, 3), np.uint8)],
                "frames 0 and 1 differ in size: 4 x 4 and",
            ),
            ([np.zeros((4, 4, 3), np.float32)], "float32"),
            (5, "int"),
        ],
        ids=["none", "empty", "flat", "sizes", "dtype", "type"],
    )
    def test_unusable_frames(self, value, message):
        with pytest.raises(MediaError, match=f"item 1: .*{message}"):
            ClipSource.open(value, OPTIONS, 1)

    def test_memory_of_a_clip_is_limited(self):
        with pytest.raises(MediaError, match="3 frames of 12 x 16 pixels take 1728 bytes, more than the limit of 1727"):
            ClipSource.open(grey_frames(3), MediaOptions(max_clip_bytes=1727))


class TestAnimations:
    @pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
    def test_frames_and_rate(self, kind):
        frames = grey_frames(5)
        source = ClipSource.open(animation(kind, frames), OPTIONS)
        assert source.metadata == VideoMetadata(5, 25.0, tuple(range(5)), 0.2)
        assert source.size == (12, 16)
        for _ in range(2):
            np.testing.assert_array_equal(source.decode().frames, frames)
        chosen = source.decode(lambda metadata: (0, 3))
        np.testing.assert_array_equal(chosen.frames, frames[[0, 3]])
        assert chosen.metadata.frames_indices == (0, 3)

    def test_a_still_is_a_clip_of_one_frame(self):
        source = ClipSource.open(animation("PNG", grey_frames(1)), OPTIONS)
        assert source.metadata == VideoMetadata(1, None, (0,))

    def test_frames_that_can_be_decoded_win(self):
        """Seven frames claimed, the file ends within the fifth; the choice is made again from four."""
        rng = np.random.default_rng(0)
        frames = rng.integers(0, 256, (7, 20, 30, 3), dtype=np.uint8)
        data = animation("PNG", frames)
        source = ClipSource.open(data[: int(len(data) * 4.5 / 7)], OPTIONS)
        assert source.metadata.total_num_frames == 7
        clip = source.decode()
        assert clip.metadata == VideoMetadata(4, 25.0, (0, 1, 2, 3), 4 / 25)
        assert clip.warnings == ("the file claims 7 frames and holds 4",)
        chosen = source.decode(lambda metadata: range(0, metadata.total_num_frames, 3))
        np.testing.assert_array_equal(chosen.frames, frames[[0, 3]])

    def test_memory_is_checked_before_decoding(self):
        with pytest.raises(MediaError, match="item 0: 5 frames"):
            ClipSource.open(animation("GIF", grey_frames(5)), MediaOptions(max_clip_bytes=1000), 0)


class TestVideoFiles:
    @pytest.mark.parametrize("container", ["mp4", "matroska"])
    def test_frames_and_rate(self, container):
        """Matroska does not say how many frames it holds."""
        frames = grey_frames(9, 32, 48)
        source = ClipSource.open(video_file(frames, container=container), OPTIONS)
        assert source.metadata == VideoMetadata(9, 10.0, tuple(range(9)), 0.9)
        assert source.size == (32, 48)
        np.testing.assert_allclose(source.decode().frames.astype(int), frames, atol=CLIP_LEVELS)
        chosen = source.decode(lambda metadata: (1, 4, 8))
        np.testing.assert_allclose(chosen.frames.astype(int), frames[[1, 4, 8]], atol=CLIP_LEVELS)
        assert chosen.metadata == VideoMetadata(9, 10.0, (1, 4, 8), 0.9)

    def test_the_callers_rate_wins(self):
        source = ClipSource.open(video_file(grey_frames(4, 32, 32)), OPTIONS, metadata={"fps": 2})
        assert (source.metadata.fps, source.metadata.duration) == (2.0, 2.0)

    def test_rotation(self):
        """Phones store the sensor's view and ask for a turn by 90 degrees clockwise."""
        frames = np.zeros((3, 32, 48, 3), np.uint8)
        frames[:, :16, :16] = 250
        data = video_file(frames)
        identity = bytes.fromhex("00010000" + "00000000" * 3 + "00010000")
        clockwise = bytes.fromhex("00000000" + "00010000" + "00000000" + "ffff0000" + "00000000")
        place = data.index(identity, data.index(b"tkhd"))
        source = ClipSource.open(data[:place] + clockwise + data[place + len(clockwise) :], OPTIONS)
        clip = source.decode()
        assert source.size == clip.frames.shape[1:3] == (48, 32)
        np.testing.assert_allclose(clip.frames.astype(int), np.rot90(frames, -1, (1, 2)), atol=CLIP_EDGE_LEVELS)

    @pytest.mark.parametrize("end", [30, 300, 700])
    def test_cut_files(self, end):
        data = video_file(grey_frames(9, 32, 48))
        with pytest.raises(MediaError, match="item 6"):
            ClipSource.open(data[:end], OPTIONS, 6).decode()

    def test_a_stream_that_ends_early(self):
        data = video_file(grey_frames(9, 32, 48), container="mpegts")
        source = ClipSource.open(data[: len(data) // 2], OPTIONS)
        clip = source.decode()
        assert 0 < len(clip.frames) < 9
        assert clip.metadata.total_num_frames == len(clip.frames)

    def test_a_file_that_is_broken_where_its_frames_are_counted(self):
        """NUT does not say how many frames it holds, and its reader gives up at a broken end."""
        data = video_file(grey_frames(9, 32, 48), container="nut")
        source = ClipSource.open(data[:-40] + bytes(40), OPTIONS)
        assert source.metadata.total_num_frames == 9
        assert 0 < len(source.decode().frames) <= 9

    def test_not_a_video(self):
        pytest.importorskip("av", reason="needs PyAV, the video extra")
        with pytest.raises(MediaError, match="item 0: the video can't be decoded"):
            ClipSource.open(b"<html></html>", OPTIONS, 0)

    def test_without_the_extra(self, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "av", None)
        with pytest.raises(MediaError, match=r"pip install 'mmjax\[video\]'"):
            ClipSource.open(b"\0\0\0\x18ftypmp42", OPTIONS, 0)
