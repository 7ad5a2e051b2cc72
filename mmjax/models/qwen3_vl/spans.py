# SPDX-License-Identifier: Apache-2.0
"""What stands in the prompt for a clip: each temporal step's time in words, and its rows between vision tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int32
from tokenizers import Tokenizer

from mmjax.errors import CheckpointError


@dataclass(frozen=True)
class ClipText:
    """Writes clips in a checkpoint's tokens.

    Attributes:
      folder: the checkpoint's directory. Its tokenizer.json is read when the first clip comes.
      start_id, end_id: vision tokens around the rows of a step.
    """

    folder: Path
    start_id: int
    end_id: int

    def span(
        self, seconds: Sequence[float], rows: int, pad_id: int
    ) -> tuple[Int32[np.ndarray, "n"], Bool[np.ndarray, "n"]]:
        """Ids of `<1.5 seconds>`, start, rows and end of every step, and which of them take a row.

        Args:
          seconds: the time of each step.
          rows: embedding rows of a step.
          pad_id: the placeholder of a row.

        Raises:
          CheckpointError: the checkpoint has no tokenizer.json that can be read.
        """
        pads = [pad_id] * rows
        ids: list[int] = []
        for time in seconds:
            ids += [*_tokens(self.folder, f"<{time:.1f} seconds>"), self.start_id, *pads, self.end_id]
        span = np.asarray(ids, np.int32)
        return span, span == pad_id


@lru_cache(maxsize=4096)
def _tokens(folder: Path, text: str) -> tuple[int, ...]:
    return tuple(_tokenizer(folder).encode(text, add_special_tokens=False).ids)


@lru_cache(maxsize=2)
def _tokenizer(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise CheckpointError(f"{file}: the times of clips need a tokenizer, which can't be read: {error}") from error
