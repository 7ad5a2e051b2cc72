# SPDX-License-Identifier: Apache-2.0
"""mmjax: multimodal inference in JAX. Images and video in, text out."""

from mmjax.config import EngineConfig, MultimodalConfig
from mmjax.errors import (
    CheckpointError,
    ConfigError,
    DeviceError,
    EngineError,
    MediaError,
    MMJaxError,
    PlaceholderError,
    PromptTooLongError,
    RequestError,
)
from mmjax.inputs.content_parts import MediaPart
from mmjax.inputs.items import Modality
from mmjax.inputs.usage import Usage
from mmjax.layers.fusion import fuse_input_embeds
from mmjax.llm import LLM
from mmjax.outputs import Delta, RequestMetrics, RequestOutput, TokenLogprobs
from mmjax.sampling_params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CheckpointError",
    "ConfigError",
    "Delta",
    "DeviceError",
    "EngineConfig",
    "EngineError",
    "MMJaxError",
    "MediaError",
    "MediaPart",
    "Modality",
    "MultimodalConfig",
    "PlaceholderError",
    "PromptTooLongError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "TokenLogprobs",
    "Usage",
    "fuse_input_embeds",
]
