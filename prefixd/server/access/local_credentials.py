"""Local credentials: each proves which user runs a process of this host."""

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
"""The word before a credential in the metadata `authorization`."""
GOOD_FOR_S = 24 * 3600.0

_FILE = "ticket.key"
_KEY_BYTES = 32
_BODY = struct.Struct("<IIq")  # uid, pid, when it was issued (seconds since the host was started)
_CREDENTIAL_BYTES = _BODY.size + hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class LocalProcess:
    """The user and the process that asked for a credential."""

    uid: int
    pid: int


class LocalCredentials:
    """Issues local credentials and reads them: each proves which user runs a process of this host.

    gRPC does not give a connection's SO_PEERCRED. So a client connects to the local door (`MemoryListener`), which
    reads SO_PEERCRED itself, gets a credential there and sends it with every call as `authorization: Ticket e803...`.
    The credential names the user and the process that asked for it and carries the daemon's signature, so the daemon
    stores no credentials, and they stay valid after a restart (`load_key`). The daemon looks up the user's rights when
    it reads the credential. It measures the credential's age by a clock that cannot be set and that starts with the
    host (`prefixd.base.clocks.elapsed_s`), so the signature covers the host's boot id: a credential from an earlier
    boot is invalid.

    A client whose credential is refused fetches a new one and repeats the call once. So the key may be lost with the
    data directory.

    Args:
        clock: seconds since the host was started.
        boot: id of that start of the host.
    """

    def __init__(self, clock: Callable[[], float], boot: bytes) -> None:
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._clock = clock
        self._boot = boot

    def load_key(self, data_dir: Path) -> None:
        """Uses the key in the data directory from now on, and makes one if there is none.

        Credentials that an earlier daemon signed with this key are valid. To make all credentials invalid, delete the
        file `ticket.key` while no daemon runs.

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
            raise ConfigError(
                f"{path} cannot be used ({error.strerror}); it signs local clients' tickets; make it readable "
                "and writable for the daemon's user"
            ) from error

    def issue(self, holder: LocalProcess) -> str:
        """Returns a credential for this process, in hexadecimal digits."""
        body = _BODY.pack(holder.uid, holder.pid, int(self._clock()))
        return (body + self._sign(body)).hex()

    def read(self, credential: str) -> LocalProcess | None:
        """Returns the process that a credential was issued to; None if this daemon did not sign it, or if it is older
        than a day."""
        try:
            given = bytes.fromhex(credential)
        except ValueError:
            return None
        body = given[: _BODY.size]
        if len(given) != _CREDENTIAL_BYTES or not hmac.compare_digest(given[_BODY.size :], self._sign(body)):
            return None
        uid, pid, issued_s = _BODY.unpack(body)
        return LocalProcess(uid, pid) if 0 <= self._clock() - issued_s <= GOOD_FOR_S else None

    def _sign(self, body: bytes) -> bytes:
        return hmac.digest(self._key, self._boot + body, "sha256")
