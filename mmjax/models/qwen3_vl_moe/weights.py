# SPDX-License-Identifier: Apache-2.0
"""Weight tables of the Qwen3-VL mixtures: checkpoints store their experts in two layouts under the same names.

The published ones (written before transformers 5) store `gate_up_proj` [X, E, 2I] and `down_proj` [X, I, E], which is
what we keep and export. transformers 5 stores [X, 2I, E] and [X, E, I]. Neither names nor versions tell them apart:
tools keep the version of the file that they started from. The shapes do, as long as a checkpoint is looked at as a
whole: where 2I = E the two shapes of `gate_up_proj` are one, and `down_proj` decides; where I = E it is the other way
round; both cannot be. A checkpoint that mixes the layouts is refused.
"""

from __future__ import annotations

from dataclasses import replace

from mmjax.models.family import Weight
from mmjax.models.qwen3_vl.config import Qwen3VLConfig
from mmjax.models.qwen3_vl.weights import weights


def outputs_first(cfg: Qwen3VLConfig) -> tuple[tuple[Weight, ...]]:
    """The one other table: transformers 5's, whose experts have their outputs before their inputs."""
    return (tuple(_turned(weight) if "experts" in weight.path else weight for weight in weights(cfg)),)


def _turned(weight: Weight) -> Weight:
    """The weight, from a tensor with its last two axes swapped."""
    shapes = tuple((*shape[:-2], shape[-1], shape[-2]) for shape in weight.source_shapes)
    return replace(weight, source_shapes=shapes, transposed=True)
