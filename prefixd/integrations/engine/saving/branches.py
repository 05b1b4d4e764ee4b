"""Finds where a prompt parts from earlier ones: later prompts are likely to share the same beginning."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

_MOST_KEYS = 1 << 17


class Branches:
    """The block keys of this engine's latest prompts; a key stands for the prefix up to the end of its block."""

    def __init__(self, most_keys: int = _MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._known: dict[Hashable, None] = {}  # the least recently used first

    def follow(self, keys: Sequence[Hashable]) -> int:
        """How many blocks a prompt shares with earlier ones before it parts from them; 0 if all of it is known.

        Args:
            keys: of the prompt's full blocks, in order.
        """
        common = next((place for place, key in enumerate(keys) if key not in self._known), len(keys))
        for key in reversed(keys):  # so that the end of a prefix is dropped first
            self._known.pop(key, None)
            self._known[key] = None
        while len(self._known) > self._most_keys:
            del self._known[next(iter(self._known))]
        return common if common < len(keys) else 0
