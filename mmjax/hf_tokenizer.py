# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's own tokenizer, through transformers, which needs no torch for it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

# What transformers says when it is imported without torch (that no model will be available), and about a config.json
# of a family that it has no model for.
_NOT_WORTH_SAYING = ("PyTorch was not found", "You are using a model of type")


def load_tokenizer(path: Path) -> Any:
    """The transformers tokenizer of the checkpoint directory `path`; nothing is downloaded."""
    logs = [logging.getLogger(name) for name in ("transformers", "transformers.configuration_utils")]
    for log in logs:
        log.addFilter(_worth_saying)
    try:
        return _load(path)
    finally:
        for log in logs:
            log.removeFilter(_worth_saying)


def _load(path: Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedConfig

    # Mistral's own format has no fast form; tokenizer.json holds the same tokens.
    options = {"local_files_only": True, "mistral_format": False}
    try:
        return AutoTokenizer.from_pretrained(path, **options)
    except ModuleNotFoundError:
        # The configs of some classes import what fails beside a torchvision built for another torch. Without its config
        # a tokenizer is of the class that tokenizer_config.json names.
        config = PreTrainedConfig.from_pretrained(path, local_files_only=True)
        return AutoTokenizer.from_pretrained(path, config=config, **options)


def _worth_saying(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_NOT_WORTH_SAYING)
