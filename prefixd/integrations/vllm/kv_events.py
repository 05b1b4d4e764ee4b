"""What prefixd holds for an engine, in the engine's own stream of KV events.

The daemon tells of its blocks (`WatchBlocks`), in the link's thread; vLLM takes events with a step. Routers know a
block by vLLM's hash, so that of a prefix is computed here from its tokens, as vLLM would. Of blocks of the daemon that
begin alike, several have the same of vLLM's blocks: such a one is stored with the first and removed with the last.

    the daemon's blocks, 64 tokens     |        A        |        B        |
    vLLM's blocks, 16 tokens           | a1 | a2 | a3 | a4 | b1 | b2 | b3 | b4 |   hashes: vLLM's chain

Nothing of this waits for a step, nor a step for it: what vLLM has not taken makes the daemon wait.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    hash_block_tokens,
    maybe_convert_block_hash,
)

from prefixd.client import (
    CallTimeout,
    ClientClosed,
    ClientError,
    NamespaceSpec,
    NotFoundError,
    ServerUnavailable,
    UnsupportedError,
)
from prefixd.integrations.engine.geometry import Geometry
from prefixd.integrations.engine.link import Link
from prefixd.integrations.vllm.log import log
from prefixd.v1.cache_pb2 import TIER_CPU, TIER_DISK, BlockChange

_MEDIA: dict[int, str] = {TIER_CPU: MEDIUM_CPU, TIER_DISK: MEDIUM_STORAGE}
_LOCALITY = "LOCAL"
_AWAY_S = 0.2  # between looks for a daemon that is away
_REST_S = 10.0  # at the most, after a daemon that refuses, or told what is not understood
_ANSWER_S = 1.0
_PAUSE_S = 0.001  # between slices, for the thread that schedules
_SLICE_TOKENS = 1024  # hashed in a slice, in 0.5 ms
_SLICE_HASHES = 1024  # in an event
_WAITING = 512  # events that vLLM has not taken
_TAKEN = 64  # events with a step
_SPECS = 4096  # the last that came
_REOPENED = 256  # namespaces, the last that came, with a daemon that was started again
_MOST_BLOCKS = 1 << 18  # of the daemon, of which vLLM's hashes are kept: 400 bytes each where they have four of vLLM's


class _Namespace:
    """What is known of one of the daemon's namespaces."""

    def __init__(self, keys: _Keys) -> None:
        self.keys = keys
        self.hashes: dict[int, tuple[bytes, ...]] = {}  # of vLLM's blocks, by the number of the daemon's
        self.tiers: dict[int, int] = {}  # that have it, a bit each


class _Keys:
    """What besides tokens is in the hashes of a namespace's blocks."""

    def __init__(self, request: Any, hash_tokens: int) -> None:
        lora = None if request is None else request.lora_request
        salt = None if request is None else request.cache_salt
        alike: Any = SimpleNamespace(mm_features=[], lora_request=lora, cache_salt=salt, prompt_embeds=None)
        self.first, _ = generate_block_hash_extra_keys(alike, 0, hash_tokens, 0)
        self.later, _ = generate_block_hash_extra_keys(alike, hash_tokens, 2 * hash_tokens, 0)
        self.lora_id = None if lora is None else lora.adapter_id
        self.lora_name = None if lora is None else lora.lora_name
        later = () if lora is None else (lora.lora_name,)
        self.told_first = (*later, salt) if salt else later or None
        self.told_later = later or None
        self.checked = False


