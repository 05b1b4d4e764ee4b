"""SIGHUP: what is read when, and what changes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from prefixd.base.clocks import boot_id, elapsed_s
from prefixd.base.errors import ConfigError
from prefixd.base.tenancy.tenants import Role
from prefixd.cache import NamespaceSpec, PartSpec, TieredCache, Troubles
from prefixd.cache.coding.codec_choice import codec_of
from prefixd.server.access.audit import AuditLog
from prefixd.server.access.local_credentials import LocalCredentials
from prefixd.server.access.socket_access import SocketAccess
from prefixd.server.rpc.sockets.listeners import Listeners
from prefixd.server.settings_reload import PART, SettingsReload
from prefixd.settings import Settings
from prefixd_swap.codecs.warm_up import WarmUp
from tests.waiting import until

MIB = 1 << 20


def loaded(values: dict[str, object]) -> Settings:
    return Settings.load(None, {"cpu.bytes": MIB, "disk.bytes": 0, **values}, {})


class House:
    """A daemon's parts that a reload changes. `begin` reads the settings in `now`."""

    def __init__(self, cache: TieredCache, now: dict[str, object]) -> None:
        self.now = now
        self.cache = cache
        settings = loaded(now)
        cache.tenants.set_quotas(settings.quotas)
        self.audit = AuditLog(None)
        self.troubles = Troubles(elapsed_s)
        self.doors = Listeners(settings, cache.tenants, LocalCredentials(elapsed_s, boot_id()), self.audit)
        self.before_read: Callable[[], object] = lambda: None
        self.reload = SettingsReload(settings, self._read, self.doors, cache, self.troubles, self.audit)

    def _read(self) -> Settings:
        values = dict(self.now)
        self.before_read()
        return loaded(values)

    async def read(self) -> str:
        """Reads the settings; what is the trouble with them then."""
        self.reload.begin()
        await self.reload.idle()
        return self.troubles.what(PART)

    def sessions(self, name: str) -> int | None:
        tenant = self.cache.tenants.get(name)
        assert tenant is not None
        return tenant.quota.sessions


