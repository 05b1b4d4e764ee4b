"""Group commit: writers that arrive while a commit is under way share the next one.

When no commit is under way, the first writer leads: it takes all waiting changes, makes them durable together and wakes
the other writers (DeWitt et al., "Implementation Techniques for Main Memory Database Systems", SIGMOD 1984, section
5.2).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prefixd_swap.errors import StorageError
from prefixd_swap.slab.files.slab_file import SlabFile
from prefixd_swap.slab.index.rows import Change


@dataclass(eq=False, slots=True)
class Commit:
    """One caller's changes to the index, and the slabs with its data."""

    changes: list[Change]
    slabs: set[SlabFile] = field(default_factory=set)
    damaged: bool = False
    """Whether the removed records are damaged: the slots that they name may belong to other blocks."""
    done: bool = False
    error: StorageError | None = None


class GroupCommit:
    """Runs `flush` on batches of commits, one batch at a time."""

    def __init__(self, flush: Callable[[Sequence[Commit]], None]) -> None:
        """`flush` makes a whole batch durable, or raises a StorageError with nothing of it durable."""
        self._flush = flush
        self._changed = threading.Condition()
        self._waiting: list[Commit] = []
        self._leading = False
        self.batches = 0
        """Batches flushed so far."""
        self.interrupted = False
        """Whether a flush ended with another error than a StorageError: its batch may be durable or not."""

    @property
    def waiting(self) -> int:
        """Commits that wait for the batch under way."""
        return len(self._waiting)

    def resume(self) -> None:
        """Accept commits again after an interruption, once the caller has reread the index."""
        self.interrupted = False

    def run(self, commit: Commit) -> None:
        """Return when the commit is durable.

        Raises:
            StorageError: the batch failed; nothing of this commit is durable.
        """
        with self._changed:
            self._waiting.append(commit)
            while self._leading and not commit.done:
                self._changed.wait()
            if not commit.done:
                self._leading = True
        if not commit.done:
            self._lead()
        if commit.error is not None:
            raise type(commit.error)(*commit.error.args) from commit.error

    def _lead(self) -> None:
        with self._changed:
            batch, self._waiting = self._waiting, []
        error: StorageError | None = None
        ended = False
        try:
            self._flush(batch)
            ended = True
        except StorageError as raised:
            error, ended = raised, True
        finally:
            if not ended:
                self.interrupted = True
                error = StorageError("the commit was interrupted; reopen to learn what is durable")
            with self._changed:
                for commit in batch:
                    commit.done, commit.error = True, error
                self.batches += 1
                self._leading = False
                self._changed.notify_all()
