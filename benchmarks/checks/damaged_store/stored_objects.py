"""Which objects of a store belong to which block, for somebody who knows the hosts' secret."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.common.daemons import as_the_daemon_has_it
from benchmarks.sharing.valkey_server import ValkeyObjects
from prefixd.base.codec_names import CODEC_NAMES
from prefixd.cache.remote.digests import root_digest
from prefixd.client import NamespaceSpec
from prefixd_swap.codecs.coding import Coding
from prefixd_swap.codecs.registry import find_codec
from prefixd_swap.stores import NAME_BYTES, object_name
from prefixd_swap.stores.sealed import Seal
from prefixd_swap.tiers import coding_label

BlockId = tuple[bytes, bytes]
"""A namespace's id, and the token ids up to a block's end."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as it was sealed."""

    name: bytes
    block: BlockId
    part: int
    data: bytes


def block_id(namespace_id: bytes, tokens: npt.NDArray[np.uint32], end: int) -> BlockId:
    """The block that ends with a prompt's first `end` tokens."""
    return namespace_id, tokens[:end].tobytes()


def read_objects(
    objects: ValkeyObjects, prefixes: Mapping[BlockId, NamespaceSpec], seal: Seal
) -> dict[BlockId, list[StoredObject]]:
    """The objects of these blocks, part after part; of no other. A block has those of one codec.

    Args:
        objects: of the store.
        prefixes: the blocks, each with its namespace.
        seal: the hosts'.
    """
    named: dict[bytes, tuple[BlockId, int]] = {}
    codings = [None if name == "exact" else Coding(find_codec(name)) for name in CODEC_NAMES]
    for block, spec in prefixes.items():
        keys, width = seal.keys(spec.salt), 4 * spec.block_tokens
        blocks = (block[1][at : at + width] for at in range(0, len(block[1]), width))
        digest = keys.chain(root_digest(keys, as_the_daemon_has_it(spec)), blocks)[-1]
        labels = [coding_label(coding) for coding in codings]
        named |= {
            object_name(digest, part, label): (block, part) for part in range(len(spec.parts)) for label in labels
        }
    found: dict[BlockId, list[StoredObject]] = {}
    names = objects.names()
    for name, data in zip(names, objects.read(names), strict=True):
        if (known := named.get(name[-NAME_BYTES:])) is not None:
            found.setdefault(known[0], []).append(StoredObject(name, *known, data))
    for parts in found.values():
        parts.sort(key=lambda each: each.part)
    return found
