# SPDX-License-Identifier: Apache-2.0
"""Settings of a checkpoint's LightOnOCR processor, read from the files that transformers writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmjax.errors import CheckpointError
from mmjax.models.added_tokens import added_token_ids
from mmjax.models.images.normalisation import Normalisation
from mmjax.models.images.settings_file import SettingsFile, first_of, load_settings
from mmjax.models.pixtral_shared.settings import PixelSettings

_DEFAULTS = {"size": {"longest_edge": 1024}, "patch_size": 16}  # of transformers' image processor


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
    joint = load_settings(folder / "processor_config.json")
    pictures = first_of(joint and joint.section("image_processor"), load_settings(folder / "preprocessor_config.json"))
    pictures, joint = pictures.with_defaults(_DEFAULTS), first_of(joint)
    joint.require_side("patch_size", patch)
    joint.require_side("spatial_merge_size", merge)
    pictures.require_resize()
    if pictures.flag("do_center_crop", False):
        raise pictures.error("do_center_crop", "is true; pictures are taken whole")
    settings = PixelSettings(
        longest_edge=_longest_edge(pictures),
        filter=pictures.filter(),
        normalisation=Normalisation.from_file(pictures),
    )
    texts = {number: text for text, number in added_token_ids(folder).items()}
    if image_token_id not in texts:
        raise CheckpointError(f"{folder}: the tokenizer has no added token {image_token_id}, config.json's image token")
    return settings, Placeholder(texts[image_token_id], image_token_id), _unit(pictures, patch)


def _longest_edge(file: SettingsFile) -> int:
    def valid(size: Any) -> bool:
        return isinstance(size, Mapping) and set(size) == {"longest_edge"} and _is_positive(size["longest_edge"])

    return file.get("size", None, valid, "{'longest_edge': pixels}")["longest_edge"]


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
