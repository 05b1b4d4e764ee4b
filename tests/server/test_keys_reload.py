"""SIGHUP: keys that encrypt blocks on disk are replaced while the daemon serves, and none that is needed is lost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prefixd_swap.sealing.rest_keys import RestKey, RestKeys
from tests.rig import Rig
from tests.server.test_settings_reload import House

ONE, TWO = b"1" * 16, b"2" * 16
FIRST, SECOND = RestKey.derive(ONE), RestKey.derive(TWO)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig(tmp_path / "store", cpu=8, disk=16, keys=RestKeys()) as rig:
        yield rig


def write_keys(path: Path, *lines: bytes) -> None:
    path.write_bytes(b"\n".join(lines))
    path.chmod(0o600)


async def store(rig: Rig, prompt: list[int]) -> None:
    await rig.put(prompt)
    await rig.cache.write_back.flush()


async def test_keys_are_replaced_and_those_in_use_must_stay(rig: Rig, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    house = House(rig.cache, {})
    await store(rig, [1])
    write_keys(file, ONE)
    house.now = {"disk.encryption_key_file": file}
    assert not await house.read()
    await store(rig, [1, 2])
    assert rig.store is not None and rig.store.encryption().records == {0: 1, FIRST.id: 1}
    assert rig.store.encryption().namespaces == {FIRST.id: 1}, "what it stands for is encrypted at once"

    write_keys(file, TWO)
    assert f"encrypted with keys that no key file has ({FIRST.name})" in await house.read()
    await store(rig, [1, 2, 3])
    assert rig.store.encryption().records == {0: 1, FIRST.id: 2}, "the former keys stay in force"

    write_keys(file, TWO, ONE)
    assert not await house.read()
    await store(rig, [1, 2, 3, 4])
    assert rig.store.encryption().records == {0: 1, FIRST.id: 2, SECOND.id: 1}
    assert rig.store.encryption().namespaces == {SECOND.id: 1}
    rig.keys = RestKeys((SECOND, FIRST))
    await rig.restart()
    assert rig.restored == 4 and await rig.get([1, 2, 3, 4]) == 4


async def test_a_key_file_that_cannot_be_used_changes_nothing(rig: Rig, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    write_keys(file, b"short")
    house = House(rig.cache, {})
    house.now = {"tenants.default.encryption_key_file": file, "tenants.default.sessions": 3}
    assert "tenants.default.encryption_key_file" in await house.read()
    assert rig.durable.keys.empty and house.sessions("default") != 3
