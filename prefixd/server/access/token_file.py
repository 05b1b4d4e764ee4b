"""The file of bearer tokens, each with a tenant and a role. The daemon reads the file again when it changes.

So an operator removes a leaked token without a restart, which would end every session. A thread reads the file
(aiofiles): it may lie on a network file system, and the event loop must not wait for a disk.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import stat
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import aiofiles
import aiofiles.os

from prefixd.base.errors import ConfigError
from prefixd.base.tenancy.tenants import DEFAULT, Role, check_tenant_name
from prefixd.cache import Troubles
from prefixd.server.access.socket_access import is_secret
from prefixd_swap import SwapError, started_threads

log = logging.getLogger(__name__)

PART = "tokens"
"""The part that `Troubles` names when the file cannot be used."""
CHECK_S = 2.0
"""Seconds between two checks whether the file has changed."""
_SHORTEST_TOKEN = 16
_TOKEN = re.compile(r"[\x21-\x7e]+")

_Identity = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Token:
    """A token's name, role, SHA-256 and tenant; the daemon does not keep the token itself."""

    name: str
    role: Role
    digest: bytes
    tenant: str = DEFAULT


@dataclass(frozen=True, slots=True)
class ReadTokens:
    """The tokens of a file, and the state in which the file was read."""

    tokens: tuple[Token, ...]
    seen: _Identity


class TokenFile:
    """The tokens that are valid now.

    Args:
        path: a file of lines `name role token [tenant]`; a line that begins with `#` is a comment.

    Raises:
        ConfigError: the thread that reads the file cannot be started.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.tokens: tuple[Token, ...] = ()
        """Empty before `load`: no caller is then known."""
        self.listeners: list[Callable[[], None]] = []
        """Called after each `use`."""
        self._by_digest: dict[bytes, Token] = {}
        self._seen: _Identity | None = None  # state of the file when `tokens` were read
        try:
            self._threads = started_threads(1, "prefixd-tokens")
        except SwapError as error:
            raise ConfigError(f"server.tokens = {path}: {error}") from error

    def close(self) -> None:
        """Stops the thread that reads the file."""
        self._threads.shutdown(wait=False)

    def find(self, secret: str) -> Token | None:
        """Returns the token with this secret, if there is one.

        The time of a lookup reveals nothing about other secrets: the table is keyed by SHA-256.
        """
        return self._by_digest.get(digest(secret))

    async def load(self) -> None:
        """Reads the file and uses it from now on. Raises ConfigError as `read` does, and changes nothing then."""
        self.use(await self.read())

    async def read(self) -> ReadTokens:
        """Returns the tokens that the file has now; changes nothing.

        Raises:
            ConfigError: the file cannot be read, other users can read it, or a line is wrong.
        """
        try:
            seen = await self._read_identity()
        except OSError as error:
            raise ConfigError(f"server.tokens = {self._path}: {error.strerror}") from error
        return ReadTokens(await read_tokens(self._path, self._threads), seen)

    def use(self, read: ReadTokens) -> None:
        """Makes these the valid tokens."""
        self.tokens = read.tokens
        self._by_digest = {token.digest: token for token in self.tokens}
        self._seen = read.seen  # the next check finds a file that has changed since it was read
        for listener in self.listeners:
            listener()

    async def watch(self, troubles: Troubles) -> None:
        """Checks the file every `CHECK_S` seconds, without end."""
        while True:
            await asyncio.sleep(CHECK_S)
            await self.reload_if_changed(troubles)

    async def reload_if_changed(self, troubles: Troubles) -> None:
        """Reads the file if it has changed. If it cannot be used, reports a trouble and keeps the tokens."""
        try:
            if await self._read_identity() != self._seen:
                before = len(self.tokens)
                await self.load()
                log.info("%s has changed: %d tokens, %d before", self._path, len(self.tokens), before)
        except (ConfigError, OSError) as error:
            reason = str(error) if isinstance(error, ConfigError) else f"server.tokens = {self._path}: {error.strerror}"
            problem, _, remedy = reason.partition("; ")
            remedy = remedy or "put the file back"
            troubles.begin(PART, f"{problem}: the tokens that were read before stay valid; {remedy}", tell=True)
        else:
            troubles.end(PART)

    async def _read_identity(self) -> _Identity:
        """Returns numbers that differ if the file, its content, its owner or its permissions are different."""
        found = await aiofiles.os.stat(self._path, executor=self._threads)
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


async def read_tokens(path: Path, threads: Executor | None = None) -> tuple[Token, ...]:
    """Returns the tokens in a file of the format that `TokenFile` describes.

    Args:
        path: the file.
        threads: threads that read the file; by default those of the event loop.

    Raises:
        ConfigError: the file cannot be read, other users can read it, or a line is wrong.
    """
    try:
        async with aiofiles.open(path, encoding="utf-8", executor=threads) as file:
            found = os.fstat(file.fileno())
            lines = (await file.read()).splitlines()
    except OSError as error:
        raise ConfigError(f"server.tokens = {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(
            f"server.tokens = {path} is no text in UTF-8; write lines of `name role token [tenant]`"
        ) from error
    mode = stat.S_IMODE(found.st_mode)
    if not is_secret(found):
        raise ConfigError(
            f"server.tokens = {path} (mode {mode:04o}, of user {found.st_uid}) must be the daemon's alone; "
            f"run `chown {os.geteuid()} {path}` and `chmod 600 {path}`"
        )
    tokens: list[Token] = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if words and not words[0].startswith("#"):
            tokens.append(_parse_token(words, tokens, f"server.tokens = {path}, line {number}"))
    if not tokens:
        raise ConfigError(f"server.tokens = {path} has no token; write lines of `name role token [tenant]`")
    return tuple(tokens)


def digest(secret: str) -> bytes:
    """Returns the SHA-256 that the daemon keeps of a token."""
    return hashlib.sha256(secret.encode("ascii", "replace")).digest()


def _parse_token(words: list[str], before: list[Token], where: str) -> Token:
    """Returns the token of one line, or raises ConfigError; no message repeats the line, which holds a secret."""
    if not 3 <= len(words) <= 4:
        raise ConfigError(f"{where} has {len(words)} words; write `name role token [tenant]`")
    name, role, secret, tenant = (*words, DEFAULT)[:4]
    if role not in tuple(Role):
        raise ConfigError(f"{where}: the role of {name} is none of {', '.join(Role)}; write one of them")
    try:
        check_tenant_name(tenant)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    if len(secret) < _SHORTEST_TOKEN or not _TOKEN.fullmatch(secret):
        raise ConfigError(
            f"{where}: the token of {name} is not {_SHORTEST_TOKEN} or more ASCII characters; "
            "make one with `openssl rand -hex 32`"
        )
    token = Token(name, Role(role), digest(secret), tenant)
    for other in before:
        if name == other.name or token.digest == other.digest:
            same = (
                f"the name {name} repeats"
                if name == other.name
                else f"the token of {name} repeats that of {other.name}"
            )
            raise ConfigError(f"{where}: {same}; give each its own")
    return token
