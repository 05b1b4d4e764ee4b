"""Malformed and hostile calls to every method, while a well-behaved client works.

Calls every method of PrefixCache, Inference, Admin, health and reflection as no client should: with bytes
that are no message, with valid messages of which a field or two were spoiled (other sessions' ids, ended
leases, absurd numbers, giant and torn arrays), with streams that are broken off, calls that are cancelled,
headers of absurd size, methods that do not exist, tokens and tickets that are wrong or another tenant's;
and with raw bytes on all sockets. Eight hostile clients at a time, on a sidecar, and on a daemon with the
embedded model: half of them operators at the unix socket, the others over TCP, of two tenants, as clients,
operators and scrapers. All tenants have quotas. Meanwhile a well-behaved client of the default tenant
stores, loads, leases and evicts, and compares every byte.

crashes counts daemons that died and tracebacks, errors and critical lines in their logs. unexpected_status
counts answers that the method's contract does not have; INTERNAL and UNKNOWN are in none, and neither is a
call that hangs. What gRPC itself answers is listed: UNIMPLEMENTED for a method that does not exist,
RESOURCE_EXHAUSTED for headers or a message above its limit, CANCELLED and DEADLINE_EXCEEDED where the caller
gave up. breaches counts calls that got at another session's leases or namespaces, or at a session with
another tenant's token. At the end every session, lease, reservation and slot must be accounted for, and
nothing may count for a tenant's quotas (integrity_violations, leaks).
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.checks.fuzzing.batch import DEADLINE_S, TRANSPORT, Batch, Findings
from benchmarks.checks.fuzzing.callers import TENANTS, UNUSED, Caller, callers
from benchmarks.checks.fuzzing.statuses import Method, all_methods
from benchmarks.checks.tenancy.house import tenanted_daemon
from benchmarks.checks.tenancy.left_behind import left_of_tenants
from benchmarks.common import harness
from benchmarks.common.daemons import START_S, violations_of, wait_for_worker
from benchmarks.common.options import option, seed
from benchmarks.load.mixed_load import LoadPlan, Tally
from benchmarks.load.process import LoadProcess
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client

_BATCH_CALLS = 100
_HOSTILE_CLIENTS = 8
_MODEL_SHARE = 0.05
_DRAINING_CALLS = 200
_RAW_VISITS = 1  # to the sockets, for each batch
_SETTLE_S = 60.0
_PREFIXES = 1_000_000  # more than there are
_SIDECAR: dict[str, object] = {"cpu.bytes": "64MiB", "disk.bytes": "96MiB", "disk.codec": "int8"}
_MODEL: dict[str, object] = {
    "worker.embedded": True,
    "gpu.device": "cpu",
    "gpu.bytes": "32MiB",
    "cpu.bytes": "64MiB",
    "disk.bytes": "96MiB",
    "disk.codec": "lossless",
}
_COUNTS: dict[str, object] = {"sessions": 64, "grants": 512, "namespaces": 128, "calls": 32, "waiting_requests": 64}
_BYTES: dict[str, object] = {
    "cpu_guaranteed": "12MiB",
    "cpu_most": "48MiB",
    "disk_guaranteed": "16MiB",
    "disk_most": "72MiB",
    "retained_bytes": "64KiB",
}
_QUOTAS: dict[str, dict[str, object]] = {
    "default": {**_BYTES, "sessions": 128, "calls": 512},
    **{tenant: {**_BYTES, **_COUNTS, "requests_per_s": 20} for tenant in TENANTS},
    UNUSED: {"sessions": 4},
}
_RECORD = re.compile(r"^(?=\d{4}-\d\d-\d\d \S+ [A-Z]+ |[IWEF]\d{4} )", re.MULTILINE)
_BAD_RECORD = re.compile(r"\S+ \S+ (ERROR|CRITICAL) |[EF]\d{4} ")
# What gRPC answers to headers beyond its limit names them all, and is beyond the limit itself.
_GRPC_TALKS_TOO_LONG = "hpack_encoder.cc"
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@dataclass(slots=True)
class Report:
    """All that was found."""

    findings: Findings
    tally: Tally = field(default_factory=Tally)
    crashes: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def result(self) -> dict[str, Any]:
        findings, tally = self.findings, self.tally
        return {
            "calls": findings.calls,
            "crashes": len(self.crashes),
            "unexpected_status": len(findings.unexpected),
            "breaches": len(findings.breaches),
            "wrong_bytes": tally.wrong_bytes,
            "failed_calls": tally.failed_calls,
            "leaks": len(self.leaks),
            "integrity_violations": len(self.violations),
            "well_behaved_calls": tally.calls.total(),
            "refused_for_room": tally.refused.total(),
            "verified_bytes": tally.verified_bytes,
            "by_status": dict(findings.by_status.most_common()),
            "by_method": dict(sorted(findings.by_method.items())),
            "by_kind": dict(findings.by_kind.most_common()),
            "transport_statuses": {kind: sorted(statuses) for kind, statuses in TRANSPORT.items()},
            "found": [
                *(*self.crashes, *findings.unexpected, *findings.breaches, *self.leaks, *self.violations),
                *(*tally.wrong, *tally.failures),
            ],
        }


def run(
    calls: int, seed: int, step: Callable[[], None] = lambda: None, only_batch: int | None = None, model: bool = True
) -> Report:
    """`calls` hostile calls, on a sidecar and, if `model`, some of them on a daemon with the embedded model.

    `step` is called after each batch; `only_batch` repeats that one.
    """
    report = Report(Findings(seed))
    methods = [method for method in all_methods() if method.name != "Drain"]
    batches = -(-calls // _BATCH_CALLS)
    on_model = max(1, round(batches * _MODEL_SHARE)) if model else 0
    numbers = range(batches) if only_batch is None else (only_batch,)
    for settings, chosen in (
        (_SIDECAR, [number for number in numbers if number >= on_model]),
        (_MODEL, [number for number in numbers if number < on_model]),
    ):
        if chosen:
            _on_daemon(settings, chosen, min(calls, _BATCH_CALLS), methods, report, step)
    return report


def _on_daemon(
    settings: dict[str, object],
    numbers: Sequence[int],
    calls: int,
    methods: Sequence[Method],
    report: Report,
    step: Callable[[], None],
) -> None:
    with tenanted_daemon(settings, _QUOTAS) as (daemon, house):
        hostile = callers(daemon.address, daemon.tcp or "", house)
        plan = LoadPlan(1, report.findings.seed, tasks=1, numbers=8, own_durable=4, timeout_s=DEADLINE_S)
        with_model = bool(settings.get("worker.embedded"))
        if with_model:
            plan = LoadPlan(1, report.findings.seed, tasks=1, numbers=8, own_durable=4, timeout_s=120, generate=True)
            with Client(daemon.address, timeout_s=START_S) as client:
                wait_for_worker(client)
        sockets = _sockets(daemon.pid)
        with LoadProcess(daemon.address, plan) as load:
            load.ask("go")
            asyncio.run(_fuzz(daemon, hostile, numbers, calls, methods, with_model, report.findings, step))
            report.tally.add(load.stop())
        report.leaks += _left_behind(daemon, sockets)
        with Client(daemon.address) as client:
            report.violations += violations_of(client)
        asyncio.run(_drain(daemon, report.findings))
        status = daemon.stop()
        if status:
            report.crashes.append(f"the daemon ended with status {status}{daemon.last_words()}")
        report.crashes += _complaints(daemon.log.read_text(errors="replace"))


async def _fuzz(
    daemon: DaemonProcess,
    callers: Sequence[Caller],
    numbers: Sequence[int],
    calls: int,
    methods: Sequence[Method],
    with_model: bool,
    findings: Findings,
    step: Callable[[], None],
) -> None:
    waiting = list(reversed(numbers))
    inference = [method for method in methods if method.service == "prefixd.v1.Inference"]

    async def hostile() -> None:
        while waiting:
            number = waiting.pop()
            async with Batch(callers[number % len(callers)], number, methods, findings) as batch:
                for index in range(calls):
                    await batch.call(index, inference if with_model and index % 2 else None)
            for visit in range(_RAW_VISITS):
                rng = random.Random(f"{findings.seed} {number} raw {visit}")
                await asyncio.to_thread(_visit, daemon, rng)
            step()

    async with asyncio.TaskGroup() as group:
        for _ in range(_HOSTILE_CLIENTS):
            group.create_task(hostile())


async def _drain(daemon: DaemonProcess, findings: Findings) -> None:
    """Hostile calls to `Drain`, and to all methods of a daemon that drains."""
    methods = all_methods()
    drain = [method for method in methods if method.name == "Drain"]
    async with Batch(Caller(daemon.address), -1, methods, findings, also=frozenset({"UNAVAILABLE"})) as batch:
        for index in range(_DRAINING_CALLS):
            await batch.call(index, drain if index < 20 or index % 10 == 0 else None)


def _visit(daemon: DaemonProcess, rng: random.Random) -> None:
    """Bytes that are no HTTP/2, or no question for the memory or a ticket, on one of the sockets."""
    host, _, port = (daemon.tcp or "").rpartition(":")
    doors: list[tuple[int, Any]] = [(socket.AF_UNIX, f"{daemon.socket}{suffix}") for suffix in ("", "-memory")]
    family, door = rng.choice([*doors, (socket.AF_INET, (host, int(port)))])
    data = rng.choice(
        (
            b"",
            b"\n",
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            _GREETING,
            _GREETING + rng.randbytes(300),
            # A frame of HTTP/2 of any kind, with flags and a length that may not be its own.
            _GREETING + bytes([0, 0, rng.randrange(256), rng.randrange(12), rng.randrange(256)]) + rng.randbytes(60),
            rng.randbytes(rng.choice((1, 100, 50_000))),
            b"f" * 32 + b"\n",
            b"ticket\n",
            b"ticket\nticket\n",
            b"\0" * 255 + b"\n",
            b"a" * 100_000,
        )
    )
    with socket.socket(family) as visitor, suppress(OSError):
        visitor.settimeout(0.1)
        visitor.connect(door)
        visitor.sendall(data)
        if rng.random() < 0.7:
            visitor.shutdown(socket.SHUT_WR)
            while visitor.recv(65_536):
                pass


def _sockets(pid: int) -> int:
    """Sockets that a process has open; those of its clients among them."""
    found = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found += os.readlink(entry).startswith("socket:")
    return found


def _left_behind(daemon: DaemonProcess, sockets: int) -> list[str]:
    """What is still held when every client has gone; there were `sockets` before the first came.

    What operators among them have pinned stays on purpose, until it is unpinned here.
    """
    deadline = time.monotonic() + _SETTLE_S
    with Client(daemon.address, memory="streamed") as client:
        _unpin_all(client)
        while True:
            stats = client.stats()
            left = {
                "sessions": len(stats.sessions),
                "leases": stats.leases,
                "reservations": stats.reservations,
                "running requests": stats.worker.running_requests + stats.scheduler.waiting_requests,
                "held blocks": sum(tier.held_blocks for tier in stats.tiers),
                "bytes in flight": sum(tier.in_flight_bytes for tier in stats.tiers),
                "quarantined bytes": sum(tier.quarantined_bytes for tier in stats.tiers),
                "sockets": max(_sockets(daemon.pid) - sockets - 1, 0),  # one is ours
            }
            if not any(left.values()) or time.monotonic() > deadline:
                found = [f"{count} {what} are left over" for what, count in left.items() if count]
                return [*found, *left_of_tenants(client, max(0.0, deadline - time.monotonic()))]
            time.sleep(0.1)


def _unpin_all(client: Client) -> None:
    if client.prefixes(limit=1).pinned_blocks:
        for prefix in client.prefixes(limit=_PREFIXES).prefixes:
            client.unpin(prefix.key)  # the blocks before it, too


def _complaints(log: str) -> list[str]:
    """Errors and tracebacks in a log (gRPC's own lines too): the first and the last lines of each."""
    found = []
    for record in _RECORD.split(log):
        if (_BAD_RECORD.match(record) and _GRPC_TALKS_TOO_LONG not in record) or "Traceback" in record:
            lines = [line.strip() for line in record.splitlines() if line.strip()]
            found.append(" | ".join([lines[0], *lines[1:][-4:]]))
    return found


@harness.benchmark(
    "checks.fuzz_rpc",
    __doc__,
    option("--calls", 100_000, "how many"),
    seed("of everything that is sent"),
    option("--batch", None, "only this batch of 100 calls, to repeat what was found in it", int),
)
def main(options: harness.Options) -> harness.Outcome:
    """Calls and what they found."""
    batches = 1 if options.batch is not None else -(-options.calls // _BATCH_CALLS)
    with harness.progress("batches", batches) as step:
        result = run(options.calls, options.seed, step, options.batch).result()
    broken = [f"{len(result['found'])} defects were found, see above"] if result["found"] else []
    return harness.Outcome(result, broken)


if __name__ == "__main__":
    harness.run(main)
