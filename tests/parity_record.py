# SPDX-License-Identifier: Apache-2.0
"""What parity tests measure, kept for `mmjax models`: written only when pytest is run with --record-parity."""

from __future__ import annotations

import datetime
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
import transformers

from mmjax.models.facts import FamilyFacts

FILE = Path(__file__).parents[1] / "mmjax" / "models" / "parity.json"


class ParityRecord:
    """Collects the largest differences of a test run, family by family."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}

    def difference(self, family: str, what: str, ours: Any, theirs: Any) -> None:
        """`what`: "rows" of the tower or "logits"; both sides are arrays of one shape."""
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        entry = self._of(family).setdefault(what, {"difference": 0.0, "largest": 0.0})
        entry["difference"] = max(entry["difference"], float(np.abs(ours - theirs).max()))
        entry["largest"] = max(entry["largest"], float(np.abs(theirs).max()))

    def greedy(self, family: str, tokens: int, ties: int) -> None:
        """An answer of `tokens` tokens, equal but for `ties` where the reference's two best logits are too close."""
        entry = self._of(family).setdefault("greedy", {"answers": 0, "tokens": 0, "ties": 0})
        for key, number in (("answers", 1), ("tokens", tokens), ("ties", ties)):
            entry[key] += number

    def facts(self, family: str, facts: FamilyFacts) -> None:
        """What the family's code says of itself."""
        self._of(family)["facts"] = asdict(facts)

    def write(self) -> None:
        """Puts what was found into the package; what this run did not measure stays as it is."""
        versions = {"transformers": transformers.__version__, "torch": torch.__version__, "jax": jax.__version__}
        stamp = {"date": datetime.date.today().isoformat(), **versions}
        records = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
        for family, found in self.found.items():
            records[family] = {**records.get(family, {}), **found, "measured": stamp}
        ordered = {family: dict(sorted(records[family].items())) for family in sorted(records)}
        FILE.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")

    def _of(self, family: str) -> dict[str, Any]:
        return self.found.setdefault(family, {})
