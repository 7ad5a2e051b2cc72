# SPDX-License-Identifier: Apache-2.0
"""What a benchmark found: a table for people, JSON for machines."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "transformers")


@dataclass(frozen=True)
class Figure:
    """One measured thing.

    Attributes:
      seconds: of each round.
      floor: the least it can take, in seconds; None where nothing sensible is known.
      note: what else belongs to it, such as a rate.
      extra: more numbers for the JSON file.
      peer: the engine that was measured, where it isn't this one.
    """

    name: str
    seconds: Sequence[float]
    floor: float | None = None
    note: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    peer: str | None = None

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))

    @property
    def spread(self) -> tuple[float, float]:
        """First and third quartile."""
        low, high = np.percentile(self.seconds, (25, 75))
        return float(low), float(high)

    @property
    def ratio(self) -> float | None:
        """Median over floor: 1 is as fast as it can be."""
        return self.median / self.floor if self.floor else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "median_s": self.median,
            "quartiles_s": self.spread,
            "rounds": len(self.seconds),
            "floor_s": self.floor,
            "ratio": self.ratio,
            "note": self.note,
            **({"peer": self.peer} if self.peer else {}),
            **self.extra,
        }


def beside(figures: Sequence[Figure], theirs: Sequence[Figure]) -> list[Figure]:
    """Ours, each followed by a peer's figure of the same name, with our floor and its time over ours.

    Raises ValueError for a peer's figure that has no match.
    """
    by_name = {figure.name: figure for figure in theirs}
    if unmatched := by_name.keys() - {figure.name for figure in figures}:
        raise ValueError(f"no figure of ours is called {', '.join(sorted(unmatched))}")
    lines = []
    for ours in figures:
        lines.append(ours)
        if peer := by_name.get(ours.name):
            note = f"{peer.median / ours.median:.2f} x the time of mmjax; {peer.note}"
            lines.append(replace(peer, floor=ours.floor, note=note))
    return lines


def render(figures: Sequence[Figure]) -> str:
    """A table: median, quartiles and floor in milliseconds."""
    rows = [("what", "ms", "quartiles", "floor", "ratio", "")]
    for figure in figures:
        low, high = (_ms(value) for value in figure.spread)
        floor, ratio = ("-", "-") if figure.floor is None else (_ms(figure.floor), f"{figure.ratio:.2f}")
        name = f"  {figure.peer}: {figure.name}" if figure.peer else figure.name
        rows.append((name, _ms(figure.median), f"{low} to {high}", floor, ratio, figure.note))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *numbers, note in rows:
        cells = [name.ljust(widths[0]), *(text.rjust(w) for text, w in zip(numbers, widths[1:], strict=False)), note]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def save(path: Path, figures: Sequence[Figure], device: str, subject: str, versions: Mapping[str, str]) -> None:
    """Figures with all that it takes to judge them: versions (a peer's `versions` too), device, date, command."""
    context = _context(device, subject, versions)
    path.write_text(json.dumps(context | {"figures": [f.as_dict() for f in figures]}, indent=1))


def _context(device: str, subject: str, versions: Mapping[str, str]) -> dict[str, Any]:
    from mmjax import __version__

    return {
        "command": " ".join(["mmjax", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "model": subject,
        "host": f"{platform.machine()}, Python {platform.python_version()}",
        "versions": {"mmjax": __version__} | {name: _version(name) for name in _PACKAGES} | dict(versions),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
