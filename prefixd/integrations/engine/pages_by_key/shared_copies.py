"""Shares copies between the caller's thread and helpers: one thread reaches a part of the memory's bandwidth."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, TypeVar

from prefixd_swap import OutOfMemoryError, started_threads

T = TypeVar("T")

_CHUNK_BYTES = 8 << 20  # a smaller chunk takes a helper longer to begin than to copy


class SharedCopies:
    """Copies on the caller's thread and on `beside` helpers, which start with the first copy of two chunks.

    A caller never waits for another caller's copy: it copies everything itself while the helpers are busy, while the
    system gives this process no threads, and while the interpreter ends.
    """

    def __init__(self, beside: int = 1) -> None:
        self._beside = beside
        self._starting = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False

    def copy(self, copy: Callable[[Sequence[T]], None], items: Sequence[T], nbytes: int) -> None:
        """Calls `copy` with runs of neighbouring items, each item once; `nbytes` is the sum of their bytes.

        When it returns or raises, no call is under way. The first error is raised here and ends the copy.
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
        """Ends the helpers once they are idle; later copies run on their callers' threads alone."""
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
    """The chunks of one copy, which several threads work off."""

    def __init__(self, copy: Callable[[Sequence[T]], None], chunks: Sequence[Sequence[T]]) -> None:
        self.error: BaseException | None = None
        """The error that ended a helper."""
        self._copy = copy
        self._chunks = iter(chunks)
        self._finished = False
        self._helpers = 0
        self._changed = threading.Condition()

    def run(self) -> None:
        """Copies chunks until none is left or one has failed."""
        while (chunk := self._next()) is not None:
            self._copy(chunk)

    def help(self) -> None:
        """As `run`, on a helper; does nothing after `finish`."""
        with self._changed:
            if self._finished:
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
        """Stops handing out chunks and waits for those under way, even if the wait is interrupted."""
        interrupted: BaseException | None = None
        while True:
            try:
                with self._changed:
                    self._finished = True
                    self._changed.wait_for(lambda: not self._helpers)
                break
            except BaseException as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted

    def _next(self) -> Sequence[T] | None:
        with self._changed:
            return None if self._finished or self.error is not None else next(self._chunks, None)
