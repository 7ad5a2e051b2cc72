# SPDX-License-Identifier: Apache-2.0
"""Video files as clips, through PyAV (the `video` extra)."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mmjax.errors import MediaError
from mmjax.media.options import MediaOptions


class VideoFileReader:
    """Reads a video file from its start, leaving out packets that can't be decoded."""

    def __init__(self, encoded: bytes, options: MediaOptions, item: int | None = None):
        self._encoded, self._options, self._item = encoded, options, item
        av = _pyav(item)
        with self._container(av) as container:
            stream = self._stream(container)
            options.check_size(stream.codec_context.height, stream.codec_context.width, item)
            self.fps = float(stream.average_rate) if stream.average_rate else None
            claimed = stream.frames
            first = next(self._frames(av, container, stream), None)
        if first is None:
            raise MediaError("a video of 0 frames", item=item)
        lying = first.rotation % 180 != 0
        self.size = (first.width, first.height) if lying else (first.height, first.width)
        self.total = claimed or self._count(av)

    def read(self, wanted: Sequence[int] | None) -> tuple[list[np.ndarray], list[int], int | None]:
        """See `ClipReader.read`."""
        av = _pyav(self._item)
        keep = None if wanted is None else set(wanted)
        frames, indices, total = [], [], 0
        with self._container(av) as container:
            for frame in self._frames(av, container, self._stream(container)):
                if keep is None or total in keep:
                    pixels = np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90) % 4)
                    if pixels.shape[:2] != self.size:
                        sizes = " and ".join(f"{height} x {width}" for height, width in (self.size, pixels.shape[:2]))
                        raise MediaError(f"frames 0 and {total} differ in size: {sizes}", item=self._item)
                    frames.append(pixels)
                    indices.append(total)
                total += 1
                if keep is not None and len(indices) == len(keep):
                    return frames, indices, None
        return frames, indices, total

    def _container(self, av: Any) -> Any:
        try:
            return av.open(io.BytesIO(self._encoded))
        except av.FFmpegError as error:
            raise MediaError(f"the video can't be decoded: {error.strerror}", item=self._item) from error

    def _stream(self, container: Any) -> Any:
        stream = next(iter(container.streams.video), None)
        if stream is None or stream.codec_context is None:
            raise MediaError("the file has no video track that can be decoded", item=self._item)
        stream.thread_type = "AUTO"
        return stream

    @staticmethod
    def _packets(av: Any, container: Any, stream: Any) -> Iterator[Any]:
        """Packets of the track, up to the end or to what can't be read any more."""
        packets = container.demux(stream)
        while True:
            try:
                packet = next(packets, None)
            except av.FFmpegError:
                return
            if packet is None:
                return
            yield packet

    @classmethod
    def _frames(cls, av: Any, container: Any, stream: Any) -> Iterator[Any]:
        for packet in cls._packets(av, container, stream):
            try:
                frames = packet.decode()
            except av.FFmpegError:
                continue
            yield from frames

    def _count(self, av: Any) -> int:
        """Packets of the track: what a header without a number of frames makes of it."""
        with self._container(av) as container:
            return sum(packet.size > 0 for packet in self._packets(av, container, self._stream(container)))


def _pyav(item: int | None) -> Any:
    try:
        import av
    except ImportError as error:
        raise MediaError("video files need PyAV: pip install 'mmjax[video]'", item=item) from error
    return av
