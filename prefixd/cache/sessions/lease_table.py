"""All sessions and their leases and reservations: how many there may be, and how each ends."""

from __future__ import annotations

import math
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from itertools import islice

from prefixd.base.errors import (
    ExhaustedError,
    InvalidArgumentError,
    NotFoundError,
    PrefixdError,
    SessionEndedError,
    UnavailableError,
)
from prefixd.base.long_work.pacer import give_way
from prefixd.base.tenancy.tenants import Tenant, Tenants
from prefixd.cache.options import CacheOptions
from prefixd.cache.sessions.sessions import End, Grant, Session

_REMEMBERED = 10_000  # ended grants whose reason is remembered for error messages
_LONGEST_NAME = 256  # characters of a client's name
_TICK_S = 0.25  # grants that expire within a tick end together, at its end
_EXPIRED_AT_ONCE = 2048  # grants: some milliseconds
_ENDED_AT_ONCE = 1 << 16  # held blocks that are released in one turn: about a millisecond
_ENDED_WITH_A_GRANT = 1 << 11  # the cost of ending a grant, in blocks
_KEPT_FOR_OTHERS = 8
"""Sessions that each tenant can open, however many others are open; fewer if `max_sessions` is small."""


class LeaseTable:
    """All sessions and their grants.

    Args:
        spawn: runs a task that ends the rest of many grants.
        closed: called with every session that ends.
        options: lifetimes and limits.
        tenants: the owners of sessions.
        ended: called with every grant that ends, and how.
    """

    def __init__(
        self,
        spawn: Callable[[Coroutine[object, object, None]], object],
        closed: Callable[[Session], None],
        options: CacheOptions,
        tenants: Tenants,
        ended: Callable[[Grant, End], None] = lambda grant, how: None,
    ) -> None:
        self._on_end = ended
        self._spawn = spawn
        self._closed = closed
        self.default_ttl_s = options.default_ttl_s
        self.max_ttl_s = options.max_ttl_s
        self.max_sessions = options.max_sessions
        self.max_grants = options.max_grants
        self._tenants = tenants
        self.sessions_of: Counter[Tenant] = Counter()
        """Open sessions by tenant."""
        self.grants_of: Counter[Tenant] = Counter()
        """Grants by tenant."""
        self.sessions: dict[str, Session] = {}
        self.ending = False
        """Whether the daemon is ending."""
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._granted = 0
        self._due: dict[int, dict[str, Grant]] = {}
        """Tick -> grant id -> grants that expire at the end of the tick."""

    def open(self, client_name: str, pid: int, now_s: float, tenant: Tenant, *, reopens: bool = False) -> Session:
        """Opens a session of a tenant; for `reopens` see `Session`.

        Raises:
            InvalidArgumentError: the name is too long, or has characters that cannot be printed.
            ExhaustedError: there are too many sessions, or too many of this tenant.
        """
        if len(client_name) > _LONGEST_NAME or not client_name.isprintable():
            raise InvalidArgumentError(
                f"client_name has {len(client_name)} characters ({client_name[:40]!r}); use at most {_LONGEST_NAME}, "
                "printable ones"
            )
        tenant.check("sessions", self.sessions_of[tenant], "sessions are open", "close one")
        others = [other for other in self._tenants if other is not tenant]
        share = min(_KEPT_FOR_OTHERS, self.max_sessions // (len(others) + 1))
        kept = sum(max(0, share - self.sessions_of[other]) for other in others)
        if len(self.sessions) + kept >= self.max_sessions:
            tenant.refused["sessions"] += 1
            for_others = f", {kept} are kept for other tenants" if kept else ""
            raise ExhaustedError(
                f"tenant {tenant.name}: {len(self.sessions)} sessions are open{for_others}, and all tenants together "
                f"may have {self.max_sessions} (limit server.max_sessions); close one, or have the operator raise it"
            )
        session = Session(secrets.token_hex(16), client_name, pid, now_s, tenant, reopens)
        self.sessions[session.id] = session
        self.sessions_of[tenant] += 1
        return session

    def close(self, session: Session) -> None:
        """Ends a session and its grants. A second call does nothing."""
        if self.sessions.pop(session.id, None) is None:
            return
        self.sessions_of[session.tenant] -= 1
        self._finish(list(session.grants.values()), End.SESSION, at_its_word=False)
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

    def session_of(self, tenant: Tenant, session_id: str) -> Session:
        """The open session with this id, if it is this tenant's."""
        session = self.session(session_id)
        if session.tenant is not tenant:
            raise SessionEndedError(
                f"session {session_id[:8]} is not open for tenant {tenant.name}; open one with OpenSession"
            )
        return session

    def ttl(self, wanted_s: float) -> float:
        """The lifetime of a grant for which `wanted_s` seconds were requested; 0: the default."""
        if wanted_s < 0 or wanted_s != wanted_s:
            raise InvalidArgumentError(f"ttl_s is {wanted_s}; it must be 0 (default) or positive")
        return min(wanted_s or self.default_ttl_s, self.max_ttl_s)

    def next_id(self) -> str:
        """A new id for a grant, which cannot be guessed."""
        self._granted += 1
        return f"{self._granted}-{secrets.token_hex(8)}"

    def admit(self, session: Session) -> None:
        """Raises ExhaustedError if a session, or its tenant, may have no further grant."""
        tenant = session.tenant
        if len(session.grants) >= self.max_grants:
            tenant.refused["grants"] += 1
            raise ExhaustedError(
                f"session {session.id[:8]} of tenant {tenant.name} has {len(session.grants)} leases, reservations and "
                "claims, the most allowed (limit server.max_grants); release some, or have the operator raise it"
            )
        if tenant.quota.grants is not None:
            tenant.check("grants", self.grants_of[tenant], "leases, reservations and claims are held", "release some")

    def grant(self, grant: Grant) -> None:
        """Adds a grant to its session.

        Raises:
            SessionEndedError: the session ended while the grant was prepared; the grant ends too.
            ExhaustedError: it is one too many, since others were granted meanwhile; it ends.
        """
        try:
            self.session(grant.session.id)
            self.admit(grant.session)
        except PrefixdError:
            grant.end(True)  # no client knows it yet
            raise
        grant.session.add(grant)
        self.grants_of[grant.session.tenant] += 1
        self._schedule(grant)

    def find(self, session: Session, grant_id: str) -> Grant:
        """A session's grant; NotFoundError, or SessionEndedError if the session ended, tells how the grant ended."""
        grant = session.grants.get(grant_id)
        if grant is None:
            how = self._ended.get(grant_id)
            if how:
                over = NotFoundError if session.id in self.sessions else SessionEndedError
                raise over(f"lease {grant_id} is over: {how}; acquire or reserve again")
            raise NotFoundError(f"lease {grant_id or '(empty)'} was never granted to this session; check the id")
        return grant

    def release(self, session: Session, grant_id: str) -> None:
        """Ends a grant that its holder releases."""
        self._finish([self.find(session, grant_id)], End.RELEASED, at_its_word=True)

    def renew(self, session: Session, grant_ids: Sequence[str], ttl_s: float, now_s: float) -> None:
        """Extends the lifetime of grants to `ttl_s` seconds from now; NotFoundError and no change if one ended."""
        if len(grant_ids) > self.max_grants:
            raise InvalidArgumentError(
                f"lease_ids has {len(grant_ids)} ids, and a session has at most {self.max_grants} leases and "
                "reservations (limit server.max_grants); name each once"
            )
        for grant in [self.find(session, grant_id) for grant_id in grant_ids]:
            self._unschedule(grant)
            grant.expires_s = now_s + ttl_s
            self._schedule(grant)

    def expire(self, now_s: float) -> int:
        """Ends expired grants, as many as take some milliseconds; returns how many. The next call ends the others."""
        overdue: list[Grant] = []
        for tick in [tick for tick in self._due if tick * _TICK_S <= now_s]:
            overdue += islice(self._due[tick].values(), _EXPIRED_AT_ONCE - len(overdue))
        self._finish(overdue, End.EXPIRED, at_its_word=False)
        return len(overdue)

    def _schedule(self, grant: Grant) -> None:
        self._due.setdefault(_tick(grant.expires_s), {})[grant.id] = grant

    def _unschedule(self, grant: Grant) -> None:
        tick = _tick(grant.expires_s)
        del self._due[tick][grant.id]
        if not self._due[tick]:
            del self._due[tick]

    def forget(self, grant: Grant, how: End) -> None:
        """Removes a grant without ending it; the caller does that."""
        grant.session.remove(grant)
        self.grants_of[grant.session.tenant] -= 1
        self._unschedule(grant)
        self._ended[grant.id] = how
        self._on_end(grant, how)
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def count(self, kind: type[Grant]) -> int:
        """The number of grants of one kind in all sessions."""
        return sum(session.granted[kind] for session in self.sessions.values())

    def _finish(self, grants: Sequence[Grant], how: End, *, at_its_word: bool) -> None:
        """Ends grants: now as many as take a millisecond, the others soon."""
        if not grants:
            return
        for grant in grants:
            self.forget(grant, how)
        self._end_all(grants, at_its_word)

    def _end_all(self, grants: Sequence[Grant], at_its_word: bool) -> None:
        blocks = 0
        for number, grant in enumerate(grants, 1):
            blocks += _ENDED_WITH_A_GRANT + grant.held
            grant.end(at_its_word)
            if blocks >= _ENDED_AT_ONCE and number < len(grants):
                self._spawn(self._end_all_later(grants[number:], at_its_word))
                return

    async def _end_all_later(self, grants: Sequence[Grant], at_its_word: bool) -> None:
        await give_way()
        self._end_all(grants, at_its_word)


def _tick(expires_s: float) -> int:
    return math.ceil(expires_s / _TICK_S)
