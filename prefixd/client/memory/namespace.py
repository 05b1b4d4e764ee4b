"""A namespace as this client has registered it, kept registered across the daemon's restarts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol, TypeVar

from prefixd.client.connecting.connection import Connection
from prefixd.client.connecting.session import Session
from prefixd.client.errors import (
    ExhaustedError,
    InvalidArgumentError,
    MemoryUnavailable,
    NamespaceClosed,
    NotFoundError,
    ServerUnavailable,
    SessionUnknown,
)
from prefixd.client.memory.copying import Copier
from prefixd.client.messages import message
from prefixd.client.spec import NamespaceSpec, Retention, retention_to_proto
from prefixd.v1 import cache_pb2

T = TypeVar("T")


class SessionSource(Protocol):
    """The part of the client that namespaces, leases and reservations use."""

    copier: Copier
    clock: Callable[[], float]

    @property
    def connection(self) -> Connection:
        """The gRPC channel and its stubs."""

    async def session(self) -> Session:
        """Returns the open session; opens a new one if the last has ended."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A response, its session, and the client's clock before the request was sent."""

    session: Session
    response: Any
    asked_at_s: float


class RegisteredNamespace:
    """Calls the daemon for one namespace, in the open session; registers the namespace in each new session."""

    def __init__(self, client: SessionSource, spec: NamespaceSpec) -> None:
        self.client = client
        self.spec = spec
        self.namespace_id = b""
        self._registered_in: Session | None = None

    async def ready(self) -> Session:
        """Returns an open session in which the namespace is registered."""

        async def itself(session: Session) -> Session:
            return session

        return await self.in_session(itself)

    async def in_session(self, attempt: Callable[[Session], Awaitable[T]]) -> T:
        """Runs `attempt` in an open session in which the namespace is registered; returns its result.

        If the daemon does not know the session, because it was restarted, runs it once more in a new session. Raises
        `ServerUnavailable` if the daemon does not know that one either.
        """
        for again in (True, False):
            session = await self.client.session()
            try:
                return await self._attempt_in(session, attempt)
            except SessionUnknown as error:
                session.disown(str(error))
                if not again:
                    raise ServerUnavailable(f"the daemon was restarted twice during one call: {error}") from error
        raise AssertionError("both attempts end by themselves")

    async def _attempt_in(self, session: Session, attempt: Callable[[Session], Awaitable[T]]) -> T:
        """Runs `attempt`; runs it once more if the daemon has closed the namespace to make room for others."""
        await self._register_in(session)
        try:
            return await attempt(session)
        except NamespaceClosed:
            self._registered_in = None
            await self._register_in(session)
            return await attempt(session)

    async def _register_in(self, session: Session) -> None:
        if self._registered_in is session:
            return
        connection = session.connection
        response = await connection.call(
            connection.cache.RegisterNamespace,
            cache_pb2.RegisterNamespaceRequest(namespace=self.spec.to_proto(), session_id=session.session_id),
        )
        self.namespace_id = response.namespace_id
        self._registered_in = session

    async def ask(
        self,
        method: str,
        request: Any,
        prompt: bytes,
        *,
        nothing: Callable[[], Any],
        grant_id: Callable[[Any], str] | None = None,
        needs_memory: bool = True,
        more_s: float = 0.0,
    ) -> Answer:
        """Calls the RPC `method` with the prompt, the session and the namespace set in `request`; returns the answer.

        For a prompt without tokens, which has no blocks, the answer is `nothing()`, without a call.

        `grant_id` returns the id of the grant in a response; if the caller is cancelled, the grant is released. With
        `needs_memory`, raises `MemoryUnavailable` if a grant is asked for and this client does not map the daemon's
        memory. The daemon may answer `more_s` later than usual.
        """

        async def attempt(session: Session) -> Answer:
            connection = session.connection
            asked_at_s = self.client.clock()
            if grant_id is not None and needs_memory and session.arena is None:
                raise MemoryUnavailable("this client does not share memory with the daemon: use load and store")
            if not prompt:
                return Answer(session, nothing(), asked_at_s)
            request.session_id, request.namespace_id = session.session_id, self.namespace_id
            stub = getattr(connection.cache, method)
            if grant_id is None:
                return Answer(session, await connection.call(stub, request), asked_at_s)

            async def give_back(response: Any) -> None:
                if found := grant_id(response):
                    release = cache_pb2.ReleaseRequest(session_id=session.session_id, lease_id=found)
                    await connection.call(connection.cache.Release, release)

            return Answer(session, await connection.call_for_grant(stub, request, give_back, more_s), asked_at_s)

        request.token_ids = prompt
        return await self.in_session(attempt)

    async def match_many(self, request: cache_pb2.MatchManyRequest) -> cache_pb2.MatchManyResponse:
        """Calls `MatchMany` with the session and the namespace set in `request`."""

        async def attempt(session: Session) -> cache_pb2.MatchManyResponse:
            connection = session.connection
            request.session_id, request.namespace_id = session.session_id, self.namespace_id
            response: cache_pb2.MatchManyResponse = await connection.call(connection.cache.MatchMany, request)
            return response

        return await self.in_session(attempt)

    async def end_claim(self, claim_id: str, in_s: float) -> bool:
        """Ends a claim, now or `in_s` seconds from now; returns False if it had ended already."""
        session = await self.client.session()
        cache, session_id = session.connection.cache, session.session_id
        try:
            if in_s:
                renew = message(cache_pb2.RenewRequest, session_id=session_id, lease_ids=[claim_id], ttl_s=in_s)
                await session.connection.call(cache.Renew, renew)
            else:
                release = cache_pb2.ReleaseRequest(session_id=session_id, lease_id=claim_id)
                await session.connection.call(cache.Release, release)
        except SessionUnknown as error:  # it ended with its session
            session.disown(str(error))
            return False
        except NotFoundError:  # its blocks are cached, or its time was over
            return False
        return True

    async def persist(self, prompt: bytes) -> int:
        """Waits until the cached prefix of `prompt` is on disk; returns its length in blocks."""
        answer = await self.ask("Persist", cache_pb2.PersistRequest(), prompt, nothing=cache_pb2.PersistResponse)
        return int(answer.response.blocks)

    async def try_to_retain(self, prompt: bytes, retention: Sequence[Retention]) -> str:
        """As `retain`, if `retention` is not empty; returns why the daemon refused it, or an empty text."""
        if retention:
            try:
                await self.retain(prompt, retention)
            except ExhaustedError as error:
                return str(error)
        return ""

    async def retain(self, prompt: bytes, retention: Sequence[Retention]) -> int:
        """Gives priorities to the cached blocks of `prompt`; returns the number of blocks with another one than 0."""
        request = cache_pb2.RetainRequest(retention=retention_to_proto(retention))
        answer = await self.ask("Retain", request, prompt, nothing=cache_pb2.RetainResponse)
        return int(answer.response.blocks)

    def full_blocks(self, prompt: bytes) -> int:
        """Number of full blocks of a prompt, given as little-endian uint32 token ids."""
        return len(prompt) // (4 * self.spec.block_tokens)

    def part_bytes(self, parts: Sequence[int] | None) -> tuple[int, ...]:
        """Bytes in a block of each of `parts` (None: all). Raises `InvalidArgumentError` for an unknown part."""
        known = self.spec.parts
        if not parts:
            return tuple(part.nbytes for part in known)
        given: Sequence[object] = parts
        for index in given:
            if not isinstance(index, Integral) or not 0 <= int(index) < len(known):
                raise InvalidArgumentError(
                    f"there is no part {index!r}: the namespace has the parts 0 to {len(known) - 1}"
                )
        return tuple(known[index].nbytes for index in parts)
