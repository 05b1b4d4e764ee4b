"""The disk tier as a client has it: through a daemon, over shared memory. And what a daemon with many blocks costs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common import harness
from benchmarks.common.process_footprint import status_bytes
from benchmarks.storage import slabs
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import AsyncCache, AsyncClient, NamespaceSpec, PartSpec, Tier
from prefixd_swap.slab.files.io import DiskIo

_IN_FLIGHT = 2
_CHAINS = 20  # prompts that the daemon with many blocks is asked for


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The blocks from `start` to `stop` of the benchmark's memory."""

    start: int
    stop: int

    @property
    def tokens(self) -> npt.NDArray[np.uint32]:
        return np.arange(self.start * slabs.TOKENS, self.stop * slabs.TOKENS, dtype=np.uint32)


class DaemonDisk:
    """A daemon whose CPU tier has room for the prompts in flight and no more, so that every load comes from disk.

    Prompts of a batch of blocks are stored durably, and acquired, two at a time: while one is copied, the other is on
    its way to or from the disk. The daemon treats its disk as it does by default, four calls at a time.

    Args:
        folder: its data directory, to be made.
        blocks: blocks a round.
        block_bytes: bytes of a block.
        batch: blocks of a prompt.
        io: the daemon's `disk.io`; its default if None.
    """

    def __init__(self, folder: Path, blocks: int, block_bytes: int, batch: int, io: DiskIo | None = None) -> None:
        if blocks % batch or blocks < (_IN_FLIGHT + 1) * batch:
            raise harness.BenchmarkError(
                f"of {blocks} blocks a round some would be loaded from memory: give a multiple of --batch {batch}, "
                f"at least {_IN_FLIGHT + 1} times as many"
            )
        self._prompts = [_Prompt(start, start + batch) for start in range(0, blocks, batch)]
        self._block_bytes = block_bytes
        self._promoted = 0
        self._compared = False
        self._slabs = folder / "blocks" / "slabs"
        folder.mkdir(mode=0o700)
        self._undo = ExitStack()
        self._daemon = self._undo.enter_context(
            DaemonProcess(
                {
                    "data_dir": folder,
                    "cpu.bytes": _IN_FLIGHT * batch * block_bytes,
                    "transfers.reserved_bytes": _IN_FLIGHT * batch * block_bytes,
                    "disk.bytes": 2 * blocks * block_bytes,
                    **({} if io is None else {"disk.io": io}),
                }
            )
        )
        try:
            self._runner = self._undo.enter_context(asyncio.Runner())
            self._client, self._cache = self._runner.run(self._connect())
        except BaseException:
            self._undo.close()
            raise

    def close(self) -> None:
        with self._undo:
            self._runner.run(self._client.close())

    def clear(self) -> None:
        self._runner.run(self._client.evict(namespace_id=self._cache.namespace_id))

    def store(self, source: slabs.Memory, batch: int) -> None:
        """Store all prompts, durably; `batch` is the daemon's."""

        async def store(prompt: _Prompt) -> None:
            result = await self._cache.store(prompt.tokens, self._bytes(source, prompt), durable=True)
            if result.committed != prompt.stop - prompt.start:
                raise harness.BenchmarkError(f"the daemon took {result.committed} blocks of {prompt}")

        self._runner.run(self._each(store))

    def load(self, target: slabs.Memory, order: Sequence[int]) -> None:
        """Bring all prompts from disk to the memory that the daemon shares; nothing is copied to `target`."""
        if list(order) != sorted(order):
            raise harness.BenchmarkError("a daemon loads prompts in the order of storing: the last are still in memory")

        async def load(prompt: _Prompt) -> None:
            async with await self._cache.acquire(prompt.tokens) as lease:
                if lease.blocks != prompt.stop - prompt.start:
                    raise harness.BenchmarkError(f"the daemon has {lease.blocks} blocks of {prompt}")

        self._runner.run(self._each(load))

    def verify(self, source: slabs.Memory, target: slabs.Memory) -> None:
        """All blocks must have come from disk; the first time, they are loaded into `target` and compared."""
        loaded = self._promoted_blocks() - self._promoted
        if loaded != self._prompts[-1].stop:
            raise harness.BenchmarkError(f"{loaded} of {self._prompts[-1].stop} blocks came from disk")

        async def fetch(prompt: _Prompt) -> None:
            await self._cache.load(prompt.tokens, self._bytes(target, prompt))

        if not self._compared:
            self._runner.run(self._each(fetch))
            target.must_equal(source)
            self._compared = True
        self._promoted = self._promoted_blocks()

    def files(self) -> Iterable[Path]:
        return self._slabs.iterdir()

    async def _connect(self) -> tuple[AsyncClient, AsyncCache]:
        client = AsyncClient(self._daemon.address, name="benchmark disk", memory="shared")
        return client, await client.register(_spec("benchmark-disk", self._block_bytes))

    async def _each(self, work: Callable[[_Prompt], Awaitable[None]]) -> None:
        """All prompts in order, so many at a time."""
        turn = asyncio.Semaphore(_IN_FLIGHT)

        async def one(prompt: _Prompt) -> None:
            async with turn:
                await work(prompt)

        async with asyncio.TaskGroup() as group:
            for prompt in self._prompts:
                group.create_task(one(prompt))

    def _promoted_blocks(self) -> int:
        """Blocks that were brought up from disk so far."""
        return sum(tier.promoted_blocks for tier in self._runner.run(self._client.stats()).tiers)

    def _bytes(self, memory: slabs.Memory, prompt: _Prompt) -> npt.NDArray[np.uint8]:
        return memory.bytes[prompt.start * self._block_bytes : prompt.stop * self._block_bytes]


