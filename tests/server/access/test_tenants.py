"""Tenants of a live daemon: a door for each role, sessions of one's own, quotas that change, an audit log."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client, ClientError, NamespaceSpec, PartSpec, PermissionDeniedError, Tier
from prefixd.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc
from tests.daemons import Remote
from tests.waiting import wait_until

ALICE, BOB, SCRAPER, OPERATOR = "alice-" + "a" * 32, "bob-" + "b" * 32, "scrape-" + "s" * 32, "operator-" + "o" * 32
SPEC = NamespaceSpec("model", 4, (PartSpec("full", 0, 128),))
TOML = """
[cpu]
bytes = "1MiB"
[disk]
bytes = 0
[server]
tcp = "127.0.0.1:0"
insecure_tcp = true
tokens = "{tokens}"
audit_log = "{audit}"
metrics = "127.0.0.1:0"
[tenants.alice]
sessions = 2
calls = 4
cpu_guaranteed = 4096
cpu_most = 524288
[tenants.bob]
"""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def house(tmp_path: Path) -> Any:
    """A daemon with tokens of two tenants, a scraper and an operator; its settings are in `prefixd.toml`."""
    tokens = tmp_path / "tokens"
    tokens.write_text(
        f"a client {ALICE} alice\nb client {BOB} bob\nscraper metrics {SCRAPER}\noperator admin {OPERATOR}\n"
    )
    tokens.chmod(0o600)
    config = tmp_path / "prefixd.toml"
    config.write_text(TOML.format(tokens=tokens, audit=tmp_path / "audit.log"))
    with DaemonProcess({}, directory=tmp_path / "d", config=config, log_level="info") as daemon:
        yield House(daemon, config)


class House:
    """A daemon under test."""

    def __init__(self, daemon: DaemonProcess, config: Path) -> None:
        self.daemon = daemon
        self.config = config

    def client(self, token: str) -> Client:
        return Client(self.daemon.tcp, token=token)

    def operator(self) -> Client:
        return Client(self.daemon.address)

    def hangup(self, until: str) -> None:
        """Has the settings read again, and waits for a line of the log."""
        os.kill(self.daemon.pid, signal.SIGHUP)
        wait_until(lambda: until in self.daemon.log.read_text(), self.daemon.log.read_text)

    def told(self, when: Callable[[list[dict[str, Any]]], bool]) -> None:
        """Waits until the audit log, which a thread writes, tells enough."""
        audit = self.config.parent / "audit.log"
        wait_until(lambda: audit.exists() and when(self.events()), "the audit log does not tell")

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.config.parent / "audit.log").read_text().splitlines()]


def scraped(house: House, token: str) -> str:
    """The metrics, as somebody with this token gets them."""
    request = urllib.request.Request(f"{house.daemon.metrics}/metrics")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


def test_a_session_is_its_tenants_own(house: House) -> None:
    with grpc.insecure_channel(house.daemon.tcp) as channel:
        cache = cache_pb2_grpc.PrefixCacheStub(channel)
        alice, bob = (("authorization", f"Bearer {token}") for token in (ALICE, BOB))
        events = cache.OpenSession(cache_pb2.OpenSessionRequest(), metadata=[alice], timeout=60)
        opened = next(events).opened
        assert opened.tenant == "alice"
        part = cache_pb2.Part(group="full", nbytes=8)
        namespace = cache_pb2.Namespace(name="m", block_tokens=1, parts=[part])
        register = cache_pb2.RegisterNamespaceRequest(session_id=opened.session_id, namespace=namespace)
        with pytest.raises(grpc.RpcError, match="is not open for tenant bob"):
            cache.RegisterNamespace(register, metadata=[bob], timeout=60)
        assert cache.RegisterNamespace(register, metadata=[alice], timeout=60).namespace_id
        events.cancel()


@pytest.mark.slow
def test_each_role_has_its_door(house: House) -> None:
    with house.client(SCRAPER) as client, pytest.raises(PermissionDeniedError, match="needs the role client"):
        client.register(SPEC)
    with house.client(ALICE) as client, pytest.raises(PermissionDeniedError, match="needs the role admin"):
        client.tenants()
    with house.client(OPERATOR) as client:
        assert [tenant.name for tenant in client.tenants()] == ["default", "alice", "bob"]

    for token in ("", ALICE, "x" * 40):
        with pytest.raises(urllib.error.HTTPError) as caught:
            scraped(house, token)
        assert caught.value.code == (403 if token == ALICE else 401) and b"role metrics or admin" in caught.value.read()
    assert all("prefixd_" in scraped(house, token) for token in (SCRAPER, OPERATOR))


@pytest.mark.slow
def test_what_tenants_have_is_in_stats_and_metrics(house: House) -> None:
    with house.client(ALICE) as alice, house.operator() as operator:
        alice.register(SPEC)
        cache = operator.register(SPEC)
        cache.store(range(8), bytes(256))
        with cache.acquire(range(8)):
            stats = operator.stats()
            metrics = scraped(house, SCRAPER)
    assert {(session.tenant, session.leases) for session in stats.sessions} == {("alice", 0), ("default", 1)}
    assert [(tenant.name, tenant.sessions, tenant.grants) for tenant in stats.tenants] == [
        ("default", 1, 1),
        ("alice", 1, 0),
        ("bob", 0, 0),
    ]
    for line in (
        'sessions{tenant="alice"} 1.0',
        'grants{tenant="default"} 1.0',
        'sessions{tenant="bob"} 0.0',
        'guaranteed_bytes{tenant="alice",tier="cpu"} 4096.0',
        'most_bytes{tenant="alice",tier="cpu"} 524288.0',
    ):
        assert f"prefixd_tenant_{line}" in metrics
    assert 'prefixd_tenant_most_bytes{tenant="bob"' not in metrics, "it has no limit"


@pytest.mark.slow
def test_settings_are_read_again_without_ending_a_session(house: House) -> None:
    with house.client(ALICE) as alice, house.operator() as operator:
        alice.register(SPEC)
        house.config.write_text(house.config.read_text().replace("sessions = 2", "sessions = 5") + "cpu_most = 65536\n")
        house.hangup("settings were read again: 2 tenants")
        quotas = {tenant.name: tenant.quota for tenant in operator.tenants()}
        assert quotas["alice"].sessions == 5
        assert [tier.most_bytes for tier in quotas["bob"].tiers if tier.HasField("most_bytes")] == [65536]
        alice.register(SPEC)
        good = house.config.read_text()
        house.config.write_text(good.replace("sessions = 5", "sessions = 0"))
        house.hangup("tenants.alice.sessions = '0'")
        assert [trouble.part for trouble in operator.stats().troubles] == ["settings"]
        assert {tenant.name: tenant.quota.sessions for tenant in operator.tenants()}["alice"] == 5
        house.config.write_text(good.replace('"1MiB"', '"2MiB"'))
        house.hangup("cpu.bytes changed; only a restart brings the change into force")
        assert not operator.stats().troubles


@pytest.mark.slow
def test_without_its_file_the_settings_stay_as_they_were(house: House) -> None:
    with house.operator() as operator:
        before = [(each.name, each.quota) for each in operator.tenants()]
        away = house.config.rename(house.config.with_suffix(".away"))
        house.hangup("trouble with the settings: cannot read the configuration")
        assert [(each.name, each.quota) for each in operator.tenants()] == before
        text = away.read_text()
        house.config.write_text(text + "\n[tenants.broken]\nsessions = 0\n")
        house.hangup("the trouble with the settings is now: tenants.broken.sessions")
        house.config.write_text(text)
        house.hangup("no more trouble with the settings")


@pytest.mark.slow
def test_an_operator_sets_quotas(house: House) -> None:
    def tenants(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "prefixd", "tenants", *arguments, "--address", house.daemon.address]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)

    done = tenants("set", "alice", "--cpu", "64KiB:256KiB", "--sessions", "none", "--requests-per-s", "2.5", "--json")
    assert done.returncode == 0, done.stderr
    quota = json.loads(done.stdout)["quota"]
    assert quota["requests_per_s"] == 2.5 and quota["sessions"] is None and quota["calls"] == 4
    shown = tenants("list").stdout
    assert "alice" in shown and "256.0 KiB" in shown
    for status, arguments, words in (
        (1, ("set", "nobody", "--sessions", "1"), "no tenant 'nobody'"),
        (2, ("set", "alice", "--cpu", "2GiB:none"), "guaranteed 2147483648 bytes of the cpu tier, which has 1048576"),
        (2, ("set", "alice", "--cpu", "512KiB:256KiB"), "lower the first"),
        (2, ("set", "alice"), "no limit is given"),
        (1, ("list", "nobody"), "no tenant 'nobody'"),
    ):
        failed = tenants(*arguments)
        assert failed.returncode == status and words in failed.stderr, failed
    assert tenants("set", "alice", "--sessions", "0").returncode == 2


@pytest.mark.slow
def test_the_audit_log_tells_who_was_let_in_and_refused(house: House) -> None:
    with house.client(ALICE) as alice:
        cache = alice.register(SPEC)
        cache.store(range(8), bytes(256))
        for call in (alice.tenants, alice.stats):
            with pytest.raises(PermissionDeniedError):
                call()
    with house.client("x" * 40) as stranger, pytest.raises(ClientError):
        stranger.register(SPEC)
    with house.operator() as operator:
        for refused in (lambda: operator.pin("0123"), lambda: operator.unpin("0123"), lambda: _shrunk(operator)):
            with pytest.raises(ClientError):
                refused()
        with pytest.raises(ClientError, match="of the cpu tier"):
            operator.set_tenant("bob", tiers={"cpu": (2 << 20, None)})
        operator.set_tenant("alice", tiers={"cpu": (4096, -1)}, limits={"sessions": 3, "requests_per_s": None})
        operator.evict(all=True)
    house.told(lambda events: any(line["event"] == "evicted" for line in events))
    log = house.config.parent / "audit.log"
    log.rename(log.with_suffix(".1"))
    house.hangup("settings were read again")
    with house.operator() as operator:
        operator.drain()
    house.told(lambda events: any(line["event"] == "drained" for line in events))
    after = house.events()
    log.with_suffix(".1").rename(log)
    before = house.events()
    assert {(line["event"], line.get("tenant"), line.get("what")) for line in before} >= {
        ("let in", "alice", None),
        ("refused", "alice", "/prefixd.v1.Admin/Stats"),
        ("refused", None, "/prefixd.v1.PrefixCache/OpenSession"),
        ("let in", "default", None),
        ("evicted", "default", "all"),
    }
    (unknown,) = [line for line in before if line["event"] == "refused" and "tenant" not in line]
    assert unknown["door"] == "tcp" and unknown["peer"].startswith("ipv4:127.0.0.1:")
    assert [line["event"] for line in before].count("let in") == 2
    assert not {"pinned", "unpinned", "resized"} & {line["event"] for line in before}, "these were refused"
    (told,) = [line for line in before if line["event"] == "quota set"]
    assert told["what"] == "alice"
    limits = {"cpu_guaranteed": 4096, "cpu_most": None, "sessions": 3, "requests_per_s": None}
    assert {name: told.get(name, "not said") for name in limits} == limits
    assert ("drained", False) in [(line["event"], line.get("shutdown")) for line in after]
    everything = json.dumps(before + after)
    assert "aaaa" not in everything and "xxxx" not in everything


def _shrunk(operator: Client) -> None:
    operator.resize_tier(Tier.GPU, 1)


@pytest.mark.slow
def test_calls_of_a_tenant_have_a_limit(house: House) -> None:
    """A stream of Put that says nothing is a call under way."""
    with grpc.insecure_channel(house.daemon.tcp) as channel:
        cache = cache_pb2_grpc.PrefixCacheStub(channel)
        alice, bob = ([("authorization", f"Bearer {token}")] for token in (ALICE, BOB))
        hang: list[Any] = []

        def silent() -> Any:
            waits = threading.Event()
            hang.append(waits)
            waits.wait(60)
            yield from ()

        calls = [cache.Put.future(silent(), metadata=alice, timeout=60) for _ in range(4)]
        with house.operator() as operator:
            wait_until(lambda: {tenant.name: tenant.calls for tenant in operator.tenants()}["alice"] >= 4)
        with pytest.raises(grpc.RpcError) as caught:
            cache.Match(cache_pb2.MatchRequest(), metadata=alice, timeout=60)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "tenant alice: 4 of 4 calls are under way (limit tenants.alice.calls)" in caught.value.details()
        with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
            cache.Match(cache_pb2.MatchRequest(), metadata=bob, timeout=60)
        metrics = scraped(house, SCRAPER)
        assert 'prefixd_tenant_calls{tenant="alice"} 4.0' in metrics
        assert 'prefixd_tenant_refused_total{limit="calls",tenant="alice"} 1.0' in metrics
        for call in calls:
            call.cancel()
        for each in hang:
            each.set()


AS_ANOTHER_USER = """
import asyncio, os, sys
from prefixd.client import AsyncClient, ClientError, NamespaceSpec, PartSpec
import prefixd.client.cache
uid = int(sys.argv[1])
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
async def main():
    async with AsyncClient(sys.argv[2], memory="streamed") as client:
        await client.register(NamespaceSpec("model", 4, (PartSpec("full", 0, 128),)))
        print((await client.session()).tenant)
        try:
            await client.stats()
            print("operator")
        except ClientError as error:
            print(error)
