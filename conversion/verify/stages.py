# SPDX-License-Identifier: Apache-2.0
"""What two implementations compute on the same inputs, stage by stage, and how far apart they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, Num

# float32 arithmetic in another order, absolute for values of order 1 to 10 and relative for larger ones: residual
# streams of published models reach thousands.
ABSOLUTE_TOLERANCE = 1e-4
RELATIVE_TOLERANCE = 1e-5

# Where the judge's two best logits lie closer than this, either token is right.
TIE_MARGIN = 1e-4


@dataclass(frozen=True)
class Stages:
    """One side's results. S tokens of the prompt, P patches, R rows, G greedy tokens.

    Attributes:
      token_ids: the expanded prompt.
      positions: rotary positions of the prompt.
      pixels: normalised: patches, or a picture in planes [C, H, W] where both sides give one.
      tower: embedding rows of the picture.
      layers: input of every decoder layer and output of the last: L + 1 arrays, before the final norm.
      logits: behind every token of the prompt.
      greedy: the answer's first tokens; each follows the judge's tokens before it.
      margins: how far the best logit of each lies above the second; only the judge's count.
    """

    token_ids: Int[np.ndarray, "S"]
    positions: Int[np.ndarray, "A S"]
    pixels: Float[np.ndarray, "..."]
    tower: Float[np.ndarray, "R E"]
    layers: Sequence[Float[np.ndarray, "S E"]]
    logits: Float[np.ndarray, "S V"]
    greedy: Int[np.ndarray, "G"]
    margins: Float[np.ndarray, "G"]

    def named(self) -> dict[str, np.ndarray]:
        """All stages but the greedy tokens, in the order of computation."""
        return {
            "token ids": self.token_ids,
            "positions": self.positions,
            "pixels": self.pixels,
            "tower rows": self.tower,
            "fused embeddings": self.layers[0],
            **{f"text layer {i}": layer for i, layer in enumerate(self.layers[1:])},
            "logits": self.logits,
        }


@dataclass(frozen=True)
class StageResult:
    """One line of a report; `note` says what a number can't, such as two shapes that differ."""

    stage: str
    error: float
    tolerance: float
    note: str = ""

    @property
    def passed(self) -> bool:
        return bool(self.error <= self.tolerance)  # False for NaN


@dataclass(frozen=True)
class Report:
    """The outcome of a comparison: one result a stage, in the order of computation."""

    title: str
    results: tuple[StageResult, ...]

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)

    @property
    def first_difference(self) -> str | None:
        """The first stage beyond its tolerance."""
        return next((result.stage for result in self.results if not result.passed), None)


def compare(ours: Stages, judge: Stages) -> tuple[StageResult, ...]:
    """Every stage of `ours` against the judge's."""
    expected = judge.named()
    results = [compare_arrays(stage, value, expected[stage]) for stage, value in ours.named().items()]
    return (*results, compare_greedy(ours.greedy, judge.greedy, judge.margins))


def compare_arrays(stage: str, ours: Num[np.ndarray, "*dims"], judge: Num[np.ndarray, "*dims"]) -> StageResult:
    """Largest absolute difference. Integers must be equal; so must pixels, which are looked up and not computed."""
    if ours.shape != judge.shape:
        return StageResult(stage, np.inf, 0.0, f"shape {list(ours.shape)}, expected {list(judge.shape)}")
    exact = np.issubdtype(judge.dtype, np.integer) or stage == "pixels"
    scale = float(np.max(np.abs(judge), initial=0.0))
    tolerance = 0.0 if exact else max(ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE * scale)
    error = float(np.max(np.abs(ours.astype(np.float64) - judge), initial=0.0))
    return StageResult(stage, error, tolerance)


def compare_greedy(
    ours: Int[np.ndarray, "G"], judge: Int[np.ndarray, "G"], margins: Float[np.ndarray, "G"]
) -> StageResult:
    """How many greedy tokens differ where the judge was not undecided."""
    if ours.shape != judge.shape:
        return StageResult("greedy tokens", np.inf, 0.0, f"{len(ours)} tokens, expected {len(judge)}")
    differs = ours != judge
    tied = differs & (margins < TIE_MARGIN)
    note = f"{len(judge) - differs.sum()} of {len(judge)} equal" + (f", {tied.sum()} tied" if tied.any() else "")
    return StageResult("greedy tokens", float((differs & ~tied).sum()), 0.0, note)


def render(report: Report) -> str:
    """The report as a table, with the verdict below."""
    rows = [("stage", "max abs error", "tolerance", "", "")]
    for result in report.results:
        verdict = "ok" if result.passed else "DIFFERS"
        rows.append((result.stage, f"{result.error:.3g}", f"{result.tolerance:.3g}", verdict, result.note))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:<{widths[3]}}  {row[4]}".rstrip()
        for row in rows
    ]
    first = report.first_difference
    verdict = "every stage agrees" if first is None else f"the first stage that differs: {first}"
    return "\n".join([report.title, "", *lines, "", verdict])
