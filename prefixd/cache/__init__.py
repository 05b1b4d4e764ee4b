"""The cache: trie, namespaces, leases, and the mover of blocks in the tiers."""

from __future__ import annotations

from prefixd.cache.audit.integrity import check_integrity
from prefixd.cache.cache import TieredCache
from prefixd.cache.index.keys.block_keys import BlockChain
from prefixd.cache.index.trie import NONE, Trie
from prefixd.cache.namespaces import Namespace, NamespaceSpec, PartSpec
from prefixd.cache.sessions.claims import ComputeClaim
from prefixd.cache.sessions.sessions import Lease, Process, Reservation, Session
from prefixd.cache.tiers import Tiers
from prefixd.cache.troubles import Troubles

__all__ = [
    "NONE",
    "BlockChain",
    "ComputeClaim",
    "Lease",
    "Namespace",
    "NamespaceSpec",
    "PartSpec",
    "Process",
    "Reservation",
    "Session",
    "TieredCache",
    "Tiers",
    "Trie",
    "Troubles",
    "check_integrity",
]
