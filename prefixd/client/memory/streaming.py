"""Loads and stores through gRPC, for clients that cannot map the daemon's memory."""

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
    """The result of one call that reads blocks.

    Attributes:
        blocks: number of blocks that were read, from the first one wanted.
        cached_blocks: cached blocks of the prompt, as far as was asked for; 0 from an older daemon, which does not
            report it.
    """

    blocks: int
    cached_blocks: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """The blocks that one call asks for.

    Attributes:
        first_block: the first of them.
        max_blocks: most blocks; 0: all.
        prefix_blocks: length of the prefix of which they are a slice; 0: no further slice is read.
        found: the match that counted the prompt as asked for; None: this call counts it.
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
    """Reads cached blocks; the first wanted block is block `first` of `buffers`."""
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
        result = Slice(0, 0)
        async with aclosing(connection.stream(connection.cache.Get, request)) as messages:
            async for message in messages:
                if message.WhichOneof("content") == "header":
                    result = Slice(message.header.blocks, message.header.cached_blocks)
                    if result.blocks > wanted.max_blocks:
                        raise ServerError(f"the daemon sends {result.blocks} blocks, of {wanted.max_blocks} asked for")
                    sink = StreamSink(buffers, first, result.blocks, message.header.sent)
                else:
                    sink.write(message.data)
        if sink.missing_bytes:
            raise ServerError(f"the daemon ended the stream {sink.missing_bytes} bytes before its end")
        return result

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
        cached = _count_stored(await connection.call(connection.cache.Match, match))
        # A match covers all parts together, and only the bytes that a reader of its length needs. So the daemon checks
        # single parts, and the bytes before `first_block` in a namespace with rules.
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
    """Returns the first block to send of a prompt of which a match has found `cached` blocks.

    A chunk that ends at the end of the match may lack bytes: a prefix of this length does not need them, but a reader
    of the same prompt continues inside the chunk. So the client sends all blocks of such a chunk: with chunks of 3
    blocks and 6 cached blocks, it sends blocks 3 to 5.
    """
    tokens = cached * spec.block_tokens
    chunks = [part.rule.tokens for part in spec.parts if isinstance(part.rule, ChunkedWindow)]
    ended = [tokens - chunk for chunk in chunks if tokens and tokens % chunk == 0]
    return min(ended, default=tokens) // spec.block_tokens


def _count_stored(match: cache_pb2.MatchResponse) -> int:
    """Counts the first blocks of the prompt that need not be sent; blocks that only a shared store has are sent."""
    blocks = 0
    for run in match.runs:
        if run.tier == cache_pb2.TIER_REMOTE:
            break
        blocks += int(run.blocks)
    return blocks


async def _persisted(namespace: RegisteredNamespace, prompt: bytes, first_block: int) -> StoreResult:
    """The result of a durable store if all blocks were cached already: it counts the blocks that are on disk."""
    on_disk = max(await namespace.persist(prompt), first_block)
    return StoreResult(0, on_disk - first_block, namespace.full_blocks(prompt) - on_disk)


def gap_error(cached: int, first_block: int) -> PreconditionError:
    """The error for a source that starts behind the end of the cached prefix: the blocks between would be missing."""
    return PreconditionError(
        f"the cached prefix ends at block {cached} and the source starts at block {first_block}: "
        f"give the source from block {cached} on, or hold a lease on the prefix while computing"
    )
