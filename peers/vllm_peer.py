# SPDX-License-Identifier: Apache-2.0
"""vLLM through its offline `LLM` class, with its own defaults: prefix and processor caches on, CUDA graphs."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence

from PIL import Image

# vLLM's engine runs in a process of its own; one that is forked would inherit the threads of JAX. Read at the import.
os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")

import vllm

from peers.interface import Conversation, PeerModel, split_pictures


class VllmPeer:
    """An engine of vLLM."""

    def __init__(self, model: PeerModel):
        self.versions = {"vllm": vllm.__version__}
        self.about = "its own defaults"
        self._random = model.random
        self._llm = vllm.LLM(
            model=str(model.folder),
            dtype=model.dtype,
            load_format="dummy" if model.random else "auto",
            limit_mm_per_prompt={"image": 1},
        )
        self._tokenizer = self._llm.get_tokenizer()

    def chat(self, conversations: Sequence[Conversation], new_tokens: int) -> list[list[int]]:
        """As `Peer.chat`, all at once."""
        prompts = []
        for conversation in conversations:
            messages, pictures = split_pictures(conversation)
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            images = [Image.fromarray(picture) for picture in pictures]
            prompts.append({"prompt": text, "multi_modal_data": {"image": images}} if images else {"prompt": text})
        # Random weights answer with ids that the tokenizer may not know.
        params = vllm.SamplingParams(
            max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=not self._random
        )
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        """Ends the engine, and with it the memory that it holds."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()
