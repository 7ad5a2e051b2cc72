# SPDX-License-Identifier: Apache-2.0
"""A table of a prompt's items: where they stand, how many rows they take, how they are named."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from mmjax.inputs.hashing import int32_to_hexdigest
from mmjax.inputs.prompt import PreparedPrompt, PromptItem
from mmjax.inputs.usage import Usage

HEADINGS = ("item", "modality", "placeholder", "positions", "tokens", "rows", "grid", "hash")
HASH_CHARACTERS = 12
MOST_RANGES = 4  # of positions that a cell spells out


@dataclass(frozen=True)
class Span:
    """One row of the table.

    Attributes:
      placeholder: "in-vocabulary" or "out-of-vocabulary", and "with specials" if some positions keep a text embedding.
      runs: (position, length) of the positions that belong to the item.
      grid: patches along (time, height, width).
      hash: content digest in hex, None if the item was only planned.
    """

    item: int
    modality: str
    placeholder: str
    runs: tuple[tuple[int, int], ...]
    rows: int
    grid: tuple[int, int, int]
    hash: str | None

    @property
    def tokens(self) -> int:
        """Prompt positions that belong to the item."""
        return sum(length for _, length in self.runs)

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        return (
            str(self.item),
            self.modality,
            self.placeholder,
            _ranges(self.runs),
            str(self.tokens),
            str(self.rows),
            "×".join(map(str, self.grid)),
            self.hash[:HASH_CHARACTERS] if self.hash else "-",
        )


@dataclass(frozen=True)
class SpanTable:
    """All items of a prompt and its token counts; prints as text and renders in notebooks."""

    spans: tuple[Span, ...]
    usage: Usage
    notes: tuple[str, ...] = ()

    def _summary(self) -> str:
        usage = self.usage
        parts = [f"{usage.text_tokens} text"]
        parts += [
            f"{count} {name}"
            for name, count in (
                ("image", usage.image_tokens),
                ("video", usage.video_tokens),
                ("audio", usage.audio_tokens),
            )
            if count
        ]
        return f"{usage.prompt_tokens} prompt tokens = {' + '.join(parts)}"

    def __str__(self) -> str:
        lines = [self._summary(), *self.notes]
        if self.spans:
            lines[1:1] = _align([HEADINGS, *(span.cells() for span in self.spans)])
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        def row(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "".join(row(span.cells(), "td") for span in self.spans)
        table = f"<table><thead>{row(HEADINGS, 'th')}</thead><tbody>{body}</tbody></table>" if self.spans else ""
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return f"<p>{html.escape(self._summary())}</p>{table}{notes}"


def explain_prompt(prompt: PreparedPrompt) -> SpanTable:
    """The table of a prepared prompt; planned items do."""
    return SpanTable(
        tuple(_span(item, prompt.vocab_size) for item in prompt.items), prompt.usage, tuple(prompt.warnings)
    )


def _span(item: PromptItem, vocab_size: int) -> Span:
    ids = item.plan.span_ids[item.plan.span_embed]
    kind = "in-vocabulary" if int(ids.max()) < vocab_size else "out-of-vocabulary"
    if item.length > item.plan.rows:
        kind += " with specials"
    return Span(
        item=item.index,
        modality=item.modality.value,
        placeholder=kind,
        runs=tuple(item.runs),
        rows=item.plan.rows,
        grid=item.plan.grid,
        hash=None if item.digest is None else int32_to_hexdigest(item.digest),
    )


def _ranges(runs: Sequence[tuple[int, int]]) -> str:
    """The runs as ranges; of many, as clips with times between their steps have them, the first and the last."""
    ranges = [f"{position}..{position + length - 1}" for position, length in runs]
    if len(ranges) > MOST_RANGES:
        return f"{ranges[0]}, {ranges[1]}, ... {ranges[-1]} ({len(ranges)} runs)"
    return ", ".join(ranges)


def _align(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
