"""vLLM's hashes of the daemon's blocks, and the KV events with which vLLM tells routers of these blocks.

Routers know a block by vLLM's hash, so the hashes of a prefix are computed here from its tokens, as vLLM would. Blocks
of the daemon that begin alike share vLLM's blocks: a shared one is stored with the first and removed with the last.

    the daemon's blocks, 32 tokens     |    A    |    B    |
    vLLM's blocks, 16 tokens           | a1 | a2 | b1 | b2 |   hashes: vLLM's chain
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens, maybe_convert_block_hash

from prefixd.integrations.engine.geometry import Geometry
from prefixd.integrations.vllm.log import log
from prefixd.v1.cache_pb2 import TIER_CPU, TIER_DISK

MEDIA: dict[int, str] = {TIER_CPU: MEDIUM_CPU, TIER_DISK: MEDIUM_STORAGE}
"""vLLM's names of the tiers that events tell of."""
_LOCALITY = "LOCAL"
_TAKEN = 64  # events with a step
_MOST_BLOCKS = 1 << 18  # of the daemon, with vLLM's hashes: 400 bytes each where a block has four of vLLM's


class ExtraKeys:
    """The parts of a namespace's block hashes that are not tokens: its adapter and its salt."""

    def __init__(self, request: Any, hash_tokens: int) -> None:
        lora = None if request is None else request.lora_request
        salt = None if request is None else request.cache_salt
        alike: Any = SimpleNamespace(mm_features=[], lora_request=lora, cache_salt=salt, prompt_embeds=None)
        self.first, _ = generate_block_hash_extra_keys(alike, 0, hash_tokens, 0)
        self.later, _ = generate_block_hash_extra_keys(alike, hash_tokens, 2 * hash_tokens, 0)
        self.lora_id = None if lora is None else lora.adapter_id
        self.lora_name = None if lora is None else lora.lora_name
        later = () if lora is None else (lora.lora_name,)
        self.event_first = (*later, salt) if salt else later or None
        self.event_later = later or None
        self.checked = False


class NamespaceBlocks:
    """The blocks of one of the daemon's namespaces that events have told of, by the daemon's numbers."""

    def __init__(self, keys: ExtraKeys) -> None:
        self.keys = keys
        self.hashes: dict[int, tuple[bytes, ...]] = {}  # of vLLM's blocks in each of the daemon's
        self.tiers: dict[int, int] = {}  # a bit for each tier that has the block


