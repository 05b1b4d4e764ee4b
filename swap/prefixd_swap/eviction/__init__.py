"""Which blocks go first when a tier is full.

A policy (`policy`) is told of every block that enters a tier, is asked for again, or leaves, and gives every block a
score; `choose_victims` takes the lowest first, leaves before their parents.

| policy | what goes first | state |
|---|---|---|
| `lru` | what was asked for longest ago | none of its own |
| `fifo` | what came first | none of its own |
| `random` | any block | none |
| `lfu` | what was asked for least often, with ageing | 8 bytes a block and tier |
| `s3-fifo` | what came first and was not asked for again | 8 bytes a block and tier, `UseHistory` |
| `weighing` | what saves least for what it holds, learned | 8 KiB, `UseHistory` |
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