asyncio.run(main())
"""


@as_root
@pytest.mark.slow
def test_a_user_of_this_host_is_of_its_tenant_and_no_operator(tmp_path: Path, launch: Callable[..., Remote]) -> None:
    with tempfile.TemporaryDirectory(prefix="prefixd-") as name:
        Path(name).chmod(0o755)
        path = Path(name) / "run" / "s"
        launch(
            {
                "cpu.bytes": "1MiB",
                "disk.bytes": 0,
                "server.socket": str(path),
                "tenants.acme.uids": "64001",
                "server.allow_uids": "64002",
                "server.admin_uids": "64003",
            }
        )
        for uid, tenant, words in (
            (64001, "acme", "uid 64001 has the role client"),
            (64002, "default", "uid 64002 has the role client"),
            (64003, "default", "operator"),
        ):
            command = [sys.executable, "-c", AS_ANOTHER_USER, str(uid), f"unix:{path}"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
            assert done.stdout.startswith(f"{tenant}\n") and words in done.stdout, done.stdout + done.stderr
        with (
            grpc.insecure_channel(f"unix:{path}") as channel,  # root, but nothing shown
            pytest.raises(grpc.RpcError, match="no ticket: users of this host belong to tenants"),
        ):
            admin_pb2_grpc.AdminStub(channel).Stats(admin_pb2.StatsRequest(), timeout=60)


@pytest.mark.slow
def test_a_ticket_is_had_without_memory_too(launch: Callable[..., Remote]) -> None:
    remote = launch({"cpu.bytes": 0, "disk.bytes": 0, "worker.embedded": "true", "tenants.acme.uids": "64001"})
    with Client(remote.daemon.address) as client:
        assert client.stats().version
    with socket.socket(socket.AF_UNIX) as visitor:
        visitor.connect(remote.daemon.address.removeprefix("unix:") + "-memory")
        visitor.sendall(b"some session\n")
        assert b"no CPU tier" in visitor.recv(4096)
