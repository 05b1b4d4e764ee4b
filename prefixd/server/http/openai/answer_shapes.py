"""The choices of an answer as JSON: of a chat and of a completion, whole or in pieces."""

from __future__ import annotations

from typing import Any, Protocol

from prefixd.server.http.openai.json_pieces import JsonPieces
from prefixd.server.http.openai.logprob_lists import Lists, LogprobLists
from prefixd.serving.generation import Tokens


class Shape(Protocol):
    """How the answers to one request look. It may keep state of its choices."""

    prefix: str
    """Of the answer's id."""
    whole: str
    """The answer's `object`."""
    piece: str
    """The `object` of a piece of a stream."""

    def begin(self, index: int) -> dict[str, Any] | None:
        """The first piece of a choice, which comes with its first token; None: there is none."""

    def logprobs(self, tokens: Tokens) -> Lists:
        """The logprobs of the next tokens of a choice."""

    def delta(self, index: int, text: str, logprobs: Lists | None) -> dict[str, Any]:
        """A piece of a choice."""

    def end(self, index: int, reason: str) -> dict[str, Any]:
        """The last piece of a choice."""

    def choice(self, index: int, text: str, logprobs: JsonPieces | None, reason: str) -> dict[str, Any]:
        """A whole choice; `logprobs` is JSON already."""


class ChatShape:
    """Messages.

    Args:
        lists: writes logprobs.
    """

    prefix, whole, piece = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, lists: LogprobLists) -> None:
        self._lists = lists

    def begin(self, index: int) -> dict[str, Any] | None:
        """The role."""
        return self._piece(index, {"role": "assistant", "content": ""})

    def logprobs(self, tokens: Tokens) -> Lists:
        """As `LogprobLists.of_chat`."""
        return self._lists.of_chat(tokens)

    def delta(self, index: int, text: str, logprobs: Lists | None) -> dict[str, Any]:
        """More of a message."""
        return self._piece(index, {"content": text}, logprobs)

    def end(self, index: int, reason: str) -> dict[str, Any]:
        """The reason why a message ends."""
        return self._piece(index, {}, None, reason)

    def choice(self, index: int, text: str, logprobs: JsonPieces | None, reason: str) -> dict[str, Any]:
        """A message."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    @staticmethod
    def _piece(
        index: int, delta: dict[str, Any], logprobs: Lists | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


class CompletionShape:
    """Texts that go on from their prompts.

    Args:
        lists: writes logprobs.
    """

    prefix, whole, piece = "cmpl-", "text_completion", "text_completion"

    def __init__(self, lists: LogprobLists) -> None:
        self._lists = lists
        self._offsets: dict[int, int] = {}  # characters of a choice's tokens that have logprobs

    def begin(self, index: int) -> dict[str, Any] | None:
        """Nothing."""
        return None

    def logprobs(self, tokens: Tokens) -> Lists:
        """As `LogprobLists.of_completion`."""
        lists, self._offsets[tokens.index] = self._lists.of_completion(tokens, self._offsets.get(tokens.index, 0))
        return lists

    def delta(self, index: int, text: str, logprobs: Lists | None) -> dict[str, Any]:
        """More of a text."""
        return self._piece(index, text, logprobs, None)

    def end(self, index: int, reason: str) -> dict[str, Any]:
        """The reason why a text ends."""
        return self._piece(index, "", None, reason)

    def choice(self, index: int, text: str, logprobs: JsonPieces | None, reason: str) -> dict[str, Any]:
        """A whole text."""
        return self._piece(index, text, logprobs, reason)

    @staticmethod
    def _piece(index: int, text: str, logprobs: Lists | JsonPieces | None, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
