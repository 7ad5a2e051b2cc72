# SPDX-License-Identifier: Apache-2.0
"""Messages to token ids through the checkpoint's chat template, with one placeholder an item that text can't forge.

Every user text is swapped for a number nobody could guess before the template runs, so that in the rendered prompt it
is known which characters the template wrote. Placeholders and other special tokens count in those alone.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from jaxtyping import Int32

from mmjax.errors import CheckpointError, PlaceholderError, RequestError
from mmjax.inputs.clip_durations import DurationMark, clip_seconds, fill_durations
from mmjax.inputs.content_format import ContentFormat, accepts_string, detect_content_format
from mmjax.inputs.content_parts import MediaPart, Message, media_parts, parse_messages
from mmjax.inputs.items import Modality, VideoMetadata
from mmjax.inputs.tokenise import GuardedTokenizer, Segment

KNOWN_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "model", "ipython"})


@dataclass(frozen=True, eq=False)
class ChatPrompt:
    """A conversation as compact ids: one placeholder id an item.

    Attributes:
      token_ids: int32 [S].
      media: the items in the order of their placeholders.
      text: what the template rendered.
      segments: the same, by writer.
    """

    token_ids: Int32[np.ndarray, "S"]
    media: tuple[MediaPart, ...]
    text: str
    segments: tuple[Segment, ...]


def load_chat_template(checkpoint: Path | str) -> str | None:
    """The template in a checkpoint's `chat_template.json`: older processors keep theirs there, tokenizers miss it."""
    file = Path(checkpoint) / "chat_template.json"
    if not file.is_file():
        return None
    return json.loads(file.read_text(encoding="utf-8")).get("chat_template")


