# SPDX-License-Identifier: Apache-2.0
"""The two kinds of failure: the caller's (one request fails) and the engine's (nobody can be served)."""

from __future__ import annotations


class MMJaxError(Exception):
    """Base of every error that mmjax raises on purpose."""


class RequestError(MMJaxError):
    """The caller's fault: this request can't be served; its neighbours are unharmed.

    Args:
      message: what is wrong and what to do, with both numbers where two numbers disagree.
      request_id: the request at fault, once it has an id.
      item: prompt-order index of the image, clip or sound at fault, if it is one item's fault.
    """

    def __init__(self, message: str, *, request_id: str | None = None, item: int | None = None):
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.item = item

    def __str__(self) -> str:
        where = []
        if self.request_id is not None:
            where.append(f"request {self.request_id}")
        if self.item is not None:
            where.append(f"item {self.item}")
        return f"{', '.join(where)}: {self.message}" if where else self.message


class MediaError(RequestError):
    """A picture, clip or sound that can't be fetched, decoded or accepted."""


class PlaceholderError(RequestError):
    """Placeholders and items, or prompt positions and embedding rows, disagree in number."""


class PromptTooLongError(RequestError):
    """The prompt, or the prompt with `max_tokens`, exceeds a limit of the engine."""


class CheckpointError(MMJaxError):
    """A checkpoint that is incomplete, of an unknown family, or does not match its config."""


class ConfigError(MMJaxError):
    """A knob with a value that can't work; the text names the knob."""


class EngineError(MMJaxError):
    """The engine itself failed; nothing of this was the caller's fault."""


class DeviceError(EngineError):
    """An executable failed on the device. Arrays it was given are lost; the engine makes them again."""
