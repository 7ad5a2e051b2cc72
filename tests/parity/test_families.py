# SPDX-License-Identifier: Apache-2.0
"""Claim: what `mmjax models` says of a family is what its code does, and what was measured is within the tolerances."""

from __future__ import annotations

import json

import pytest
import tolerances
from tiny_families import MODULES

from mmjax.models.catalogue import parity_records, recorded_facts
from mmjax.models.facts import FamilyFacts, Rotary, Span, TowerAttention, family_facts
from mmjax.models.registry import FAMILIES

NAMES = [family.name for family in FAMILIES]
WITHOUT_CLIPS = ("lighton_ocr", "mistral3", "pixtral", "deepseek_v4_1")
AGAIN = "run pytest tests/parity --record-parity"


@pytest.fixture
def facts(tiny_checkpoint):
    """A function (family) -> what its code says of a tiny checkpoint."""

    def read(name: str) -> FamilyFacts:
        path = tiny_checkpoint(name).path
        (family,) = (family for family in FAMILIES if family.name == name)
        return family_facts(family, json.loads((path / "config.json").read_text()), path)

    return read


@pytest.mark.parametrize("name", NAMES)
def test_facts_are_those_of_the_code(facts, parity_record, pytestconfig, name):
    found = facts(name)
    parity_record.facts(name, found)
    if not pytestconfig.getoption("--record-parity"):
        assert found == recorded_facts(parity_records()[name]), AGAIN


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen2_vl", (Span.WHOLE, True, 4, TowerAttention.FULL, False, Rotary.BLOCKS)),
        ("qwen2_5_vl", (Span.WHOLE, True, 4, TowerAttention.WINDOWS, False, Rotary.BLOCKS)),
        ("hyperclovax", (Span.WHOLE, True, 4, TowerAttention.WINDOWS, False, Rotary.PLAIN)),
        ("qwen3_vl", (Span.STEPS, True, 4, TowerAttention.FULL, True, Rotary.INTERLEAVED)),
        ("qwen3_vl_moe", (Span.STEPS, True, 4, TowerAttention.FULL, True, Rotary.INTERLEAVED)),
        ("lighton_ocr", (Span.WHOLE, True, 4, TowerAttention.FULL, False, Rotary.PLAIN)),
        ("mistral3", (Span.BREAKS, False, 4, TowerAttention.FULL, False, Rotary.PLAIN)),
        ("pixtral", (Span.BREAKS, False, 1, TowerAttention.FULL, False, Rotary.PLAIN)),
        ("deepseek_v4_1", (Span.WHOLE, False, 9, TowerAttention.FULL, False, Rotary.PLAIN)),
    ],
)
def test_facts_are_told_apart(facts, name, expected):
    found = facts(name)
    assert tuple(vars(found).values())[1:] == expected
    assert list(found.modalities) == (["image"] if name in WITHOUT_CLIPS else ["image", "video"])


def test_every_family_is_recorded_and_none_else():
    assert sorted(parity_records()) == sorted(NAMES) == sorted(MODULES), AGAIN


@pytest.mark.parametrize("name", NAMES)
def test_records_are_within_the_tolerances(name):
    record = parity_records()[name]
    for what, bound in (("rows", tolerances.TOWER_ROWS), ("logits", tolerances.LOGITS)):
        assert 0 < record[what]["difference"] <= bound < 1e-2 * record[what]["largest"]
    assert record["greedy"]["tokens"] >= 16 * record["greedy"]["answers"] > 0
    assert record["greedy"]["ties"] <= record["greedy"]["answers"]
    assert record["measured"].keys() == {"date", "transformers", "torch", "jax"}
