# SPDX-License-Identifier: Apache-2.0
"""Claim: a checkpoint of 7B sizes loads from disk and chats about a real photo, and nothing compiles meanwhile."""

from __future__ import annotations

import time

import numpy as np
import pytest
import tolerances
from real_size import write_checkpoint

import mmjax

skimage_data = pytest.importorskip("skimage.data", reason="ships the photo")


def test_7b_sizes_chat_with_a_photo(tmp_path, record_property):
    start = time.perf_counter()
    path = write_checkpoint(tmp_path / "random-7b")
    print(f"\nwritten after {time.perf_counter() - start:.1f} s", flush=True)
    start = time.perf_counter()
    config = mmjax.EngineConfig(max_batch_size=4, max_num_tokens=1024, max_seq_len=4096)
    multimodal = mmjax.MultimodalConfig(encoder_max_num_tokens=8192)
    with mmjax.LLM(path, engine=config, multimodal=multimodal, progress=False) as llm:
        ready = time.perf_counter() - start
        params = mmjax.SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True, logprobs=2)
        photos = [skimage_data.astronaut(), skimage_data.coffee(), skimage_data.chelsea()]
        outputs = [llm.chat(_about(photo), params) for photo in photos]
        again = llm.chat(_about(photos[0]), params)
        salted = llm.chat(_about(photos[0]), params, cache_salt="nothing cached")
        together = llm.chat([_about(photo) for photo in photos], params)
        rows = llm.encode([photos[0]])[0]
        stats = llm.stats()
    print(f"\n7B sizes: ready after {ready:.1f} s ({stats.compiles['seconds']:.1f} s of it compiling)")
    for output in outputs:
        print(f"  {output.usage.prompt_tokens} prompt tokens, {output.metrics}")
    print(stats)
    assert [len(output.token_ids) for output in outputs] == [32, 32, 32]
    assert outputs[0].usage.image_tokens == len(rows) == 18 * 18
    assert np.isfinite(rows).all()
    assert rows.std() > 0
    assert salted.token_ids == outputs[0].token_ids, "one layout: equal to the bit"
    assert again.metrics.items_encoded == 0
    assert again.metrics.prefix_tokens_reused > 0
    assert _equal_but_for_ties(again, outputs[0]), "another layout: equal up to the rounding of bfloat16"
    assert len({tuple(output.token_ids) for output in outputs}) == 3, "the answer depends on the picture"
    assert all(output.finish_reason == "length" for output in together)
    assert stats.compiles["since"] == 0
    record_property("ready_seconds", ready)


def _equal_but_for_ties(one, other) -> bool:
    """Whether the tokens agree up to the first place where either answer's best two were nearly as likely."""
    for step, (ours, theirs) in enumerate(zip(one.token_ids, other.token_ids, strict=True)):
        if ours != theirs:
            best, second = sorted(other.logprobs[step].top.values(), reverse=True)
            return best - second < tolerances.BF16_TIE
    return True


def _about(photo: np.ndarray) -> list[dict]:
    content = [{"type": "image", "image": photo}, {"type": "text", "text": "What is in the picture?"}]
    return [{"role": "user", "content": content}]
