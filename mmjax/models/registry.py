# SPDX-License-Identifier: Apache-2.0
"""The model families, by the `model_type` of a checkpoint's config.json."""

from __future__ import annotations

from importlib.metadata import entry_points

from mmjax.errors import CheckpointError
from mmjax.models import deepseek_v4_1, hyperclovax, mistral3, pixtral_12b, qwen2_5_vl, qwen2_vl, qwen3_vl, qwen3_vl_moe
from mmjax.models.family import Family

FAMILIES: tuple[Family, ...] = (
    qwen2_vl.FAMILY,
    qwen2_5_vl.FAMILY,
    deepseek_v4_1.FAMILY,
    hyperclovax.FAMILY,
    mistral3.FAMILY,
    pixtral_12b.FAMILY,
    qwen3_vl.FAMILY,
    qwen3_vl_moe.FAMILY,
)

ENTRY_POINTS = "mmjax.families"  # group under which other packages offer a Family


def family_for(model_type: str) -> Family:
    """The family that serves `model_type`: one of ours, else one that an installed package offers.

    Raises:
      CheckpointError: no family knows it; the text lists the known ones.
    """
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = {name for family in FAMILIES for name in family.model_types}
    for entry in entry_points(group=ENTRY_POINTS):
        family = entry.load()
        if model_type in family.model_types:
            return family
        known.update(family.model_types)
    raise CheckpointError(f"config.json: model_type {model_type!r} is unknown; known: {', '.join(sorted(known))}")
