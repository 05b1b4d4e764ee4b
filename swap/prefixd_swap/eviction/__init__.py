"""Eviction policies: the order in which blocks leave a full tier.

A policy (`policy`) is called for every block that enters a tier, is used again, or leaves, and gives every block a
score; `choose_victims` evicts the lowest score first, leaves before their parents.

| policy | evicted first | state |
|---|---|---|
| `lru` | the least recently used block | none of its own |
| `fifo` | the block that entered first | none of its own |
| `random` | any block | none |
| `lfu` | the least frequently used block, with ageing | 8 bytes a block and tier |
| `s3-fifo` | the block that entered first and was not used again | 8 bytes a block and tier, `UseHistory` |
| `weighing` | the block that saves the least time for its bytes, learned | 8 KiB, `UseHistory` |
"""

from prefixd_swap.eviction.choice import choose_victims
from prefixd_swap.eviction.lfu import Lfu
from prefixd_swap.eviction.policies import POLICY_NAMES, create_eviction_policy
from prefixd_swap.eviction.policy import BlockTable, ComputeTime, EvictionPolicy, Rows, Scores
from prefixd_swap.eviction.s3_fifo import S3Fifo
from prefixd_swap.eviction.simple import Fifo, Lru, Random
from prefixd_swap.eviction.use_history import UseHistory
from prefixd_swap.eviction.weighing import Weighing

__all__ = [
    "POLICY_NAMES",
    "BlockTable",
    "ComputeTime",
    "EvictionPolicy",
    "Fifo",
    "Lfu",
    "Lru",
    "Random",
    "Rows",
    "S3Fifo",
    "Scores",
    "UseHistory",
    "Weighing",
    "choose_victims",
    "create_eviction_policy",
]
