"""Sessions with their leases and reservations: the right to read or fill blocks for a limited time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from prefixd.base.errors import NamespaceClosedError
from prefixd.base.tenancy.tenants import Tenant
from prefixd.cache.index.keys.block_keys import BlockChain
from prefixd.cache.index.trie import Rows, Trie
from prefixd.cache.namespaces import Namespace
from prefixd.cache.placement.holds import Hold
from prefixd.cache.sessions.arrivals import Arrivals
from prefixd_swap.tiers import Account

_NAMESPACES = 2048
"""Namespaces open in one session. Engine connectors before 0.1 forgot the first of 1,024 registered ones, so they never
used one that was not among the last 2,046."""


class End(StrEnum):
    """How a grant ended, in words for its holder."""

    RELEASED = "it was released"
    EXPIRED = "its time was up"
    SESSION = "its session ended"
    COMMITTED = "it was committed"
    CACHED = "its blocks are cached"


class Grant(Protocol):
    """What a session has until it releases it, its time is over, or the session ends."""

    id: str
    session: Session
    granted_s: float
    expires_s: float

    @property
    def held(self) -> int: ...

    def end(self, at_its_word: bool) -> None: ...


@dataclass(slots=True)
class Lease:
    """The right to read blocks in the CPU tier.

    `hold` holds the blocks, and for each the KV groups that a reader of the whole prefix needs.
    """

    id: str
    session: Session
    hold: Hold
    expires_s: float
    granted_s: float = 0.0

    @property
    def trie(self) -> Trie:
        """The blocks' trie."""
        return self.hold.trie

    @property
    def rows(self) -> Rows:
        """The leased blocks, in prompt order."""
        return self.hold.rows

    @property
    def held(self) -> int:
        """Blocks that it holds."""
        return len(self.hold.rows)

    def end(self, at_its_word: bool) -> None:
        """Releases the blocks."""
        self.hold.end()


@dataclass(eq=False, slots=True)
class Process:
    """A client's process that has the arena mapped."""

    pid: int
    alive: bool = True
    quarantined_bytes: int = 0
    """Bytes of slots in quarantine into which it may still be writing."""


@dataclass(slots=True)
class Reservation:
    """The right to fill `slots` for the blocks from `first_block` on.

    `slots[i, j]`, [blocks, parts], is the arena offset of part `parts[j]` of block `first_block + i`; `prefix` holds
    the blocks before `first_block`, so that a committed block always has its prefix. `by_daemon`: the daemon fills the
    slots itself, from a stream; the client does not know them. `retention_refused`: why its commit did not grant the
    retention; empty if it did. `ended` releases the prefix and the slots (`Reservations.end`).
    """

    id: str
    session: Session
    namespace: Namespace
    trie: Trie
    chain: BlockChain
    prefix: Hold
    first_block: int
    parts: tuple[int, ...]
    slots: npt.NDArray[np.int64]
    expires_s: float
    ended: Callable[[Reservation, bool], None]
    by_daemon: bool = False
    retention_refused: str = ""
    granted_s: float = 0.0

    @property
    def held(self) -> int:
        """Blocks that it holds."""
        return len(self.prefix.rows)

    def end(self, at_its_word: bool) -> None:
        """Releases its prefix and slots; `at_its_word`: its holder says that it no longer writes into the slots."""
        self.ended(self, at_its_word)


@dataclass(slots=True)
class Session:
    """One engine's connection. Its grants end with it.

    `namespaces` are the open ones, by id, the least recently used first; the session reads and fills no others.
    `processes` are live processes that mapped the arena for this session. `reserved` counts the bytes of its
    reservations' slots. `reopens`: its client registers a closed namespace again. `arrivals` has its hints.
    """

    id: str
    client_name: str
    pid: int
    opened_s: float
    tenant: Tenant
    reopens: bool = False
    grants: dict[str, Grant] = field(default_factory=dict)
    namespaces: dict[bytes, Namespace] = field(default_factory=dict)
    processes: set[Process] = field(default_factory=set)
    reserved: Account = field(default_factory=Account)
    arrivals: Arrivals = field(default_factory=Arrivals)
    granted: Counter[type[Grant]] = field(default_factory=Counter)
    """The number of current grants of each kind."""
    stored_bytes: int = 0
    """Bytes of blocks that it has committed and the cache did not have."""

    def add(self, grant: Grant) -> None:
        """Adds a grant."""
        self.grants[grant.id] = grant
        self.granted[type(grant)] += 1

    def remove(self, grant: Grant) -> None:
        """Removes a grant that it has."""
        del self.grants[grant.id]
        self.granted[type(grant)] -= 1

    def open_namespace(self, namespace: Namespace) -> None:
        """Opens a registered namespace, and closes the least recently used one beyond 2,048."""
        self.namespaces.pop(namespace.id, None)
        self.namespaces[namespace.id] = namespace
        if len(self.namespaces) > _NAMESPACES:
            del self.namespaces[next(iter(self.namespaces))]

    def namespace(self, identity: bytes) -> Namespace:
        """A namespace that is open to this session; NamespaceClosedError for every other, known or not."""
        namespace = self.namespaces.pop(identity, None)
        if namespace is None:
            raise NamespaceClosedError(
                f"namespace {identity.hex() or '(empty)'} is not open to this session; register it in this session "
                "with RegisterNamespace"
            )
        self.namespaces[identity] = namespace
        return namespace
