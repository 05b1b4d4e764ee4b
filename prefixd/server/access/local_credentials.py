"""LocalCredentials: how a process of this host proves at the gRPC socket which user it is.

gRPC cannot be asked for a connection's SO_PEERCRED. So a client connects to the local door (`LocalDoor`), which can,
gets a ticket there and shows it with every call. A ticket is a statement with the daemon's own signature, so none is
kept, and it is good after a restart, too. It says which user and process asked for it; what the user may do is looked
up when it is shown. Its age is measured by a clock that nobody sets and that begins anew with the host
(`prefixd.base.clocks.elapsed_s`), so the signature names the host's boot: no ticket of an earlier one is good.

A client whose ticket is refused fetches another one and asks once more. So the key may be lost with the data directory.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prefixd.base.errors import ConfigError

SCHEME = "Ticket"
"""Before a ticket in the metadata `authorization`."""
GOOD_FOR_S = 24 * 3600.0

_FILE = "ticket.key"
_KEY_BYTES = 32
_BODY = struct.Struct("<IIq")  # uid, pid, when it was issued (seconds since the host was started)
_TICKET_BYTES = _BODY.size + hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class LocalProcess:
    """Who asked for a ticket."""

    uid: int
    pid: int


class LocalCredentials:
    """Issues tickets and reads them, once it has its key (`load_key`).

    Args:
        clock: seconds since the host was started.
        boot: which start of the host that is.
    """

    def __init__(self, clock: Callable[[], float], boot: bytes) -> None:
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._clock = clock
        self._boot = boot

    def load_key(self, data_dir: Path) -> None:
        """Uses the key of the data directory from now on, which is made where there is none: what was signed with it
        before is good. Delete the file, with no daemon running, to make all tickets void.

        Raises:
            ConfigError: the file cannot be read or written.
        """
        path = data_dir / _FILE
        try:
            if path.exists() and len(key := path.read_bytes()) == _KEY_BYTES:
                self._key = key
                return
            fresh = path.with_suffix(".new")
            fresh.unlink(missing_ok=True)
            with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(self._key)
            fresh.replace(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be used ({error.strerror}); it signs local clients' tickets") from error

    def issue(self, holder: LocalProcess) -> str:
        """A ticket for this process, in hexadecimal digits."""
        body = _BODY.pack(holder.uid, holder.pid, int(self._clock()))
        return (body + self._sign(body)).hex()

    def read(self, ticket: str) -> LocalProcess | None:
        """Whose it is; None for one that is not ours, or too old."""
        try:
            given = bytes.fromhex(ticket)
        except ValueError:
            return None
        body = given[: _BODY.size]
        if len(given) != _TICKET_BYTES or not hmac.compare_digest(given[_BODY.size :], self._sign(body)):
            return None
        uid, pid, issued_s = _BODY.unpack(body)
        return LocalProcess(uid, pid) if 0 <= self._clock() - issued_s <= GOOD_FOR_S else None

    def _sign(self, body: bytes) -> bytes:
        return hmac.digest(self._key, self._boot + body, "sha256")
