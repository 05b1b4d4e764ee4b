"""Follows what the daemon stores and drops, for the engine's own stream of KV events.

The daemon sends each change of its blocks (`WatchBlocks`) to the link's thread; `HashedBlocks` turns it into events,
which vLLM takes with its steps. No step waits for the daemon; events that vLLM has not taken make the daemon wait.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
from vllm.v1.core import kv_cache_utils

from prefixd.client import (
    CallTimeout,
    ClientClosed,
    ClientError,
    NamespaceSpec,
    NotFoundError,
    ServerUnavailable,
    UnsupportedError,
)
from prefixd.integrations.engine.daemon_link import Link
from prefixd.integrations.engine.geometry import Geometry
from prefixd.integrations.vllm.kv_events.hashed_blocks import MEDIA, ExtraKeys, HashedBlocks, NamespaceBlocks
from prefixd.integrations.vllm.log import log
from prefixd.v1.cache_pb2 import BlockChange

_AWAY_S = 0.2  # between attempts to reach a daemon that is away
_REST_S = 10.0  # the longest pause after a daemon refused, or sent a change that was not understood
_ANSWER_S = 1.0
_PAUSE_S = 0.001  # between slices, for the thread that schedules
_SLICE_TOKENS = 1024  # hashed in a slice, in 0.5 ms
_SLICE_HASHES = 1024  # in an event, at most
_WAITING = 512  # events that vLLM has not taken, at most
_SPECS = 4096  # namespaces of which extra keys, or foreign ids, are kept: the last that came
_REOPENED = 256  # namespaces opened again with a restarted daemon: the last that came


class BlockEvents:
    """Events of the blocks that prefixd has of this engine.

    Args:
        vllm_config: vLLM's configuration, with KV events enabled.
        link: the line to the daemon.
        geometry: how the daemon's blocks are made of vLLM's.
        hash_tokens: tokens for which vLLM has a hash.
    """

    def __init__(self, vllm_config: Any, link: Link, geometry: Geometry, hash_tokens: int) -> None:
        self._link = link
        self._blocks = HashedBlocks(vllm_config, geometry, hash_tokens)
        self._block_tokens = geometry.block_tokens
        self._hash_tokens = hash_tokens
        self._slice_blocks = max(1, _SLICE_HASHES * self._blocks.event_tokens // self._block_tokens)
        self._keys: dict[NamespaceSpec, ExtraKeys] = {}  # of this engine's namespaces, the last used last
        self._moving = threading.Lock()  # while a spec moves to the end of `_keys`
        self._namespaces: dict[bytes, NamespaceBlocks] = {}  # by id, those with blocks in events
        self._foreign: dict[bytes, None] = {}  # ids of namespaces that are not this engine's
        self._applying = asyncio.Lock()  # blocks are taken back before the next change is applied
        self._wrong = False  # vLLM computes other hashes than `HashedBlocks`
        self._following = link.spawn(self._follow)
        self._following.add_done_callback(link.report)

    # -- in the scheduler's thread --------------------------------------------------------------------------------

    def begin(self, spec: NamespaceSpec) -> None:
        """Opens the namespace of requests without adapter and salt, before the first of them comes."""
        self._keys[spec] = ExtraKeys(None, self._hash_tokens)

        async def register() -> None:
            await self._link.cache(spec)

        self._link.start(register).add_done_callback(self._link.report)

    def note_request(self, spec: NamespaceSpec, request: Any) -> None:
        """Notes the extra keys of an arriving request's namespace, and checks once that its hashes are as computed."""
        with self._moving:
            keys = self._keys.pop(spec, None) or ExtraKeys(request, self._hash_tokens)
            if len(self._keys) >= _SPECS:
                self._keys.pop(next(iter(self._keys)))
            self._keys[spec] = keys
        if keys.checked or request.mm_features or not request.block_hashes:
            return
        keys.checked = True
        if not self._blocks.hashes_as_vllm(request, keys):
            log.warning(
                "prefixd: this vLLM has other hashes of blocks than computed from their tokens; its KV events do not "
                "tell of what prefixd has. Let routers subscribe to the daemon's (events.endpoint)."
            )
            self._wrong = True
            self._take_back()

    def take_events(self) -> list[Any]:
        """The next events for vLLM."""
        return self._blocks.take_events()

    @property
    def waiting(self) -> bool:
        """Whether vLLM has events to take."""
        return self._blocks.waiting > 0

    def reset(self) -> None:
        """Takes back all blocks: the engine has other namespaces from now on, as after a change of weights."""
        self._keys.clear()
        self._take_back()

    def close(self) -> None:
        """Stops following the daemon."""
        self._following.cancel()

    def _take_back(self) -> None:
        self._link.spawn(self._remove_all).add_done_callback(self._link.report)

    # -- in the link's thread -------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        now_s = asyncio.get_running_loop().time
        pause_s, said = _AWAY_S, set[type[Exception]]()
        while not self._wrong:
            # Engines are made before the number with which vLLM's hashes of first blocks begin.
            if self._link.up and hasattr(kv_cache_utils, "NONE_HASH"):
                since_s, failure = now_s(), None
                try:
                    await self._watch_daemon()
                except UnsupportedError:
                    log.warning("prefixd is of an earlier version, and tells the engine nothing for its KV events.")
                    return
                except ClientClosed:
                    return
                except (ServerUnavailable, NotFoundError, CallTimeout) as error:
                    log.debug("prefixd: what it has is not told for now: %s", error)
                except Exception as error:
                    failure = error
                if now_s() - since_s >= _REST_S:
                    pause_s = _AWAY_S
                    said.clear()
                await self._remove_all()
                if failure is not None:
                    self._log_failure(failure, again=type(failure) in said)
                    said.add(type(failure))
                    await asyncio.sleep(pause_s)
                    pause_s = min(_REST_S, 2 * pause_s)
            await asyncio.sleep(_AWAY_S)

    def _log_failure(self, failure: Exception, again: bool) -> None:
        if not isinstance(failure, ClientError):
            level = logging.DEBUG if again else logging.ERROR
            log.log(level, "prefixd: what the daemon told of its blocks was not understood", exc_info=failure)
            return
        log.log(
            logging.DEBUG if again else logging.WARNING,
            "prefixd does not let this engine watch its blocks, and KV events do not tell of them: %s. Enable KV "
            "events in fewer engines, or let routers subscribe to the daemon's (events.endpoint); the engine asks "
            "again by itself.",
            failure,
        )

    async def _watch_daemon(self) -> None:
        """Applies the changes that the daemon sends; opens the namespaces again once it has not refused the watch."""

        async def follow() -> None:
            async with aclosing(self._link.watch_blocks()) as changes:
                async for change in changes:
                    await self._apply(change)

        following = asyncio.ensure_future(follow())
        try:
            await asyncio.wait((following,), timeout=_ANSWER_S)
            if not following.done():
                for spec in list(self._keys)[-_REOPENED:]:
                    await self._link.reopen(spec)
            await following
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _apply(self, change: BlockChange) -> None:
        async with self._applying:
            await self._wait_for_room()
            if self._wrong or not (change.stored or change.namespace_id in self._namespaces):
                return
            namespace = await self._namespace(change.namespace_id)
            if namespace is None:
                return
            if change.cleared:
                await self._remove(namespace, list(namespace.tiers), MEDIA)
            if change.tier in MEDIA:
                await self._remove(namespace, change.removed, (change.tier,))
                await self._store_all(namespace, change)
            if not namespace.tiers:
                del self._namespaces[change.namespace_id]

    async def _wait_for_room(self) -> None:
        while self._blocks.waiting >= _WAITING:
            await asyncio.sleep(_PAUSE_S)

    async def _namespace(self, identity: bytes) -> NamespaceBlocks | None:
        if identity in self._namespaces:
            return self._namespaces[identity]
        end_s = asyncio.get_running_loop().time() + (0.0 if identity in self._foreign else _ANSWER_S)
        while (spec := self._link.spec_of(identity)) is None and asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(_PAUSE_S)  # a change may overtake the answer to the namespace's registration
        with self._moving:
            keys = None if spec is None else self._keys.get(spec)
        self._foreign.pop(identity, None)
        if keys is None:
            if len(self._foreign) >= _SPECS:
                self._foreign.pop(next(iter(self._foreign)))
            self._foreign[identity] = None
            return None
        self._namespaces[identity] = NamespaceBlocks(keys)
        return self._namespaces[identity]

    async def _store_all(self, namespace: NamespaceBlocks, change: BlockChange) -> None:
        tokens = np.frombuffer(change.token_ids, "<u4").reshape(len(change.stored), -1) if change.stored else None
        parent = change.parent if change.HasField("parent") else None
        each = max(1, _SLICE_TOKENS // self._block_tokens)
        for start in range(0, len(change.stored), each):
            numbers = change.stored[start : start + each]
            assert tokens is not None
            self._blocks.store(namespace, numbers, parent, tokens[start : start + each], change.tier)
            parent = numbers[-1]
            await asyncio.sleep(_PAUSE_S)

    async def _remove(self, namespace: NamespaceBlocks, numbers: Sequence[int], tiers: Iterable[int]) -> None:
        for start in range(0, len(numbers), self._slice_blocks):
            await self._wait_for_room()
            for tier in tiers:
                self._blocks.remove(namespace, numbers[start : start + self._slice_blocks], tier)
            await asyncio.sleep(_PAUSE_S)

    async def _remove_all(self) -> None:
        """Queues events that take back every block that earlier events told of."""
        async with self._applying:
            while self._namespaces:
                _, namespace = self._namespaces.popitem()
                await self._remove(namespace, list(namespace.tiers), MEDIA)
            self._foreign.clear()
            self._blocks.reset_counts()
