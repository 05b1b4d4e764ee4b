"""SIGHUP: what is read when, and what changes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from prefixd.cache import TieredCache, Troubles
from prefixd.server.audit import AuditLog
from prefixd.server.listeners import Listeners
from prefixd.server.settings_reload import PART, SettingsReload
from prefixd.server.tickets import Tickets
from prefixd.settings import Settings

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
        self.troubles = Troubles(time.monotonic)
        self.doors = Listeners(settings, cache.tenants, Tickets(time.time), self.audit)
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
    await _until(reading.is_set)
    house.now["tenants.a.sessions"] = 2
    house.reload.begin()
    house.reload.begin()
    go_on.set()
    await house.reload.idle()
    assert house.sessions("a") == 2
    assert len(reopened) == 2, "two signals during one read are read for once"


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)
