"""The hits of a cache without a limit."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b


class SeenBlocks:
    """A plain set of all block prefixes seen.

    A prompt may hit whole blocks, and never its last token, which the first token of the answer is computed from. Of an
    answer the last token is never computed.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._seen: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._seen)

    def prompt(self, tokens: Sequence[int]) -> int:
        """Tokens of a prompt that could be hits; it counts as seen from now on."""
        names = self._names(tokens)
        usable = (len(tokens) - 1) // self._block_tokens
        known = next((i for i, name in enumerate(names[:usable]) if name not in self._seen), usable)
        self._seen.update(names)
        return known * self._block_tokens

    def answered(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Records a prompt's answer: a later prompt may begin with both."""
        self._seen.update(self._names([*prompt, *output[:-1]]))

    def _names(self, tokens: Sequence[int]) -> list[bytes]:
        """A name for each full block's prefix, by all of its tokens."""
        names, name = list[bytes](), b""
        for first in range(0, len(tokens) - self._block_tokens + 1, self._block_tokens):
            block = array("I", tokens[first : first + self._block_tokens]).tobytes()
            name = blake2b(name + block, digest_size=16).digest()
            names.append(name)
        return names
