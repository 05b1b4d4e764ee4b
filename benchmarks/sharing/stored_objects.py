"""Which objects of a store belong to which block, for somebody who can read the store but has no secret."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.sharing.valkey_server import ValkeyObjects

HEAD = struct.Struct("<8sHHHxxIIQQ8s8s")
"""Magic, version, flags, part, tokens, depth, nbytes, checksum, namespace, geometry: see `stores.sealed`."""
VERSION_AT = 8
NONCE_BYTES, TAG_BYTES = 12, 16
TAG_AT = HEAD.size + NONCE_BYTES
TOKENS_AT = TAG_AT + TAG_BYTES

BlockId = tuple[bytes, bytes]
"""A namespace's id, and the token ids up to a block's end."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as it was sealed."""

    name: bytes
    block: BlockId
    part: int
    data: bytes

    @property
    def payload_at(self) -> int:
        """Where the payload begins."""
        return TOKENS_AT + 4 * int(HEAD.unpack_from(self.data)[4])


def block_id(namespace_id: bytes, tokens: npt.NDArray[np.uint32], end: int) -> BlockId:
    """The block that ends with a prompt's first `end` tokens."""
    return namespace_id, tokens[:end].tobytes()


def read_objects(objects: ValkeyObjects, prefixes: Iterable[BlockId]) -> dict[BlockId, list[StoredObject]]:
    """The objects of these blocks, part after part.

    Raises:
        KeyError: an object is none of theirs.
    """
    # A head names a block by its own tokens and its depth; they are random, so no two blocks have both in common.
    known: dict[tuple[bytes, bytes, int], BlockId] = {}
    found: dict[BlockId, list[StoredObject]] = {}
    names = objects.names()
    everything = list(zip(names, objects.read(names), strict=True))
    heads = [HEAD.unpack_from(data) for _, data in everything]
    widths = {head[8]: 4 * head[4] for head in heads}  # bytes of a block's tokens, of each namespace
    for namespace_id, tokens in prefixes:
        width = widths[namespace_id]
        known[namespace_id, tokens[-width:], len(tokens) // width - 1] = namespace_id, tokens
    for name, data in everything:
        _, _, _, part, count, depth, _, _, namespace_id, _ = HEAD.unpack_from(data)
        block = known[namespace_id, data[TOKENS_AT : TOKENS_AT + 4 * count], depth]
        found.setdefault(block, []).append(StoredObject(name, block, part, data))
    for parts in found.values():
        parts.sort(key=lambda each: each.part)
    return found
