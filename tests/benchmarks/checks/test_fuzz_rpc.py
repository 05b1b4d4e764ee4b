"""The fuzzer in short, and proof that it sees: wrong statuses, silence, breaches, tracebacks, what is left behind."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from benchmarks.checks import fuzz_rpc
from benchmarks.checks.fuzzing import batch as _fuzz_batch
from benchmarks.checks.fuzzing.batch import Batch, Findings
from benchmarks.checks.fuzzing.callers import Caller
from benchmarks.checks.fuzzing.calls import Answer
from benchmarks.checks.fuzzing.statuses import all_methods
from benchmarks.load.world import NAMESPACES
from prefixd.base.tenancy.tenants import Role
from prefixd.cache import BlockChain
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client, NamespaceSpec, PartSpec
from prefixd.v1 import admin_pb2, cache_pb2


@pytest.mark.slow
def test_hostile_calls_in_short() -> None:
    result = fuzz_rpc.run(1500, seed=11).result()
    assert result["found"] == []
    assert result["calls"] >= 1500 and result["well_behaved_calls"] > 0 and result["verified_bytes"] > 0
    assert {status for status in result["by_status"]} >= {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "UNAVAILABLE"}
    methods = {f"{method.service.rpartition('.')[2]}.{method.name}" for method in all_methods()}
    assert set(result["by_method"]) == methods
    assert set(result["by_kind"]) == set(_fuzz_batch._KINDS)


def test_every_method_has_its_statuses() -> None:
    for method in all_methods():
        assert {"OK", "INVALID_ARGUMENT"} <= method.statuses
        assert not method.statuses & {"INTERNAL", "UNKNOWN", "CANCELLED", "DATA_LOSS"}
    assert [method.name for method in all_methods() if "DEADLINE_EXCEEDED" in method.statuses] == [
        "Claim",
        "WatchBlocks",
        "RecordTrace",
    ]


class StandIn(grpc.GenericRpcHandler):
    """Takes every method, remembers what it was sent, and answers as it is told."""

    def __init__(self, answer: Callable[[str, Any], Any]) -> None:
        self._answer = answer
        self.sent: list[tuple[str, bytes]] = []

    def service(self, details: Any) -> Any:
        async def handle(requests: Any, context: Any) -> Any:
            async for request in requests:
                self.sent.append((details.method, request))
            yield await self._answer(details.method, context)

        return grpc.stream_stream_rpc_method_handler(handle)


async def fuzzed(stand_in: StandIn, folder: Path, calls: int, caller: Callable[[str], Caller] = Caller) -> Findings:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([stand_in])
    address = f"unix:{folder}/s"
    server.add_insecure_port(address)
    await server.start()
    findings = Findings(seed=5)
    try:
        async with Batch(caller(address), 0, all_methods(), findings) as batch:
            for index in range(calls):
                await batch.call(index)
    finally:
        await server.stop(None)
    return findings


def without_clocks(findings: Findings) -> list[str]:
    """What was unexpected, but for calls that may end before their answer comes, and for headers so large that gRPC
    refuses some of them by chance."""
    return [line for line in findings.unexpected if not re.search("cancelled|hurried|miscounted|headers", line)]


@pytest.mark.slow
async def test_internal_errors_are_found_and_can_be_repeated(tmp_path: Path) -> None:
    async def fail(_: str, context: Any) -> None:
        await context.abort(grpc.StatusCode.INTERNAL, "broken")

    first, second = StandIn(fail), StandIn(fail)
    findings = await fuzzed(first, tmp_path, 120)
    assert findings.calls == 120
    assert len(findings.unexpected) >= findings.by_status["INTERNAL"] > 50
    assert findings.unexpected[0].startswith("INTERNAL (broken) from /")
    assert "of `--seed 5 --batch 0`, sent [" in findings.unexpected[0]
    again = await fuzzed(second, tmp_path, 120)
    assert without_clocks(again) == without_clocks(findings)


@pytest.mark.slow
async def test_silence_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fuzz_batch, "DEADLINE_S", 0.05)

    async def hang(_: str, context: Any) -> None:
        await asyncio.Event().wait()

    findings = await fuzzed(StandIn(hang), tmp_path, 20)
    assert any(line.startswith("DEADLINE_EXCEEDED ") for line in findings.unexpected)


@pytest.mark.slow
async def test_breaches_are_found(tmp_path: Path) -> None:
    """A daemon that lets everybody read everything, and end everybody's leases."""
    granted = iter(range(1_000_000))

    async def allow(method: str, context: Any) -> bytes:
        number = str(next(granted))
        match method.rpartition("/")[2]:
            case "OpenSession":
                opened = cache_pb2.SessionOpened(session_id=number)
                return cache_pb2.SessionEvent(opened=opened).SerializeToString()
            case "RegisterNamespace":
                return cache_pb2.RegisterNamespaceResponse(namespace_id=number.encode()).SerializeToString()
            case "Acquire":
                return cache_pb2.AcquireResponse(lease_id=number).SerializeToString()
            case "Reserve":
                return cache_pb2.ReserveResponse(reservation_id=number, blocks=1).SerializeToString()
            case "Stats":
                load = cache_pb2.Namespace(name=NAMESPACES[0].name)
                known = admin_pb2.NamespaceStats(namespace_id=b"foreign!", namespace=load)
                return admin_pb2.StatsResponse(namespaces=[known]).SerializeToString()
        return b""

    findings = await fuzzed(StandIn(allow), tmp_path, 3000)
    assert any("foreign namespace" in breach for breach in findings.breaches)
    assert any("foreign grant" in breach for breach in findings.breaches)
    assert not any("foreign session" in breach for breach in findings.breaches)
    another = (("authorization", "Bearer of-another"),)
    findings = await fuzzed(StandIn(allow), tmp_path, 600, lambda address: Caller(address, other=another))
    assert any("foreign session" in breach for breach in findings.breaches)


