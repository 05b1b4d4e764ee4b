"""A million salts: memory that stays bounded, nobody refused, and hits of the salts in use.

Sends --salts salts through one session of a cache, in this process: each is registered and looked up, and one in
--store-every leaves a block. Meanwhile --in-use salts of the same tenant and as many of another one are asked for in
turn, and have to be found. Then --through-daemon salts go through the SDK and a daemon with a disk tier, which is
started again at the end.

It fails when a registration is refused, a salt in use is not found, namespaces take more than their bound, or the
process grows between a fifth of the salts and the last by more than 16 MiB.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

from benchmarks.common import harness
from benchmarks.common.options import option
from benchmarks.common.process_footprint import status_bytes
from prefixd.base.errors import ExhaustedError
from prefixd.base.tenancy.tenants import Tenants
from prefixd.cache import NamespaceSpec, PartSpec, Session, TieredCache, Tiers
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client
from prefixd.client import NamespaceSpec as ClientSpec
from prefixd.client import PartSpec as ClientPart
from prefixd.serving.dispatch.wiring import make_cache
from prefixd.settings import Settings
from prefixd_swap import CpuArena, create_copy_engine

_BLOCK = 4096
_TOKENS = np.arange(4, dtype="<u4").tobytes()
_ROOM = "16MiB"
_CPU = "64MiB"
_ASKED_EVERY = 16  # salts; then one of each tenant's salts in use is asked for
_GROWTH = 16 << 20


class Salts:
    """One cache, two tenants: `default`, through whose session all salts go, and `other`, which keeps to a few."""

    def __init__(self, store_every: int, in_use: int) -> None:
        settings = Settings.load(
            None,
            {"cpu.bytes": _CPU, "disk.bytes": 0, "server.namespace_bytes": _ROOM, "tenants.other.sessions": 8},
            {},
        )
        self._engine = create_copy_engine("cpu", 1)
        arena = CpuArena(settings.cpu.bytes, populate=True)
        arena.wait_populated()
        tenants = Tenants(settings.quotas)
        self.cache: TieredCache = make_cache(settings, Tiers.local(arena), self._engine, time.monotonic, tenants)
        self._sessions = {
            name: self.cache.leases.open("salts", 1, 0.0, tenants.known(name), reopens=True)
            for name in ("default", "other")
        }
        self._store_every = store_every
        self._in_use = in_use
        self.figures = {"registered": 0, "refused": 0, "stored": 0, "asked_in_use": 0, "found_in_use": 0}
        self.most_namespace_bytes = 0

    async def run(self, salts: int) -> list[int]:
        """All salts; what the process had resident after each fifth of them."""
        with harness.progress("salts", 100) as step:
            resident = []
            for name in self._sessions:
                for number in range(self._in_use):
                    await self._ask(name, -1 - number, store=True)
            for number in range(salts):
                await self._ask("default", number, store=number % self._store_every == 0)
                if number % _ASKED_EVERY == 0:
                    for name in self._sessions:
                        found = await self._ask(name, -1 - number // _ASKED_EVERY % self._in_use, store=False)
                        self.figures["asked_in_use"] += 1
                        self.figures["found_in_use"] += found
                self.most_namespace_bytes = max(self.most_namespace_bytes, self.cache.namespaces.nbytes)
                if (number + 1) * 5 // salts > number * 5 // salts:
                    resident.append(status_bytes("self")["RssAnon"])
                if (number + 1) * 100 // salts > number * 100 // salts:
                    step()
        await self.cache.close()
        self._engine.close()
        return resident

    async def _ask(self, tenant: str, salt: int, *, store: bool) -> int:
        """Registers a salt and looks up its prompt; returns the number of blocks found. Stores the block if `store`."""
        session = self._sessions[tenant]
        spec = NamespaceSpec(
            "model", 4, (PartSpec("kv", 0, _BLOCK),), salt.to_bytes(8, "little", signed=True), tenant=tenant
        )
        try:
            namespace = await self.cache.open_namespace(session, spec)
        except ExhaustedError:
            self.figures["refused"] += 1
            return 0
        self.figures["registered"] += 1
        chain = self.cache.chain(namespace, _TOKENS)
        found = len(await self.cache.match(namespace, chain))
        if store and not found:
            await self._store(session, spec)
        return found

    async def _store(self, session: Session, spec: NamespaceSpec) -> None:
        namespace = self.cache.register(spec)
        reservation = await self.cache.reserve(session, namespace, self.cache.chain(namespace, _TOKENS))
        if not isinstance(reservation, int):
            await self.cache.commit(reservation, 1)
            self.figures["stored"] += 1


def through_daemon(salts: int) -> dict[str, Any]:
    """The same through the SDK, with a disk tier and a new start at the end."""
    settings = {"cpu.bytes": "32MiB", "disk.bytes": "256MiB", "server.namespace_bytes": "1MiB"}
    data, tokens = np.ones(_BLOCK, np.uint8), [1, 2, 3, 4]

    def spec(number: int) -> ClientSpec:
        return ClientSpec("model", 4, (ClientPart("kv", 0, _BLOCK),), salt=b"%d" % number)

    asked = found = 0
    with DaemonProcess(settings) as daemon, harness.progress("through a daemon", salts) as step:
        with Client(daemon.address, name="salts") as client:
            kept = [client.register(spec(-1 - number)) for number in range(16)]
            for cache in kept:
                cache.store(tokens, data)
            for number in range(salts):
                client.register(spec(number)).store(tokens, data)
                step()
                if number % _ASKED_EVERY == 0:
                    asked += 1
                    found += kept[number // _ASKED_EVERY % len(kept)].match(tokens).blocks
            room, troubles = client.stats().namespace_room, len(client.stats().troubles)
        daemon.restart()
        with Client(daemon.address, name="salts") as client:
            client.register(spec(-1)).match(tokens)
            again = client.stats().namespace_room
            violations = list(client.check_integrity().violations)
    return {
        "daemon_salts": salts,
        "daemon_refused": int(room.refused_namespaces),
        "daemon_forgotten": int(room.forgotten_namespaces),
        "daemon_troubles": troubles,
        "daemon_asked_in_use": asked,
        "daemon_found_in_use": found,
        "daemon_namespace_bytes": int(room.used_bytes),
        "daemon_namespace_bytes_after_restart": int(again.used_bytes),
        "daemon_namespace_limit_bytes": int(room.limit_bytes),
        "daemon_violations": violations,
    }


def failures(result: dict[str, Any]) -> list[str]:
    """Returns the bounds that a result misses, in words."""
    of_daemon = dict.fromkeys(
        ("daemon_namespace_bytes", "daemon_namespace_bytes_after_restart"), result["daemon_namespace_limit_bytes"]
    )
    broken = harness.missed(
        result,
        zero=("refused", "daemon_refused", "daemon_troubles"),
        least={f"{where}found_in_use": result[f"{where}asked_in_use"] for where in ("", "daemon_")},
        most={"most_namespace_bytes": result["namespace_limit_bytes"], "growth_bytes": _GROWTH, **of_daemon},
    )
    return broken + list(result["daemon_violations"])


@harness.benchmark(
    "checks.salts",
    __doc__,
    option("--salts", 1_000_000, "in this process"),
    option("--store-every", 8, "one in so many leaves a block"),
    option("--in-use", 64, "of each tenant, asked for in turn"),
    option("--through-daemon", 10_000, "through the SDK"),
)
def main(options: harness.Options) -> harness.Outcome:
    """In this process, then through a daemon."""
    began_s = time.perf_counter()
    salts = Salts(options.store_every, options.in_use)
    resident = asyncio.run(salts.run(options.salts))
    result: dict[str, Any] = {
        "seconds": round(time.perf_counter() - began_s, 1),
        **salts.figures,
        "forgotten": salts.cache.namespace_room.forgotten,
        "most_namespace_bytes": salts.most_namespace_bytes,
        "namespace_limit_bytes": salts.cache.namespace_room.limit_bytes,
        "resident_bytes": resident,
        "growth_bytes": resident[-1] - resident[0],
        **through_daemon(options.through_daemon),
    }
    return harness.Outcome(result, failures(result))


if __name__ == "__main__":
    harness.run(main)
