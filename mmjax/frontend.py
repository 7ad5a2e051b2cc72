# SPDX-License-Identifier: Apache-2.0
"""From what callers write (messages, prompts, media) to prepared prompts, in their thread and the media threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmjax.config import MultimodalConfig
from mmjax.errors import EngineError, PlaceholderError, RequestError
from mmjax.inputs.chat import ChatRenderer, load_chat_template
from mmjax.inputs.clip_durations import DurationMark, clip_seconds, fill_durations
from mmjax.inputs.content_parts import MediaPart
from mmjax.inputs.embeddings import accept_embeddings
from mmjax.inputs.hashing import item_digest
from mmjax.inputs.items import Modality, VideoMetadata
from mmjax.inputs.prepare import prepare_prompt
from mmjax.inputs.process import media_item, planned_item
from mmjax.inputs.prompt import CacheKey, ItemInput, PreparedPrompt
from mmjax.inputs.prompt_forms import compact_prompt
from mmjax.inputs.tokenise import GuardedTokenizer, Segment
from mmjax.media import MediaOptions, open_media
from mmjax.models.family import Model

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class InputOptions:
    """What a caller may say about the inputs of one request. By modality: one value an item, or a lone item's value.

    Attributes:
      cache_salt: a tenant's secret; caches are shared under one salt only.
      multi_modal_uuids: names of items; they keep equal contents apart.
      multi_modal_embeddings: float rows [R, row_width] in place of pixels, None for items to be encoded. The item
        itself is still given: its size says where the rows go.
      mm_processor_kwargs: processor options of all items; an item's own options come before them.
      truncate: None refuses prompts that are too long; "left" or "right" drops text and whole items.
    """

    cache_salt: str | None = None
    multi_modal_uuids: Mapping[str, str | Sequence[str | None]] | None = None
    multi_modal_embeddings: Mapping[str, Any] | None = None
    mm_processor_kwargs: Mapping[str, Any] | None = None
    truncate: str | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> InputOptions:
        """From a call's keyword arguments. Raises TypeError for one that is unknown."""
        known = cls.__dataclass_fields__
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise TypeError(f"unknown option {unknown[0]!r}; known are {', '.join(sorted(known))}")
        return cls(**options)


