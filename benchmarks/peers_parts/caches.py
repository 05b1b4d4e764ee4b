"""What vLLM is run with: nothing below its own prefix cache, prefixd, LMCache's server, or vLLM's own offloading."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from benchmarks.engines.vllm_engine import connector
from benchmarks.peers_parts.lmcache_server import LMCacheServer
from prefixd.base.extras import MissingExtraError, require
from prefixd.cli.demo.daemon_process import DaemonProcess

Config = Mapping[str, Any] | None
"""vLLM's `kv_transfer_config`; None for vLLM alone."""

_CLIENT = ("google", "grpc", "numpy", "typer", "xxhash")
ALONE, PREFIXD, LMCACHE, OFFLOADING = "vllm", "prefixd", "lmcache", "offloading"

LABELS = {
    ALONE: "vLLM alone",
    PREFIXD: "vLLM with prefixd",
    LMCACHE: "vLLM with LMCache",
    OFFLOADING: "vLLM with its own offloading",
}


@dataclass(frozen=True, slots=True)
class Room:
    """What every cache below vLLM gets."""

    memory_bytes: int
    """Of host memory; less than all chats need, so that some of them are on disk alone."""
    lmcache_chunk_tokens: int
    block_tokens: int
    """Of vLLM."""


class Caches:
    """The caches by name. Opening one starts it empty; it outlives restarts of the engine and ends with the context."""

    def __init__(self, room: Room, connector_options: Mapping[str, object]) -> None:
        self._room = room
        self._connector_options = dict(connector_options)

    def open(self, name: str) -> AbstractContextManager[Config]:
        """A context manager: what to start the engine with. Raises DaemonFailed and LMCacheFailed."""
        openers: Mapping[str, Callable[[], AbstractContextManager[Config]]] = {
            ALONE: self._alone,
            PREFIXD: self._prefixd,
            LMCACHE: self._lmcache,
            OFFLOADING: self._offloading,
        }
        return openers[name]()

    @contextmanager
    def _alone(self) -> Iterator[Config]:
        yield None

    @contextmanager
    def _prefixd(self) -> Iterator[Config]:
        disk_bytes = max(4 << 30, 4 * self._room.memory_bytes)
        settings = {"cpu.bytes": self._room.memory_bytes, "disk.bytes": disk_bytes, "cpu.populate": True}
        with DaemonProcess(settings) as daemon:
            yield connector(daemon.address, **self._connector_options)

    @contextmanager
    def _lmcache(self) -> Iterator[Config]:
        with LMCacheServer(self._room.memory_bytes, self._room.lmcache_chunk_tokens) as server:
            yield server.kv_transfer()

    @contextmanager
    def _offloading(self) -> Iterator[Config]:
        """For GPUs: vLLM refuses it on a CPU. Its host memory goes with the engine, its files stay."""
        with tempfile.TemporaryDirectory(prefix="vllm-files-") as directory:
            yield {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "spec_name": "TieringOffloadingSpec",
                    "cpu_bytes_to_use": self._room.memory_bytes,
                    "block_size": 2 * self._room.block_tokens,
                    "secondary_tiers": [{"type": "fs", "root_dir": directory}],
                },
            }


def names_here() -> list[str]:
    """The caches that run here: LMCache where it is installed, vLLM's own offloading where torch sees a GPU."""
    further = ((LMCACHE, find_spec("lmcache") is not None), (OFFLOADING, has_gpu()))
    return [ALONE, PREFIXD, *(name for name, runs in further if runs)]


def why_no_prefixd() -> str | None:
    """Why neither a daemon nor the connector runs in this Python; None if their packages are there."""
    try:
        for extra in ("daemon", "vllm"):
            require(extra, "a daemon beside vLLM")
    except MissingExtraError as error:
        return str(error)
    missing = [module for module in _CLIENT if find_spec(module) is None]
    return f"prefixd's client lacks {' and '.join(missing)}; pip install prefixd" if missing else None


def has_gpu() -> bool:
    """Asks torch."""
    import torch

    return torch.cuda.is_available()
