"""Memory for the pixels of images, shared by the daemon with its decode process and its workers.

```
offset   0            1 GiB        2 GiB        3 GiB
         [file]       [pixels]                  [pixels]          a memory file; only what is in use has memory
          decoding     a request's  (ended)      a request's
```

Each image gets a place that no image had before: a reader of a place after its end finds zeros, never another image's
pixels. A place has 1 GiB of addresses in the file, which cost nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

from prefixd.base.errors import ConfigError
from prefixd_swap import SwapError
from prefixd_swap.vmem.backends.linux import punch_hole

log = logging.getLogger(__name__)

_PLACE_BYTES = 1 << 30
_PLACES = 1 << 32
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

HoldBytes = Callable[[int], AbstractContextManager[None]]
"""Counts bytes as a tenant's while the context lasts (`SharedBytes.held`)."""


class PixelStore:
    """The memory file. `fd`: its descriptor, for the processes that share it.

    Raises ConfigError: there is no descriptor for it.
    """

    def __init__(self) -> None:
        try:
            self.fd = os.memfd_create("prefixd-pixels", os.MFD_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"there is no memory file for the pixels of images ({error.strerror}); raise the limit of open files "
                "(ulimit -n, LimitNOFILE=)"
            ) from error
        self._next = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are in use."""
        return os.fstat(self.fd).st_blocks * 512

    def place(self) -> PixelPlace:
        """A place for an image; the caller is its first user."""
        offset = self._next * _PLACE_BYTES
        self._next = (self._next + 1) % _PLACES
        return PixelPlace(self, offset)

    def free(self, offset: int, nbytes: int) -> None:
        """Gives the memory of a range back."""
        if self.fd < 0:
            return
        try:
            punch_hole(self.fd, offset, nbytes)
        except SwapError as error:
            log.error("pixels of an image keep their memory: %s", error)

    def close(self) -> None:
        """Closes the descriptor; the memory is freed when the last process has closed it."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class PixelPlace:
    """Holds an image's file until it is decoded, and then its pixels, until the last user leaves it."""

    def __init__(self, store: PixelStore, offset: int) -> None:
        self.offset = offset
        self._store = store
        self._users = 1
        self._counted = ExitStack()

    def write(self, data: bytes) -> None:
        """Writes the file there; call it in a thread. Raises OSError: no memory."""
        left, offset = memoryview(data), self.offset
        while left:
            written = os.pwrite(self._store.fd, left, offset)
            left, offset = left[written:], offset + written

    def keep(self, nbytes: int, hold: HoldBytes) -> None:
        """Keeps the first `nbytes` bytes, which count from now on, and frees the rest. Raises what `hold` raises."""
        kept = -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
        self._store.free(self.offset + kept, _PLACE_BYTES - kept)
        self._counted.enter_context(hold(nbytes))

    def enter(self) -> None:
        """Adds a user."""
        self._users += 1

    def leave(self) -> None:
        """Removes a user; with the last one the memory is freed."""
        self._users -= 1
        if not self._users:
            self._counted.close()
            self._store.free(self.offset, _PLACE_BYTES)
