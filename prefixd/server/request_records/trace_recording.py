"""Records the prompts that come, as hashes of their blocks of 512 tokens, for `prefixd plan`."""

from __future__ import annotations

import asyncio
import hashlib
import math
import secrets
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from prefixd.base.errors import InvalidArgumentError, PreconditionError
from prefixd.base.long_work.pacer import Pacer
from prefixd.cache import Namespace, TieredCache
from prefixd.cache.index.keys.block_keys import BlockChain
from prefixd.cache.prompt_listeners import Lookup
from prefixd.v1 import admin_pb2 as pb

HASH_TOKENS = 512
"""Tokens of a block of a trace, as in the traces that `prefixd plan` reads."""
_QUEUED_BYTES = 32 << 20
_QUEUED_REQUESTS = 4096
_MOST_HASHES = 1 << 16  # in a message: half a MiB
_BLOCK_BYTES = 4 * HASH_TOKENS
_HASHED_US = 3  # microseconds to hash a block
_REQUEST_US = 4  # to add a request to a message


@dataclass(slots=True)
class _Heard:
    """A request that waits to be sent."""

    arrival_s: float
    token_ids: bytes
    prompt_tokens: int
    output_tokens: int
    seed: int


class TraceRecording:
    """Records for one caller at a time; costs nothing while nobody records.

    Args:
        cache: whose prompts are recorded.
        every_s: the time between two messages.
    """

    def __init__(self, cache: TieredCache, every_s: float = 0.25) -> None:
        self._cache = cache
        self._every_s = every_s
        self._recording = False
        self._queue: deque[_Heard] = deque()
        self._queued_bytes = 0
        self._dropped = 0
        self._began_s = 0.0

    async def record(self, duration_s: float) -> AsyncGenerator[pb.RecordedRequests, None]:
        """Yields the requests that come; the last message has `done` set.

        Args:
            duration_s: for how long; 0: until the generator is closed.

        Raises:
            InvalidArgumentError: the duration is negative or no number.
            PreconditionError: another recording is under way.
        """
        if not 0 <= duration_s < math.inf:
            raise InvalidArgumentError(f"duration_s = {duration_s:g}; give seconds, or 0 to record until the call ends")
        if self._recording:
            raise PreconditionError("another recording is under way; end it, or wait until it has ended")
        cache, prompts = self._cache, self._cache.prompts
        self._recording, self._dropped, self._began_s = True, 0, cache.clock()
        prompts.looked_up.append(self._looked_up)
        prompts.answered.append(self._answered)
        salt = secrets.token_bytes(32)
        try:
            yield pb.RecordedRequests()  # the caller knows that it has begun
            while not duration_s or cache.clock() - self._began_s < duration_s:
                left_s = self._began_s + duration_s - cache.clock() if duration_s else self._every_s
                await asyncio.sleep(min(self._every_s, max(left_s, 0.0)))
                async for message in self._messages(salt):
                    yield message
            async for message in self._messages(salt):
                yield message
            yield pb.RecordedRequests(dropped_requests=self._dropped, done=True)
        finally:
            prompts.looked_up.remove(self._looked_up)
            prompts.answered.remove(self._answered)
            self._queue.clear()
            self._queued_bytes = 0
            self._recording = False

    async def _messages(self, salt: bytes) -> AsyncGenerator[pb.RecordedRequests, None]:
        """What waits, in messages of bounded size; one in any case, so that a caller that has gone is noticed."""
        pacer, left = Pacer(), len(self._queue)
        while True:
            message, hashes = pb.RecordedRequests(dropped_requests=self._dropped), 0
            while left and hashes < _MOST_HASHES:
                left -= 1
                heard = self._queue.popleft()
                self._queued_bytes -= len(heard.token_ids)
                hashed = await _hash_blocks(heard, salt, pacer)
                hashes += len(hashed)
                message.requests.append(
                    pb.RecordedRequest(
                        arrival_s=max(0.0, heard.arrival_s - self._began_s),
                        prompt_tokens=heard.prompt_tokens,
                        output_tokens=heard.output_tokens,
                        hashes=hashed,
                    )
                )
                await pacer.worked(_REQUEST_US)
            yield message
            if not left:
                return

    def _looked_up(self, namespace: Namespace, chain: BlockChain, lookup: Lookup) -> None:
        self._hear(namespace, chain, chain.tokens, 0, self._cache.clock())

    def _answered(
        self, namespace: Namespace, chain: BlockChain, prompt_tokens: int, output_tokens: int, arrival_s: float
    ) -> None:
        if arrival_s >= self._began_s:
            self._hear(namespace, chain, prompt_tokens, output_tokens, arrival_s)

    def _hear(
        self, namespace: Namespace, chain: BlockChain, prompt_tokens: int, output_tokens: int, arrival_s: float
    ) -> None:
        if len(self._queue) >= _QUEUED_REQUESTS or self._queued_bytes >= _QUEUED_BYTES:
            self._dropped += 1
            return
        token_ids = chain.first_tokens(prompt_tokens)
        self._queued_bytes += len(token_ids)
        self._queue.append(_Heard(arrival_s, token_ids, prompt_tokens, output_tokens, namespace.seed))


async def _hash_blocks(heard: _Heard, salt: bytes, pacer: Pacer) -> list[int]:
    """For each full block of 512 tokens a keyed hash of all tokens up to its end, and of the namespace's seed."""
    found = []
    hashed = hashlib.blake2b(heard.seed.to_bytes(8, "little"), key=salt, digest_size=16).digest()
    for end in range(_BLOCK_BYTES, len(heard.token_ids) + 1, _BLOCK_BYTES):
        block = heard.token_ids[end - _BLOCK_BYTES : end]
        hashed = hashlib.blake2b(hashed + block, key=salt, digest_size=16).digest()
        found.append(int.from_bytes(hashed[:8], "little"))
        await pacer.worked(_HASHED_US)
    return found
