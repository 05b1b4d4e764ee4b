"""Who uses the daemon under attack: tenants, users of this host, and what each tenant is guaranteed or allowed."""

from __future__ import annotations

# What is imported when it is first needed: another user may not be able to read this Python's library.
import concurrent.futures.thread  # noqa: F401
import encodings.idna  # noqa: F401
import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy.random  # noqa: F401

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Person:
    """The only member of the tenant `name`: over TCP by its tokens, at the unix socket as the user `uid`."""

    name: str
    uid: int


ALICE = Person("alice", 64_001)
BOB = Person("bob", 64_002)
CAROL = Person("carol", 64_003)
MALLORY = Person("mallory", 64_666)

QUOTAS: Mapping[str, Mapping[str, object]] = {
    "alice": {"gpu_guaranteed": 12 * MIB, "cpu_guaranteed": 16 * MIB, "disk_guaranteed": 64 * MIB},
    "bob": {"gpu_guaranteed": 12 * MIB, "cpu_guaranteed": 16 * MIB, "disk_guaranteed": 64 * MIB},
    "carol": {"cpu_guaranteed": 8 * MIB, "disk_guaranteed": 16 * MIB},
    "mallory": {
        "gpu_most": 24 * MIB,
        "cpu_most": 24 * MIB,
        "disk_most": 96 * MIB,
        "sessions": 16,
        "grants": 64,
        "namespaces": 32,
        "waiting_requests": 8,
        "requests_per_s": 20,
        "calls": 16,
    },
}
"""Of bystanders what they need, and more; of Carol, who only comes by, twice what she has in the cache; and what an
operator allows to a tenant that nobody knows. None has a limit of its own for what it retains: they share one."""


def users() -> dict[str, object]:
    """Settings by which these are users of this host, too, where this process can become them."""
    if os.geteuid():
        return {}
    uids: dict[str, object] = {f"tenants.{each.name}.uids": each.uid for each in (ALICE, BOB, CAROL, MALLORY)}
    return {**uids, "tenants.bob.map_memory": True}


def become(uid: int) -> None:
    """From here on this process is another user's, if it may choose; else it stays who it is."""
    if os.geteuid() == 0 and uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
