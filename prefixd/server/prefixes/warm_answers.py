"""Brings prefixes that an operator names to CPU memory: `Admin.Warm`."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np

from prefixd.base.errors import InvalidArgumentError, NotFoundError
from prefixd.base.long_work.pacer import Pacer, give_way
from prefixd.cache import Namespace, TieredCache, Trie
from prefixd.cache.index.trie import Rows
from prefixd.cache.namespaces import namespace_digest
from prefixd.cache.placement.paths import find_path
from prefixd.server.namespace_messages import namespace_spec
from prefixd.server.prefixes.prefix_keys import find_prefix
from prefixd.server.tier_runs import tier_runs
from prefixd.v1 import admin_pb2 as pb

_LOOKUP_S = 10.0
"""The longest wait for a shared store's answer: nobody else waits for it."""
_TOKENS_AT_ONCE = 1 << 17
"""Copied in one turn: a prompt may have four million."""
_AT_ONCE = 2
"""Calls that bring blocks at a time; others wait for their turn."""


class WarmAnswers:
    """Warms prefixes up.

    Args:
        cache: the cache.
    """

    def __init__(self, cache: TieredCache) -> None:
        self._cache = cache
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._number = itertools.count(1)

    async def warm(self, request: pb.WarmRequest) -> pb.WarmResponse:
        """Returns the answer to `Warm`, when the prefix is there.

        Raises:
            InvalidArgumentError: nothing was named, or the prompt or the namespace is invalid.
            NotFoundError: no tier has the prefix with the key, or the namespace is not known.
        """
        what = request.WhichOneof("what")
        async with self._turns:
            if what == "key":
                prefix = await find_prefix(self._cache, request.key)
                path = await prefix.path(Pacer())
                namespace = self._cache.namespaces.at(int(prefix.trie.namespace[prefix.row]))
                return await self._warm(namespace, await _token_ids(prefix.trie, path))
            if what == "token_ids":
                return await self._warm(self._namespace(request), request.token_ids)
        raise InvalidArgumentError("nothing to warm up was named; send a key, or token_ids and a namespace_id")

    async def _warm(self, namespace: Namespace, token_ids: bytes) -> pb.WarmResponse:
        cache = self._cache
        trie, chain = cache.trie(namespace), cache.chain(namespace, token_ids)
        if cache.mover.remote is not None:
            await cache.mover.remote.lookups.look_up(trie, namespace, chain, None, _LOOKUP_S)
        path = trie.usable(await find_path(trie, namespace, chain))
        cache.placement.touch(trie, path)
        answer = pb.WarmResponse(blocks=len(chain), found=await tier_runs(trie, path))
        lacking = self._lacking(trie, path)
        if lacking:
            tenant = cache.mover.use.tenant_of(namespace)
            await cache.warm(tenant, f"warm-up {next(self._number)}", trie, path)
            after = trie.usable(await find_path(trie, namespace, chain))
            answer.left = self._lacking(trie, after)
            answer.brought = max(lacking - answer.left - (len(path) - len(after)), 0)
        return answer

    def _lacking(self, trie: Trie, path: Rows) -> int:
        """How many blocks of a prefix have bytes to be brought to CPU memory."""
        if not self._cache.tiers.exists(self._cache.tiers.shared):
            return 0
        return int(np.count_nonzero(trie.lacking(path, self._cache.tiers.shared.level, trie.needed(len(path)))))

    def _namespace(self, request: pb.WarmRequest) -> Namespace:
        """The namespace with the request's id; registers it if the request describes it."""
        cache = self._cache
        if request.namespace_id in cache.namespaces:
            return cache.namespaces.get(request.namespace_id)
        named = request.namespace_id.hex() or "(empty)"
        if not request.HasField("namespace"):
            raise NotFoundError(f"namespace {named} is not known here; send it as `namespace`, with its tenant")
        if cache.tenants.get(request.tenant) is None:
            raise NotFoundError(
                f"there is no tenant {request.tenant!r} here yet; define it in the settings, or warm up once it has "
                "called"
            )
        spec = namespace_spec(request.namespace, request.tenant, salt=b"")
        if namespace_digest(spec) != request.namespace_id:
            raise NotFoundError(
                f"namespace {named} of tenant {request.tenant} is not known here, and it has a salt (a secret) "
                "or a worker of the daemon fills it; warm up once its engine, or the model, has started"
            )
        return cache.register(spec)


async def _token_ids(trie: Trie, path: Rows) -> bytes:
    """The token ids of a path, little-endian uint32. If a block leaves meanwhile, what follows is not found later."""
    step, found = max(1, _TOKENS_AT_ONCE // trie.block_tokens), bytearray()
    for start in range(0, len(path), step):
        if start:
            await give_way()
        found += trie.tokens[path[start : start + step]].astype("<u4", copy=False).tobytes()
    return bytes(found)
