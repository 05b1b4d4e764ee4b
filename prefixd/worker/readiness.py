"""What the worker says of itself once requests may start, and again when something of it changes."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from prefixd.worker_protocol.protocol import Note, Ready


class Readiness:
    """The worker's `Ready`. What changes before it is sent goes with it; what changes later is sent at once.

    send: sends a message to the daemon.
    """

    def __init__(self, send: Callable[[Ready | Note], None]) -> None:
        self.said = Ready()
        self._send = send
        self._sent = False

    def change(self, **fields: bool | str) -> None:
        """Set fields of `Ready`."""
        self.said = msgspec.structs.replace(self.said, **fields)
        if self._sent:
            self._send(self.said)

    def note(self, text: str) -> None:
        """A line for the daemon's log."""
        self._send(Note(text))

    def send(self) -> None:
        """Requests may start."""
        self._sent = True
        self._send(self.said)
