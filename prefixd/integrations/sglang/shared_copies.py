"""Copies that the caller's thread and others make together: one thread reaches a part of what memory can move."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, TypeVar

from prefixd_swap import OutOfMemoryError, started_threads

T = TypeVar("T")

_CHUNK_BYTES = 8 << 20  # handing out less costs more than it saves


class SharedCopies:
    """Copies on the caller's thread and on `beside` others, which start with the first copy that is worth it.

    Nobody waits for another's copy: a caller whose helpers are busy copies everything itself, as it does while the
    system gives this process no threads.
    """

    def __init__(self, beside: int = 1) -> None:
        self._beside = beside
        self._starting = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False

    def copy(self, copy: Callable[[Sequence[T]], None], items: Sequence[T], nbytes: int) -> None:
        """Has `copy` called with every item once, in runs of neighbours; `nbytes` is what they have together.

        Returns when no call is under way any more. What the first one to fail raises is raised here, and no further
        call begins.
        """
        count = min(len(items), nbytes // _CHUNK_BYTES)
        if count <= 1:
            copy(items)
            return
        ends = [len(items) * chunk // count for chunk in range(count + 1)]
        work = _Work(copy, [items[begin:end] for begin, end in itertools.pairwise(ends)])
        helpers = self._handed_out(work.run)
        work.run()
        for helper in helpers:
            if not helper.cancel():
                helper.result()
        if work.error is not None:
            raise work.error

    def close(self) -> None:
        """Ends the threads once they are idle; later copies are their callers' alone."""
        with self._starting:
            self._closed = True
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)

    def _handed_out(self, run: Callable[[], None]) -> list[Future[None]]:
        with self._starting:
            if self._threads is None and not self._closed:
                with suppress(OutOfMemoryError):  # then the caller copies alone
                    self._threads = started_threads(self._beside, "prefixd-copy")
            return [] if self._threads is None else [self._threads.submit(run) for _ in range(self._beside)]


class _Work(Generic[T]):
    """Chunks of one copy, which several threads take one after the other."""

    def __init__(self, copy: Callable[[Sequence[T]], None], chunks: Sequence[Sequence[T]]) -> None:
        self.error: BaseException | None = None
        self._copy = copy
        self._chunks = iter(chunks)
        self._taking = threading.Lock()

    def run(self) -> None:
        """Copies chunks until none is left, or one has failed."""
        while True:
            with self._taking:
                chunk = None if self.error is not None else next(self._chunks, None)
            if chunk is None:
                return
            try:
                self._copy(chunk)
            except BaseException as error:
                self.error = self.error or error
                return
