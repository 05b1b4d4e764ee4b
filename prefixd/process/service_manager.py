"""Tells the service manager (systemd) what state the daemon is in: the protocol of sd_notify(3).

A unit with `Type=notify` gives the daemon a datagram socket in `NOTIFY_SOCKET`. Each message has lines such as
`READY=1`, `STATUS=...` and `WATCHDOG=1`. Without the variable nothing is sent.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import socket
import time
from collections.abc import MutableMapping

log = logging.getLogger(__name__)

_PINGS = 3
"""Signs of life in the time after which the service manager restarts the daemon."""


class ServiceManager:
    """The socket of the service manager, or none.

    Args:
        environ: `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID` are taken out, so that no child process has them.
    """

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        self._address = environ.pop("NOTIFY_SOCKET", "")
        usec, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", str(os.getpid()))
        self._failed = False
        self.watchdog_s: float | None = None
        """After this time without a sign of life the service manager ends the daemon; None: it does not watch."""
        if self._address and usec.isdecimal() and int(usec) and pid == str(os.getpid()):
            self.watchdog_s = int(usec) / 1e6

    def ready(self, status: str) -> None:
        """The daemon takes calls. `status` is what `systemctl status` shows; also ends `reloading`."""
        self._send("READY=1", f"STATUS={_one_line(status)}")

    def status(self, status: str) -> None:
        """Sets what `systemctl status` shows."""
        self._send(f"STATUS={_one_line(status)}")

    def reloading(self) -> None:
        """The daemon reads its settings again; `ready` says when it has."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self, status: str) -> None:
        """The daemon ends."""
        self._send("STOPPING=1", f"STATUS={_one_line(status)}")

    async def watch(self) -> None:
        """Sends signs of life from the event loop until cancelled; returns at once if nobody watches.

        If a callback holds the loop, they stay away, and the service manager sends SIGABRT. All threads' stacks are
        then written to stderr; the main thread's begins with the callback.
        """
        if self.watchdog_s is None:
            return
        faulthandler.enable()
        while True:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s / _PINGS)

    def _send(self, *lines: str) -> None:
        """Sends one message. It never waits: a service manager whose queue is full gets the next sign of life."""
        if not self._address:
            return
        path = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
            ) as sender:
                sender.sendto("\n".join(lines).encode(errors="replace"), path)
        except OSError as error:
            if not self._failed:  # once: the log is not for every sign of life
                log.warning("the service manager at NOTIFY_SOCKET=%s takes no messages: %s", self._address, error)
            self._failed = True


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())
