"""Handles SIGINT, SIGTERM and SIGHUP of a process, from its first line to its last.

```
             main()           a command                      the daemon, when it begins to take calls
SIGINT       end_at_once      interruptible, for its time    DaemonSignals
SIGTERM      end_at_once      ended_by_sigterm, or none      DaemonSignals
SIGHUP       hold_hangups     release_hangups: it ends       release_hangups: the settings are read again
```

Imports only modules that Python has loaded: a signal during an import before `end_at_once` would print a traceback.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ENDING = (signal.SIGINT, signal.SIGTERM)
SAME_SIGNAL_S = 0.25
"""A signal within this time is the same one: `timeout`, `uv run` and shells signal a process and its group."""
_SECOND = b"prefixd: a second signal: ending without finishing what runs\n"


def end_at_once() -> None:
    """Lets SIGINT and SIGTERM end the process at once, with the exit status 130 or 143 and without a message.

    Use it while there is nothing to undo. An import could swallow a KeyboardInterrupt or print its traceback, and the
    default action does nothing in a container's first process. An ignored SIGINT stays ignored, as in a script's
    background jobs.
    """
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


@contextmanager
def interruptible() -> Iterator[None]:
    """Makes SIGINT raise KeyboardInterrupt inside the block instead of ending the process, for code that cleans up."""
    if signal.getsignal(signal.SIGINT) is not _end:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _end)


def hold_hangups() -> None:
    """Blocks SIGHUP until `release_hangups`: a starting daemon cannot read its settings again."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


def release_hangups() -> None:
    """Unblocks SIGHUP and delivers a held one; call it when its handler is installed or its default action is right."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


class DaemonSignals:
    """Handles a daemon's signals: the first SIGINT or SIGTERM asks it to end, the second ends the process at once.

    For the main thread.

    Args:
        first: called from the signal handler, between any two instructions.
        clock: seconds.
    """

    def __init__(self, first: Callable[[], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._first = first
        self._clock = clock
        self._signalled_s: float | None = None
        self._installed = False

    def install(self) -> None:
        """Makes `handle` the handler of both signals."""
        self._installed = True
        for number in ENDING:
            signal.signal(number, self.handle)

    def handle(self, number: int, _frame: object) -> None:
        """Handles a signal: calls `first`, or ends the process at the second one."""
        now = self._clock()
        if self._signalled_s is None:
            self._signalled_s = now
            self._first()
        elif now - self._signalled_s > SAME_SIGNAL_S:
            os.write(2, _SECOND)  # the signal may have interrupted logging
            os._exit(128 + number)

    def take_hangups(self, hangup: Callable[[], object]) -> None:
        """Makes SIGHUP call `hangup` from the signal handler; a held SIGHUP is delivered now."""
        signal.signal(signal.SIGHUP, lambda _number, _frame: hangup())
        release_hangups()

    def ignore_hangups(self) -> None:
        """Ignores SIGHUP from now on, since the daemon cannot read its settings again any more."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def ignore(self) -> None:
        """Ignores both signals at the daemon's end, so that a late signal does not change the exit status."""
        if self._installed:
            for number in ENDING:
                signal.signal(number, signal.SIG_IGN)


def _end(number: int, _frame: object) -> None:
    os._exit(128 + number)
