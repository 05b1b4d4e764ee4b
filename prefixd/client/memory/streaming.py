"""Bytes through gRPC, for clients that cannot map the daemon's memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from prefixd.base.rules.rules import ChunkedWindow
from prefixd.client.connecting.session import Session
from prefixd.client.errors import PreconditionError, ServerError
from prefixd.client.memory.buffers import BlockBuffers, StreamSink
from prefixd.client.memory.namespace import RegisteredNamespace
from prefixd.client.spec import MatchResult, NamespaceSpec, Retention, StoreResult, retention_to_proto
from prefixd.v1 import cache_pb2

_PIECE_BYTES = 1 << 20
_JOINED_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Slice:
    """What one call has read.

    Attributes:
        blocks: from the first one asked for.
        cached_blocks: of the prompt, as far as was asked for; 0: the daemon is older and does not say.
    """

    blocks: int
    cached_blocks: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one call is to read.

    Attributes:
        first_block: from here on.
        max_blocks: so many at the most.
        prefix_blocks: they are a slice of a prefix of this length; 0: the prompt goes on behind them.
        found: the answer by which the prompt was counted as asked for; None: this call counts it.
    """

    first_block: int
    max_blocks: int
    prefix_blocks: int = 0
    found: MatchResult | None = None


async def get(
    namespace: RegisteredNamespace,
    prompt: bytes,
    buffers: BlockBuffers,
    wanted: Wanted,
    first: int,
    parts: Sequence[int] | None,
) -> Slice:
    """Reads cached blocks; the first one wanted is block `first` of `buffers`."""
    connection = namespace.client.connection

    async def attempt(session: Session) -> Slice:
        request = cache_pb2.GetRequest(
            session_id=session.session_id,
            namespace_id=namespace.namespace_id,
            token_ids=prompt,
            first_block=wanted.first_block,
            max_blocks=wanted.max_blocks,
            prefix_blocks=wanted.prefix_blocks,
            parts=parts or (),
            uncounted=wanted.found is not None,
            hits=wanted.found is not None,
            found=None if wanted.found is None else wanted.found.to_found(),
        )
        sink = StreamSink(buffers, first, 0)
        came = Slice(0, 0)
        async with aclosing(connection.stream(connection.cache.Get, request)) as messages:
            async for message in messages:
                if message.WhichOneof("content") == "header":
                    came = Slice(message.header.blocks, message.header.cached_blocks)
                    if came.blocks > wanted.max_blocks:
                        raise ServerError(
                            f"the daemon sends {came.blocks} blocks where {wanted.max_blocks} were asked for"
                        )
                    sink = StreamSink(buffers, first, came.blocks, message.header.sent)
                else:
                    sink.write(message.data)
        if sink.missing_bytes:
            raise ServerError(f"the daemon ended the stream {sink.missing_bytes} bytes before its end")
        return came

    return await namespace.in_session(attempt)


async def put(
    namespace: RegisteredNamespace,
    prompt: bytes,
    buffers: BlockBuffers,
    first_block: int,
    parts: Sequence[int] | None,
    durable: bool,
    retention: Sequence[Retention],
) -> StoreResult:
    """Sends the full blocks of `prompt` from `first_block` on; `buffers` starts with that block."""
    total = namespace.full_blocks(prompt)
    connection = namespace.client.connection
    wishes = retention_to_proto(retention)

    async def attempt(session: Session) -> StoreResult | None:
        match = cache_pb2.MatchRequest(
            session_id=session.session_id, namespace_id=namespace.namespace_id, token_ids=prompt
        )
        cached = _cached_there(await connection.call(connection.cache.Match, match))
        # A match speaks of all parts together and of what a reader of its length needs: of single parts, and of what
        # may be missing before `first_block`, it is the daemon that knows.
        if cached < first_block and not parts and not any(part.rule for part in namespace.spec.parts):
            raise gap_error(cached, first_block)
        start = first_block if parts else max(first_block, _first_to_send(namespace.spec, cached))
        if start >= total:
            refused = await namespace.try_to_retain(prompt, retention)
            return None if durable else StoreResult(0, total - first_block, 0, refused)
        header = cache_pb2.PutHeader(
            session_id=session.session_id,
            namespace_id=namespace.namespace_id,
            token_ids=prompt,
            first_block=start,
            parts=parts or (),
            durable=durable,
            retention=wishes,
        )
        messages = buffers.messages(start - first_block, total - start, _PIECE_BYTES, _JOINED_BYTES)
        data = (cache_pb2.PutRequest(data=message) for message in messages)
        response = await connection.upload(connection.cache.Put, cache_pb2.PutRequest(header=header), data)
        if durable and not response.committed:
            return None
        dropped = total - start - response.committed - response.duplicates
        duplicates = response.duplicates + start - first_block
        return StoreResult(response.committed, duplicates, max(0, dropped), response.retention_refused)

    stored = await namespace.in_session(attempt)
    return await _persisted(namespace, prompt, first_block) if stored is None else stored


def _first_to_send(spec: NamespaceSpec, cached: int) -> int:
    """The first block to send of a prompt of which a match has found `cached` blocks.

    A match does without a chunk that ends with it, but the same prompt again continues inside that chunk. So where a
    chunk ends there, all of it is sent: with chunks of 3 blocks and 6 cached, blocks 3 to 5.
    """
    tokens = cached * spec.block_tokens
    chunks = [part.rule.tokens for part in spec.parts if isinstance(part.rule, ChunkedWindow)]
    ended = [tokens - chunk for chunk in chunks if tokens and tokens % chunk == 0]
    return min(ended, default=tokens) // spec.block_tokens


def _cached_there(match: cache_pb2.MatchResponse) -> int:
    """Blocks of the prompt, from the first, that need not be sent: what only a shared store has is sent, too."""
    blocks = 0
    for run in match.runs:
        if run.tier == cache_pb2.TIER_REMOTE:
            break
        blocks += int(run.blocks)
    return blocks


async def _persisted(namespace: RegisteredNamespace, prompt: bytes, first_block: int) -> StoreResult:
    """For a durable store of what was cached already: what of it is on disk."""
    there = max(await namespace.persist(prompt), first_block)
    return StoreResult(0, there - first_block, namespace.full_blocks(prompt) - there)


def gap_error(cached: int, first_block: int) -> PreconditionError:
    """For a source that starts after the end of what is cached: nothing would lead up to its first block."""
    return PreconditionError(
        f"the cached prefix ends at block {cached} and the source starts at block {first_block}: "
        f"give the source from block {cached} on, or hold a lease on the prefix while computing"
    )
