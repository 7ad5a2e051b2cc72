# SPDX-License-Identifier: Apache-2.0
"""Seconds of clips in a prompt's text: some chat templates leave a mark for the processor to put them in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from mmjax.errors import RequestError
from mmjax.inputs.items import VideoMetadata
from mmjax.inputs.tokenise import Segment


@dataclass(frozen=True)
class DurationMark:
    """The mark, and the key of a clip's message part under which a caller may give the seconds instead."""

    text: str
    key: str


def clip_seconds(metadata: VideoMetadata) -> float:
    """How long the source is, rounded to hundredths."""
    seconds = metadata.duration
    if seconds is None:
        seconds = metadata.total_num_frames / metadata.rate
    return round(float(seconds), 2)


def fill_durations(segments: Sequence[Segment], mark: DurationMark, seconds: Sequence[float]) -> list[Segment]:
    """The segments with the template's marks replaced, in order. A user who types a mark sends its characters.

    Raises:
      RequestError: more marks than clips.
    """
    wanted = sum(segment.text.count(mark.text) for segment in segments if not segment.from_user)
    if wanted > len(seconds):
        raise RequestError(f"the prompt has {wanted} marks {mark.text} for the seconds of {len(seconds)} clips")
    values = iter(seconds)

    def filled(text: str) -> str:
        first, *rest = text.split(mark.text)
        return first + "".join(json.dumps(next(values)) + piece for piece in rest)

    return [segment if segment.from_user else segment._replace(text=filled(segment.text)) for segment in segments]
