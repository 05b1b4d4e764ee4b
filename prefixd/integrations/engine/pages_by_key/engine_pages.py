"""The interface by which an engine's pages are copied from and to the daemon's arena."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from prefixd.base.errors import PrefixdError

Bytes = npt.NDArray[np.uint8]
Check = Callable[[], None]


class PagesUnusable(PrefixdError):
    """The engine named pages that cannot be copied: outside of its memory, or of another size than its pages."""


class PagesAt(ABC):
    """Some pages, ready to be copied."""

    by_threads = True
    """Whether several threads may copy different pages at once."""

    @abstractmethod
    def load(self, arena: Bytes, places: Sequence[tuple[int, int]], check: Check) -> None:
        """Copies pages from the arena: `places` has (page, byte offset in the arena). Calls `check` before each copy;
        it raises once the lease has ended."""

    @abstractmethod
    def save(self, arena: Bytes, places: Sequence[tuple[int, int]], check: Check) -> None:
        """Copies pages to the arena; arguments as `load`."""


class WholePages(PagesAt):
    """Pages of which each lies in one piece of the engine's memory."""

    @abstractmethod
    def bytes_of(self, page: int) -> Bytes:
        """The memory of a page. Raises PagesUnusable if it cannot be used any more."""

    def load(self, arena: Bytes, places: Sequence[tuple[int, int]], check: Check) -> None:
        for page, offset in places:
            check()
            target = self.bytes_of(page)
            np.copyto(target, arena[offset : offset + target.nbytes])

    def save(self, arena: Bytes, places: Sequence[tuple[int, int]], check: Check) -> None:
        for page, offset in places:
            check()
            source = self.bytes_of(page)
            np.copyto(arena[offset : offset + source.nbytes], source)
