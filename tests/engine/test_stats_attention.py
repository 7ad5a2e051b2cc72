# SPDX-License-Identifier: Apache-2.0
"""Claim: `stats()` names the implementation of each attention that a model runs, and of none that it does not run."""

from __future__ import annotations

from dataclasses import replace

import jax
import llm_kit
import pytest

from kernels_pallas import dispatch
from mmjax.loading import open_model
from mmjax.stats import attention_in_use

PAGE = 64


@pytest.fixture
def model(tiny_checkpoint):
    """A function (family) -> its family and its config in bfloat16."""

    def make(family: str):
        path = tiny_checkpoint(family, **llm_kit.CHECKPOINT).path
        opened = open_model(path, dtype="float32", device=jax.devices()[0])
        return opened.family, replace(opened.cfg, dtype="bfloat16")

    return make


@pytest.fixture
def ampere(monkeypatch):
    """The choices of a GPU that no kernel of ours is for."""
    monkeypatch.setattr(dispatch, "local_device", lambda platform: dispatch.Device("cuda", (8, 0)))


@pytest.mark.parametrize(("family", "windowed"), [("qwen2_5_vl", True), ("qwen2_vl", False)])
def test_windows_are_named_where_there_are_some(model, family, windowed):
    assert ("windowed" in attention_in_use(*model(family), "cpu", PAGE)) == windowed


def test_text_and_tower_are_chosen_by_their_own_heads(model, ampere):
    """The tower's heads are 16 wide, the decoder's 24."""
    family, cfg = model("mistral3")
    assert attention_in_use(family, cfg, "gpu", PAGE) == {"packed": "xla", "prefill": "xla", "decode": "cudnn"}


def test_attention_of_a_familys_own_is_no_shared_implementation(model, ampere):
    used = attention_in_use(*model("deepseek_v4_1"), "gpu", PAGE)
    assert used["prefill"] == used["decode"] == "the family's own"
