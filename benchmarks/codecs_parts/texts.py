"""Five texts of the standard library, which every machine has: three of the reference, two of code with prose in it."""

from __future__ import annotations

import heapq
import inspect
import random
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Final

_TOPICS: Final = ("objects", "import", "formatstrings")
_SOURCES: Final = (heapq, random)


def passages(encode: Callable[[str], list[int]], tokens: int) -> list[list[int]]:
    """The first `tokens` tokens of each text, as `encode` makes them."""
    texts = [*(topics[name] for name in _TOPICS), *(inspect.getsource(module) for module in _SOURCES)]
    return [encode(text)[:tokens] for text in texts]
