# SPDX-License-Identifier: Apache-2.0
"""Ids of a tokenizer's added tokens, read from its files, for processors that need them before a tokenizer is there."""

from __future__ import annotations

import json
from pathlib import Path

from mmjax.errors import CheckpointError


def added_token_ids(folder: Path) -> dict[str, int]:
    """Text -> id of every added token, from tokenizer.json, else from tokenizer_config.json.

    Raises:
      CheckpointError: neither file lists any.
    """
    entries = _read(folder / "tokenizer.json").get("added_tokens") or []
    ids = {entry["content"]: entry["id"] for entry in entries}
    if not ids:
        decoder = _read(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
        ids = {entry["content"]: int(number) for number, entry in decoder.items()}
    if not ids:
        raise CheckpointError(f"{folder}: neither tokenizer.json nor tokenizer_config.json lists added tokens")
    return ids


def _read(path: Path) -> dict:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path.name}: can't be read as JSON: {error}") from error
