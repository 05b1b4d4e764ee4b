"""A request for the next message of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from prefixd.base.sampling import MOST_LOGPROBS
from prefixd.server.http.openai.image_urls import image_file
from prefixd.server.http.openai.sampling_fields import FieldError, SamplingFields, read_field
from prefixd.serving.generation import GenerateParams
from prefixd.serving.text.chat_template import Chat

MOST_PARTS = 16384
"""Messages and parts of messages of one request, so that reading them takes milliseconds."""
_AROUND = 8  # characters that a template writes around a message or a part, at least: empty ones are work, too
_LONGEST_EMPTY = 16  # bytes: `null`, `[]`, `{}`, perhaps with spaces
_NAMES = (b'"role"', b'"type"', b"\\u006", b"\\u007")  # the latter: a name that is written in escapes


class _TextPart(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class _ImageUrl(msgspec.Struct):
    url: str


class _ImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    image_url: _ImageUrl


class _Message(msgspec.Struct):
    role: str
    content: str | list[_TextPart | _ImagePart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Raw | UnsetType = UNSET  # not read: a list of a million lists takes seconds
    function_call: Raw | UnsetType = UNSET
    tool_call_id: str | None = None


class ChatRequest(SamplingFields, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: Raw
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Raw | UnsetType = UNSET

    tools: Raw | UnsetType = UNSET
    tool_choice: Raw | UnsetType = UNSET
    functions: Raw | UnsetType = UNSET
    function_call: Raw | UnsetType = UNSET
    modalities: Raw | UnsetType = UNSET
    audio: Raw | UnsetType = UNSET
    web_search_options: Raw | UnsetType = UNSET
    verbosity: Raw | UnsetType = UNSET
    continue_final_message: Raw | UnsetType = UNSET
    add_special_tokens: Raw | UnsetType = UNSET
    documents: Raw | UnsetType = UNSET
    chat_template: Raw | UnsetType = UNSET
    mm_processor_kwargs: Raw | UnsetType = UNSET

    refused: ClassVar[dict[str, tuple[object, ...]]] = SamplingFields.refused | {
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "modalities": (None, [], ["text"]),
        "audio": (None,),
        "web_search_options": (None,),
        "verbosity": (None,),
        "continue_final_message": (None, False),
        "add_special_tokens": (None, False),
        "documents": (None, []),
        "chat_template": (None,),
        "mm_processor_kwargs": (None, {}),
    }

    def params(self) -> list[GenerateParams]:
        """What `Generation.run` takes: one prompt. Raises FieldError."""
        self.check()
        conversation = _read_messages(self.messages)
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return [
            GenerateParams(
                prompt=Chat(
                    conversation.messages,
                    conversation.characters,
                    self._variables(),
                    begin_answer=self.add_generation_prompt is not False,
                ),
                images=conversation.images,
                sampling=self.sampling(most, self._logprobs()),
                n=self.answers,
                priority=self.priority or 0,
                salt=self.salt,
                model=self.model or "",
                as_long_as_fits=most is None,
            )
        ]

    def _logprobs(self) -> int | None:
        most = self.top_logprobs
        if most is not None and not 0 <= most <= MOST_LOGPROBS:
            raise FieldError("top_logprobs", f"top_logprobs is {most}; ask for at most {MOST_LOGPROBS}")
        if most and not self.logprobs:
            raise FieldError("top_logprobs", f"top_logprobs is {most} without logprobs; set logprobs to true")
        return (most or 0) if self.logprobs else None

    def _variables(self) -> Mapping[str, Any]:
        """What the request sets for the template."""
        given = read_field("chat_template_kwargs", self.chat_template_kwargs, dict[str, Any] | None) or {}
        if reserved := given.keys() & {"messages", "tools", "documents", "add_generation_prompt"}:
            name = min(reserved)
            raise FieldError("chat_template_kwargs", f"chat_template_kwargs has {name}, a field of its own; move it")
        return given if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort, **given}


@dataclass(frozen=True, slots=True)
class _Conversation:
    messages: list[dict[str, Any]]
    images: list[bytes]
    characters: int


def _read_messages(raw: Raw) -> _Conversation:
    data = bytes(raw)
    if sum(data.count(name) for name in _NAMES) > MOST_PARTS:
        raise FieldError("messages", f"messages has more than {MOST_PARTS} messages and parts; send fewer")
    try:
        given = msgspec.json.decode(data, type=list[_Message])
    except (msgspec.DecodeError, RecursionError) as error:
        raise FieldError("messages", f"messages cannot be read: {error}") from error
    if not given:
        raise FieldError("messages", "messages is empty; send at least one")
    messages, images, characters = [], [], 0
    for message in given:
        if _given(message.tool_calls) or _given(message.function_call) or message.tool_call_id is not None:
            raise FieldError("messages", f"a message of the role {message.role!r} is about tools; prefixd has none")
        parts: list[dict[str, str]] = []
        for part in message.content if isinstance(message.content, list) else ():
            if isinstance(part, _TextPart):
                parts.append({"type": "text", "text": part.text})
                characters += len(part.text)
            else:
                parts.append({"type": "image"})
                images.append(image_file(part.image_url.url))
        text = message.content or ""
        read: dict[str, Any] = {"role": message.role, "content": parts if isinstance(text, list) else text}
        for name in ("name", "reasoning_content"):
            if (value := getattr(message, name)) is not None:
                read[name] = value
        characters += _AROUND * (1 + len(parts)) + sum(len(value) for value in read.values() if isinstance(value, str))
        messages.append(read)
    return _Conversation(messages, images, characters)


def _given(raw: Raw | UnsetType) -> bool:
    """Whether a field has a value that says something."""
    return raw is not UNSET and (len(memoryview(raw)) > _LONGEST_EMPTY or bool(msgspec.json.decode(raw)))
