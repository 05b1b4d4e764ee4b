"""The users of the daemon under attack: tenants, users of this host, and each tenant's quota."""

from __future__ import annotations

# Imported now, not at first use: by then this process may be a user that cannot read Python's library.
import concurrent.futures.thread  # noqa: F401
import encodings.idna  # noqa: F401
import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy.random  # noqa: F401

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Person:
    """The only member of the tenant `name`: calls over TCP with its tokens, at the unix socket as the user `uid`."""

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
"""Bystanders have more than they need. Carol, who makes few calls, has twice the bytes of her blocks. Mallory has the
limits that an operator gives an unknown tenant. No tenant has a limit of its own for retained bytes: they share one."""


def users() -> dict[str, object]:
    """Returns settings that give each tenant its user of this host; none if this process cannot become another user."""
    if os.geteuid():
        return {}
    uids: dict[str, object] = {f"tenants.{each.name}.uids": each.uid for each in (ALICE, BOB, CAROL, MALLORY)}
    return {**uids, "tenants.bob.map_memory": True}


def become(uid: int) -> None:
    """Makes this process another user's, if it is root's; otherwise changes nothing."""
    if os.geteuid() == 0 and uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
