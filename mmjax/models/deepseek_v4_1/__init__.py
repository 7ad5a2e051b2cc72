# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1 vision-language: a tower for still pictures, and the DeepSeek-V4 text decoder.

Of the decoder, Engram look-ups, DSpark and multi-token prediction are missing; a config that asks for them is refused.
No checkpoint or code of V4.1 was at hand: keys of `vision_config` and the name of the routers' bias for pictures
(`ffn.gate.vision_bias`) are ours; all other names are DeepSeek's.
"""

from __future__ import annotations

from typing import Any

from mmjax.models.decoder.text import embed
from mmjax.models.deepseek_v4_1 import text
from mmjax.models.deepseek_v4_1.config import DeepseekV41Config
from mmjax.models.deepseek_v4_1.inputs import vision_input_shapes
from mmjax.models.deepseek_v4_1.processing import DeepseekProcessor
from mmjax.models.deepseek_v4_1.vision import encode, vision_spec
from mmjax.models.deepseek_v4_1.weights import canonical_name, weights
from mmjax.models.family import About, Family
from mmjax.models.vlm import deepstack_layers


def _spec(cfg: DeepseekV41Config) -> dict[str, Any]:
    return {"vision": vision_spec(cfg), "text": text.text_spec(cfg)}


FAMILY = Family(
    name="deepseek_v4_1",
    model_types=("deepseek_v4_1", "deepseek_v41"),
    config=DeepseekV41Config.from_hf,
    spec=_spec,
    weights=weights,
    canonical_name=canonical_name,
    vision_inputs=vision_input_shapes,
    encode=encode,
    embed=embed,
    forward=text.forward,
    layer_outputs=text.layer_outputs,
    logits=text.logits,
    processor=DeepseekProcessor.from_checkpoint,
    deepstack_layers=deepstack_layers,
    processor_files=False,
    state_shapes=text.state_shapes,
    about=About(
        "DeepSeek-V4.1",
        lacks=("Engram look-ups", "DSpark", "multi-token prediction"),
        remarks=(
            "Transformers has DeepSeek-V4 without a tower: rows are compared with a second implementation of its "
            "description, logits with the decoder of transformers",
            "No checkpoint of V4.1 was at hand: the keys of its vision_config and one name of a weight are ours",
        ),
    ),
)
