# SPDX-License-Identifier: Apache-2.0
"""The table of `mmjax models`: what each family is, and how far it is from transformers.

`parity.json` holds what the parity tests found, see `pytest tests/parity --record-parity`.
"""

from __future__ import annotations

import json
import math
import textwrap
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from mmjax.errors import CheckpointError
from mmjax.models.facts import FamilyFacts, Rotary, Span, TowerAttention
from mmjax.models.family import About, Family
from mmjax.models.registry import FAMILIES, load_offered, offered, package_of

NOWHERE = "No family takes quantised weights or sound."
_HEAD = (
    "family",
    "`model_type`",
    "takes",
    "placeholders",
    "ids beyond the vocabulary",
    "patches a row",
    "tower attention",
    "deepstack",
    "rotary positions",
    "tower rows",
    "logits",
    "greedy tokens",
)
_UNKNOWN = "-"
_TAKES = {"image": "images", "video": "clips", "audio": "sound"}


@dataclass(frozen=True)
class Listing:
    """One line: a family, the package that it comes from if it is not ours, and what is recorded of it."""

    family: Family
    package: str | None
    record: dict[str, Any] | None

    @property
    def about(self) -> About:
        return self.family.about or About(self.family.name)


@cache
def parity_records() -> dict[str, dict[str, Any]]:
    """Family -> its facts and what the parity tests measured."""
    return json.loads((files("mmjax.models") / "parity.json").read_text(encoding="utf-8"))


def recorded_facts(record: dict[str, Any]) -> FamilyFacts:
    """The facts in one record."""
    facts = record["facts"]
    return FamilyFacts(
        **facts
        | {
            "modalities": tuple(facts["modalities"]),
            "span": Span(facts["span"]),
            "attention": TowerAttention(facts["attention"]),
            "rotary": Rotary(facts["rotary"]),
        }
    )


def listings() -> tuple[list[Listing], list[str]]:
    """Our families, then those of other packages; and what is wrong with those that can't be loaded."""
    found = [Listing(family, None, parity_records().get(family.name)) for family in FAMILIES]
    broken = []
    for offer in offered():
        try:
            found.append(Listing(load_offered(offer), package_of(offer), None))
        except CheckpointError as error:
            broken.append(str(error))
    return found, broken


def as_text() -> str:
    """The table for a terminal, turned: a family a block, since it has too many columns for one line each."""
    found, broken = listings()
    width = max(map(len, _HEAD)) + 4
    blocks = []
    for listing in found:
        names = [name.strip("`") for name in _HEAD[1:]]
        cells = [cell.replace("`", "") for cell in _cells(listing)[1:]]
        lines = [f"  {name:{width}}{cell}" for name, cell in zip(names, cells, strict=True)]
        if listing.about.lacks:
            lines.append(f"  {'not supported':{width}}{', '.join(listing.about.lacks)}")
        lines += [
            textwrap.fill(f"{remark}.", 100, initial_indent="  ", subsequent_indent="  ")
            for remark in listing.about.remarks
        ]
        origin = f" (from {listing.package})" if listing.package else ""
        blocks.append("\n".join([f"{listing.about.title}{origin}", *lines]))
    return "\n\n".join([*blocks, *broken, f"{_how(found)}\n{NOWHERE}"])


def as_markdown() -> str:
    """The table of our own families for the README, and what they lack."""
    found = [listing for listing in listings()[0] if listing.package is None]
    table = [_line(_HEAD), _line(["---"] * len(_HEAD)), *(_line(_cells(listing)) for listing in found)]
    shared: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for listing in found:
        shared.setdefault((listing.about.lacks, listing.about.remarks), []).append(listing.about.title)
    notes = []
    for (lacks, remarks), titles in shared.items():
        said = [f"not supported: {', '.join(lacks)}"] if lacks else []
        notes += [f"- {', '.join(titles)}: {'. '.join([*said, *remarks])}."] if said or remarks else []
    return "\n".join([*table, "", _how(found), NOWHERE, "", *notes])


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(listing: Listing) -> list[str]:
    types = ", ".join(f"`{name}`" for name in listing.family.model_types)
    if listing.record is None:
        return [listing.about.title, types, *[_UNKNOWN] * (len(_HEAD) - 2)]
    record, facts = listing.record, recorded_facts(listing.record)
    return [
        listing.about.title,
        types,
        ", ".join(_TAKES[modality] for modality in facts.modalities),
        facts.span,
        _yes(facts.beyond_vocabulary),
        str(facts.merge),
        facts.attention,
        _yes(facts.deepstack),
        facts.rotary,
        round_up(record["rows"]["difference"]),
        round_up(record["logits"]["difference"]),
        _greedy(**record["greedy"]),
    ]


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _greedy(answers: int, tokens: int, ties: int) -> str:
    but = f", but for {ties} ties" if ties else ""
    return f"{tokens} equal{but}"


def round_up(value: float) -> str:
    """A positive number with one digit, never less than it is: 1.2e-6 is "2e-6"."""
    if value <= 0:
        return "0"
    power = math.floor(math.log10(value))
    digit = math.ceil(value / 10.0**power - 1e-9)
    return f"1e{power + 1}" if digit == 10 else f"{digit}e{power}"


def _how(found: list[Listing]) -> str:
    """How the numbers were found."""
    records = [listing.record for listing in found if listing.record]
    versions = sorted({f"transformers {record['measured']['transformers']}" for record in records})
    largest = {what: [record[what]["largest"] for record in records] for what in ("rows", "logits")}
    reach = " and ".join(f"{what} up to {max(values):.2g}" for what, values in largest.items())
    return (
        f"Tower rows and logits: largest absolute difference from {', '.join(versions)} in float32 on the CPU, "
        f"random checkpoints with every parameter redrawn ({reach})."
    )
