# SPDX-License-Identifier: Apache-2.0
"""Conversations with media, and what transformers makes of them: ids, decoder input, logits, greedy tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import transformers
from llm_kit import clip, noise, user
from qwen_kit import FPS, Case, reference_inputs

NEW_TOKENS = 32


@dataclass(frozen=True)
class Talk:
    """Parts of one user message: text, (height, width) of a picture, (frames, height, width) of a clip."""

    parts: tuple[str | tuple[int, ...], ...]

    @property
    def images(self) -> tuple[tuple[int, ...], ...]:
        return tuple(part for part in self.parts if len(part) == 2 and not isinstance(part, str))

    @property
    def videos(self) -> tuple[tuple[int, ...], ...]:
        return tuple(part for part in self.parts if len(part) == 3 and not isinstance(part, str))

    def media(self) -> dict[str, list]:
        """The same pixels that `reference_inputs` draws, as `multi_modal_data`."""
        return {
            "image": [noise(*size, seed=i) for i, size in enumerate(self.images)],
            "video": [(clip(*size, seed=50 + i), {"fps": FPS}) for i, size in enumerate(self.videos)],
        }

    def messages(self) -> list[dict]:
        """The conversation for `LLM.chat`."""
        media = {kind: iter(items) for kind, items in self.media().items()}
        kinds = {2: "image", 3: "video"}
        return user(*(part if isinstance(part, str) else next(media[kinds[len(part)]]) for part in self.parts))


# Merge blocks of 28 pixels, windows of 2 x 2 blocks: no grid here but the clip's is a multiple of the window.
TALKS = {
    "image": Talk(("What is ", (84, 140), "?")),
    "images": Talk(((56, 84), " and then ", (140, 84), " or ", (28, 196), "Which?")),
    "text": Talk(("How old is the moon?",)),
    "clip": Talk(("Look: ", (6, 56, 84), "Where does it go?")),
    "image and clip": Talk(((84, 84), "before", (3, 56, 112), "after")),
}


@dataclass(frozen=True)
class Judged:
    """What transformers computes for a talk.

    Attributes:
      embeds: float32 [T, E], the decoder's input.
      logits: float32 [NEW_TOKENS, V] behind the prompt and behind every token but the last.
      tokens: greedy answer that never takes a placeholder and never ends.
      margins: distance of the two largest logits among those that may be taken.
    """

    prompt_ids: list[int]
    embeds: np.ndarray
    logits: np.ndarray
    tokens: list[int]
    margins: np.ndarray


def judge(checkpoint, talk: Talk, never_sampled: tuple[int, ...]) -> Judged:
    """Runs transformers' own processor, model and `generate`."""
    shown = [{"type": "text", "text": part} if isinstance(part, str) else _PART[len(part)] for part in talk.parts]
    text = checkpoint.processor.apply_chat_template(
        [{"role": "user", "content": shown}], tokenize=False, add_generation_prompt=True
    )
    inputs = reference_inputs(checkpoint, Case(text, talk.images, talk.videos))
    caught = []
    hook = checkpoint.model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: caught.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    config = transformers.GenerationConfig(
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        suppress_tokens=list(never_sampled),
        eos_token_id=checkpoint.model.config.get_text_config().vocab_size,  # no token: the answer never ends
        pad_token_id=0,
    )
    try:
        with torch.no_grad():
            answer = checkpoint.model.generate(
                **inputs, generation_config=config, output_logits=True, return_dict_in_generate=True
            )
    finally:
        hook.remove()
    length = inputs["input_ids"].shape[1]
    logits = torch.cat(answer.logits).float().numpy()
    allowed = np.delete(logits, list(never_sampled), axis=1)
    best = np.sort(allowed, axis=1)[:, -2:]
    return Judged(
        prompt_ids=inputs["input_ids"][0].tolist(),
        embeds=caught[0][0].float().numpy(),
        logits=logits,
        tokens=answer.sequences[0, length:].tolist(),
        margins=best[:, 1] - best[:, 0],
    )


_PART = {2: {"type": "image"}, 3: {"type": "video"}}
