# SPDX-License-Identifier: Apache-2.0
"""HyperCLOVAX vision, second version (HyperCLOVAX-SEED-Think-32B)."""

from __future__ import annotations

from mmjax.models.decoder.family import decoder_family
from mmjax.models.family import About
from mmjax.models.hyperclovax.config import HyperClovaXConfig
from mmjax.models.hyperclovax.processing import HyperClovaXProcessor
from mmjax.models.hyperclovax.vision import encode, vision_spec
from mmjax.models.hyperclovax.weights import canonical_name, weights

FAMILY = decoder_family(
    "hyperclovax",
    model_types=("hyperclovax_vision_v2", "vlm"),  # the second is what the published checkpoint first said
    config=HyperClovaXConfig.from_hf,
    vision_spec=vision_spec,
    weights=weights,
    canonical_name=canonical_name,
    encode=encode,
    processor=HyperClovaXProcessor.from_checkpoint,
    about=About("HyperCLOVAX vision v2", lacks=("the first version, with its CLIP tower", "biases in the decoder")),
)
