"""What the log says at the start, and that a port that is open to all is warned of."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixd.server.startup.start_log import start_lines, why_public, why_small_disk
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
