"""Copies that the caller's thread and others make together: one thread reaches a part of what memory can move."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, TypeVar

from prefixd_swap import OutOfMemoryError, started_threads

T = TypeVar("T")

_CHUNK_BYTES = 8 << 20  # handing out less costs more than it saves


class SharedCopies:
    """Copies on the caller's thread and on `beside` others, which start with the first copy that is worth it.

    Nobody waits for another's copy: a caller whose helpers are busy copies everything itself, as it does while the
    system gives this process no threads, and while the interpreter ends.
    """

    def __init__(self, beside: int = 1) -> None:
        self._beside = beside
        self._starting = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False

    def copy(self, copy: Callable[[Sequence[T]], None], items: Sequence[T], nbytes: int) -> None:
        """Has `copy` called with every item once, in runs of neighbours; `nbytes` is what they have together.

        However it ends, no call is under way any more then. What one raises is raised here, and no further one begins.
        """
        count = min(len(items), nbytes // _CHUNK_BYTES)
        if count <= 1:
            copy(items)
            return
        ends = [len(items) * chunk // count for chunk in range(count + 1)]
        work = _Work(copy, [items[begin:end] for begin, end in itertools.pairwise(ends)])
        try:
            self._hand_out(work.help)
            work.run()
        finally:
            work.finish()
        if work.error is not None:
            raise work.error

    def close(self) -> None:
        """Ends the threads once they are idle; later copies are their callers' alone."""
        with self._starting:
            self._closed = True
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)

    def _hand_out(self, help_: Callable[[], None]) -> None:
        # Without threads, or when the interpreter ends (RuntimeError), the caller copies alone.
        with self._starting, suppress(OutOfMemoryError, RuntimeError):
            if self._threads is None and not self._closed:
                self._threads = started_threads(self._beside, "prefixd-copy")
            if self._threads is not None:
                for _ in range(self._beside):
                    self._threads.submit(help_)


class _Work(Generic[T]):
    """Chunks of one copy, which several threads take one after the other."""

    def __init__(self, copy: Callable[[Sequence[T]], None], chunks: Sequence[Sequence[T]]) -> None:
        self.error: BaseException | None = None
        """What ended a helper."""
        self._copy = copy
        self._chunks = iter(chunks)
        self._over = False
        self._helpers = 0
        self._changed = threading.Condition()

    def run(self) -> None:
        """Copies chunks until none is left, or one has failed."""
        while (chunk := self._next()) is not None:
            self._copy(chunk)

    def help(self) -> None:
        """As `run`, on another thread than the caller's; nothing where `finish` came first."""
        with self._changed:
            if self._over:
                return
            self._helpers += 1
        try:
            self.run()
        except BaseException as error:
            self.error = error
        finally:
            with self._changed:
                self._helpers -= 1
                self._changed.notify_all()

    def finish(self) -> None:
        """Has no further chunk begin, and waits for those under way, also when it is interrupted meanwhile."""
        interrupted: BaseException | None = None
        while True:
            try:
                with self._changed:
                    self._over = True
                    self._changed.wait_for(lambda: not self._helpers)
                break
            except BaseException as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted

    def _next(self) -> Sequence[T] | None:
        with self._changed:
            return None if self._over or self.error is not None else next(self._chunks, None)
