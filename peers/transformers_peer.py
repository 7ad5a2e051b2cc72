# SPDX-License-Identifier: Apache-2.0
"""transformers at its best: a packed tower, text through a static cache, the fast processor on the device."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
import transformers

from conversion.verify.transformers_judge import make_torchvision_importable
from mmjax.errors import CheckpointError
from peers.interface import Conversation, Ids, PeerModel, Picture, split_pictures
from peers.packed_attention import pack_tower, varlen_attention

make_torchvision_importable()  # transformers' classes can't be reached before

_BATCH = 32  # conversations of one `generate`: more gain little, and their pixels and activations take much memory
_ROUND = 64  # lengths of static caches; another length compiles the decode step again


class TransformersPeer:
    """A model of transformers and its processor.

    Raises CheckpointError if transformers can't load it.
    """

    def __init__(self, model: PeerModel):
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        self._device = torch.device(model.device)
        self._model = _load(model, self._device)
        self._processor = transformers.AutoProcessor.from_pretrained(model.folder, local_files_only=True)
        self._processor.tokenizer.padding_side = "left"
        # A fresh config: the checkpoint's own may sample, penalise or stop early.
        self._model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
        varlen = varlen_attention(self._device, self._model.dtype)
        packed = varlen is not None and pack_tower(self._model, varlen)
        attention = "torch varlen_attn, packed" if packed else "sdpa"
        self.about = f"tower attention {attention}, at most {_BATCH} requests at once"

    @torch.no_grad()
    def chat(self, conversations: Sequence[Conversation], new_tokens: int) -> list[list[int]]:
        """As `Peer.chat`, `_BATCH` conversations at a time."""
        answers: list[list[int]] = []
        for start in range(0, len(conversations), _BATCH):
            inputs = self._inputs(conversations[start : start + _BATCH])
            length = inputs["input_ids"].shape[1] + new_tokens
            # A cache of a round length that serves the next load too; the stop comes where the answer is complete.
            room = -(-(length + 1) // _ROUND) * _ROUND
            stop = transformers.StoppingCriteriaList([_StopAt(length)])
            output = self._model.generate(**inputs, **_cache(new_tokens), max_length=room, stopping_criteria=stop)
            answers += output[:, -new_tokens:].tolist()
        return answers

    def _inputs(self, conversations: Sequence[Conversation]) -> transformers.BatchFeature:
        texts, pictures = [], []
        for conversation in conversations:
            messages, own = split_pictures(conversation)
            texts.append(self._processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
            pictures.append([_planes(picture) for picture in own])
        # The template writes all special tokens, a BOS too if there is one.
        inputs = self._processor(
            text=texts,
            images=pictures if any(pictures) else None,
            return_tensors="pt",
            padding=True,
            add_special_tokens=False,
            device=self._device,
        )
        return inputs.to(self._device)

    @torch.no_grad()
    def generate(self, ids: Ids, new_tokens: int) -> tuple[Ids, list[float]]:
        """As `ModelPeer.generate`; on a GPU the seconds are the device's."""
        tokens = torch.from_numpy(ids.astype(np.int64)).to(self._device)
        clock = _Clock(self._device)
        output = self._model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            **_cache(new_tokens),
            max_new_tokens=new_tokens,
            stopping_criteria=transformers.StoppingCriteriaList([clock]),
        )
        return output[:, ids.shape[1] :].cpu().numpy().astype(np.int32), clock.seconds()

    @torch.no_grad()
    def tower(self, pictures: Sequence[Picture], *, resident: bool) -> Callable[[], None]:
        """As `ModelPeer.tower`. Pixels travel in the model's dtype, from pinned memory."""
        processed = self._processor.image_processor(
            [_planes(picture) for picture in pictures], return_tensors="pt", device=self._device
        )
        sizes = ("image_grid_thw", "image_sizes")
        media = {name: processed[name].to(self._device) for name in sizes if name in processed}
        pixels = processed["pixel_values"].to(self._model.dtype)
        if not resident:
            pixels = pixels.cpu()
            pixels = pixels.pin_memory() if self._device.type == "cuda" else pixels

        @torch.no_grad()
        def call() -> None:
            self._model.model.get_image_features(pixels.to(self._device, non_blocking=True), **media)
            self._wait()

        return call

    def close(self) -> None:
        """Drops the model, what was compiled for it, and torch's pool of device memory."""
        del self._model
        torch.compiler.reset()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _load(model: PeerModel, device: torch.device) -> transformers.PreTrainedModel:
    auto, options = transformers.AutoModelForImageTextToText, {"attn_implementation": "sdpa"}
    try:
        if model.random:
            config = transformers.AutoConfig.from_pretrained(model.folder, local_files_only=True)
            with device:
                loaded = auto.from_config(config, dtype=getattr(torch, model.dtype), **options)
        else:
            loaded = auto.from_pretrained(model.folder, dtype=model.dtype, local_files_only=True, **options)
    except (ValueError, OSError) as error:  # no such model, or no weights in its format
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{model.folder}: transformers {transformers.__version__}: {reason}") from error
    return loaded.to(device).eval().requires_grad_(False)


def _cache(new_tokens: int) -> dict[str, str]:
    """A static cache, over which transformers compiles decoding by itself on a GPU.

    A prompt alone runs faster without: attention needs no mask where the cache ends with the prompt.
    """
    return {"cache_implementation": "static"} if new_tokens > 1 else {}


def _planes(picture: Picture) -> torch.Tensor:
    """A picture as the fast processors take it, uint8 [3, height, width]."""
    return torch.from_numpy(picture).permute(2, 0, 1)


class _StopAt(transformers.StoppingCriteria):
    """Ends all sequences when they have `length` tokens."""

    def __init__(self, length: int):
        self._length = length

    def __call__(self, input_ids: torch.Tensor, scores: object, **options: object) -> torch.Tensor:
        done = input_ids.shape[1] >= self._length
        return torch.full((input_ids.shape[0],), done, dtype=torch.bool, device=input_ids.device)


class _Clock(transformers.StoppingCriteria):
    """Stops nobody; notes when each token was there, without waiting for the device."""

    def __init__(self, device: torch.device):
        self._device = device
        self._ticks: list = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **options: object) -> torch.Tensor:
        if self._device.type == "cuda":
            tick = torch.cuda.Event(enable_timing=True)
            tick.record()
        else:
            tick = time.perf_counter()
        self._ticks.append(tick)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def seconds(self) -> list[float]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return [before.elapsed_time(after) / 1e3 for before, after in pairwise(self._ticks)]
        return [after - before for before, after in pairwise(self._ticks)]
