"""SIGINT, SIGTERM and SIGHUP of a process, from its first line to its last.

```
             main()           a command                      the daemon, when it begins to take calls
SIGINT       end_at_once      interruptible, for its time    DaemonSignals
SIGTERM      end_at_once      ended_by_sigterm, or none      DaemonSignals
SIGHUP       hold_hangups     release_hangups: it ends       release_hangups: the settings are read again
```

Imports only what is there anyway: whatever is imported before `end_at_once` can still be interrupted with a traceback.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ENDING = (signal.SIGINT, signal.SIGTERM)
SAME_SIGNAL_S = 0.25
"""`timeout`, `uv run` and shells signal a process and its group: it comes twice, but was meant once."""
_SECOND = b"prefixd: a second signal: ending without finishing what runs\n"


def end_at_once() -> None:
    """From now on SIGINT and SIGTERM end the process at once, with the exit status 130 or 143 and without a word.

    For as long as there is nothing to undo. A KeyboardInterrupt would not do: in an import it is swallowed, or told
    with a traceback, wherever it happens to be raised. Nor would the default action: a container's first process
    ignores such a signal. SIGINT stays ignored where it is, as in a script's background jobs.
    """
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


@contextmanager
def interruptible() -> Iterator[None]:
    """Around what has something to undo: SIGINT, where it ends the process at once, raises KeyboardInterrupt in it."""
    if signal.getsignal(signal.SIGINT) is not _end:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _end)


def hold_hangups() -> None:
    """SIGHUP waits until `release_hangups`: a daemon that is not there yet cannot read its settings again."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


def release_hangups() -> None:
    """SIGHUP comes, one that was held among them: the handler is there, or its default action is right."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


class DaemonSignals:
    """The first SIGINT or SIGTERM asks a daemon to end, the second ends the process at once, whatever it does then.

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
        """From now on both signals come here."""
        self._installed = True
        for number in ENDING:
            signal.signal(number, self.handle)

    def handle(self, number: int, _frame: object) -> None:
        """What a signal does."""
        now = self._clock()
        if self._signalled_s is None:
            self._signalled_s = now
            self._first()
        elif now - self._signalled_s > SAME_SIGNAL_S:
            os.write(2, _SECOND)  # logging may be what was interrupted
            os._exit(128 + number)

    def take_hangups(self, hangup: Callable[[], object]) -> None:
        """From now on SIGHUP calls `hangup`, as `first` is called; one that was held does so now."""
        signal.signal(signal.SIGHUP, lambda _number, _frame: hangup())
        release_hangups()

    def ignore_hangups(self) -> None:
        """There is nothing any more that could read the settings again."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def ignore(self) -> None:
        """The daemon is over: a signal that comes before its process has ended does not change the exit status."""
        if self._installed:
            for number in ENDING:
                signal.signal(number, signal.SIG_IGN)


def _end(number: int, _frame: object) -> None:
    os._exit(128 + number)
