# SPDX-License-Identifier: Apache-2.0
"""Claim: the compiled prefill and decode sizes hold every step that the engine's limits allow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mmjax.config import EngineConfig, decode_ladder, prefill_ladder, resolve_engine


def test_sizes_of_an_engine_on_a_gpu():
    config = resolve_engine(EngineConfig(), "gpu", 128_000)
    assert [bucket.tokens for bucket in prefill_ladder(config)] == [
        64, 128, 256, 512, 1024, 1408, 1728, 2048, 2752, 3456, 4096, 5504, 6848, 8192,
    ]  # fmt: skip
    assert [bucket.sequences for bucket in prefill_ladder(config)] == [2, 4, 8, 16] + [32] * 10
    assert decode_ladder(config, "gpu") == (16, 32, 64, 128, 256)
    assert decode_ladder(config, "cpu") == (1, 2, 4, 8, 16, 32, 64, 128, 256)


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
    ladder = prefill_ladder(config)
    assert list(ladder) == sorted(ladder)
    assert any(bucket.tokens >= total and bucket.sequences >= chunks for bucket in ladder)
    assert max(decode_ladder(config, "cpu")) == max(decode_ladder(config, "gpu")) == batch
