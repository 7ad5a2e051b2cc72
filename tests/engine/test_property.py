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

import pytest
from property_episodes import Episode, draw_episode, smallest
from property_judge import Tally, run_episode
from property_models import MODELS
from property_world import World

REQUESTS = int(os.environ.get("MMJAX_PROPERTY_REQUESTS", "2000"))
SEED = int(os.environ.get("MMJAX_PROPERTY_SEED", "0"))
TIES = 1e-3  # of all tokens


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
@pytest.mark.parametrize("name", MODELS)
def test_answers_are_the_references(property_world, name, caplog, capsys):
    caplog.set_level(logging.CRITICAL)  # device errors are injected by the dozen
    world, tally = property_world(name), Tally()
    start = time.perf_counter()
    for seed in count(SEED):
        if tally.requests >= REQUESTS * MODELS[name].share:
            break
        judge(world, draw_episode(world, seed), tally)
    with capsys.disabled():
        print(f"\n{name}: {tally}, {time.perf_counter() - start:.1f} s")
    assert tally.ties <= TIES * tally.tokens
    if tally.requests > 500:  # what is hard to come by has come by
        assert min(tally.preemptions, tally.recoveries, tally.restores, tally.re_encodes, tally.failed) > 0