class ChatRenderer:
    """Turns conversations into prompts for one checkpoint.

    Args:
      tokenizer: the checkpoint's transformers tokenizer.
      placeholder_text: the token that stands for an item of each modality the model takes.
      guarded_ids: ids that only items may bring into a context, besides the tokenizer's special ones.
      chat_template: used in place of the tokenizer's own.
      duration_mark: what the template writes for the seconds of a clip.

    Raises:
      CheckpointError: there is no chat template, or the tokenizer lacks a placeholder.
    """

    def __init__(
        self,
        tokenizer: Any,
        placeholder_text: Mapping[Modality, str],
        guarded_ids: Iterable[int] = (),
        chat_template: str | None = None,
        duration_mark: DurationMark | None = None,
    ):
        if chat_template is None and tokenizer.chat_template is None:
            raise CheckpointError(
                "the checkpoint has no chat template (chat_template.jinja, or one in tokenizer_config.json); "
                "use generate() with a prompt that holds the placeholders, or add a template"
            )
        self._hf = tokenizer
        self._template = chat_template
        self._mark = duration_mark
        self._placeholder_text = dict(placeholder_text)
        placeholder_ids = {modality: _token_id(tokenizer, text) for modality, text in placeholder_text.items()}
        self._modality_of = {token: modality for modality, token in placeholder_ids.items()}
        self.tokenizer = GuardedTokenizer(tokenizer, [*guarded_ids, *placeholder_ids.values()])

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        **template_options: Any,
    ) -> ChatPrompt:
        """Renders and tokenises a conversation.

        Where no text of the caller spells a special token, the ids are those of
        `tokenizer.apply_chat_template(..., tokenize=True)`.

        Raises:
          RequestError: a malformed message, a modality the model does not take, or the template's own refusal.
          PlaceholderError: the template made another number of placeholders than there are items.
        """
        parsed = parse_messages(messages)
        self._check_roles(parsed)
        media = media_parts(parsed)
        self._check_modalities(media)
        options = dict(template_options, add_generation_prompt=add_generation_prompt)
        masked = _Masking(self.tokenizer, self._placeholder_text)
        rendered = self._render(parsed, tools, options, masked.user_text, masked.media, masked.nested)
        segments = masked.unmask(rendered)
        plain = self._plain_rendering(parsed, tools, options, masked, segments)
        if plain is not None:
            segments = [Segment(plain, from_user=False)]
        ids = self.tokenizer.encode_segments(segments)
        text = "".join(part.text for part in segments)
        return ChatPrompt(np.asarray(ids, np.int32), self._in_prompt_order(ids, media), text, tuple(segments))

    def with_durations(self, prompt: ChatPrompt, metadata: Sequence[VideoMetadata]) -> ChatPrompt:
        """The prompt with the seconds of its clips where the template left a mark for them.

        Args:
          metadata: of the clips, in the order of their placeholders.

        Raises:
          RequestError: more marks than clips whose message part does not give the seconds itself.
        """
        if self._mark is None or self._marks(prompt.segments) == 0:
            return prompt
        clips = [part for part in prompt.media if part.modality is Modality.VIDEO]
        unsaid = [clip for part, clip in zip(clips, metadata, strict=True) if self._mark.key not in part.options]
        segments = fill_durations(prompt.segments, self._mark, [clip_seconds(clip) for clip in unsaid])
        ids = np.asarray(self.tokenizer.encode_segments(segments), np.int32)
        return ChatPrompt(ids, prompt.media, "".join(part.text for part in segments), tuple(segments))

    def _marks(self, segments: Sequence[Segment]) -> int:
        """How many duration marks template text holds."""
        if self._mark is None:
            return 0
        return sum(segment.text.count(self._mark.text) for segment in segments if not segment.from_user)

    def _plain_rendering(
        self,
        parsed: Sequence[Message],
        tools: Sequence[Any] | None,
        options: dict[str, Any],
        masked: _Masking,
        segments: Sequence[Segment],
    ) -> str | None:
        """The template's rendering of the real texts, if no text spells a special token and none is made from one.

        Templates trim and split what they are given, so this can differ from the masked rendering in plain text.
        """
        if masked.spells_guarded():
            return None
        plain = self._render(parsed, tools, options, str, lambda part: self._placeholder_text[part.modality], _same)
        whole = [Segment(plain, from_user=False)]
        same_tokens = self.tokenizer.guarded_sequence(whole) == self.tokenizer.guarded_sequence(segments)
        return plain if same_tokens and self._marks(whole) == self._marks(segments) else None

    def _render(
        self,
        parsed: Sequence[Message],
        tools: Sequence[Any] | None,
        options: dict[str, Any],
        user_text: Callable[[str], str],
        media: Callable[[MediaPart], str],
        nested: Callable[[Any], Any],
    ) -> str:
        template = self._hf.get_chat_template(self._template, tools=tools)
        content_format = detect_content_format(template)
        as_list = content_format is ContentFormat.OPENAI and not accepts_string(template)
        conversation = []
        for message in parsed:
            extra = {
                key: user_text(value) if key == "reasoning_content" and isinstance(value, str) else nested(value)
                for key, value in message.extra.items()
            }
            parts = [message.content] if as_list and isinstance(message.content, str) else message.content
            if isinstance(parts, str):
                content: Any = user_text(parts)
            elif parts is None:
                content = None
            elif content_format is ContentFormat.OPENAI:
                content = [_typed_part(part, user_text, self._mark) for part in parts]
            else:
                content = "".join(user_text(part) if isinstance(part, str) else media(part) for part in parts)
            conversation.append({"role": message.role, "content": content, **extra})
        try:
            return self._hf.apply_chat_template(
                conversation, tools=nested(tools), chat_template=template, tokenize=False, **options
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise RequestError(f"the chat template can't render this conversation: {error}") from error

    def _check_roles(self, parsed: Sequence[Message]) -> None:
        """Templates may write a role into a token, `<|` + role + `|>`: it must not be a piece of one that items own."""
        for index, message in enumerate(parsed):
            role = message.role
            if role in KNOWN_ROLES:
                continue
            if not re.fullmatch(r"[A-Za-z][\w-]*", role) or any(role in text for text in self.tokenizer.reserved):
                raise RequestError(f"message {index}: role {role!r} is not usable")

    def _check_modalities(self, media: Sequence[MediaPart]) -> None:
        for index, part in enumerate(media):
            if part.modality not in self._placeholder_text:
                takes = ", ".join(self._placeholder_text) or "text only"
                raise RequestError(f"this model takes no {part.modality} (it takes {takes})", item=index)

    def _in_prompt_order(self, ids: Sequence[int], media: Sequence[MediaPart]) -> tuple[MediaPart, ...]:
        """Items in the order of the placeholders; within a modality that is content order."""
        slots = [self._modality_of[token] for token in ids if token in self._modality_of]
        found, given = Counter(slots), Counter(part.modality for part in media)
        for modality in Modality:
            if found[modality] != given[modality]:
                raise PlaceholderError(
                    f"the chat template made {found[modality]} {modality} placeholders for {given[modality]} items; "
                    "templates may ignore media in some roles"
                )
        queues = {modality: iter([part for part in media if part.modality == modality]) for modality in given}
        return tuple(next(queues[modality]) for modality in slots)


class _Masking:
    """Stand-ins for what must not reach a template, and the way back.

    A stand-in is a number of fixed length with an unguessable beginning: it survives JSON, trimming and changes of
    case, and its white space stays outside, where templates may trim it.
    """

    _digits = 8

    def __init__(self, tokenizer: GuardedTokenizer, placeholder_text: Mapping[Modality, str]):
        self._nonce = str(secrets.randbelow(9 * 10**23) + 10**23)
        self._segments: list[Segment] = []
        self._texts: list[str] = []
        self._tokenizer = tokenizer
        self._placeholder_text = placeholder_text
        # Quotes and backslashes may be escaped by a template, so they can't be swapped back.
        punctuation = {char for text in tokenizer.guarded for char in text if not char.isalnum() and char not in ' "\\'}
        self._punctuation = re.compile(
            "[" + "".join(map(re.escape, sorted(punctuation))) + "]" if punctuation else "(?!)"
        )

    def user_text(self, text: str) -> str:
        """Hides a text of the caller."""
        self._texts.append(text)
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        return text[:start] + self._stand_in(Segment(core, from_user=True)) + text[start + len(core) :]

    def media(self, part: MediaPart) -> str:
        """A placeholder of ours, for templates that take content as one string."""
        return self._stand_in(Segment(self._placeholder_text[part.modality], from_user=False))

    def nested(self, value: Any) -> Any:
        """Tool calls, tool schemas, names: hides only what special tokens are made of, as templates look into these."""
        if isinstance(value, str):
            self._texts.append(value)
            return self._punctuation.sub(lambda match: self._stand_in(Segment(match.group(), from_user=True)), value)
        if isinstance(value, Mapping):
            return {self.nested(key): self.nested(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.nested(entry) for entry in value]
        return value

    def spells_guarded(self) -> bool:
        """Whether the hidden texts, each or joined, spell a guarded token."""
        joined = "".join(self._texts)
        return self._tokenizer.holds_guarded(joined) or any(map(self._tokenizer.holds_guarded, self._texts))

    def unmask(self, rendered: str) -> list[Segment]:
        """The rendered prompt with every stand-in replaced, as segments."""
        first, *others = rendered.split(self._nonce)
        segments = [Segment(first, from_user=False)]
        for other in others:
            number, text = other[: self._digits], other[self._digits :]
            if len(number) == self._digits and number.isdecimal():
                segments += [self._segments[int(number)], Segment(text, from_user=False)]
            else:  # the template cut it
                segments.append(Segment(self._nonce + other, from_user=False))
        return [segment for segment in segments if segment.text]

    def _stand_in(self, segment: Segment) -> str:
        self._segments.append(segment)
        return f"{self._nonce}{len(self._segments) - 1:0{self._digits}d}"


def _same(value: Any) -> Any:
    return value


def _typed_part(part: str | MediaPart, user_text: Callable[[str], str], mark: DurationMark | None) -> dict[str, Any]:
    """A part as templates know it. Some look at `type`, some for a key of that name; and for a clip's seconds."""
    if isinstance(part, str):
        return {"type": "text", "text": user_text(part)}
    name = part.modality.value
    said = mark is not None and isinstance(part.options.get(mark.key), int | float)
    return {"type": name, name: name} | ({mark.key: part.options[mark.key]} if said else {})


def _token_id(tokenizer: Any, text: str) -> int:
    token = tokenizer.convert_tokens_to_ids(text)
    if token is None or token == tokenizer.unk_token_id:
        raise CheckpointError(f"the tokenizer does not know the placeholder {text!r}")
    return token
