# SPDX-License-Identifier: Apache-2.0
"""Weight table of LightOnOCR: Pixtral's, under other names of tower and projector."""

from __future__ import annotations

from dataclasses import replace

from mmjax.models.family import Weight
from mmjax.models.pixtral_shared import weights as pixtral
from mmjax.models.pixtral_shared.config import PixtralConfig

_TOWER = ("model.vision_tower.", "model.vision_encoder.")
_PROJECTOR = ("model.multi_modal_projector.", "model.vision_projection.")


def canonical_name(name: str) -> str:
    """The name itself: there is one layout."""
    return name


def weights(cfg: PixtralConfig) -> tuple[Weight, ...]:
    """Every leaf of the parameter tree and the checkpoint tensors it is made of."""
    return tuple(replace(leaf, sources=tuple(map(_renamed, leaf.sources))) for leaf in pixtral.weights(cfg))


def _renamed(source: str) -> str:
    """LightOnOCR's name of a tensor that Pixtral's table names."""
    return source.replace(*_TOWER).replace(*_PROJECTOR)
