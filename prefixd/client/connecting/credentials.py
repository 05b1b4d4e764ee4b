"""Credentials of a client: tickets for a unix socket; certificates and a token for another host."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from prefixd.client.errors import InvalidArgumentError

DOOR_SUFFIX = "-memory"
"""The name of the daemon's local door is the name of its socket and this suffix."""
_FRESH_S = 3600.0  # a ticket is valid for a day
_FETCH_S = 5.0
_ANSWER_LIMIT = 4096

Metadata = tuple[tuple[str, str], ...]


class Ticket:
    """A ticket from the daemon's local door. It is fetched before the first call, once an hour, and after a refusal.

    Without a door (only the socket was mounted into a container) calls have no ticket; the daemon treats the client as
    one of its default tenant, or refuses it.

    Args:
        socket: path of the daemon's unix socket.
        clock: seconds, as `prefixd.base.clocks.elapsed_s`.
    """

    def __init__(self, socket: str, clock: Callable[[], float]) -> None:
        self._door = socket + DOOR_SUFFIX
        self._clock = clock
        self.metadata: Metadata = ()
        """The metadata of a call."""
        self.fresh_until_s = 0.0
        """Time of the next fetch, by the clock."""
        self._fetching = asyncio.Lock()

    async def fetch(self) -> None:
        """Fetches the ticket unless it is fresh. Without a door it stays as it is."""
        async with self._fetching:
            if self._clock() >= self.fresh_until_s:
                await self._fetch()

    async def replace(self, refused: Metadata) -> bool:
        """Fetches another ticket after the daemon has refused a call with `refused`; False if there is none.

        Calls that were refused together share one fetch.
        """
        async with self._fetching:
            if self.metadata == refused:
                await self._fetch()
            return self.metadata != refused

    async def _fetch(self) -> None:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_FETCH_S):
                answer = await self._ask()
            self.metadata = (("authorization", f"Ticket {answer}"),) if answer else ()
            self.fresh_until_s = self._clock() + _FRESH_S

    async def _ask(self) -> str:
        reader, writer = await asyncio.open_unix_connection(self._door)
        try:
            writer.write(b"ticket\n")
            answer = await reader.read(_ANSWER_LIMIT)
        finally:
            writer.close()
        try:
            said = json.loads(answer)
        except ValueError:  # a daemon without tickets hangs up
            return ""
        return str(said.get("ticket", "")) if isinstance(said, dict) else ""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials for `host:port`. At a unix socket a client sends a `Ticket` instead.

    Args:
        tls_ca: file of authorities, PEM, one of which signed the daemon's certificate. Without it the connection is
            plain TCP: others can read and change the traffic on the way, also the token.
        tls_cert: file of the client's certificate, PEM, for a daemon with `server.tls_client_ca`.
        tls_key: file of the certificate's key.
        token: for a daemon with `server.tokens`.

    Raises:
        InvalidArgumentError: some of them are missing, or the token has other characters than visible ASCII.
    """

    tls_ca: str | os.PathLike[str] | None = None
    tls_cert: str | os.PathLike[str] | None = None
    tls_key: str | os.PathLike[str] | None = None
    token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidArgumentError("tls_cert and tls_key belong together; give both or none")
        if self.tls_cert is not None and self.tls_ca is None:
            raise InvalidArgumentError("tls_cert is for connections with TLS; give tls_ca too")
        if not all("!" <= character <= "~" for character in self.token):
            raise InvalidArgumentError("the token has characters that are not visible ASCII; give the token alone")

    def channel(self, address: str, options: list[tuple[str, Any]]) -> grpc.aio.Channel:
        """Makes a channel to `address`. Raises InvalidArgumentError for a file that cannot be used."""
        if address.startswith("unix:") or self.tls_ca is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, self._tls(), options=options)

    @property
    def metadata(self) -> Metadata:
        """The metadata of each call: the token, if there is one."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def _tls(self) -> grpc.ChannelCredentials:
        import ssl

        content = [
            None if path is None else _read(name, Path(path))
            for name, path in (("tls_ca", self.tls_ca), ("tls_key", self.tls_key), ("tls_cert", self.tls_cert))
        ]
        # gRPC itself would retry without end with a wrong file, and would not report the cause.
        try:
            check = ssl.create_default_context(cafile=self.tls_ca)
            if self.tls_cert is not None:
                check.load_cert_chain(self.tls_cert, self.tls_key, password="")
        except (ssl.SSLError, ValueError) as error:
            given = ", ".join(
                f"{name} = {path}"
                for name, path in (("tls_ca", self.tls_ca), ("tls_cert", self.tls_cert), ("tls_key", self.tls_key))
                if path is not None
            )
            raise InvalidArgumentError(
                f"{given}: not certificates in PEM and a key without a password that belongs to its certificate "
                f"({getattr(error, 'reason', None) or error})"
            ) from error
        return grpc.ssl_channel_credentials(*content)


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(f"{name} = {path}: {error.strerror}") from error