@pytest.mark.slow
async def test_what_a_role_may_use_and_what_it_must_be_refused(tmp_path: Path) -> None:
    methods = {f"{method.service.rpartition('.')[2]}.{method.name}": method for method in all_methods()}

    async def unexpected(role: Role, method: str, kind: str, status: str, details: str = "", sent: bytes = b"") -> bool:
        findings = Findings(seed=5)
        batch = Batch(Caller(f"unix:{tmp_path}/none", role), 0, all_methods(), findings)
        batch._count(methods[method], kind, 0, [sent], Answer(status, details, []))
        return bool(findings.unexpected)

    for role, method, right, wrong in (
        (Role.CLIENT, "Admin.Stats", "PERMISSION_DENIED", "OK"),
        (Role.METRICS, "PrefixCache.Match", "PERMISSION_DENIED", "NOT_FOUND"),
        (Role.METRICS, "ServerReflection.ServerReflectionInfo", "PERMISSION_DENIED", "OK"),
        (Role.METRICS, "Health.Check", "OK", "PERMISSION_DENIED"),
        (Role.ADMIN, "Admin.SetTenant", "NOT_FOUND", "PERMISSION_DENIED"),
        (Role.CLIENT, "PrefixCache.Match", "OK", "RESOURCE_EXHAUSTED"),
    ):
        assert not await unexpected(role, method, "valid", right)
        assert await unexpected(role, method, "valid", wrong)
    many = "4 of 4 calls are under way"
    assert not await unexpected(Role.CLIENT, "PrefixCache.Match", "valid", "RESOURCE_EXHAUSTED", many)
    limit = bytes(16 << 20)
    assert await unexpected(Role.CLIENT, "PrefixCache.Match", "wild", "RESOURCE_EXHAUSTED", sent=limit)
    assert not await unexpected(Role.CLIENT, "PrefixCache.Match", "wild", "RESOURCE_EXHAUSTED", sent=limit + b"1")
    assert await unexpected(Role.ADMIN, "Admin.Stats", "credentials", "OK")
    assert not await unexpected(Role.ADMIN, "Admin.Stats", "credentials", "UNAUTHENTICATED")
    assert not await unexpected(Role.ADMIN, "Health.Check", "credentials", "OK")


