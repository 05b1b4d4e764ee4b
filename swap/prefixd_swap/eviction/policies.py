"""The eviction policies by name."""

from __future__ import annotations

from collections.abc import Callable

from prefixd_swap.errors import UnknownPolicyError
from prefixd_swap.eviction.lfu import Lfu
from prefixd_swap.eviction.policy import EvictionPolicy
from prefixd_swap.eviction.s3_fifo import S3Fifo
from prefixd_swap.eviction.simple import Fifo, Lru, Random
from prefixd_swap.eviction.weighing import Weighing

_MAKERS: dict[str, Callable[[int], EvictionPolicy]] = {
    Lru.name: lambda seed: Lru(),
    Fifo.name: lambda seed: Fifo(),
    Random.name: Random,
    Lfu.name: lambda seed: Lfu(),
    S3Fifo.name: lambda seed: S3Fifo(),
    Weighing.name: lambda seed: Weighing(),
}

POLICY_NAMES = tuple(_MAKERS)


def create_eviction_policy(name: str, seed: int) -> EvictionPolicy:
    """The policy of that name; `seed` is for the policies that draw random numbers.

    Raises:
        UnknownPolicyError: no policy has this name; the message lists the names.
    """
    if name not in _MAKERS:
        raise UnknownPolicyError(f"no eviction policy is called {name!r}; choose one of {', '.join(_MAKERS)}")
    return _MAKERS[name](seed)
