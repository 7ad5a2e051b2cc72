# SPDX-License-Identifier: Apache-2.0
"""Settings of a checkpoint's LightOnOCR processor, read from the files that transformers writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmjax.errors import CheckpointError
from mmjax.models.added_tokens import added_token_ids
from mmjax.models.images.settings_file import SettingsFile
from mmjax.models.pixtral_shared.settings import PixelSettings, read_pictures

_DEFAULTS = {"patch_size": 16}  # of transformers' image processor


@dataclass(frozen=True)
class Placeholder:
    """The token that stands for a picture in a prompt, and for each of its rows."""

    text: str
    image: int


def read_settings(
    folder: Path, *, patch: int, merge: int, image_token_id: int
) -> tuple[PixelSettings, Placeholder, int]:
    """Settings of the checkpoint in `folder`, its placeholder, and the pixels that sides are multiples of.

    Args:
      patch, merge: of the tower; the files must agree.
      image_token_id: what config.json says; the tokenizer must have it.

    Raises:
      CheckpointError: a setting that can't be followed, or no such token; names file and key.
    """
    settings, pictures, _ = read_pictures(folder, patch=patch, merge=merge)
    texts = {number: text for text, number in added_token_ids(folder).items()}
    if image_token_id not in texts:
        raise CheckpointError(f"{folder}: the tokenizer has no added token {image_token_id}, config.json's image token")
    unit = _unit(pictures.with_defaults(_DEFAULTS), patch)
    return settings, Placeholder(texts[image_token_id], image_token_id), unit


def _unit(file: SettingsFile, patch: int) -> int:
    """The image processor's own `patch_size`, a number or the sides of a square."""

    def sides(size: Any) -> set[Any]:
        return set(size.values()) if isinstance(size, Mapping) else {size}

    def valid(size: Any) -> bool:
        return len(sides(size)) == 1 and all(_is_positive(side) and side % patch == 0 for side in sides(size))

    (unit,) = sides(file.get("patch_size", None, valid, f"a multiple of the tower's patches, {patch}"))
    return unit


def _is_positive(value: Any) -> bool:
    return type(value) is int and value > 0
