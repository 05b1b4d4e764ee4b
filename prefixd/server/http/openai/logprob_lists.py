"""Logprobs of sampled tokens as OpenAI's API answers them."""

from __future__ import annotations

from typing import Any, TypeAlias

from prefixd.serving.generation import Tokens
from prefixd.serving.text.token_bytes import TokenBytes

_IMPOSSIBLE = -9999.0
"""In place of minus infinity, for which JSON has no number; the same as vLLM's."""

Lists: TypeAlias = dict[str, list[Any]]
"""By their names in the answer; the lists of the next tokens are appended to them."""


class LogprobLists:
    """Writes lists of logprobs.

    Args:
        tokens: the bytes of the model's tokens; None if the model has no tokenizer: a token is then its id.
    """

    def __init__(self, tokens: TokenBytes | None) -> None:
        self._tokens = tokens

    def of_chat(self, tokens: Tokens) -> Lists:
        """For a chat: each token with its bytes, and the most likely ones."""
        content = []
        for token, found in zip(tokens.token_ids, tokens.logprobs, strict=True):
            best = [self._entry(*each) for each in zip(found.token_ids, found.logprobs, strict=True)]
            content.append({**self._entry(token, found.chosen), "top_logprobs": best})
        return {"content": content}

    def of_completion(self, tokens: Tokens, offset: int) -> tuple[Lists, int]:
        """For a completion: lists with an element a token; and the offset behind the last one.

        offset: characters of the tokens before.
        """
        written, values, best, offsets = [], [], [], []
        for token, found in zip(tokens.token_ids, tokens.logprobs, strict=True):
            text = self._text(token)
            likely = {token: found.chosen, **dict(zip(found.token_ids, found.logprobs, strict=True))}
            written.append(text)
            values.append(_finite(found.chosen))
            best.append({self._text(each): _finite(value) for each, value in likely.items()})
            offsets.append(offset)
            offset += len(text)
        lists: Lists = {"tokens": written, "token_logprobs": values, "top_logprobs": best, "text_offset": offsets}
        return lists, offset

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = None if self._tokens is None else self._tokens.of(token)
        text = f"token_id:{token}" if raw is None else raw.decode(errors="replace")
        return {"token": text, "logprob": _finite(logprob), "bytes": None if raw is None else list(raw)}

    def _text(self, token: int) -> str:
        return f"token_id:{token}" if self._tokens is None else self._tokens.of(token).decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, _IMPOSSIBLE)
