"""A cache whose blocks are keys and values, as an engine's are, so that codecs make fewer bytes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from prefixd.cache import BlockChain, Namespace, NamespaceSpec, PartSpec, Trie
from prefixd.cache.coding.namespace_codings import TierCodec
from prefixd.cache.index.trie import CPU, DISK, NO_SLOT
from prefixd_swap.codecs.part_shape import PartShape
from tests.rig import BLOCK_TOKENS, Rig

SHAPE = PartShape("bfloat16", 4, BLOCK_TOKENS, 4, 128, ("layer", "kv", "token", "head", "channel"))


class CodedRig(Rig):
    """A slot has the bytes of one part of `SHAPE`.

    Bytes of a lossy copy are right if they are as close to the exact ones as the cache says. `mixed`: a quarter of the
    blocks are noise, of which no codec makes fewer bytes.
    """

    def __init__(self, path: Path, *, shaped: bool = True, mixed: bool = True, **options: Any) -> None:
        self.shape = SHAPE if shaped else None
        self.mixed = mixed
        self.served_altered = 0
        super().__init__(path, part_bytes=SHAPE.nbytes, **options)

    def register(
        self, name: str = "model", parts: int = 1, nbytes: int | None = None, salt: bytes = b"", codec: str = ""
    ) -> Namespace:
        size = SHAPE.nbytes if nbytes is None else nbytes
        shape = self.shape if size == SHAPE.nbytes else None
        specs = tuple(PartSpec("kv", rank, size, shape=shape) for rank in range(parts))
        return self.cache.register(NamespaceSpec(name, BLOCK_TOKENS, specs, salt, codec=codec))

    def content(self, namespace: Namespace, chain: BlockChain, block: int, part: int = 0) -> bytes:
        seed = xxhash.xxh3_64_intdigest(namespace.id + chain.blocks(block + 1), part)
        rng = np.random.default_rng(seed)
        if self.mixed and seed % 4 == 0:
            return rng.bytes(namespace.spec.parts[part].nbytes)
        count = namespace.spec.parts[part].nbytes // 2
        return (rng.standard_normal(count, np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()

    def check_bytes(self, trie: Trie, row: int, part: int, found: bytes, exact: bytes) -> None:
        if found != exact:
            assert trie.decoded[row] & trie.part_mask[part]
            self.served_altered += 1
            largest, rms = trie.errors[row].tolist()
            assert 0 < rms <= largest and difference(found, exact) <= largest * 1.2

    async def restart_with(self, codec: TierCodec) -> None:
        """As `restart`, with another codec of the disk tier."""
        self._options = replace(self._options, disk_codec=codec)
        await self.restart()

    async def to_disk_alone(self, prompt: Sequence[int], namespace: Namespace | None = None) -> list[int]:
        """Stores a prompt, and takes it out of memory once it is on disk; returns its rows."""
        await self.put(prompt, namespace=namespace)
        await self.cache.write_back.flush()
        return self.forget_memory(prompt, namespace)

    def forget_memory(self, prompt: Sequence[int], namespace: Namespace | None = None) -> list[int]:
        home = namespace or self.namespace
        rows = self.rows(prompt, home)
        self.cache.placement.drop(self.cache.trie(home), rows[::-1], self.cache.tiers.shared)
        assert (self.cache.trie(home).slots[rows, CPU] == NO_SLOT).all()
        return rows

    def stored(self, rows: Sequence[int], namespace: Namespace | None = None) -> int:
        """Stored bytes of blocks on disk."""
        trie, chosen = self.cache.trie(namespace or self.namespace), np.array(rows)
        assert (trie.slots[chosen, DISK] != NO_SLOT).all()
        return int(trie.stored_bytes(chosen).sum())


def difference(one: bytes, other: bytes) -> float:
    """The largest difference, relative to the RMS of all exact numbers: nearly that of each layer."""
    found, exact = numbers(one), numbers(other)
    return float(np.abs(found - exact).max() / np.sqrt((exact**2).mean()))


def numbers(data: bytes) -> npt.NDArray[np.float32]:
    """bfloat16 numbers."""
    return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
