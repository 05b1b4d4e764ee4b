"""Token ids of a growing output back to text, never half a character."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_LONGEST_CHARACTER = 4  # bytes in UTF-8, and a token has at least one
_PENDING = 2 * _LONGEST_CHARACTER
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Decodes one output as its tokens come.

    The text of a token depends on those before it: the first one of a text loses its space, bytes join into characters.
    So each time the last tokens that became text are decoded twice: alone, and with those that came since.

    ```
        ids:   ... [context][pending] token
        text:      |<-out->|<- new ->|       new = decode(context + pending) without decode(context)
    ```

    A text that ends in a replacement character may be half a character, and waits. Bytes that are no UTF-8 at all would
    wait for ever, and cost more with each token: of more than `_PENDING` tokens all but the last few become text
    as they are.

    Args:
        tokenizer: the model's.
        special: ids of tokens that have no text, such as the end of a turn.
    """

    def __init__(self, tokenizer: Tokenizer, special: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._context: list[int] = []
        self._pending: list[int] = []
        self._out = ""  # the text of the context alone

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that became complete with these tokens."""
        return "".join(map(self._step, token_ids))

    def end(self) -> str:
        """The text of the tokens that still waited for others: none will come, so half a character is shown as such."""
        return self._flush(len(self._pending), self._decode(self._context + self._pending))

    def _step(self, token: int) -> str:
        if token in self._special:
            return ""
        self._pending.append(token)
        text = self._decode(self._context + self._pending)
        if len(text) > len(self._out) and not text.endswith(_UNFINISHED):
            return self._flush(len(self._pending), text)
        if len(self._pending) < _PENDING:
            return ""
        ready = len(self._pending) - _LONGEST_CHARACTER
        return self._flush(ready, self._decode(self._context + self._pending[:ready]))

    def _flush(self, count: int, text: str) -> str:
        """Makes the first `count` pending tokens the context; `text` is that of the old context and of them."""
        new = text[len(self._out) :]
        self._context, self._pending = self._pending[:count], self._pending[count:]
        self._out = self._decode(self._context)
        return new

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True) if token_ids else ""