async def test_what_changes_while_settings_are_read_is_read_next(
    cache: TieredCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(cache, {"tenants.a.sessions": 1})
    reopened = []
    monkeypatch.setattr(house.audit, "reopen", lambda: reopened.append(1))
    reading, go_on = threading.Event(), threading.Event()
    house.before_read = lambda: reading.set() or go_on.wait(10)
    house.reload.begin()
    await until(reading.is_set)
    house.now["tenants.a.sessions"] = 2
    house.reload.begin()
    house.reload.begin()
    go_on.set()
    await house.reload.idle()
    assert house.sessions("a") == 2
    assert len(reopened) == 2, "two signals during one read are read for once"


async def test_guarantees_that_only_a_restart_can_keep_change_nothing(cache: TieredCache, tokens: Path) -> None:
    house = House(cache, {"tenants.a.sessions": 1, "server.tokens": str(tokens)})
    assert house.doors.tokens is not None
    await house.doors.tokens.load()
    house.now |= {"cpu.bytes": 8 * MIB, "tenants.a.sessions": 2, "tenants.b.cpu_guaranteed": 4 * MIB}
    tokens.write_text(f"other client {'b' * 32}\n")
    trouble = await house.read()
    assert f"guaranteed {4 * MIB} bytes of the cpu tier, which has {MIB}" in trouble
    assert "raise cpu.bytes and start the daemon again" in trouble and "that were read before stay in force" in trouble
    assert house.sessions("a") == 1 and cache.tenants.get("b") is None
    assert [token.name for token in house.doors.tokens.tokens] == ["engine"]
    house.now["tenants.b.cpu_guaranteed"] = MIB // 2
    assert not await house.read()
    assert house.sessions("a") == 2 and cache.tenants.get("b") is not None
    assert [token.name for token in house.doors.tokens.tokens] == ["other"]
    house.doors.tokens.close()


async def test_a_tenant_gets_another_codec_if_its_packages_are_there(
    cache: TieredCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[list[str]] = []

    def compile_all(work: WarmUp) -> None:
        assert codec_of(spec, cache.tenants, "exact") == "exact", "no block needs them yet"
        compiled.append(work.names)

    monkeypatch.setattr(WarmUp, "run", compile_all)
    house = House(cache, {})
    spec = NamespaceSpec("model", 16, (PartSpec("kv", 0, 64),), tenant="a")
    house.now = {"tenants.a.codec": "int8"}
    assert not await house.read() and codec_of(spec, cache.tenants, "exact") == "int8"
    assert compiled == [["lossless", "int8"]]
    house.now = {"tenants.a.sessions": 1}
    assert not await house.read() and codec_of(spec, cache.tenants, "exact") == "exact"
    house.now = {"tenants.a.codec": "lossless"}
    assert not await house.read() and codec_of(spec, cache.tenants, "exact") == "lossless"
    assert len(compiled) == 1, "they are compiled once"
    house.now = {"tenants.a.sessions": 1}
    assert not await house.read()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    house.now = {"tenants.a.codec": "k8v4", "tenants.a.sessions": 2}
    assert "tenants.a.codec = k8v4: the package zstandard is missing" in await house.read()
    assert codec_of(spec, cache.tenants, "exact") == "exact" and house.sessions("a") == 1


async def test_users_who_cannot_be_let_in_change_nothing(
    cache: TieredCache, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(cache, {"server.socket": str(sockets), "tenants.a.sessions": 1})
    house.now |= {"tenants.a.sessions": 2, "tenants.a.uids": "64001"}
    let_in: list[tuple[str, tuple[int, ...]]] = []

    def access(self: SocketAccess, path: Path) -> None:
        if self.uids and path != sockets:
            raise ConfigError("no access control list; use another directory")
        let_in.append((path.name, self.uids))

    monkeypatch.setattr(SocketAccess, "open", access)
    assert "no access control list" in await house.read()
    assert let_in == [("s", (64001,)), ("s", ()), ("s-memory", ())], "the first socket is closed to that user again"
    assert house.sessions("a") == 1 and not house.doors.access.uids
    assert house.doors.identities.of_user(64001, 1).tenant.name == "default"


async def test_the_mode_of_the_sockets_stays_with_the_users_that_change(cache: TieredCache, sockets: Path) -> None:
    house = House(cache, {"server.socket": str(sockets)})
    house.now["server.socket_mode"] = "0666"
    assert not await house.read()
    assert house.doors.identities.of_local("").role is Role.ADMIN, "nobody else can connect"
    house.now["tenants.a.uids"] = "64001"
    assert not await house.read()
    assert house.doors.access == SocketAccess(0o600, (64001,))
    assert [path.stat().st_mode & 0o007 for path in (sockets, sockets.with_name("s-memory"))] == [0, 0]


async def test_tokens_and_blocks_of_tenants_that_settings_do_not_name_are_told_of_once(
    cache: TieredCache, tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        caplog.clear()
        return [line for line in found if "only a restart" not in line]

    tokens.write_text(f"engine client {'a' * 32} acme\nother client {'b' * 32} acne\n")
    house = House(cache, {"tenants.acme.sessions": 1, "server.tokens": str(tokens)})
    file = house.doors.tokens
    assert file is not None
    await file.load()
    (line,) = warnings()
    assert "the token other is of tenant acne" in line and "add [tenants.acne]" in line
    assert not await house.read() and not warnings()
    shared, acme = cache.tiers.shared, cache.tenants.known("acme")
    slots = shared.allocate((4096,), 1, account=cache.mover.use.granted(acme, shared))
    house.now = {"tenants.b.sessions": 1, "server.tokens": str(tokens)}
    assert not await house.read()
    strange, removed = warnings()
    assert "tenant acme any more, which has 4096 bytes of the cpu tier" in removed
    assert "the token engine is of tenant acme" in strange
    assert not await house.read() and not warnings()
    tokens.write_text(f"engine client {'a' * 32} b\nthird client {'c' * 32} c\n")
    await file.reload_if_changed(house.troubles)
    (line,) = warnings()
    assert "the token third is of tenant c" in line
    shared.free(slots)
    file.close()


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.touch(mode=0o600)
    path.write_text(f"engine client {'a' * 32}\n")
    return path


@pytest.fixture
def sockets(tmp_path: Path) -> Path:
    """The path of a unix socket; beside it is that of the local door."""
    for name in ("s", "s-memory"):
        (tmp_path / name).touch(mode=0o600)
    return tmp_path / "s"
