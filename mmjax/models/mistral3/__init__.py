# SPDX-License-Identifier: Apache-2.0
"""Mistral3: Mistral Small 3.1 and its successors with a Pixtral tower and a patch merger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmjax.models.family import About
from mmjax.models.hf_config import ConfigSection
from mmjax.models.pixtral_shared.config import PixtralConfig, read_config
from mmjax.models.pixtral_shared.family import pixtral_family


def config(hf: Mapping[str, Any]) -> PixtralConfig:
    """From the parsed config.json. Raises CheckpointError with the name of a missing or unusable key."""
    top = ConfigSection(hf)
    return read_config(
        hf,
        tie_word_embeddings=top.flag("tie_word_embeddings", True),
        merge=top.integer("spatial_merge_size", 2),
        patch_merger=True,
        projector_bias=False,
        image_token=10,
        feature_layer=-1,
    )


FAMILY = pixtral_family(
    "mistral3",
    model_type="mistral3",
    config=config,
    about=About("Mistral3", lacks=("sliding-window attention", "rows from earlier layers of the tower")),
)
