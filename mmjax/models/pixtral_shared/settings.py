# SPDX-License-Identifier: Apache-2.0
"""Settings of a checkpoint's Pixtral processor, read from the files that transformers writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmjax.errors import CheckpointError, RequestError
from mmjax.inputs.items import Modality
from mmjax.models.added_tokens import added_token_ids
from mmjax.models.images.normalisation import Normalisation
from mmjax.models.images.request_options import options_for
from mmjax.models.images.resize import Filter
from mmjax.models.images.settings_file import SettingsFile, first_of, load_settings

_LONGEST_EDGE = 1024
_TOKENS = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}


@dataclass(frozen=True)
class PixelSettings:
    """What happens to a picture. `longest_edge` limits its longer side before sides are rounded up."""

    longest_edge: int
    filter: Filter
    normalisation: Normalisation


@dataclass(frozen=True)
class ImageTokens:
    """The tokens of a picture's span: one `image` a row of the encoder, `row_end` behind each line, `end` at last."""

    text: str  # of `image`
    image: int
    row_end: int
    end: int


def read_settings(folder: Path, *, patch: int, merge: int, image_token_id: int) -> tuple[PixelSettings, ImageTokens]:
    """Settings of the checkpoint in `folder`, as `read_pictures` has them, and its tokens.

    Args:
      image_token_id: what config.json says; the tokenizer must agree.

    Raises:
      CheckpointError: a setting that can't be followed, or a token that the tokenizer lacks; names file and key.
    """
    settings, _, joint = read_pictures(folder, patch=patch, merge=merge)
    return settings, _image_tokens(folder, joint, image_token_id)


def read_pictures(folder: Path, *, patch: int, merge: int) -> tuple[PixelSettings, SettingsFile, SettingsFile]:
    """What happens to pictures, and the files that say so: the image processor's and the joint one.

    transformers 5 nests the image processor in processor_config.json; before, it had a file of its own. What the files
    leave out has the value of transformers' classes.

    Args:
      patch, merge: of the tower; the files must agree.

    Raises:
      CheckpointError: a setting that can't be followed; names file and key.
    """
    joint = load_settings(folder / "processor_config.json")
    pictures = first_of(joint and joint.section("image_processor"), load_settings(folder / "preprocessor_config.json"))
    joint = first_of(joint)
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
    return settings, pictures, joint


def resolve_image(settings: PixelSettings, options: Mapping[str, Any]) -> dict[str, Any]:
    """`longest_edge`, from the request's `longest_edge` or `size`, else the checkpoint's.

    Raises RequestError for unknown names and unusable values.
    """
    own = options_for(Modality.IMAGE, options)
    if unknown := sorted(set(own) - {"longest_edge", "size"}):
        raise RequestError(f"unknown processor option {', '.join(unknown)}; known are longest_edge, size")
    own = {name: value for name, value in own.items() if value is not None}
    size = own.get("size", {})
    if not isinstance(size, Mapping) or set(size) - {"longest_edge"}:
        raise RequestError(f"processor option size must be {{'longest_edge': pixels}}, got {size!r}")
    edge = own.get("longest_edge", size.get("longest_edge", settings.longest_edge))
    if type(edge) is not int or edge < 1:
        raise RequestError(f"processor option longest_edge must be a positive integer, got {edge!r}")
    return {"longest_edge": edge}


def _longest_edge(file: SettingsFile) -> int:
    """Older files give a number, or the two sides of a square."""

    def valid(value: Any) -> bool:
        if isinstance(value, Mapping):
            sides = {side for side in value.values() if side is not None}
            return len(sides) == 1 and set(value) <= {"longest_edge", "height", "width"} and valid(*sides)
        return type(value) is int and value > 0

    size = file.get("size", _LONGEST_EDGE, valid, "{'longest_edge': pixels}")
    return size if isinstance(size, int) else next(side for side in size.values() if side is not None)


def _image_tokens(folder: Path, file: SettingsFile, image_token_id: int) -> ImageTokens:
    known = added_token_ids(folder)
    text = {key: file.get(key, default, lambda v: isinstance(v, str), "a token") for key, default in _TOKENS.items()}
    for key, token in text.items():
        if token not in known:
            raise CheckpointError(f"{folder}: the tokenizer has no token {token!r}, the {key} of its processor")
    image, row_end, end = (known[text[key]] for key in _TOKENS)
    if image != image_token_id:
        raise CheckpointError(f"{folder}: {text['image_token']} is token {image}, config.json says {image_token_id}")
    return ImageTokens(text["image_token"], image, row_end, end)