class BlockEvents:
    """Events of the blocks that prefixd has of this engine.

    Args:
        vllm_config: vLLM's configuration, whose KV events are enabled.
        link: the line to the daemon.
        geometry: how the daemon's blocks are made of vLLM's.
        hash_tokens: tokens for which vLLM has a hash.
    """

    def __init__(self, vllm_config: Any, link: Link, geometry: Geometry, hash_tokens: int) -> None:
        group = geometry.groups[geometry.body[0]]
        self._link = link
        self._group = group.index
        self._width = group.block_tokens  # of a block that is told of
        self._block_tokens = geometry.block_tokens
        self._hash_tokens = hash_tokens
        self._hash = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        self._vocabulary = vllm_config.model_config.get_vocab_size()
        self._slice_blocks = max(1, _SLICE_HASHES * self._width // self._block_tokens)
        self._keys: dict[NamespaceSpec, _Keys] = {}  # of the namespaces that are told of, the last used last
        self._moving = threading.Lock()  # one of them to the end
        self._namespaces: dict[bytes, _Namespace] = {}  # by id, those of which blocks are told
        self._strange: dict[bytes, None] = {}  # ids of others
        self._telling = asyncio.Lock()  # what is taken back comes before what is told next
        self._counts: dict[int, Counter[bytes]] = {tier: Counter() for tier in _MEDIA}
        self._events: deque[Any] = deque()
        self._known = 0  # blocks of which vLLM's hashes are kept
        self._wrong = False  # vLLM's hashes are others
        self._full = False
        self._following = link.spawn(self._follow)
        self._following.add_done_callback(link.report)

    # -- in the scheduler's thread --------------------------------------------------------------------------------

    def begin(self, spec: NamespaceSpec) -> None:
        """Tells of what there is of requests without adapter and salt, before the first of them comes."""
        self._keys[spec] = _Keys(None, self._hash_tokens)

        async def register() -> None:
            await self._link.cache(spec)

        self._link.start(register).add_done_callback(self._link.report)

    def arrived(self, spec: NamespaceSpec, request: Any) -> None:
        """A request of the namespace has come: what is in its hashes, and whether they are as computed here."""
        with self._moving:
            keys = self._keys.pop(spec, None) or _Keys(request, self._hash_tokens)
            if len(self._keys) >= _SPECS:
                self._keys.pop(next(iter(self._keys)))
            self._keys[spec] = keys
        if keys.checked or request.mm_features or not request.block_hashes:
            return
        keys.checked = True
        tokens = request.all_token_ids[: self._hash_tokens]
        if hash_block_tokens(self._hash, None, tokens, keys.first) != request.block_hashes[0]:
            log.warning(
                "prefixd: this vLLM has other hashes of blocks than computed from their tokens; its KV events do not "
                "tell of what prefixd has. Let routers subscribe to the daemon's (events.endpoint)."
            )
            self._wrong = True
            self._take_back()

    def take(self) -> list[Any]:
        """The next events."""
        return [self._events.popleft() for _ in range(min(_TAKEN, len(self._events)))]

    @property
    def waiting(self) -> bool:
        """Whether there are any."""
        return bool(self._events)

    def reset(self) -> None:
        """The engine has namespaces of other names from now on, and those of its old ones are not told of any more."""
        self._keys.clear()
        self._take_back()

    def close(self) -> None:
        """Tells nothing more."""
        self._following.cancel()

    def _take_back(self) -> None:
        self._link.spawn(self._forget).add_done_callback(self._link.report)

    # -- in the link's thread -------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        now_s = asyncio.get_running_loop().time
        pause_s, said = _AWAY_S, set[type[Exception]]()
        while not self._wrong:
            # Engines are made before the number with which vLLM's hashes of first blocks begin.
            if self._link.up and hasattr(kv_cache_utils, "NONE_HASH"):
                since_s, failure = now_s(), None
                try:
                    await self._watch()
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
                await self._forget()
                if failure is not None:
                    self._say(failure, again=type(failure) in said)
                    said.add(type(failure))
                    await asyncio.sleep(pause_s)
                    pause_s = min(_REST_S, 2 * pause_s)
            await asyncio.sleep(_AWAY_S)

    def _say(self, failure: Exception, again: bool) -> None:
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

    async def _watch(self) -> None:
        """Tells what the daemon tells. Namespaces are opened again when it has not refused to."""

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
        async with self._telling:
            await self._room()
            if self._wrong or not (change.stored or change.namespace_id in self._namespaces):
                return
            namespace = await self._namespace(change.namespace_id)
            if namespace is None:
                return
            if change.cleared:
                await self._remove(namespace, list(namespace.tiers), _MEDIA)
            if change.tier in _MEDIA:
                await self._remove(namespace, change.removed, (change.tier,))
                await self._store_all(namespace, change)
            if not namespace.tiers:
                del self._namespaces[change.namespace_id]

    async def _room(self) -> None:
        while len(self._events) >= _WAITING:
            await asyncio.sleep(_PAUSE_S)

    async def _namespace(self, identity: bytes) -> _Namespace | None:
        if identity in self._namespaces:
            return self._namespaces[identity]
        end_s = asyncio.get_running_loop().time() + (0.0 if identity in self._strange else _ANSWER_S)
        while (spec := self._link.spec_of(identity)) is None and asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(_PAUSE_S)  # the daemon tells of it before the answer to its registration is here
        with self._moving:
            keys = None if spec is None else self._keys.get(spec)
        self._strange.pop(identity, None)
        if keys is None:
            if len(self._strange) >= _SPECS:
                self._strange.pop(next(iter(self._strange)))
            self._strange[identity] = None
            return None
        self._namespaces[identity] = _Namespace(keys)
        return self._namespaces[identity]

    async def _store_all(self, namespace: _Namespace, change: BlockChange) -> None:
        tokens = np.frombuffer(change.token_ids, "<u4").reshape(len(change.stored), -1) if change.stored else None
        parent = change.parent if change.HasField("parent") else None
        each = max(1, _SLICE_TOKENS // self._block_tokens)
        for start in range(0, len(change.stored), each):
            numbers = change.stored[start : start + each]
            assert tokens is not None
            self._store(namespace, numbers, parent, tokens[start : start + each], change.tier)
            parent = numbers[-1]
            await asyncio.sleep(_PAUSE_S)

    def _store(self, namespace: _Namespace, numbers: Sequence[int], parent: int | None, tokens: Any, tier: int) -> None:
        """Tells of consecutive blocks, as far as vLLM's hashes are known of what they continue."""
        keys, counts = namespace.keys, self._counts[tier]
        told: list[bytes] = []
        told_tokens: list[int] = []
        before: bytes | None = None  # the hash of what `told` continues
        for number, own in zip(numbers, tokens, strict=True):
            hashes = self._hashes(namespace, number, parent, own)
            if hashes is None:
                break
            namespace.tiers[number] = namespace.tiers.get(number, 0) | 1 << tier
            above = None if parent is None else namespace.hashes[parent][-1]
            for place, key in enumerate(hashes):
                counts[key] += 1
                if counts[key] > 1:
                    self._tell(keys, told, before, told_tokens, tier)
                    told, told_tokens = [], []
                else:
                    before = before if told else above
                    told.append(key)
                    told_tokens += own[self._width * place : self._width * (place + 1)].tolist()
                above = key
            parent = number
        self._tell(keys, told, before, told_tokens, tier)

    def _tell(self, keys: _Keys, hashes: list[bytes], before: bytes | None, tokens: list[int], tier: int) -> None:
        if not hashes:
            return
        first = keys.told_first if before is None else keys.told_later
        self._events.append(
            BlockStored(
                block_hashes=[maybe_convert_block_hash(key) for key in hashes],
                parent_block_hash=None if before is None else maybe_convert_block_hash(before),
                token_ids=tokens,
                block_size=self._width,
                lora_id=keys.lora_id,
                medium=_MEDIA[tier],
                lora_name=keys.lora_name,
                extra_keys=[first, *[keys.told_later] * (len(hashes) - 1)],
                group_idx=self._group,
                locality=_LOCALITY,
            )
        )

    def _hashes(self, namespace: _Namespace, number: int, parent: int | None, tokens: Any) -> tuple[bytes, ...] | None:
        """vLLM's of one of the daemon's blocks; None where they are not known: behind a medium, whose ids are drawn."""
        if parent is not None and parent not in namespace.hashes:
            return None
        known = namespace.hashes.get(number)
        if known is not None:
            return known
        if int(tokens.max()) >= self._vocabulary:
            return None
        if self._known >= _MOST_BLOCKS:
            if not self._full:
                self._full = True
                log.warning(
                    "prefixd has more than %d blocks of this engine; its KV events do not tell of the others.",
                    _MOST_BLOCKS,
                )
            return None
        before = None if parent is None else namespace.hashes[parent][-1]
        extra = namespace.keys.first if before is None else namespace.keys.later
        ids, found = tokens.tolist(), []
        for end in range(self._hash_tokens, len(ids) + 1, self._hash_tokens):
            before = hash_block_tokens(self._hash, before, ids[end - self._hash_tokens : end], extra)
            extra = namespace.keys.later
            if end % self._width == 0:
                found.append(before)
        self._known += 1
        namespace.hashes[number] = tuple(found)
        return namespace.hashes[number]

    async def _remove(self, namespace: _Namespace, numbers: Sequence[int], tiers: Iterable[int]) -> None:
        for start in range(0, len(numbers), self._slice_blocks):
            await self._room()
            for tier in tiers:
                self._remove_slice(namespace, numbers[start : start + self._slice_blocks], tier)
            await asyncio.sleep(_PAUSE_S)

    def _remove_slice(self, namespace: _Namespace, numbers: Sequence[int], tier: int) -> None:
        counts, gone = self._counts[tier], []
        for number in numbers:
            tiers = namespace.tiers.get(number, 0)
            if not tiers & 1 << tier:
                continue  # was not told of
            for key in namespace.hashes[number]:
                counts[key] -= 1
                if not counts[key]:
                    del counts[key]
                    gone.append(maybe_convert_block_hash(key))
            namespace.tiers[number] = tiers & ~(1 << tier)
            if not namespace.tiers[number]:
                del namespace.tiers[number], namespace.hashes[number]
                self._known -= 1
        if gone:
            self._events.append(BlockRemoved(gone, _MEDIA[tier], group_idx=self._group, locality=_LOCALITY))

    async def _forget(self) -> None:
        """Tells that all is gone that was told of."""
        async with self._telling:
            while self._namespaces:
                _, namespace = self._namespaces.popitem()
                await self._remove(namespace, list(namespace.tiers), _MEDIA)
            self._strange.clear()
            for counts in self._counts.values():
                counts.clear()  # where a change was not understood