@pytest.mark.slow
async def test_a_lost_status_is_not_taken_for_the_daemons(tmp_path: Path) -> None:
    findings = Findings(seed=5)
    batch = Batch(Caller(f"unix:{tmp_path}/none"), 0, all_methods(), findings)
    put = next(method for method in all_methods() if method.name == "Put")
    batch._count(put, "spoilt", 0, [b""], Answer(_fuzz_batch.LOST, "", []))
    assert not findings.unexpected and findings.by_status[_fuzz_batch.LOST] == 1


def test_what_a_log_complains_about() -> None:
    log = (
        "2026-11-21 10:34:53,214 WARNING prefixd.server: all is well\n"
        "2026-11-21 10:34:53,215 ERROR   prefixd.server.rpc.status: a call failed with an unexpected error\n"
        "Traceback (most recent call last):\n  File x\nKeyError: 'y'\n"
        "E1121 10:34:53.223564    2837 hpack_encoder.cc:618] Ignoring key value pair due to size limit.\n"
        "2026-11-21 10:34:54,214 WARNING prefixd.server: a warning\nTraceback (most recent call last):\nValueError\n"
        "F1121 10:34:53.223564    2837 call.cc:1] dead\n"
    )
    found = fuzz_rpc._complaints(log)
    assert [line.rpartition("| ")[2] for line in found] == ["KeyError: 'y'", "ValueError", found[2]]
    assert "F1121" in found[2]


@pytest.mark.slow
def test_what_is_left_behind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_rpc, "_SETTLE_S", 0.0)
    with DaemonProcess({"cpu.bytes": "4MiB", "disk.bytes": 0}) as daemon:
        sockets = fuzz_rpc._sockets(daemon.pid)
        with Client(daemon.address) as client:
            cache = client.register(NamespaceSpec("left", 4, (PartSpec("full", 0, 64),)))
            cache.store(range(8), bytes(128))
            with cache.acquire(range(8)), cache.reserve(range(100, 108)):
                left = " ".join(fuzz_rpc._left_behind(daemon, sockets))
                for what in ("1 sessions", "1 leases", "1 reservations", "held blocks", "bytes in flight", "sockets"):
                    assert what in left


@pytest.mark.slow
def test_what_is_pinned_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_rpc, "_SETTLE_S", 0.0)
    with DaemonProcess({"cpu.bytes": "4MiB", "disk.bytes": 0}) as daemon:
        sockets = fuzz_rpc._sockets(daemon.pid)
        with Client(daemon.address) as client:
            cache = client.register(NamespaceSpec("left", 4, (PartSpec("full", 0, 64),)))
            cache.store(range(12), bytes(192))
            chain = BlockChain(np.arange(12, dtype="<u4").tobytes(), 4, int.from_bytes(cache.namespace_id, "little"))
            client.pin(chain.key(1).hex())
            assert sum(tier.held_bytes for tenant in client.tenants() for tier in tenant.tiers) > 0
        assert not [line for line in fuzz_rpc._left_behind(daemon, sockets) if "held" in line]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "result.json"
    monkeypatch.setattr(fuzz_rpc, "run", lambda *_: fuzz_rpc.Report(Findings(3), crashes=["it died"]))
    with pytest.raises(fuzz_rpc.harness.BenchmarkError, match="1 defects"):
        fuzz_rpc.main(["--batch", "7", "--seed", "3", "--json", str(file)])
    result = json.loads(file.read_text())
    assert (result["crashes"], result["seed"], result["found"]) == (1, 3, ["it died"])
    assert "it died" in capsys.readouterr().out
