"""A mooncake_master, and a process that gives memory to its store."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from prefixd_swap.stores import MooncakeOptions
from tests.remote.processes import Process, free_port, listens

_GIVER = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 1 << 20, "tcp", "", sys.argv[1])
print("ready" if code == 0 else f"error {code}", flush=True)
time.sleep(3600)
"""


@dataclass
class MooncakeServer:
    """A master that runs, and the process that has the objects."""

    port: int
    folder: Path
    master: Process
    giver: Process

    def options(self, **more: object) -> MooncakeOptions:
        """How to reach it."""
        return MooncakeOptions(master=f"127.0.0.1:{self.port}", **more)  # type: ignore[arg-type]


def mooncake_folder() -> Path:
    """Where the package is; skips the test where its client cannot be loaded."""
    found = importlib.util.find_spec("mooncake")
    if found is None or found.origin is None:
        pytest.skip("mooncake-transfer-engine-non-cuda is not installed: pip install 'prefixd[mooncake]'")
    os.environ.setdefault("MC_RPC_TIMEOUT_MS", "10000")  # long after the deadlines of calls to a master that is frozen
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        pytest.skip(
            f"Mooncake's client cannot be loaded ({error}); see stores/mooncake/mooncake_store.py for the remedy"
        )
    return Path(found.origin).parent


def start_master(folder: Path, port: int) -> Process:
    """A master that forgets nobody who is silent for some seconds, since tests freeze it."""
    program = str(mooncake_folder() / "mooncake_master")
    words = [program, "-rpc_address", "127.0.0.1", "-rpc_port", str(port), "-metrics_port", str(free_port())]
    master = Process([*words, "-client_ttl", "60"], folder / "log")
    master.wait_until(lambda: listens(port))
    return master


@contextmanager
def mooncake_server(folder: Path, segment_bytes: int = 256 << 20) -> Iterator[MooncakeServer]:
    """A master, and a process that gives so much memory."""
    folder.mkdir(exist_ok=True)
    port = free_port()
    master = start_master(folder, port)
    output = folder / "giver"
    giver = Process([sys.executable, "-c", _GIVER, f"127.0.0.1:{port}", str(segment_bytes)], output)
    server = MooncakeServer(port, folder, master, giver)
    try:
        giver.wait_until(lambda: "ready" in output.read_text())
        time.sleep(0.05)
        yield server
    finally:
        giver.end()
        server.master.end()
