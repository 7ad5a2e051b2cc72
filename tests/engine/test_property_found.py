# SPDX-License-Identifier: Apache-2.0
"""Claim: what random episodes have found stays mended. Small episodes that failed once, their prompts spelt out."""

from __future__ import annotations

import pytest
from encoder_kit import PROMPT, make_items, make_scheduler, selected
from property_episodes import Ask, Episode, Faults, Limits
from property_judge import run_episode
from property_world import World

PAGE = 4
FOUR, ANOTHER_FOUR, SIX, NINE, TWELVE, TWENTY = 0, 1, 2, 3, 5, 7  # pictures of the stock, by their rows


@pytest.fixture
def world(property_world):
    return property_world("qwen2_5_vl")


def prompt(world: World, text: int, *pictures: int, after: int = 2) -> int:
    """`text` tokens, pictures with a token before each, `after` tokens."""
    shown = [part for picture in pictures for part in ([32], world.stock[picture])]
    return world.add(list(range(65, 65 + text)), *shown, [66] * after)


def test_a_batch_that_fails_as_a_whole_fails_its_own_requests(world):
    """Without chunk budgets a step makes several encoder calls; the second fails though its picture packs alone."""
    asks = Ask(prompt(world, 4, FOUR)), Ask(prompt(world, 4, NINE))
    run = run_episode(world, Episode(PAGE, asks, Limits(policy="disabled", items=1), Faults(pack=(1,))))
    assert [run.requests[i].handle.wait(0).finish_reason for i in range(2)] == ["length", "error"]


@pytest.mark.parametrize("call", range(4))
def test_rows_are_delivered_once_when_the_device_fails_between_them(world, call):
    asks = (Ask(prompt(world, 4, FOUR, NINE), embed_only=True),)
    run = run_episode(world, Episode(PAGE, asks, Limits(), Faults(device=(call,))))
    assert [len(rows) for rows in run.requests[0].rows] == [4, 9]


def test_preempted_requests_wait_in_order_of_arrival(world):
    """The older of two preempted requests waited behind the younger, which the encoder's gate alone let pass."""
    long, short = prompt(world, 40, FOUR, SIX, NINE, ANOTHER_FOUR), prompt(world, 20, SIX, NINE, TWELVE)
    for blocks in range(20, 30):
        limits = Limits(chunk=4, blocks=blocks, readiness="request")
        asks = Ask(long, max_tokens=9), Ask(short, 1), Ask(short, 1)
        run_episode(world, Episode(PAGE, asks, limits))


@pytest.mark.parametrize("call", range(2, 24, 3))
def test_one_that_waits_for_a_slot_does_not_stop_those_that_run(world, call):
    """After a device error a picture is decoded again; meanwhile a younger request takes the only slot."""
    asks = Ask(prompt(world, 8, SIX, TWELVE)), Ask(prompt(world, 30))
    run_episode(world, Episode(PAGE, asks, Limits(chunk=4, batch=1), Faults(device=(call,))))


def test_looking_ahead_leaves_budget_to_those_that_hold_rows(world):
    """One item a step: the second picture of the first request waited for look-ahead that the third cancelled."""
    first, second = prompt(world, 4, NINE, FOUR), prompt(world, 20, TWELVE)
    third = prompt(world, 4, TWENTY, NINE)
    asks = Ask(first), Ask(second), Ask(third, embed_only=True)
    run_episode(world, Episode(PAGE, asks, Limits(policy="eager", readiness="request", items=1, rows=30)))


def test_what_look_ahead_gives_up_leaves_its_budget():
    """One item a step: a claim that cancels look-ahead for want of rows is encoded in its place."""
    scheduler = make_scheduler("eager", items=1, rows=10)
    scheduler.admit("ahead", make_items(8, rows=4, keys=["x"]))
    scheduler.admit("claims", make_items(8, rows=8, keys=["y"]))
    scheduler.begin()
    scheduler.look_ahead(["ahead"])
    assert scheduler.claim("claims", 0, PROMPT).end == PROMPT
    plan = scheduler.close()
    assert (selected(plan), plan.look_ahead) == ({"claims": [0]}, ())
