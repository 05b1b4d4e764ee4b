"""Where a prompt leaves those before it: what other prompts shared, later ones are likely to share too."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

_MOST_KEYS = 1 << 17


class Branches:
    """Remembers the blocks of this engine's latest prompts, by keys that each stand for the prefix up to a block."""

    def __init__(self, most_keys: int = _MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._known: dict[Hashable, None] = {}  # the longest unused first

    def follow(self, keys: Sequence[Hashable]) -> int:
        """The blocks that a prompt has in common with an earlier one and then leaves; 0 where it leaves none.

        Args:
            keys: of the prompt's full blocks, in order.
        """
        common = next((place for place, key in enumerate(keys) if key not in self._known), len(keys))
        for key in reversed(keys):  # a prefix is forgotten from its end
            self._known.pop(key, None)
            self._known[key] = None
        while len(self._known) > self._most_keys:
            del self._known[next(iter(self._known))]
        return common if common < len(keys) else 0
