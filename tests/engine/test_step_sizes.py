# SPDX-License-Identifier: Apache-2.0
"""Claim: the compiled prefill and decode sizes hold every step that the engine's limits allow."""

from __future__ import annotations

from dataclasses import replace

import jax
import llm_kit
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels_pallas.dispatch import AttentionChoice
from mmjax import LLM, SamplingParams
from mmjax import config as config_module
from mmjax.bench.subject import Subject
from mmjax.bucket_sizes import sizes_that_reach
from mmjax.config import EngineConfig, decode_ladder, prefill_ladder, resolve_engine
from mmjax.engine import runner
from mmjax.loading import open_model


def test_sizes_of_an_engine_on_a_gpu():
    config = resolve_engine(EngineConfig(), "gpu", 128_000)
    prefill = prefill_ladder(config, "gpu")
    assert [bucket.tokens for bucket in prefill[True]] == [
        64, 128, 256, 512, 1024, 1408, 1728, 2048, 2752, 3456, 4096, 5504, 6848, 8192,
    ]  # fmt: skip
    assert [bucket.sequences for bucket in prefill[True]] == [2, 4, 8, 16] + [32] * 10
    assert prefill[False] == prefill[True][:8]
    assert decode_ladder(config, "gpu") == (16, 32, 64, 128, 256)
    assert decode_ladder(config, "cpu") == (1, 2, 4, 8, 16, 32, 64, 128, 256)


def test_padding_is_small_on_a_mix_of_photos():
    """Patches of photos from 0.1 to 12 megapixels, up to 8 in a batch of 8,192 patches, larger ones alone."""
    rng, batches = np.random.default_rng(0), []
    processor = Subject("qwen2.5-vl-7b", None).model.processor
    for _ in range(2000):
        batches.append(0)
        for _ in range(rng.choice([1, 1, 1, 1, 2, 3, 4, 8])):
            area, aspect = np.exp(rng.uniform(np.log(1e5), np.log(12e6))), np.exp(rng.normal(0, 0.35))
            tokens = processor.plan_image(int((area * aspect) ** 0.5), int((area / aspect) ** 0.5), {}).encoder_tokens
            if batches[-1] and batches[-1] + tokens > 8192:
                batches.append(0)
            batches[-1] += tokens
    ladder = np.array(sizes_that_reach(max(batches), 256))
    padded = ladder[np.searchsorted(ladder, batches)].sum()
    assert 1 - sum(batches) / padded < 0.12
    assert len(ladder) <= 21


@given(
    batch=st.integers(1, 300),
    tokens=st.integers(1, 9000),
    sequences=st.none() | st.integers(1, 300),
    data=st.data(),
)
def test_some_step_holds_whatever_the_limits_allow(batch, tokens, sequences, data):
    limits = EngineConfig(
        max_batch_size=batch, max_num_tokens=max(batch, tokens), max_seq_len=64, max_prefill_sequences=sequences
    )
    config = resolve_engine(limits, "cpu", 128)
    chunks = data.draw(st.integers(1, config.max_prefill_sequences))
    total = data.draw(st.integers(chunks, config.max_num_tokens))
    for platform in ("cpu", "gpu"):
        ladder = prefill_ladder(config, platform)[True]
        assert list(ladder) == sorted(ladder)
        assert any(bucket.tokens >= total and bucket.sequences >= chunks for bucket in ladder)
        assert max(decode_ladder(config, platform)) == batch


def test_the_steps_of_a_gpu_give_the_answers_of_a_cpus(tiny_checkpoint, monkeypatch):
    """Those without prefixes, and padded to the smallest size, all on this machine's CPU."""
    checkpoint = tiny_checkpoint("qwen2_5_vl", **llm_kit.CHECKPOINT)
    text = {"type": "text", "text": "Which is larger?"}
    pictures = [np.full((56, 84, 3), value, np.uint8) for value in (10, 200)]
    asked = [[{"role": "user", "content": [{"type": "image", "image": picture}, text]}] for picture in pictures]
    params = [
        SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=6, seed=3, logprobs=2, ignore_eos=True),
    ]
    engine = replace(llm_kit.ENGINE, compilation_cache=True)
    answers = {}
    for platform in ("cpu", "gpu"):
        for name in ("prefill_ladder", "decode_ladder"):
            ladder = getattr(config_module, name)
            monkeypatch.setattr(runner, name, lambda config, _, ladder=ladder, kind=platform: ladder(config, kind))
        with LLM(checkpoint.path, progress=False, engine=engine, multimodal=llm_kit.MULTIMODAL) as llm:
            first = llm.chat(asked[0], params[0])
            answers[platform] = [first.token_ids] + [
                [out.token_ids for out in llm.chat(asked, each)] for each in (params[0], params)
            ]
            names = set(llm.running.machine.text.executables())
            assert llm.stats().compiles["since"] == 0
    assert {"decode 4", "sample 4", "sample 4 greedy", "prefill 64", "prefill 64 without prefix"} <= names
    assert answers["gpu"] == answers["cpu"]


@pytest.mark.parametrize(
    ("family", "prefill", "twice"),
    [("qwen2_vl", "cudnn", True), ("qwen2_vl", "mosaic", False), ("deepseek_v4_1", "cudnn", False)],
)
def test_steps_without_prefixes_are_compiled_where_they_are_quicker(
    tiny_checkpoint, monkeypatch, family, prefill, twice
):
    """Our kernel, and layers that attend by themselves, would run the same step again."""
    monkeypatch.setattr(runner, "choices", lambda *_, **__: AttentionChoice(prefill=prefill))
    monkeypatch.setattr(runner, "prefill_ladder", lambda config, _: prefill_ladder(config, "gpu"))
    device = jax.devices()[0]
    model = open_model(tiny_checkpoint(family, **llm_kit.CHECKPOINT).path, dtype="float32", device=device)
    text = runner.ModelRunner(
        model.family,
        model.cfg,
        model.family.spec(model.cfg)["text"],
        resolve_engine(llm_kit.ENGINE, "gpu", model.cfg.max_position_embeddings),
        device=device,
        pool=lambda: None,
        pool_rows=1,
        banned_ids=(),
    )
    text.set_num_blocks(1)
    names = [job.name for job in text.jobs()]
    assert {"prefill 64", "prefill 128"} <= set(names)
    assert ("prefill 64 without prefix" in names) == twice