class Frontend:
    """Prepares prompts for one model. Methods may run in any thread but the media threads, which they wait for.

    `known` tells whether an engine has the rows of a cache key.
    """

    def __init__(
        self,
        model: Model,
        config: MultimodalConfig,
        media: Executor,
        known: Callable[[CacheKey | None], bool] = lambda key: False,
    ):
        self.model, self.config = model, config
        self._media, self._known = media, known
        self._options = MediaOptions(
            image_background=config.image_background,
            max_image_pixels=config.max_image_pixels,
            allowed_local_media=config.allowed_local_media,
            allow_private_hosts=config.allow_private_hosts,
        )
        self._renderer: ChatRenderer | None = None
        self._tokenizer = GuardedTokenizer(model.tokenizer, model.processor.never_sampled)
        self._duration_mark: DurationMark | None = getattr(model.processor, "duration_mark", None)

    # ---- prompts --------------------------------------------------------------------------------------------------

    def chat(
        self, messages: Messages, options: InputOptions, *, limit: int | None, pixels: bool = True
    ) -> PreparedPrompt:
        """A conversation through the checkpoint's chat template; without `pixels` only planned, for counts.

        Raises RequestError and its kinds for whatever is wrong with it, before any device work.
        """
        renderer = self._chat_renderer()
        prompt = renderer.encode(messages)
        self._check_counts(prompt.media)
        items = self._items(self._named(prompt.media, options), options, pixels)
        prompt = renderer.with_durations(prompt, _clips(items))
        return self._prepare(prompt.token_ids, items, options, limit)

    def prompt(
        self,
        prompt: str | Sequence[int],
        multi_modal_data: Mapping[str, Any] | None,
        options: InputOptions,
        *,
        limit: int | None,
    ) -> PreparedPrompt:
        """A prompt that the caller owns whole: text whose special tokens count, or token ids, compact or expanded."""
        parts = data_parts(multi_modal_data)
        self._check_counts(parts)
        items = self._items(self._named(parts, options), options, pixels=True)
        by_modality: dict[Modality, list[ItemInput]] = {}
        for item in items:
            by_modality.setdefault(item.plan.modality, []).append(item)
        if isinstance(prompt, str):
            ids = self._tokenizer.encode_prompt(self._with_durations(prompt, items))
        else:
            ids = prompt
        plans = {modality: [item.plan for item in group] for modality, group in by_modality.items()}
        compact, order = compact_prompt(ids, plans, self.model.processor)
        ordered = [by_modality[modality][index] for modality, index in order]
        return self._prepare(compact, ordered, options, limit)

    def _with_durations(self, prompt: str, items: Sequence[ItemInput]) -> str:
        """The prompt with the seconds of its clips where it has marks for them."""
        if self._duration_mark is None:
            return prompt
        seconds = [clip_seconds(clip) for clip in _clips(items)]
        (filled,) = fill_durations([Segment(prompt, from_user=False)], self._duration_mark, seconds)
        return filled.text

    def images(self, images: Sequence[Any], options: InputOptions) -> PreparedPrompt:
        """Items alone, for `LLM.encode`: a prompt of nothing but their spans."""
        parts = [value if isinstance(value, MediaPart) else MediaPart(Modality.IMAGE, value) for value in images]
        items = self._items(self._named(parts, options), options, pixels=True)
        ids = np.asarray([self.model.processor.placeholder_id[item.plan.modality] for item in items], np.int32)
        return self._prepare(ids, items, options, limit=None)

    def _prepare(
        self, ids: np.ndarray, items: Sequence[ItemInput], options: InputOptions, limit: int | None
    ) -> PreparedPrompt:
        if len(ids) == 0:
            raise RequestError("the prompt is empty")
        vocab_size = self.model.cfg.vocab_size
        guarded = set(self.model.processor.placeholder_id.values())
        outside = [int(token) for token in ids if not 0 <= token < vocab_size and int(token) not in guarded]
        if outside:
            raise RequestError(f"token id {outside[0]} lies outside the vocabulary of {vocab_size}")
        return prepare_prompt(
            ids,
            items,
            self.model.processor,
            vocab_size=vocab_size,
            salt=options.cache_salt,
            limit=limit,
            truncate=options.truncate,
        )

    def _chat_renderer(self) -> ChatRenderer:
        if self._renderer is None:
            self._renderer = ChatRenderer(
                self.model.tokenizer,
                self.model.processor.placeholder_text,
                self.model.processor.never_sampled,
                load_chat_template(self.model.path),
                self._duration_mark,
            )
        return self._renderer

    # ---- items ----------------------------------------------------------------------------------------------------

    def _check_counts(self, parts: Sequence[MediaPart]) -> None:
        """Raises RequestError if a prompt brings more items of a modality than allowed."""
        for name, limit in (self.config.limit_mm_per_prompt or {}).items():
            count = sum(part.modality == name for part in parts)
            if count > limit:
                raise RequestError(f"{count} {name} items; limit_mm_per_prompt allows {limit}")

    def _named(self, parts: Sequence[MediaPart], options: InputOptions) -> list[MediaPart]:
        """Each item with the name that the request has for it."""
        named = list(parts)
        for name, uuids in (options.multi_modal_uuids or {}).items():
            modality = _modality(name)
            indices = [index for index, part in enumerate(parts) if part.modality is modality]
            uuids = [uuids] if isinstance(uuids, str) else list(uuids)
            if not all(uuid is None or isinstance(uuid, str) for uuid in uuids):
                raise RequestError(f"multi_modal_uuids must be strings or None, got {uuids}")
            if len(uuids) != len(indices):
                raise RequestError(f"multi_modal_uuids has {len(uuids)} names for {len(indices)} {name} items")
            for index, uuid in zip(indices, uuids, strict=True):
                named[index] = replace(named[index], uuid=uuid)
        return named

    def _items(self, parts: Sequence[MediaPart], options: InputOptions, pixels: bool) -> list[ItemInput]:
        """Opens, decodes and cuts all items in the media threads; the first failure in order is raised."""
        supplied = {
            _modality(name): list(rows) if isinstance(rows, list | tuple) else [rows]
            for name, rows in (options.multi_modal_embeddings or {}).items()
        }
        for modality, values in supplied.items():
            count = sum(part.modality is modality for part in parts)
            if len(values) != count:
                raise PlaceholderError(f"multi_modal_embeddings has {len(values)} entries for {count} {modality} items")
        queues = {modality: iter(values) for modality, values in supplied.items()}
        futures = []
        for index, part in enumerate(parts):
            embedding = next(queues.get(part.modality, iter(())), None)
            try:
                futures.append(self._media.submit(self._item, index, part, options, pixels, embedding))
            except RuntimeError as error:
                raise EngineError("this LLM was closed") from error
        return [future.result() for future in futures]

    def _item(self, index: int, part: MediaPart, options: InputOptions, pixels: bool, embedding: Any) -> ItemInput:
        processor = self.model.processor
        processor_options = {**(options.mm_processor_kwargs or {}), **part.options}
        if self.config.disable_mm_encoder and embedding is None:
            raise RequestError("this engine runs without an encoder (disable_mm_encoder): text only", item=index)
        if part.source is None:
            raise RequestError(f"the {part.modality} part holds no {part.modality}", item=index)
        source = open_media(part.modality, part.source, self._options, index)
        if not pixels:
            return planned_item(source, processor, processor_options, uuid=part.uuid)
        if embedding is None:
            names = {"uuid": part.uuid, "salt": options.cache_salt}
            return media_item(source, processor, processor_options, **names, known=self._known)
        planned = planned_item(source, processor, processor_options, uuid=part.uuid)
        rows = accept_embeddings(embedding, self.model.cfg.row_width, planned.plan.rows, index)
        return replace(planned, embedding=rows, digest=item_digest(rows, part.uuid, options.cache_salt))


def data_parts(multi_modal_data: Mapping[str, Any] | None) -> list[MediaPart]:
    """`multi_modal_data` as parts: each modality's value is one item or a list of items."""
    parts = []
    for name, values in (multi_modal_data or {}).items():
        modality = _modality(name)
        values = values if isinstance(values, list) else [values]
        parts += [MediaPart(modality, value) for value in values]
    return parts


def _clips(items: Sequence[ItemInput]) -> list[VideoMetadata]:
    return [item.clip or item.source.metadata for item in items if item.plan.modality is Modality.VIDEO]


def _modality(name: str) -> Modality:
    try:
        return Modality(name)
    except ValueError:
        raise RequestError(f"unknown modality {name!r}; known are {', '.join(Modality)}") from None
