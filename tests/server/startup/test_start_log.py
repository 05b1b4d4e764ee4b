"""What the log says at the start, and that a port that is open to all is warned of."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from prefixd.server.access.disk_keys import read_disk_keys
from prefixd.server.startup.start_log import start_lines, why_public, why_small_disk
from prefixd.server.startup.storage import open_store
from prefixd.settings import Settings


def test_sizes_paths_and_choices_are_said_and_no_secret(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("c0ffee" * 8)
    settings = Settings.load(
        None,
        {
            "data_dir": tmp_path,
            "cpu.bytes": "1GiB",
            "cache.eviction": "weighing",
            "scheduler.policy": "lpm",
            "remote.url": "redis://10.0.0.7:6379",
            "remote.secret_file": secret,
            "worker.embedded": True,
            "gpu.bytes": "2GiB",
        },
    )
    said = "\n".join(start_lines(settings, "cuda:0", None, {"llama": Path("/models/llama")}))
    for words in (
        "prefixd 0.1.0",
        f"data directory: {tmp_path}",
        "gpu tier: 2.0 GiB on cuda:0",
        "cpu tier: 1.0 GiB",
        "no disk tier",
        "shared store: valkey://10.0.0.7:6379",
        "eviction weighing, queue lpm",
        "model llama: /models/llama on cuda:0",
        "listens at unix:",
    ):
        assert words in said
    assert "c0ffee" not in said


async def test_codecs_and_keys_at_rest_are_said_by_setting(tmp_path: Path) -> None:
    names = {"disk.encryption_key_file": "all", "tenants.acme.encryption_key_file": "acme"}
    for name in names.values():
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_text(f"{name} " * 8)
    chosen = {"data_dir": tmp_path, "disk.bytes": "8MiB", "cpu.bytes": "1MiB"}
    coded = {"disk.codec": "lossless", "disk.codec_error": 0.01, "tenants.acme.codec": "int8"}

    async def lines(settings: Settings) -> list[str]:
        async with AsyncExitStack() as stack:
            return list(start_lines(settings, "cpu", open_store(settings, None, stack), {}))

    said = await lines(Settings.load(None, chosen, {}))
    assert "codecs: disk.codec = exact" in said
    assert "encryption at rest: none, blocks are written in clear" in said
    settings = Settings.load(None, chosen | coded | {name: tmp_path / file for name, file in names.items()}, {})
    shared, own = (read_disk_keys(settings).key_for(tenant) for tenant in ("default", "acme"))
    assert shared is not None and own is not None
    said = await lines(settings)
    assert "codecs: disk.codec = lossless, disk.codec_error = 0.01, tenants.acme.codec = int8" in said
    assert (
        f"encryption at rest: disk.encryption_key_file = {tmp_path}/all (key {shared.name}), "
        f"tenants.acme.encryption_key_file = {tmp_path}/acme (key {own.name})" in said
    )


@pytest.mark.parametrize(
    ("server", "public"),
    [
        ({}, False),
        ({"tcp": "0.0.0.0:7070", "insecure_tcp": True}, True),
        ({"tcp": "[::]:7070", "insecure_tcp": True}, True),
        ({"tcp": "host.example:7070", "tls_cert": "/c", "tls_key": "/k"}, True),
        ({"tcp": "127.0.0.1:7070", "insecure_tcp": True}, False),
        ({"tcp": "[::1]:7070", "insecure_tcp": True}, False),
        ({"tcp": "localhost:7070", "insecure_tcp": True}, False),
        ({"tcp": "0.0.0.0:7070", "insecure_tcp": True, "tokens": "/t"}, False),
        ({"tcp": "0.0.0.0:7070", "tls_cert": "/c", "tls_key": "/k", "tls_client_ca": "/a"}, False),
    ],
)
def test_a_port_that_is_open_to_all_is_warned_of(server: dict[str, object], public: bool) -> None:
    settings = Settings.load(None, {f"server.{name}": value for name, value in server.items()})
    assert ("server.tokens" in why_public(settings)) is public


@pytest.mark.parametrize(
    ("redis", "valkey"), [("redis://h:6379/2", "valkey://h:6379/2"), ("rediss://h", "valkeys://h")]
)
def test_redis_is_another_name_of_valkey(redis: str, valkey: str, tmp_path: Path) -> None:
    overrides = {"remote.url": redis, "remote.secret_file": tmp_path / "s"}
    assert Settings.load(None, overrides).remote.url == valkey


@pytest.mark.parametrize(("disk", "small"), [("0", False), ("1GiB", True), ("2GiB", False)])
def test_a_disk_tier_smaller_than_the_cpu_tier_is_warned_of(disk: str, small: bool) -> None:
    why = why_small_disk(Settings.load(None, {"cpu.bytes": "2GiB", "disk.bytes": disk}))
    assert ("disk.bytes = 1.0 GiB is less than cpu.bytes = 2.0 GiB" in why) is small
