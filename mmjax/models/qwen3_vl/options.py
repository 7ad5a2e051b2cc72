# SPDX-License-Identifier: Apache-2.0
"""Processor options of a request that Qwen3-VL adds to those of Qwen2-VL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmjax.errors import RequestError
from mmjax.inputs.items import Modality
from mmjax.models.images.request_options import NESTED_NAMES, options_for

NESTED = "nested_vision_tokens"


def take_nested(options: Mapping[str, Any]) -> tuple[bool, dict[str, Any]]:
    """The value of `nested_vision_tokens`, and the other options.

    Chat templates write a clip as start, placeholder, end, and a clip's span has such a pair around every step. True,
    the default and what transformers does: the template's pair stays around the whole. False: it goes. The time of the
    first step is then tokenised by itself all the same, not together with the text in front of it.
    """
    value, clips = options_for(Modality.VIDEO, options).get(NESTED), NESTED_NAMES[Modality.VIDEO]
    rest = {name: option for name, option in options.items() if name != NESTED}
    if rest.get(clips):
        rest[clips] = {name: option for name, option in rest[clips].items() if name != NESTED}
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"processor option {NESTED} must be true or false, got {value!r}")
    return value is not False, rest
