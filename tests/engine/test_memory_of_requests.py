# SPDX-License-Identifier: Apache-2.0
"""Claim: a thousand pictures later, devices and host hold what they held after the first fifty."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import jax
import numpy as np
import pytest
from llm_kit import assert_nothing_held, noise, png, user

import mmjax
from mmjax.inputs import process

STATM = Path("/proc/self/statm")
REQUESTS, WARM = 1000, 50
ONE = mmjax.SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


def resident() -> int:
    """Bytes of host memory that this process holds."""
    pages = int(STATM.read_text().split()[1])
    return pages * 4096


def live() -> tuple[int, int]:
    """Device arrays and their bytes."""
    arrays = jax.live_arrays()
    return len(arrays), sum(array.nbytes for array in arrays)


@pytest.mark.skipif(not STATM.exists(), reason="needs /proc, to read what the process holds")
def test_a_thousand_pictures_leave_nothing_behind(llm, monkeypatch):
    """Arrays, files and pictures with their rows supplied; answers, rows alone, failures and cancelled ones."""
    born: list[weakref.ref] = []
    patches_of = process.ProcessedItem.__init__

    def counted(self, plan, patches):
        born.append(weakref.ref(patches))
        patches_of(self, plan, patches)

    monkeypatch.setattr(process.ProcessedItem, "__init__", counted)
    after_warm = None
    for start in range(0, REQUESTS, WARM):
        batch = [noise(56, 84, start + n) for n in range(WARM)]
        outs = llm.chat([user(png(picture) if n % 2 else picture, "?") for n, picture in enumerate(batch)], ONE)
        assert [out.error for out in outs] == [None] * WARM
        llm.encode([batch[0]])
        rows = [np.ones((6, 64), np.float32) * start]
        llm.chat(user(batch[1], "?"), ONE, multi_modal_embeddings={"image": rows})
        assert llm.chat([user(b"broken", "?")], ONE)[0].error is not None
        llm.submit(user(noise(84, 84, start), "?"), mmjax.SamplingParams(max_tokens=100)).cancel()
        del batch, outs, rows
        llm.stats()  # between two steps: whoever was cancelled is gone
        gc.collect()
        pixels = sum(array() is not None for array in born)
        assert pixels <= 1, "the engine's loop may still name what it packed last"
        if after_warm is None:
            after_warm = (*live(), resident())
    assert_nothing_held(llm)
    assert len(born) >= REQUESTS
    assert llm.stats().items["items_encoded"] >= REQUESTS
    arrays, nbytes, memory = after_warm
    assert live() == (arrays, nbytes)
    assert resident() - memory < 16 << 20
