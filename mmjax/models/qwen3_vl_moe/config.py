# SPDX-License-Identifier: Apache-2.0
"""Config of the Qwen3-VL mixtures: that of Qwen3-VL, and which layers have experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmjax.models.decoder.config import MoeConfig
from mmjax.models.hf_config import ConfigSection
from mmjax.models.qwen3_vl.config import Qwen3VLConfig


def config_from_hf(hf: Mapping[str, Any]) -> Qwen3VLConfig:
    """From the parsed config.json. Raises CheckpointError with the name of a missing or unusable key."""
    return Qwen3VLConfig.from_hf(hf, _experts(ConfigSection(hf).section("text_config")))


def _experts(text: ConfigSection) -> MoeConfig | None:
    """The experts, None where every layer is dense. The weights of those chosen always sum to one in this family."""
    # transformers 5 writes the older name of the same number.
    experts = text.integer("num_local_experts" if "num_local_experts" in text else "num_experts")
    layers, step = text.integer("num_hidden_layers"), text.integer("decoder_sparse_step", 1)
    if step < 1:
        raise text.error("decoder_sparse_step", f"must be positive, got {step}")
    dense = text.integers("mlp_only_layers") if "mlp_only_layers" in text else ()
    sparse = tuple(i for i in range(layers) if experts > 0 and (i + 1) % step == 0 and i not in dense)
    if not sparse:
        return None
    chosen = text.integer("num_experts_per_tok")
    if not 1 <= chosen <= experts:
        raise text.error("num_experts_per_tok", f"must be between 1 and {experts} (num_experts), got {chosen}")
    return MoeConfig(experts, chosen, text.integer("moe_intermediate_size"), norm_topk=True, sparse_layers=sparse)
