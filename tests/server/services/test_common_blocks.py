"""Tenants of a live daemon whose blocks become common (`cache.share_after`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixd.base.errors import ConfigError
from prefixd.base.tenancy.tenants import COMMON
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client, Finished, NamespaceSpec, PartSpec, Sampling, StoreResult, Tokens
from prefixd.settings import Settings
from prefixd.v1 import admin_pb2, cache_pb2
from tests.daemons import Remote

TENANTS = ("alice", "bob", "carol", "dave")
PROMPT = [(7 * at) % 200 for at in range(100)]  # 6 blocks and 4 tokens
SPEC = NamespaceSpec("model", 4, (PartSpec("full", 0, 128),))


@pytest.fixture
def house(tmp_path: Path, with_model: dict[str, Any]) -> Iterator[House]:
    tokens = tmp_path / "tokens"
    tokens.write_text("".join(f"{tenant} client {_token(tenant)} {tenant}\n" for tenant in TENANTS))
    tokens.chmod(0o600)
    settings = {
        **with_model,
        "cache.share_after": 3,
        "server.tcp": "127.0.0.1:0",
        "server.insecure_tcp": True,
        "server.tokens": str(tokens),
    }
    with DaemonProcess(settings, directory=tmp_path / "d") as daemon:
        yield House(daemon)


def _token(tenant: str) -> str:
    return f"{tenant}-" + tenant[0] * 32


class House:
    """A daemon under test."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon

    @contextmanager
    def client(self, tenant: str) -> Iterator[Client]:
        assert self.daemon.tcp is not None
        with Client(self.daemon.tcp, token=_token(tenant)) as client:
            yield client

    def ask(self, tenant: str) -> tuple[list[int], int]:
        """The answer to the prompt, and how many tokens of it were found."""
        with self.client(tenant) as client:
            events = list(client.generate(PROMPT, sampling=Sampling(max_tokens=8, ignore_eos=True), timeout_s=60))
        tokens = [token for event in events if isinstance(event, Tokens) for token in event.token_ids]
        last = events[-1]
        assert isinstance(last, Finished)
        return tokens, sum(last.hit_tokens.values())

    def until_common(self) -> None:
        """Waits until all blocks that three tenants have are common, too, and on disk: they are in the trie before."""

        def on_disk(stats: admin_pb2.StatsResponse) -> bool:
            used = {(tenant.name, tier.tier): tier.used_bytes for tenant in stats.tenants for tier in tenant.tiers}
            return used.get((COMMON, cache_pb2.TIER_DISK), 0) == max(used.values()) > 0

        with Remote(self.daemon) as remote:
            remote.until(on_disk)


@pytest.mark.slow
def test_a_tenant_finds_what_three_others_have_computed(house: House) -> None:
    (first, none), *others = [house.ask(tenant) for tenant in TENANTS[:3]]
    assert none == 0 and others == [(first, 0)] * 2
    house.until_common()
    assert house.ask("dave") == (first, 96)
    house.daemon.stop()
    house.daemon.start()
    assert house.ask("dave") == (first, 96)


@pytest.mark.slow
def test_engines_find_what_three_others_have_stored(house: House) -> None:
    tokens, data = list(range(20)), np.arange(5 * 128, dtype=np.uint32).astype(np.uint8)
    with house.client("dave") as dave:
        cache = dave.register(SPEC)
        for tenant in TENANTS[:3]:
            assert cache.match(tokens).blocks == 0
            with house.client(tenant) as client:
                theirs = client.register(SPEC)
                assert theirs.namespace_id != cache.namespace_id
                assert theirs.store(tokens, data) == StoreResult(committed=5, duplicates=0)
        house.until_common()
        assert cache.match(tokens).blocks == 5
        read = np.zeros_like(data)
        cache.load(tokens, read)
        assert (read == data).all()


def test_blocks_become_common_in_the_cpu_tier() -> None:
    with pytest.raises(ConfigError, match=r"cache\.share_after = 2, but blocks become common in the CPU tier"):
        Settings.load(overrides={"cache.share_after": 2, "cpu.bytes": 0}, environ={})
