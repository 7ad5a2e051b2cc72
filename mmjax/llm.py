# SPDX-License-Identifier: Apache-2.0
"""`LLM`: load a checkpoint, ask about pictures and clips, get answers, embeddings, counts and explanations."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mmjax.async_calls import parts_of
from mmjax.config import EngineConfig, MultimodalConfig
from mmjax.engine.detokenizer import Detokenizer
from mmjax.engine.handle import Handle, Stream
from mmjax.engine.request import Request
from mmjax.engine.stop import StopChecker
from mmjax.engine.trace import StepTrace
from mmjax.errors import ConfigError, EngineError, PromptTooLongError, RequestError
from mmjax.frontend import Frontend, InputOptions, Messages
from mmjax.inputs.explain import SpanTable, explain_prompt
from mmjax.inputs.kv_key import block_keys
from mmjax.inputs.parts import join_rows
from mmjax.inputs.prompt import PreparedPrompt
from mmjax.inputs.usage import Usage
from mmjax.list_calls import answer, answers, params_each, share_out
from mmjax.loading import device_for, load_params, open_model
from mmjax.models.family import Model
from mmjax.outputs import Delta, RequestOutput
from mmjax.reference.engine import ReferenceEngine
from mmjax.sampling_params import SamplingParams
from mmjax.startup import start_engine
from mmjax.stats import Stats, collect_stats

# Few steps to compile, so that the demo starts quickly; enough for its largest pictures and clips.
_DEMO = {
    "engine": EngineConfig(max_batch_size=4, max_num_tokens=256),
    "multimodal": MultimodalConfig(encoder_max_num_tokens=1536),
}


class LLM:
    """A multimodal language model, ready to answer.

    Args:
      model: directory of a Hugging Face checkpoint, or of one that `mmjax convert` wrote.
      dtype: "float32" or "bfloat16"; None takes the checkpoint's on a GPU that has it, else float32.
      engine: knobs of tokens, sequences and KV pages.
      multimodal: knobs of items, their budgets and their cache.
      reference: the slow judge: one request at a time, float32, plain masks, no cache, no kernels.
      progress: progress bars for loading and compiling.
      device: "cpu" or "gpu"; None takes the first GPU, else the CPU.

    Methods may be called from any thread. A single call raises RequestError when its request is at fault; in a call
    with a list, such a request gives an output with `finish_reason == "error"` and the others finish.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str | None = None,
        engine: EngineConfig | None = None,
        multimodal: MultimodalConfig | None = None,
        reference: bool = False,
        progress: bool = True,
        device: str | None = None,
    ):
        if reference and dtype not in (None, "float32"):
            raise ConfigError(f"the reference computes in float32, got dtype={dtype!r}")
        on = device_for(device)
        opened = open_model(model, dtype="float32" if reference else dtype, device=on)
        load = partial(load_params, opened, device=on, progress=progress)
        self._serve(opened, load, engine, multimodal, device=on, reference=reference, progress=progress)

    @classmethod
    def of(
        cls,
        model: Model,
        params: dict,
        *,
        device: jax.Device,
        engine: EngineConfig | None = None,
        multimodal: MultimodalConfig | None = None,
        progress: bool = True,
    ) -> LLM:
        """Serves a model whose parameters are at hand: {"vision": ..., "text": ...}, arrays on `device`."""
        llm = cls.__new__(cls)
        llm._serve(model, lambda: params, engine, multimodal, device=device, reference=False, progress=progress)
        return llm

    def _serve(
        self,
        model: Model,
        load: Callable[[], dict],
        engine: EngineConfig | None,
        multimodal: MultimodalConfig | None,
        *,
        device: jax.Device,
        reference: bool,
        progress: bool,
    ) -> None:
        self.engine_config, self.multimodal = engine or EngineConfig(), multimodal or MultimodalConfig()
        self.device, self.model = device, model
        self._media = ThreadPoolExecutor(self.multimodal.media_threads, thread_name_prefix="mmjax-media")
        self.frontend = Frontend(model, self.multimodal, self._media, known=lambda key: self.running.has_rows(key))
        self.running = start_engine(
            model,
            load(),
            self.engine_config,
            self.multimodal,
            media=self._media,
            device=device,
            reference=reference,
            progress=progress,
        )
        self._ids = itertools.count()
        self._closed = False

    @classmethod
    def demo(cls, **options: Any) -> LLM:
        """The small model that ships with mmjax: it answers questions about drawn scenes; see `mmjax.demo`."""
        from mmjax.demo import checkpoint_path

        return cls(checkpoint_path(), **(_DEMO | options))

    # ---- answers --------------------------------------------------------------------------------------------------

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> RequestOutput | list[RequestOutput]:
        """Answers a conversation, or each of a list of conversations, in order.

        Args:
          messages: dicts with role and content, as OpenAI's and Hugging Face's APIs have them.
          params: one for all, or one for each.
          options: `cache_salt`, `multi_modal_uuids`, `multi_modal_embeddings`, `mm_processor_kwargs`, `truncate`; one
            for all, or a list with one for each.
        """
        if _is_conversation(messages):
            return answer(self.submit(messages, params, **options))
        limit = self._prompt_limit()
        every = [InputOptions.of(own) for own in share_out(options, len(messages))]
        prompts = [
            partial(self.frontend.chat, conversation, own, limit=limit)
            for conversation, own in zip(messages, every, strict=True)
        ]
        return self._answers(prompts, params_each(params, len(messages)))

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        multi_modal_data: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        **options: Any,
    ) -> RequestOutput | list[RequestOutput]:
        """Continues a prompt that the caller owns whole, or each of a list of prompts.

        Args:
          prompt: text whose special tokens count, or token ids with one placeholder an item or with whole spans.
          multi_modal_data: {"image": [...], "video": [...]}, in the order of their placeholders.
        """
        if isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], int | np.integer)):
            handle, inputs, limit = self._handle(), InputOptions.of(options), self._prompt_limit()
            self._start(handle, lambda: self.frontend.prompt(prompt, multi_modal_data, inputs, limit=limit), params)
            return answer(handle)
        data = multi_modal_data if isinstance(multi_modal_data, Sequence) else [multi_modal_data] * len(prompt)
        if len(data) != len(prompt):
            raise RequestError(f"{len(data)} entries of multi_modal_data for {len(prompt)} prompts")
        limit = self._prompt_limit()
        every = [InputOptions.of(own) for own in share_out(options, len(prompt))]
        prompts = [
            partial(self.frontend.prompt, one, own_data, own, limit=limit)
            for one, own_data, own in zip(prompt, data, every, strict=True)
        ]
        return self._answers(prompts, params_each(params, len(prompt)))

    def stream(self, messages: Messages, params: SamplingParams | None = None, **options: Any) -> Stream:
        """The answer piece by piece. Raises the request's error where it happens; closing it cancels the request."""
        return self.submit(messages, params, **options).stream()

    def submit(self, messages: Messages, params: SamplingParams | None = None, **options: Any) -> Handle:
        """Decodes a conversation's media, queues it and returns its handle, without waiting for the answer."""
        handle, inputs, limit = self._handle(), InputOptions.of(options), self._prompt_limit()
        self._start(handle, lambda: self.frontend.chat(messages, inputs, limit=limit), params)
        return handle

    async def achat(self, messages: Messages, params: SamplingParams | None = None, **options: Any) -> RequestOutput:
        """`chat` of one conversation for coroutines; cancelling the task cancels the request."""
        async with aclosing(parts_of(partial(self.submit, messages, params, **options))) as parts:
            *_, output = [part async for part in parts]
        return output

    async def astream(
        self, messages: Messages, params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[Delta]:
        """`stream` for coroutines."""
        async with aclosing(parts_of(partial(self.submit, messages, params, **options))) as parts:
            async for part in parts:
                if isinstance(part, Delta):
                    yield part

    # ---- embeddings, counts, explanations -------------------------------------------------------------------------

    def encode(self, images: Sequence[Any], **options: Any) -> list[np.ndarray]:
        """Embedding rows of each image: float32 [rows, E * (1 + deepstack levels)], through scheduler and cache.

        Args:
          images: paths, URLs, bytes, PIL images or uint8 arrays; a `MediaPart` for a clip.
        """
        if len(images) == 0:
            return []
        handle, inputs = self._handle(), InputOptions.of(options)
        params = SamplingParams(max_tokens=1)
        request = self._start(handle, lambda: self.frontend.images(images, inputs), params, embed_only=True)
        if answer(handle).finish_reason != "stop":
            raise EngineError("the engine was closed before all items were encoded")
        return join_rows(request.prompt, request.rows)

    def count_tokens(self, messages: Messages, **options: Any) -> Usage:
        """Exact prompt tokens by kind, without decoding pixels or running the model."""
        return self.frontend.chat(messages, InputOptions.of(options), limit=None, pixels=False).usage

    def explain(self, messages: Messages, **options: Any) -> SpanTable:
        """A table of the conversation's items: positions, rows, grid, hash. Prints as text, renders in notebooks."""
        return explain_prompt(self.frontend.chat(messages, InputOptions.of(options), limit=None))

    # ---- state ----------------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Budgets, pools, cache hits, compiles since start-up, pages, step times. The reference has none."""
        self._check_open()
        if isinstance(self.running, ReferenceEngine):
            raise EngineError("the reference keeps no statistics")
        return collect_stats(self.running, self.model.cfg, self.device)

    def invalidate_caches(self) -> None:
        """Forgets encoder rows and KV prefixes of earlier requests. Raises EngineError while requests are under way."""
        self._check_open()
        self.running.invalidate()

    def replace_weights(self, params: Mapping[str, Any]) -> None:
        """Serves with other weights from now on; nothing compiles, and what the old ones computed is forgotten.

        Args:
          params: {"vision": ..., "text": ...}, the tree of `family.spec(cfg)` in arrays of the same shapes and dtypes.

        Raises EngineError while requests are under way, ConfigError for another tree; then the old weights stay.
        """
        self._check_open()
        self.running.replace_weights(params)

    @property
    def trace(self) -> StepTrace:
        """The last `EngineConfig.trace_steps` steps: `rows`, `save(path)` for Perfetto, `plot()`."""
        if isinstance(self.running, ReferenceEngine):
            raise EngineError("the reference takes no steps")
        return self.running.engine.trace

    def close(self) -> None:
        """Cancels what is running and lets go of the device's arrays. May be called twice."""
        if not self._closed:
            self._closed = True
            self.running.close()
            self._media.shutdown()
            self.running.release()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    # ---- requests -------------------------------------------------------------------------------------------------

    def _prompt_limit(self) -> int:
        return self.running.max_seq_len - 1

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("this LLM was closed")

    def _handle(self) -> Handle:
        self._check_open()
        return Handle(f"r{next(self._ids)}", self.running.cancel)

    def _answers(
        self, prompts: Sequence[Callable[[], PreparedPrompt]], params: Sequence[SamplingParams | None]
    ) -> list[RequestOutput]:
        makers = [partial(self._made, self._handle(), *each) for each in zip(prompts, params, strict=True)]
        return answers(makers, self.running.submit, threads=self.multimodal.media_threads)

    def _start(
        self,
        handle: Handle,
        prepare: Callable[[], PreparedPrompt],
        params: SamplingParams | None,
        *,
        embed_only: bool = False,
    ) -> Request:
        request = self._made(handle, prepare, params, embed_only=embed_only)
        self.running.submit(request)
        return request

    def _made(
        self,
        handle: Handle,
        prepare: Callable[[], PreparedPrompt],
        params: SamplingParams | None,
        *,
        embed_only: bool = False,
    ) -> Request:
        """A request of what `prepare` makes; its errors name it."""
        if self.multimodal.mm_encoder_only and not embed_only:
            raise EngineError("this engine only encodes (mm_encoder_only): use LLM.encode")
        try:
            params = _checked(params)
            return self._request(handle, prepare(), params, embed_only=embed_only)
        except RequestError as error:
            error.request_id = error.request_id or handle.request_id
            raise

    def _request(self, handle: Handle, prompt: PreparedPrompt, params: SamplingParams, *, embed_only: bool) -> Request:
        room = self.running.max_seq_len - len(prompt.token_ids)
        if not embed_only and room < 1:
            raise PromptTooLongError(
                f"the prompt has {len(prompt.token_ids)} tokens, max_seq_len is {self.running.max_seq_len}"
            )
        room = max(room, 1)
        self.running.check_prompt(len(prompt.token_ids), embed_only=embed_only)
        reuse = self.running.tokens_per_block if prompt.reusable and not embed_only else None
        key_tokens = prompt.key_tokens() if reuse else []
        return Request(
            id=handle.request_id,
            prompt=prompt,
            params=params,
            handle=handle,
            checker=StopChecker(params, Detokenizer(self.model.tokenizer), self.model.eos_token_ids, room),
            max_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            eos_token_ids=self.model.eos_token_ids,
            key_tokens=key_tokens,
            block_keys=block_keys(key_tokens, reuse, prompt.root) if reuse else [],
            embed_only=embed_only,
        )


def _is_conversation(messages: Any) -> bool:
    """Whether this is one conversation (a list of messages, or nothing that makes sense) and no list of them."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        return True
    return len(messages) > 0 and isinstance(messages[0], Mapping)


def _checked(params: SamplingParams | None) -> SamplingParams:
    if params is not None and not isinstance(params, SamplingParams):
        raise RequestError(f"params must be SamplingParams, got {type(params).__name__}")
    return params or SamplingParams()
