# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's own tokenizer, through transformers, which needs no torch for it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any


def load_tokenizer(path: Path) -> Any:
    """The transformers tokenizer of the checkpoint directory `path`; nothing is downloaded."""
    log = logging.getLogger("transformers")
    log.addFilter(_worth_saying)
    try:
        from transformers import AutoTokenizer
    finally:
        log.removeFilter(_worth_saying)
    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def _worth_saying(record: logging.LogRecord) -> bool:
    """False for what transformers says when it is imported without torch: that no model will be available."""
    return "PyTorch was not found" not in record.getMessage()
