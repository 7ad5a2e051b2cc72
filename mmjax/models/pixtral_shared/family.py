# SPDX-License-Identifier: Apache-2.0
"""A family of a Pixtral tower and the Mistral decoder."""

from __future__ import annotations

from collections.abc import Callable

from mmjax.models.decoder.family import decoder_family
from mmjax.models.family import About, Family
from mmjax.models.pixtral_shared.config import PixtralConfig
from mmjax.models.pixtral_shared.processing import PixtralProcessor
from mmjax.models.pixtral_shared.vision import encode, vision_spec
from mmjax.models.pixtral_shared.weights import canonical_name, weights


def pixtral_family(name: str, *, model_type: str, config: Callable[[dict], PixtralConfig], about: About) -> Family:
    """The record of the family `name`, for checkpoints of `model_type`."""
    return decoder_family(
        name,
        model_types=(model_type,),
        config=config,
        vision_spec=vision_spec,
        weights=weights,
        canonical_name=canonical_name,
        encode=encode,
        processor=PixtralProcessor.from_checkpoint,
        about=about,
    )
