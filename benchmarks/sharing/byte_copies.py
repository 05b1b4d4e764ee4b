"""How often a block's bytes are copied on their way between a host's memory and Valkey.

A copy is one pass in which the host's CPUs move a block's bytes to another place in memory: between the process and the
kernel's socket buffers, once each way, which no client can avoid; and whatever the process adds to that, which the
daemon counts itself (`RemoteStats.copied_bytes`). Passes that only read them (authentication, checksums) are none, and
what an engine's client copies to or from the daemon's memory is not the store's.

The daemon's count is checked from outside: a client that kept copies would allocate memory for them
(`peak_allocated_share`), and one that made them would take the CPU's time beyond what a plain socket takes
(`one_copy_cpu_s_per_gb` is what a copy costs here).
"""

from __future__ import annotations

import asyncio
import socket
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import harness
from benchmarks.sharing.hosts import Secrets, cache_host, remote_stats, sharing, wait_until_shared
from benchmarks.sharing.valkey_server import ValkeyServer, valkey_objects
from benchmarks.stand_ins.slow_link import SlowLink
from prefixd.client import Client, NamespaceSpec, PartSpec
from prefixd_swap.stores import ObjectStore, Read, Write, open_store
from prefixd_swap.stores.base import NAME_BYTES
from prefixd_swap.stores.valkey.valkey_store import ValkeyOptions, command

MOST_COPIES = 2.0
_BLOCK_BYTES = 4 << 20
_BLOCK_TOKENS = 16
_PROMPT_BLOCKS = 8
_DEADLINE_S = 120.0
_SLOW_BYTES_PER_S = 125e6  # the sockets fill up, and what they do not take at once has to be kept
_SLICE_BYTES = 256 << 10


