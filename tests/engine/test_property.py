# SPDX-License-Identifier: Apache-2.0
"""Claim: whatever is asked, under whatever limits and faults, each answer is the reference's and all ends in order.

Random episodes (`property_episodes.py`): text, pictures, clips and mixtures that share them; chunks of 1 to 64 tokens,
budgets, pools, pages and block limits down to the least that can work; cancels, preemptions, encoder and device
failures. `MMJAX_PROPERTY_REQUESTS=50000` makes it a long run, `MMJAX_PROPERTY_SEED` starts at another episode.
"""

from __future__ import annotations

import logging
import os
import time
from itertools import count

import jax
import pytest
from property_episodes import Episode, draw_episode, smallest
from property_judge import Tally, run_episode
from property_world import World, build_world, fill_with_noise

REQUESTS = int(os.environ.get("MMJAX_PROPERTY_REQUESTS", "2000"))
SEED = int(os.environ.get("MMJAX_PROPERTY_SEED", "0"))
TIES = 1e-3  # of all tokens
PAGES = {"qwen2_5_vl": (4, 16), "qwen2_vl": (8,)}
SHARES = {"qwen2_5_vl": 0.7, "qwen2_vl": 0.3}


@pytest.fixture(scope="module")
def world(tiny_checkpoint):
    """A function (family) -> World, made once."""
    worlds = {}

    def make(family: str) -> World:
        if family not in worlds:
            path = tiny_checkpoint(family, layers=2, vision_depth=2, video_blocks=8, max_frames=6).path
            with jax.default_matmul_precision("highest"):
                worlds[family] = fill_with_noise(build_world(path, PAGES[family]))
        return worlds[family]

    return make


def judge(world: World, episode: Episode, tally: Tally) -> None:
    """Runs an episode; if it fails, the error shows the smallest form of it that fails in the same way."""
    try:
        run_episode(world, episode, tally)
    except Exception as error:
        kind = type(error)

        def fails(simpler: Episode) -> bool:
            try:
                run_episode(world, simpler)
            except kind:
                return True
            return False

        pytest.fail(f"{error!r} in the episode of seed {episode.seed}; the smallest one:\n{smallest(episode, fails)}")


@pytest.mark.timeout(0 if REQUESTS > 2000 else 600)
@pytest.mark.parametrize("family", PAGES)
def test_answers_are_the_references(world, family, exact_float32, caplog, capsys):
    caplog.set_level(logging.CRITICAL)  # device errors are injected by the dozen
    tally, start = Tally(), time.perf_counter()
    there = world(family)
    ready = time.perf_counter()
    for seed in count(SEED):
        if tally.requests >= REQUESTS * SHARES[family]:
            break
        judge(there, draw_episode(there, seed), tally)
    with capsys.disabled():
        print(f"\n{family}: {tally}, {time.perf_counter() - ready:.1f} s, start-up {ready - start:.1f} s")
    assert tally.ties <= TIES * tally.tokens
    assert min(tally.preemptions, tally.recoveries, tally.restores, tally.re_encodes, tally.failed) > 0
