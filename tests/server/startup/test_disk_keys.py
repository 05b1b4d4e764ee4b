"""Key files: what is refused at the start, and what a daemon with other keys than the blocks' says."""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from prefixd.base.errors import ConfigError
from prefixd.base.extras import MissingExtraError
from prefixd.server.access.disk_keys import read_disk_keys
from prefixd.server.startup.storage import open_store
from prefixd.settings import Settings
from prefixd_swap import NewBlock, SlabStore
from prefixd_swap.sealing.rest_keys import RestKey, RestKeys

ONE, TWO = b"1" * 16, b"2" * 16


def key_file(path: Path, *lines: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(b"\n".join(lines) + b"\n")
    path.chmod(mode)
    return path


def settings(folder: Path, **values: object) -> Settings:
    return Settings.load(None, {"data_dir": folder, "disk.bytes": "1MiB", **values}, {})


def test_no_key_file_is_no_key(tmp_path: Path) -> None:
    assert read_disk_keys(settings(tmp_path)).empty


def test_the_first_line_encrypts_and_a_tenants_file_comes_first(tmp_path: Path) -> None:
    files = {
        "disk.encryption_key_file": key_file(tmp_path / "all", TWO, ONE),
        "tenants.acme.encryption_key_file": key_file(tmp_path / "acme", ONE),
    }
    keys = read_disk_keys(settings(tmp_path, **files))
    assert keys.key_for("other") == RestKey.derive(TWO)
    assert keys.key_for("acme") == RestKey.derive(ONE)


@pytest.mark.parametrize("name", ["disk.encryption_key_file", "tenants.acme.encryption_key_file"])
def test_files_that_cannot_be_used_are_named(tmp_path: Path, name: str) -> None:
    for lines, mode, why in (
        ([ONE], 0o644, "must be the daemon's alone"),
        ([b"short"], 0o600, "has 5 bytes; it needs 16"),
        ([ONE, b"short"], 0o600, "line 2 has 5 bytes, and a key needs 16"),
        ([ONE, ONE], 0o600, "line 2 has the key of line 1 again"),
    ):
        file = key_file(tmp_path / "keys", *lines, mode=mode)
        with pytest.raises(ConfigError, match=why) as caught:
            read_disk_keys(settings(tmp_path, **{name: file}))
        assert str(caught.value).startswith(f"{name} = {file}") and "short" not in str(caught.value)
    with pytest.raises(ConfigError, match="No such file"):
        read_disk_keys(settings(tmp_path, **{name: tmp_path / "none"}))


def test_without_the_package_the_error_has_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    file = key_file(tmp_path / "keys", ONE)
    with pytest.raises(MissingExtraError, match=r"pip install 'prefixd\[encryption\]'"):
        read_disk_keys(settings(tmp_path, **{"disk.encryption_key_file": file}))


def test_common_blocks_need_a_key_for_all(tmp_path: Path) -> None:
    values = {"tenants.acme.encryption_key_file": key_file(tmp_path / "acme", ONE), "cache.share_after": 2}
    with pytest.raises(ConfigError, match=r"on disk in clear; set disk\.encryption_key_file"):
        settings(tmp_path, **values)
    settings(tmp_path, **values, **{"disk.encryption_key_file": key_file(tmp_path / "all", TWO)})


async def test_a_daemon_without_the_key_of_blocks_refuses_to_start(tmp_path: Path) -> None:
    key = RestKey.derive(ONE)
    (tmp_path / "blocks").mkdir(mode=0o700)
    store = SlabStore.open(tmp_path / "blocks", 1 << 20, keys=RestKeys((key,)))
    assert all(store.write([NewBlock(b"namespac", b"k" * 16, b"", b"toke", 0, [None], encryption=key)]))
    assert all(store.write([_with_bytes(key)]))
    store.close()
    for values in ({}, {"disk.encryption_key_file": key_file(tmp_path / "keys", TWO)}):
        async with AsyncExitStack() as stack:
            with pytest.raises(ConfigError, match=rf"{key.name}.*disk\.encryption_key_file"):
                open_store(settings(tmp_path, **values), None, stack)
    async with AsyncExitStack() as stack:
        files = {"disk.encryption_key_file": key_file(tmp_path / "keys", TWO, ONE)}
        opened = open_store(settings(tmp_path, **files), None, stack)
        assert opened is not None and opened.recovery.kept == 1, "the one with bytes"
        (record,) = opened.records()
        assert record.tokens == b"toke"


def _with_bytes(key: RestKey) -> NewBlock:
    from prefixd_swap.codecs.coded_part import CodedPart
    from prefixd_swap.sealing.sealed_objects import part_identity, seal

    stored = seal(np.zeros(100, np.uint8), key, part_identity(b"namespac", b"l" * 16, 0))
    part = CodedPart(stored, 1, key.id)
    return NewBlock(b"namespac", b"l" * 16, b"", b"toke", 0, [part], encryption=key)
