"""Sessions, leases and reservations: who may read or fill what, and until when."""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from prefixd.cache.holds import Hold
from prefixd.cache.index.keys import BlockChain
from prefixd.cache.index.trie import Rows, Trie
from prefixd.cache.namespaces import Namespace
from prefixd.errors import (
    ExhaustedError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    SessionEndedError,
    UnavailableError,
)
from prefixd.tenants import Tenant
from prefixd_swap.tiers import Account

_REMEMBERED = 10_000  # ended leases of which we still know how they ended, for a better message


@dataclass(slots=True)
class Lease:
    """The right to read blocks in the CPU tier.

    `hold` has the blocks, and of each the KV groups that a reader of the whole prefix needs.
    """

    id: str
    session: Session
    hold: Hold
    expires_s: float

    @property
    def trie(self) -> Trie:
        """The blocks' trie."""
        return self.hold.trie

    @property
    def rows(self) -> Rows:
        """The leased blocks, in order."""
        return self.hold.rows


@dataclass(eq=False, slots=True)
class Process:
    """A client's process that has the arena mapped."""

    pid: int
    alive: bool = True
    quarantined_bytes: int = 0
    """Of slots into which it may still be writing."""


@dataclass(slots=True)
class Reservation:
    """The right to fill `slots` for the blocks from `first_block` on.

    `slots[i, j]`, [blocks, parts], is the arena offset of part `parts[j]` of block `first_block + i`; `prefix` holds
    the blocks before `first_block`, so that a committed block always has its prefix. `by_daemon`: the daemon fills the
    slots itself, from a stream; the client does not know them.
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
    by_daemon: bool = False


@dataclass(slots=True)
class Session:
    """One engine's connection. Everything it was granted ends with it.

    `namespaces` are those it has registered, by id: it reads and fills no others. `processes` are those that have the
    arena through it and live. `reserved` has the bytes of its reservations' slots.
    """

    id: str
    client_name: str
    pid: int
    opened_s: float
    tenant: Tenant
    grants: dict[str, Lease | Reservation] = field(default_factory=dict)
    namespaces: dict[bytes, Namespace] = field(default_factory=dict)
    processes: set[Process] = field(default_factory=set)
    reserved: Account = field(default_factory=Account)
    _granted: Counter[type[Lease] | type[Reservation]] = field(default_factory=Counter)

    def count(self, kind: type[Lease] | type[Reservation]) -> int:
        """Grants of one kind that have not ended."""
        return self._granted[kind]

    def add(self, grant: Lease | Reservation) -> None:
        """Adds a grant."""
        self.grants[grant.id] = grant
        self._granted[type(grant)] += 1

    def remove(self, grant: Lease | Reservation) -> None:
        """Removes a grant that it has."""
        del self.grants[grant.id]
        self._granted[type(grant)] -= 1

    def namespace(self, identity: bytes) -> Namespace:
        """A namespace that this session has registered; PermissionDeniedError for every other, known or not."""
        try:
            return self.namespaces[identity]
        except KeyError:
            raise PermissionDeniedError(
                f"namespace {identity.hex() or '(empty)'} is not open to this session; register it in this session "
                "with RegisterNamespace"
            ) from None


class LeaseTable:
    """All sessions and what they hold.

    Args:
        end: called with grants that end, however they end, and whether at their holder's word; gives back what they
            protected, at once or, where that is much, soon.
        closed: called with every session that ends.
        default_ttl_s: lifetime of a grant that asked for none.
        max_ttl_s: longest lifetime that may be asked for.
        max_sessions: sessions open at once.
    """

    def __init__(
        self,
        end: Callable[[Sequence[Lease | Reservation], bool], None],
        closed: Callable[[Session], None],
        *,
        default_ttl_s: float,
        max_ttl_s: float,
        max_sessions: int,
    ) -> None:
        self._end = end
        self._closed = closed
        self.default_ttl_s = default_ttl_s
        self.max_ttl_s = max_ttl_s
        self.max_sessions = max_sessions
        self.sessions: dict[str, Session] = {}
        self.ending = False
        """Whether the daemon is ending, and with it every session."""
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._granted = 0
        self._deadlines: list[tuple[float, str, str]] = []
        """A heap of (a time, session, grant): each grant is in it with a time at which it may be overdue, at the latest
        that of its end. Grants that have ended stay in it until then."""

    def open(self, client_name: str, pid: int, now_s: float, tenant: Tenant) -> Session:
        """A new session of a tenant; ExhaustedError when there are too many."""
        if len(self.sessions) >= self.max_sessions:
            raise ExhaustedError(
                f"{len(self.sessions)} sessions are open, the most allowed; close one or raise server.max_sessions"
            )
        session = Session(secrets.token_hex(16), client_name, pid, now_s, tenant)
        self.sessions[session.id] = session
        return session

    def close(self, session: Session) -> None:
        """Ends a session and all it was granted. Closing twice does nothing."""
        if self.sessions.pop(session.id, None) is None:
            return
        self._finish(list(session.grants.values()), "its session ended", at_its_word=False)
        session.namespaces.clear()
        self._closed(session)

    def session(self, session_id: str) -> Session:
        """The open session with this id."""
        try:
            return self.sessions[session_id]
        except KeyError:
            if self.ending:
                raise UnavailableError("the daemon ends, and its sessions with it; try again when it is back") from None
            raise SessionEndedError(
                f"session {session_id[:8] or '(empty)'} is not open; open one with OpenSession and keep its stream"
            ) from None

    def ttl(self, wanted_s: float) -> float:
        """The lifetime for a wish of `wanted_s` seconds; 0 asks for the default."""
        if wanted_s < 0 or wanted_s != wanted_s:
            raise InvalidArgumentError(f"ttl_s is {wanted_s}; it must be 0 (default) or positive")
        return min(wanted_s or self.default_ttl_s, self.max_ttl_s)

    def next_id(self) -> str:
        """A fresh id for a grant, that nobody can guess."""
        self._granted += 1
        return f"{self._granted}-{secrets.token_hex(8)}"

    def grant(self, grant: Lease | Reservation) -> None:
        """Adds a grant to its session; ends it with NotFoundError when the session ended while it was prepared."""
        if grant.session.id not in self.sessions:
            self._end([grant], True)  # nobody has been told of it
        self.session(grant.session.id).add(grant)
        self._watch(grant)

    def find(self, session: Session, grant_id: str) -> Lease | Reservation:
        """A session's grant; NotFoundError says how it ended if it did: with its session, SessionEndedError."""
        grant = session.grants.get(grant_id)
        if grant is None:
            how = self._ended.get(grant_id)
            if how:
                over = NotFoundError if session.id in self.sessions else SessionEndedError
                raise over(f"lease {grant_id} is over: {how}; acquire or reserve again")
            raise NotFoundError(f"lease {grant_id or '(empty)'} was never granted to this session; check the id")
        return grant

    def release(self, session: Session, grant_id: str) -> None:
        """Ends a grant at its holder's wish."""
        self._finish([self.find(session, grant_id)], "it was released", at_its_word=True)

    def renew(self, session: Session, grant_ids: Sequence[str], ttl_s: float, now_s: float) -> None:
        """Lets grants live for `ttl_s` seconds from now; none of them, with NotFoundError, when one is over."""
        grants = [self.find(session, grant_id) for grant_id in grant_ids]
        for grant in grants:
            sooner = now_s + ttl_s < grant.expires_s
            grant.expires_s = now_s + ttl_s
            if sooner:
                self._watch(grant)

    def expire(self, now_s: float) -> int:
        """Ends every grant whose time is up; returns how many."""
        overdue: dict[str, Lease | Reservation] = {}
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, session_id, grant_id = heappop(self._deadlines)
            session = self.sessions.get(session_id)
            grant = None if session is None else session.grants.get(grant_id)
            if grant is None:
                continue
            if grant.expires_s <= now_s:
                overdue[grant_id] = grant
            else:  # it was renewed
                self._watch(grant)
        self._finish(list(overdue.values()), "its time was up", at_its_word=False)
        return len(overdue)

    def _watch(self, grant: Lease | Reservation) -> None:
        heappush(self._deadlines, (grant.expires_s, grant.session.id, grant.id))

    def forget(self, grant: Lease | Reservation, how: str) -> None:
        """Removes a grant whose protection the caller has dealt with itself."""
        grant.session.remove(grant)
        self._ended[grant.id] = how
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def count(self, kind: type[Lease] | type[Reservation]) -> int:
        """Grants of one kind, all sessions."""
        return sum(session.count(kind) for session in self.sessions.values())

    def _finish(self, grants: Sequence[Lease | Reservation], how: str, *, at_its_word: bool) -> None:
        for grant in grants:
            self.forget(grant, how)
        self._end(grants, at_its_word)
