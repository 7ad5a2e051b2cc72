# SPDX-License-Identifier: Apache-2.0
"""Opened media to items: sizes planned, pixels cut to patches, content named. May run in any thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import UInt8

from mmjax.errors import RequestError
from mmjax.inputs.hashing import ImageData, VideoData, item_digest
from mmjax.inputs.items import ItemPlan, Modality, ProcessedItem
from mmjax.inputs.prompt import CacheKey, ItemInput, PromptItem
from mmjax.media import ClipSource, ImageSource, MediaSource
from mmjax.models.family import Processor


def media_item(
    source: MediaSource,
    processor: Processor,
    options: Mapping[str, Any] | None = None,
    *,
    uuid: str | None = None,
    salt: str | None = None,
    known: Callable[[CacheKey | None], bool] = lambda key: False,
) -> ItemInput:
    """Decodes an item, names its content and cuts it to patches.

    Args:
      options: processor options as the caller gave them; the item's key covers them with every default spelled out.
      uuid, salt: see `item_digest`.
      known: whether the rows of this key are there: then a picture is not cut. Should they be gone when it runs,
        `patches_again` cuts it.

    Raises:
      RequestError: it can't be decoded, or the model does not take it; names the item.
    """
    with _naming(source.item):
        decoded = _decode(source, processor, options or {})
        digest = item_digest(decoded.content, uuid, salt)
        if decoded.plan is not None:
            item = ItemInput(decoded.plan, digest=digest, uuid=uuid, source=source)
            if known(item.cache_key()):
                return item
        processed = decoded.process()
        plan = replace(processed.plan, warnings=decoded.warnings + processed.plan.warnings)
    clip = decoded.content.metadata if isinstance(decoded.content, VideoData) else None
    return ItemInput(plan, processed.patches, digest, uuid, source, clip=clip)


def planned_item(
    source: MediaSource,
    processor: Processor,
    options: Mapping[str, Any] | None = None,
    *,
    uuid: str | None = None,
) -> ItemInput:
    """An item from its header alone: enough to count and explain a prompt, without a digest and without pixels."""
    with _naming(source.item):
        resolved = processor.resolve(_modality(source), options or {})
        if isinstance(source, ClipSource):
            plan = processor.plan_video(source.metadata, *source.size, resolved)
            plan = replace(plan, warnings=source.warnings + plan.warnings)
        else:
            plan = processor.plan_image(*source.size, resolved)
    return ItemInput(plan, uuid=uuid, source=source)


def patches_again(items: Sequence[PromptItem], processor: Processor) -> list[UInt8[np.ndarray, "P values"]]:
    """Patches made anew from their one source, for an encoder that has to run again: of an item, or of parts of one."""
    first = items[0]
    with _naming(first.number):
        patches = _decode(first.source, processor, first.plan.options).process().patches
    return [patches if item.part is None else patches[item.part.begin : item.part.end] for item in items]


@dataclass(frozen=True)
class _Decoded:
    content: ImageData | VideoData
    process: Callable[[], ProcessedItem]
    plan: ItemPlan | None = None  # of a picture
    warnings: tuple[str, ...] = ()


def _decode(source: MediaSource, processor: Processor, options: Mapping[str, Any]) -> _Decoded:
    resolved = processor.resolve(_modality(source), options)
    if isinstance(source, ClipSource):
        clip = source.decode(lambda metadata: processor.sample_frames(metadata, resolved))
        content = VideoData(clip.frames, clip.metadata)
        return _Decoded(content, lambda: processor.video(clip.frames, clip.metadata, resolved), warnings=clip.warnings)
    plan = processor.plan_image(*source.size, resolved)  # what the model refuses by its size is not decoded
    pixels = source.decode()
    return _Decoded(ImageData(pixels), lambda: processor.image(pixels, resolved), plan)


def _modality(source: MediaSource) -> Modality:
    if isinstance(source, ImageSource):
        return Modality.IMAGE
    if isinstance(source, ClipSource):
        return Modality.VIDEO
    raise RequestError("this model takes no audio")


@contextmanager
def _naming(item: int | None) -> Iterator[None]:
    """Processors do not know which item they work on; errors of theirs get its index here."""
    try:
        yield
    except RequestError as error:
        if error.item is None:
            error.item = item
        raise