def measure(nbytes: int, folder: Path) -> dict[str, Any]:
    """Host A writes `nbytes`, host B reads them; then the store's client alone does, and a plain socket beside it."""
    prompts = max(1, nbytes // (_PROMPT_BLOCKS * _BLOCK_BYTES))
    blocks = prompts * _PROMPT_BLOCKS
    result: dict[str, Any] = {"bytes": blocks * _BLOCK_BYTES}
    with ValkeyServer(folder / "valkey") as valkey:
        secrets = Secrets(folder)
        result |= _of_hosts("", valkey.port, secrets, prompts)
        with valkey_objects(valkey.port) as objects:
            objects.delete_all()
        with SlowLink("127.0.0.1", valkey.port, bytes_per_s=_SLOW_BYTES_PER_S) as link:
            result |= _of_hosts("slow_", link.port, secrets, prompts)
        result |= asyncio.run(_client_alone(valkey.port, blocks))
    result["bytes_copied_per_byte"] = max(
        value for name, value in result.items() if name.endswith("bytes_copied_per_byte")
    )
    return result


def _of_hosts(link: str, port: int, secrets: Secrets, prompts: int) -> dict[str, float]:
    """Returns the copies that a writing and a reading host count; the names of the results begin with `link`."""
    found, blocks, settings = {}, prompts * _PROMPT_BLOCKS, sharing(port, secrets)
    for way in ("write", "read"):
        with cache_host((blocks + 16) * _BLOCK_BYTES, settings) as host, Client(host.address) as client:
            _move(way, client, prompts)
            if way == "write":
                wait_until_shared(client, blocks)
            stats = remote_stats(client)
        moved = stats.written_bytes if way == "write" else stats.read_bytes
        if moved != blocks * _BLOCK_BYTES:
            raise harness.BenchmarkError(f"{moved} bytes went to the store or came, not {blocks * _BLOCK_BYTES}")
        in_process = stats.copied_bytes / moved
        found[f"{link}{way}_copies_in_process_per_byte"] = round(in_process, 4)
        found[f"{link}{way}_bytes_copied_per_byte"] = round(1 + in_process, 4)
    return found


def _move(way: str, client: Client, prompts: int) -> None:
    cache = client.register(NamespaceSpec("copies", _BLOCK_TOKENS, (PartSpec("full", 0, _BLOCK_BYTES),)))
    data = np.random.default_rng(0).integers(0, 256, _PROMPT_BLOCKS * _BLOCK_BYTES, np.uint8)
    got = np.empty_like(data)
    for number in range(prompts):
        tokens = np.arange(_PROMPT_BLOCKS * _BLOCK_TOKENS, dtype=np.uint32) + np.uint32(number << 16)
        if way == "write":
            cache.store(tokens, data)
        elif cache.load(tokens, got) != _PROMPT_BLOCKS or not np.array_equal(got, data):
            raise harness.BenchmarkError("the second host did not find what the first one has shared")


async def _client_alone(port: int, blocks: int) -> dict[str, float]:
    """CPU seconds a GB and memory allocated a byte of the store's client, without a daemon."""
    nbytes = blocks * _BLOCK_BYTES
    data = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
    views = [data[at : at + _BLOCK_BYTES].data for at in range(0, nbytes, _BLOCK_BYTES)]
    names = [b"%032d" % number for number in range(blocks)]
    assert len(names[0]) == NAME_BYTES
    writes = [Write(name, (view,)) for name, view in zip(names, views, strict=True)]
    reads = [Read(name, (view,)) for name, view in zip(names, views, strict=True)]
    store = open_store(ValkeyOptions(port=port))
    try:
        put, got = _put(store, writes), _get(store, reads)
        found = {"write_cpu_s_per_gb": await _cpu_s(put, nbytes), "read_cpu_s_per_gb": await _cpu_s(got, nbytes)}
        for way, call in (("write", put), ("read", got)):
            tracemalloc.start()
            await call()
            found[f"{way}_peak_allocated_share"] = round(tracemalloc.get_traced_memory()[1] / nbytes, 4)
            tracemalloc.stop()
    finally:
        await store.close()
    key = [ValkeyOptions().prefix + name for name in names]
    found["write_plain_socket_cpu_s_per_gb"] = await _cpu_s(lambda: asyncio.to_thread(_send, port, key, views), nbytes)
    found["read_plain_socket_cpu_s_per_gb"] = await _cpu_s(
        lambda: asyncio.to_thread(_receive, port, key, views), nbytes
    )
    other = np.empty_like(data)
    other[:] = 0  # its pages exist before it is timed

    async def copy() -> None:
        np.copyto(other, data)

    found["one_copy_cpu_s_per_gb"] = await _cpu_s(copy, nbytes)
    return found


def _put(store: ObjectStore, writes: list[Write]) -> Callable[[], Awaitable[object]]:
    return lambda: store.put(writes, 0, _DEADLINE_S)


def _get(store: ObjectStore, reads: list[Read]) -> Callable[[], Awaitable[object]]:
    return lambda: store.get(reads, _DEADLINE_S)


async def _cpu_s(call: Callable[[], Awaitable[object]], nbytes: int) -> float:
    took = []
    for _ in range(3):
        began_s = time.process_time()
        await call()
        took.append(time.process_time() - began_s)
    return round(min(took) / nbytes * 1e9, 4)


def _send(port: int, keys: list[bytes], views: list[memoryview]) -> None:
    with socket.create_connection(("127.0.0.1", port)) as link:
        for key, view in zip(keys, views, strict=True):
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(view))
            link.sendall(head)
            for at in range(0, len(view), _SLICE_BYTES):
                link.sendall(view[at : at + _SLICE_BYTES])
            link.sendall(b"\r\n")
            _receive_into(link, memoryview(bytearray(5)))


def _receive(port: int, keys: list[bytes], views: list[memoryview]) -> None:
    with socket.create_connection(("127.0.0.1", port)) as link:
        for key, view in zip(keys, views, strict=True):
            link.sendall(command(b"GET", key))
            _receive_into(link, memoryview(bytearray(len(b"$%d\r\n" % len(view)))))
            _receive_into(link, view)
            _receive_into(link, memoryview(bytearray(2)))


def _receive_into(link: socket.socket, view: memoryview) -> None:
    while len(view):
        count = link.recv_into(view)
        if not count:
            raise harness.BenchmarkError("the Valkey server closed the connection")
        view = view[count:]


violations = partial(harness.missed, most={"bytes_copied_per_byte": MOST_COPIES})
"""Returns the bounds that a result misses, in words."""