def reopen(folder: Path, blocks: int) -> dict[str, Any]:
    """What a daemon without a model costs on the store that `slabs.fill` has made, and that it serves its blocks."""
    index_alone = {"disk.bytes": blocks * slabs.SLOT_BYTES, "cpu.populate": False}  # no memory for blocks' bytes
    with DaemonProcess(index_alone) as daemon:
        empty_bytes = status_bytes(daemon.pid)["VmRSS"]
    begin = time.perf_counter()
    with DaemonProcess({"data_dir": folder, **index_alone}) as daemon:
        start_s = time.perf_counter() - begin
        asyncio.run(_ask(daemon.address, blocks))
        memory = status_bytes(daemon.pid)
        resident = memory["VmRSS"]
        return {
            "start_s": round(start_s, 3),
            "reopen_s": round(daemon.opening_s, 3),
            "bytes_per_block": round(resident / blocks, 1),
            # The kernel counts pages a thread at a time and late: its peak can be a little below what is there now.
            "peak_bytes_per_block": round(max(resident, memory["VmHWM"]) / blocks, 1),
            "empty_daemon_bytes": empty_bytes,
        }


async def _ask(address: str, blocks: int) -> None:
    """The daemon must have all blocks, find whole prompts, and load what it finds."""
    async with AsyncClient(address, name="benchmark disk", memory="shared") as client:
        stats = await client.stats()
        on_disk = stats.tiers[-1].blocks
        if on_disk != blocks:
            raise harness.BenchmarkError(f"{on_disk} of {blocks} blocks came back")
        cache = await client.register(_spec(slabs.SPEC.name, slabs.SLOT_BYTES))
        for chain in range(0, -(-blocks // slabs.CHAIN), max(1, blocks // slabs.CHAIN // _CHAINS)):
            tokens = np.frombuffer(slabs.prompt(chain), np.uint32)
            expected = min(slabs.CHAIN, blocks - chain * slabs.CHAIN)
            found = await cache.match(tokens)
            if found.blocks_in(Tier.DISK) != expected:
                raise harness.BenchmarkError(f"prompt {chain} has {expected} blocks on disk, of which {found} matched")
        into = np.ones(expected * slabs.SLOT_BYTES, np.uint8)
        if await cache.load(tokens, into, max_blocks=expected) != expected or into.any():
            raise harness.BenchmarkError("the blocks loaded are not the blocks stored")


def _spec(name: str, block_bytes: int) -> NamespaceSpec:
    return NamespaceSpec(name, slabs.TOKENS, (PartSpec("full", 0, block_bytes),))
