"""Chats become texts by the chat template of their model, as in transformers' `apply_chat_template`.

A template is a program in Jinja that comes with the model. It runs in Jinja's sandbox and sees strings, numbers, lists
and dictionaries alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from prefixd.base.errors import ChatRefusedError

if TYPE_CHECKING:
    import jinja2

Message: TypeAlias = Mapping[str, Any]
"""`role`, and `content`: a text, or a list of `{"type": "text", "text": ...}` and `{"type": "image"}`."""

_PROBE = "probe 7c1f"
_LONGEST_REASON = 300  # characters


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation whose next message the model is to write."""

    messages: Sequence[Message]
    characters: int
    """In all texts together, and some for each message: how long the chat takes to tokenize, about."""
    variables: Mapping[str, Any]
    """For the template, such as `{"enable_thinking": False}`."""
    begin_answer: bool = True
    """Whether the text ends with the beginning of the model's message."""


class ChatTemplate:
    """A model's chat template.

    Args:
        source: in Jinja.
        special_tokens: by their names in the template, such as `bos_token`.
        image_tokens: the tokens for an image's begin, the image and its end, if the model wants all three. A template
            that does not name the second writes the first alone (Gemma 3), and the others are put behind it.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], image_tokens: Sequence[str] = ()) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._image_tokens = () if image_tokens and image_tokens[1] in source else tuple(image_tokens)

    def render(self, chat: Chat) -> str:
        """The text of a chat, special tokens included.

        Raises:
            ChatRefusedError: the template refuses the chat, or cannot be used.
        """
        messages = [{**message, "content": self._content(message["content"])} for message in chat.messages]
        variables = {**chat.variables, "add_generation_prompt": chat.begin_answer}
        text = self._render(messages, variables)
        if self._image_tokens:
            begin, image, end = self._image_tokens
            text = text.replace(begin, f"\n\n{begin}{image}{end}\n\n")
        return text

    def _content(self, content: str | list[dict[str, str]]) -> str | list[dict[str, str]]:
        if isinstance(content, str):
            return content if self._takes_text else [{"type": "text", "text": content}]
        if self._takes_parts or any(part["type"] != "text" for part in content):
            return content
        return "\n".join(part["text"] for part in content)

    @cached_property
    def _takes_text(self) -> bool:
        """Whether a content that is a text appears in the result: some templates look for parts only."""
        return _PROBE in self._try(_PROBE) or not self._takes_parts

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether a content of parts appears as their text: many templates would write the list as Python does."""
        tried = self._try([{"type": "text", "text": _PROBE}])
        return _PROBE in tried and "'type'" not in tried and '"type"' not in tried

    def _try(self, content: object) -> str:
        try:
            return self._render([{"role": "user", "content": content}], {"add_generation_prompt": True})
        except ChatRefusedError:
            return ""

    def _render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        given = {**self._special_tokens, "tools": None, "documents": None, **variables, "messages": messages}
        try:
            return self._compiled.render(given)
        except Exception as error:  # a template is a program: it may fail in any way
            raise ChatRefusedError(type(error).__name__, " ".join(str(error).split())[:_LONGEST_REASON]) from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        import jinja2.ext  # not at the top: who sends no chats needs none
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        # The filters and functions are those of transformers' `_compile_jinja_template`.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(), jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.globals["dict"] = lambda *args, **fields: dict(*args, **fields)  # a template may not see the class
        return environment.from_string(self._source)


def _generation_tag() -> Any:
    """The extension for `{% generation %}`, with which a template marks the model's messages for training."""
    from jinja2.ext import Extension

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationTag


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes for HTML of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise ValueError(message)
