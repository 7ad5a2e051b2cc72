# SPDX-License-Identifier: Apache-2.0
"""The record of a family that joins a tower of its own to the shared decoder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mmjax.models.decoder import text
from mmjax.models.family import Family
from mmjax.models.vision_inputs import vision_input_shapes
from mmjax.models.vlm import VLMConfig, deepstack_layers


def decoder_family(
    name: str, *, vision_spec: Callable[[Any], dict], model_types: tuple[str, ...] | None = None, **fields: Any
) -> Family:
    """A `Family` whose text side is the shared decoder.

    Args:
      name: also its one `model_type`, unless `model_types` says otherwise.
      vision_spec: shapes of the tower's parameters; the decoder's are added.
      fields: config, weights, canonical_name, encode and processor, as in `Family`; and any other field of it that
        differs from what is set here.
    """
    shared = {
        "spec": partial(_spec, vision_spec),
        "vision_inputs": vision_input_shapes,
        "embed": text.embed,
        "forward": text.forward,
        "layer_outputs": text.layer_outputs,
        "logits": text.logits,
        "deepstack_layers": deepstack_layers,
    }
    return Family(name=name, model_types=model_types or (name,), **(shared | fields))


def _spec(vision_spec: Callable[[Any], dict], cfg: VLMConfig) -> dict:
    return {"vision": vision_spec(cfg), "text": text.text_spec(cfg)}
