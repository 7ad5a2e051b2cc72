# SPDX-License-Identifier: Apache-2.0
"""Chat messages as callers write them, read into roles, texts and media parts in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from mmjax.errors import RequestError
from mmjax.inputs.items import Modality

# Names of a media part, each with its modality. The value may stand under the part's own name or under `url`, `path`.
PART_NAMES = {
    "image": Modality.IMAGE,
    "image_url": Modality.IMAGE,
    "video": Modality.VIDEO,
    "video_url": Modality.VIDEO,
    "audio": Modality.AUDIO,
    "audio_url": Modality.AUDIO,
    "input_audio": Modality.AUDIO,
}
# Keys of a media part that are not processor options. `detail` is a hint of another API that no model here knows.
PART_KEYS = frozenset({"type", "uuid", "url", "path", "detail"}) | PART_NAMES.keys()


@dataclass(frozen=True, eq=False)
class MediaPart:
    """One image, clip or sound in a message.

    Attributes:
      source: path, URL, bytes, PIL image, array...: whatever the media loader takes; None if the part names none.
      uuid: the caller's name for it.
      options: processor options of this item alone, such as `max_pixels`.
    """

    modality: Modality
    source: Any = None
    uuid: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


Content: TypeAlias = str | list[str | MediaPart] | None


@dataclass(frozen=True)
class Message:
    """A message with its content in parts; `extra` holds the other keys (tool calls, names) as they came."""

    role: str
    content: Content
    extra: Mapping[str, Any]


def parse_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Reads OpenAI-style and Hugging Face-style messages.

    Raises:
      RequestError: no messages, a message without role, content or a part of an unknown kind; says which.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise RequestError("a conversation is a non-empty list of messages")
    return [_parse_message(index, message) for index, message in enumerate(messages)]


def media_parts(messages: Sequence[Message]) -> list[MediaPart]:
    """All media parts of a conversation, in content order."""
    return [
        part
        for message in messages
        if isinstance(message.content, list)
        for part in message.content
        if isinstance(part, MediaPart)
    ]


def _parse_message(index: int, message: Mapping[str, Any]) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"message {index} is not a dict with a role")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        content = [_parse_part(f"message {index}, part {place}", part) for place, part in enumerate(content)]
    elif content is not None and not isinstance(content, str):
        raise RequestError(f"message {index}: content must be text or a list of parts, got {type(content).__name__}")
    extra = {key: value for key, value in message.items() if key not in ("role", "content")}
    return Message(message["role"], content, extra)


def _parse_part(where: str, part: Any) -> str | MediaPart:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise RequestError(f"{where}: a part is text or a dict, got {type(part).__name__}")
    kind = part.get("type")
    if kind is None:
        named = [name for name in ("text", *PART_NAMES) if name in part]
        kind = named[0] if len(named) == 1 else None
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}: a text part needs a string under 'text'")
        return part["text"]
    if kind not in PART_NAMES:
        known = ", ".join(["text", *PART_NAMES])
        raise RequestError(f"{where}: unknown part type {kind!r}; known are {known}")
    return _media_part(where, kind, part)


def _media_part(where: str, kind: str, part: Mapping[str, Any]) -> MediaPart:
    values = [part[key] for key in (kind, PART_NAMES[kind].value, "url", "path") if part.get(key) is not None]
    source = values[0] if values else None
    uuid = part.get("uuid")
    if isinstance(source, Mapping):
        uuid = source.get("uuid", uuid)
        source = _unwrap(where, kind, source)
    if uuid is not None and not isinstance(uuid, str):
        raise RequestError(f"{where}: uuid must be a string, got {type(uuid).__name__}")
    options = {key: value for key, value in part.items() if key not in PART_KEYS}
    return MediaPart(PART_NAMES[kind], source, uuid, options)


def _unwrap(where: str, kind: str, wrapped: Mapping[str, Any]) -> Any:
    """The source inside `{"url": ...}`, or inside `{"data": base64, "format": ...}` as a data URL."""
    if isinstance(wrapped.get("url"), str):
        return wrapped["url"]
    if kind == "input_audio" and isinstance(wrapped.get("data"), str):
        return f"data:audio/{wrapped.get('format', 'wav')};base64,{wrapped['data']}"
    expected = "'data'" if kind == "input_audio" else "'url'"
    raise RequestError(f"{where}: {kind} needs a string under {expected}")
