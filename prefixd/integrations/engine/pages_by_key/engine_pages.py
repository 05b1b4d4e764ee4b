"""What an engine says of its pages: how each is copied from and to the daemon's arena."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from prefixd.base.errors import PrefixdError

Bytes = npt.NDArray[np.uint8]
Check = Callable[[], None]


class PagesUnusable(PrefixdError):
    """Pages that the engine names cannot be copied: they are not in its memory, or have other sizes than its pages."""


class PagesAt(ABC):
    """Some pages, ready to be copied."""

    by_threads = True
    """Whether several threads may copy different ones at once."""

    @abstractmethod
    def load(self, arena: Bytes, places: Sequence[tuple[int, int]], check: Check) -> None:
        """Copies from the arena: `places` are (page, byte offset in the arena); `check` is called before each copy and
        raises when it may not be made any more."""

    @abstractmethod
    def save(self, arena: Bytes, places: Sequence[tuple[int, int]], check: Check) -> None:
        """As `load`, the other way."""
