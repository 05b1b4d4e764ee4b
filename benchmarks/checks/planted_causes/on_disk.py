"""Plants of four kinds on a daemon with a disk, which is started once for each kind."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from benchmarks.checks.planted_causes.plants import Plants, ask
from benchmarks.stand_ins.throttled import DiskRate, ThrottledDaemon
from benchmarks.storage.bit_flips import StoredBlocks
from prefixd.client import Client
from prefixd.v1 import admin_pb2, cache_pb2

_DISK_BYTES = 256 << 20
_SETTINGS: dict[str, object] = {
    "worker.embedded": True,
    "worker.threads": 1,
    "gpu.device": "cpu",
    "gpu.bytes": "64MiB",
    "cpu.bytes": "64MiB",
    "disk.bytes": _DISK_BYTES,
    "disk.scrub_bytes_per_s": 0,  # else the scrubber may find the damage before the request does
    "scheduler.load": "always",
}


def plant_on_disk(plants: Plants, each: int, latency_s: float) -> None:
    """Plants `each` causes of each kind. A read from the slow disk takes `latency_s`."""
    with tempfile.TemporaryDirectory(prefix="prefixd-why-") as folder:
        directory = Path(folder)
        never, slow, damaged = ([plants.prompt() for _ in range(each)] for _ in range(3))
        with _daemon(directory) as (_, client):
            _plant_loading(plants, client, each)
            for prompt in (*never, *slow, *damaged):
                ask(client, prompt)
        with _daemon(directory, {"scheduler.load": "never"}) as (_, client):
            ask(client, plants.prompt())  # waits for the model
            for prompt in never:
                plants.plant(client, client, "computing_faster", prompt, _was_on_disk)
        with _daemon(directory) as (daemon, client):
            ask(client, plants.prompt())
            daemon.throttle(DiskRate(latency_s=latency_s))
            for prompt in slow:
                plants.plant(client, client, "slow_load", prompt, _was_on_disk)
            daemon.throttle(DiskRate())
        _damage(directory / "data/blocks")
        with _daemon(directory) as (_, client):
            ask(client, plants.prompt())
            for prompt in damaged:
                plants.plant(client, client, "damaged", prompt, _was_on_disk)


@contextmanager
def _daemon(directory: Path, settings: dict[str, object] | None = None) -> Iterator[tuple[ThrottledDaemon, Client]]:
    with (
        ThrottledDaemon({**_SETTINGS, **(settings or {})}, directory=directory) as daemon,
        Client(daemon.address) as client,
    ):
        yield daemon, client


def _plant_loading(plants: Plants, client: Client, each: int) -> None:
    """Sends new prompts while the model of a daemon that has just started is loading, all at once."""
    identities = [plants.next_id() for _ in range(each)]
    prompts = [plants.prompt() for _ in identities]
    with ThreadPoolExecutor(each) as pool:
        list(pool.map(lambda prompt, identity: ask(client, prompt, identity), prompts, identities))
    for identity in identities:
        plants.judge(client, "model_loading", identity)


def _was_on_disk(info: admin_pb2.RequestInfo) -> bool:
    return [(found.tier, found.tokens) for found in info.found] == [(cache_pb2.TIER_DISK, 64)]


def _damage(blocks: Path) -> None:
    """Changes a byte of each block of a disk tier that no daemon has open."""
    for stored in StoredBlocks(blocks, _DISK_BYTES).blocks.values():
        place = stored.places[0]
        with place.file.open("r+b") as file:
            file.seek(place.offset + place.nbytes // 2)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