class HashedBlocks:
    """Queues an event for each of vLLM's blocks that comes to a tier or leaves it.

    Args:
        vllm_config: vLLM's configuration.
        geometry: how the daemon's blocks are made of vLLM's.
        hash_tokens: tokens for which vLLM has a hash.
    """

    def __init__(self, vllm_config: Any, geometry: Geometry, hash_tokens: int) -> None:
        group = geometry.groups[geometry.body[0]]
        self._group = group.index
        self.event_tokens = group.block_tokens  # tokens of a block in an event
        self._hash_tokens = hash_tokens
        self._hash = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        self._vocabulary = vllm_config.model_config.get_vocab_size()
        self._counts: dict[int, Counter[bytes]] = {tier: Counter() for tier in MEDIA}
        self._events: deque[Any] = deque()
        self._hashed_blocks = 0
        self._full = False

    @property
    def waiting(self) -> int:
        """Events that vLLM has not taken."""
        return len(self._events)

    def take_events(self) -> list[Any]:
        """The next events, at most as many as one step of vLLM carries."""
        return [self._events.popleft() for _ in range(min(_TAKEN, len(self._events)))]

    def hashes_as_vllm(self, request: Any, keys: ExtraKeys) -> bool:
        """Whether vLLM's first hash of a request is the one that is computed here from its tokens."""
        tokens = request.all_token_ids[: self._hash_tokens]
        return bool(hash_block_tokens(self._hash, None, tokens, keys.first) == request.block_hashes[0])

    def store(
        self, namespace: NamespaceBlocks, numbers: Sequence[int], parent: int | None, tokens: Any, tier: int
    ) -> None:
        """Queues events of consecutive blocks that came to a tier; ends at the first one without known hashes.

        Args:
            numbers: the daemon's numbers of the blocks.
            parent: the daemon's number of the block before them; None at the start of a prompt.
            tokens: [len(numbers), tokens of a block], their token ids.
        """
        keys, counts = namespace.keys, self._counts[tier]
        stored: list[bytes] = []
        stored_tokens: list[int] = []
        before: bytes | None = None  # the hash of the block before `stored`
        for number, own in zip(numbers, tokens, strict=True):
            hashes = self._block_hashes(namespace, number, parent, own)
            if hashes is None:
                break
            namespace.tiers[number] = namespace.tiers.get(number, 0) | 1 << tier
            above = None if parent is None else namespace.hashes[parent][-1]
            for place, key in enumerate(hashes):
                counts[key] += 1
                if counts[key] > 1:
                    self._queue_stored(keys, stored, before, stored_tokens, tier)
                    stored, stored_tokens = [], []
                else:
                    before = before if stored else above
                    stored.append(key)
                    stored_tokens += own[self.event_tokens * place : self.event_tokens * (place + 1)].tolist()
                above = key
            parent = number
        self._queue_stored(keys, stored, before, stored_tokens, tier)

    def remove(self, namespace: NamespaceBlocks, numbers: Sequence[int], tier: int) -> None:
        """Queues one event of the blocks that left a tier; leaves out blocks that no event has told of."""
        counts, gone = self._counts[tier], []
        for number in numbers:
            tiers = namespace.tiers.get(number, 0)
            if not tiers & 1 << tier:
                continue
            for key in namespace.hashes[number]:
                counts[key] -= 1
                if not counts[key]:
                    del counts[key]
                    gone.append(maybe_convert_block_hash(key))
            namespace.tiers[number] = tiers & ~(1 << tier)
            if not namespace.tiers[number]:
                del namespace.tiers[number], namespace.hashes[number]
                self._hashed_blocks -= 1
        if gone:
            self._events.append(BlockRemoved(gone, MEDIA[tier], group_idx=self._group, locality=_LOCALITY))

    def reset_counts(self) -> None:
        """Drops the counts that a change which was not understood has left, once every block is removed."""
        for counts in self._counts.values():
            counts.clear()

    def _queue_stored(
        self, keys: ExtraKeys, hashes: list[bytes], before: bytes | None, tokens: list[int], tier: int
    ) -> None:
        if not hashes:
            return
        first = keys.event_first if before is None else keys.event_later
        self._events.append(
            BlockStored(
                block_hashes=[maybe_convert_block_hash(key) for key in hashes],
                parent_block_hash=None if before is None else maybe_convert_block_hash(before),
                token_ids=tokens,
                block_size=self.event_tokens,
                lora_id=keys.lora_id,
                medium=MEDIA[tier],
                lora_name=keys.lora_name,
                extra_keys=[first, *[keys.event_later] * (len(hashes) - 1)],
                group_idx=self._group,
                locality=_LOCALITY,
            )
        )

    def _block_hashes(
        self, namespace: NamespaceBlocks, number: int, parent: int | None, tokens: Any
    ) -> tuple[bytes, ...] | None:
        """vLLM's hashes in one of the daemon's blocks; None where they cannot be computed: behind a medium (its token
        ids are drawn from beyond the vocabulary), behind such a block, and beyond `_MOST_BLOCKS`."""
        if parent is not None and parent not in namespace.hashes:
            return None
        known = namespace.hashes.get(number)
        if known is not None:
            return known
        if int(tokens.max()) >= self._vocabulary:
            return None
        if self._hashed_blocks >= _MOST_BLOCKS:
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
            if end % self.event_tokens == 0:
                found.append(before)
        self._hashed_blocks += 1
        namespace.hashes[number] = tuple(found)
        return namespace.hashes[number]
