# SPDX-License-Identifier: Apache-2.0
"""Draws a training curve: `python -m mmjax.demo.training.plot curve.csv curve.png` (needs matplotlib)."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from matplotlib import pyplot


def plot(source: Path, target: Path) -> None:
    """Loss of the answers and of the cell labels, and share of answer tokens right, over seconds; one colour a run."""
    with open(source, newline="") as file:
        rows = list(csv.DictReader(file))
    figure, (losses, right) = pyplot.subplots(1, 2, figsize=(9, 3), layout="constrained")
    for run, colour in zip(sorted({row["run"] for row in rows}), ("tab:blue", "tab:orange"), strict=False):
        mine = [row for row in rows if row["run"] == run]
        seconds = [float(row["seconds"]) for row in mine]
        for name, style in (("answers", "-"), ("shapes", ":")):
            values = [float(row[name]) for row in mine]
            losses.plot(seconds, values, style, color=colour, label=f"run {run}, {name}")
        right.plot(seconds, [100 * float(row["tokens_right"]) for row in mine], color=colour, label=f"run {run}")
    losses.set(yscale="log", xlabel="seconds", ylabel="cross-entropy")
    right.set(ylim=(50, 100), xlabel="seconds", ylabel="answer tokens right, %")
    for axes in (losses, right):
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(target, dpi=90)


if __name__ == "__main__":
    plot(Path(sys.argv[1]), Path(sys.argv[2]))
