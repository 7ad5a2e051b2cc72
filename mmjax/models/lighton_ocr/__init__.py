# SPDX-License-Identifier: Apache-2.0
"""LightOnOCR: a Pixtral tower with a patch merger, and the Qwen3 decoder."""

from __future__ import annotations

from mmjax.models.decoder.family import decoder_family
from mmjax.models.family import About
from mmjax.models.lighton_ocr.config import config
from mmjax.models.lighton_ocr.processing import LightOnOcrProcessor
from mmjax.models.lighton_ocr.vision import encode, input_shapes
from mmjax.models.lighton_ocr.weights import canonical_name, weights
from mmjax.models.pixtral_shared.vision import vision_spec

FAMILY = decoder_family(
    "lighton_ocr",
    config=config,
    vision_spec=vision_spec,
    vision_inputs=input_shapes,
    weights=weights,
    canonical_name=canonical_name,
    encode=encode,
    processor=LightOnOcrProcessor.from_checkpoint,
    about=About(
        "LightOnOCR",
        lacks=("sliding-window attention", "checkpoints that call themselves Mistral3"),
        remarks=("Patches beyond the last whole merge block are seen, but make no rows, as in transformers",),
    ),
)
