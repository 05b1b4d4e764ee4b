"""Background work that keeps a daemon's disk busy, from a process of its own: new blocks, which are written back, and
prefetches of blocks that are on disk only.

`python -m benchmarks.load.disk_traffic ADDRESS PLAN`: each line on its standard input is answered with one line of
JSON, the `Traffic` so far. It ends with its input. `DiskTraffic` starts it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from itertools import count

import numpy as np

from benchmarks.common.block_bytes import BlockBytes, Tokens
from benchmarks.load.companion import Companion, order_lines
from prefixd.client import AsyncCache, AsyncClient, AsyncLease, ExhaustedError, NamespaceSpec, PartSpec, Tier

BLOCK_TOKENS = 16
TIMEOUT_S = 600.0
_LOOK_S = 0.05  # between two checks of the prefetching client
_LOST_S = 30.0  # a prefetch without progress for this long counts as lost
_AGAIN_S = 0.1  # after a call that the daemon refused for want of room


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of one length in a namespace of their own. No two of their blocks have the same tokens."""

    name: str
    blocks: int
    """Of each prompt."""
    block_bytes: int

    @property
    def spec(self) -> NamespaceSpec:
        return NamespaceSpec(self.name, BLOCK_TOKENS, (PartSpec("full", 0, self.block_bytes),))

    def tokens(self, prompt: int) -> Tokens:
        """[blocks * BLOCK_TOKENS] token ids of a prompt."""
        first = prompt * self.blocks * BLOCK_TOKENS
        return np.arange(first, first + self.blocks * BLOCK_TOKENS, dtype=np.uint32)

    def content(self, prompt: int) -> BlockBytes:
        return BlockBytes(self.spec, self.tokens(prompt))

    async def store(self, blocks: AsyncCache, prompt: int, *, durable: bool = False) -> int:
        """Stores a prompt; returns the number of new blocks. Raises ExhaustedError: there is no room for a block."""
        content = self.content(prompt)
        return (await blocks.store(content.tokens, content.content(), durable=durable)).committed

    def wrong_bytes(self, lease: AsyncLease, prompt: int) -> int:
        """Returns the number of wrong bytes in the leased blocks of a prompt, from its first block on."""
        content = self.content(prompt)
        return sum(content.wrong_in(lease, block) for block in range(lease.blocks))


@dataclass(frozen=True, slots=True)
class TrafficPlan:
    """The prompts that two clients prefetch and write."""

    prefetched: Prompts
    pool: int
    """Number of prompts that are prefetched in turn; together they are larger than the CPU tier."""
    under_way: int
    """Number of prefetches under way at a time."""
    written: Prompts
    written_bytes_per_s: float
    """At most; the daemon may let the writer wait longer."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TrafficPlan:
        plain = json.loads(text)
        return cls(**(plain | {name: Prompts(**plain[name]) for name in ("prefetched", "written")}))


@dataclass(slots=True)
class Traffic:
    """Counts of the two clients so far."""

    prefetched_blocks: int = 0
    """Blocks that prefetches were asked to bring from disk and that have come."""
    waiting_blocks: int = 0
    """Blocks of prefetches under way that have not come."""
    prefetched: list[int] = field(default_factory=list)
    """Prompts whose prefetch has ended, in this order."""
    lost: int = 0
    """Prefetches that were given up after 30 s without progress."""
    refused: int = 0
    """Prefetches that the daemon refused for now."""
    written_blocks: int = 0
    written: list[int] = field(default_factory=list)
    """Prompts that were written, in this order."""


class DiskTraffic(Companion):
    """Starts and controls the process; used in the harness."""

    def __init__(self, address: str, plan: TrafficPlan) -> None:
        super().__init__("benchmarks.load.disk_traffic", address, plan.to_json())

    def look(self) -> Traffic:
        """Returns the counts so far. Waits until the process is ready. Raises BenchmarkError: the process has ended."""
        self.tell()
        return Traffic(**self.answer())


@dataclass(slots=True)
class _UnderWay:
    """A prefetch, as its client sees it."""

    prompt: int
    on_disk: int
    """Blocks of it that are on disk only, when looked at last."""
    changed_s: float
    """When that number changed last."""


async def _prefetch(blocks: AsyncCache, plan: TrafficPlan, traffic: Traffic) -> None:
    """Prefetches one prompt after the other, `under_way` at a time."""
    prompts, turn = plan.prefetched, 0
    under_way: list[_UnderWay] = []
    while True:
        while len(under_way) < plan.under_way:
            try:
                asked = await blocks.prefetch(prompts.tokens(turn % plan.pool))
            except ExhaustedError:
                traffic.refused += 1
                break
            under_way.append(_UnderWay(turn % plan.pool, asked, time.monotonic()))
            turn += 1
        await asyncio.sleep(_LOOK_S)
        for each in list(under_way):
            left = (await blocks.match(prompts.tokens(each.prompt))).blocks_in(Tier.DISK)
            if left < each.on_disk:
                traffic.prefetched_blocks += each.on_disk - left
                each.on_disk, each.changed_s = left, time.monotonic()
            if not left:
                traffic.prefetched.append(each.prompt)
                under_way.remove(each)
            elif time.monotonic() - each.changed_s > _LOST_S:
                traffic.lost += 1
                under_way.remove(each)
        traffic.waiting_blocks = sum(each.on_disk for each in under_way)


async def _write(blocks: AsyncCache, plan: TrafficPlan, traffic: Traffic) -> None:
    """Stores one new prompt after the other, at the plan's rate."""
    prompts = plan.written
    every_s = prompts.blocks * prompts.block_bytes / plan.written_bytes_per_s
    due_s = time.monotonic()
    for prompt in count():
        try:
            traffic.written_blocks += await prompts.store(blocks, prompt)
            traffic.written.append(prompt)
        except ExhaustedError:  # what holds the room is being read or written
            await asyncio.sleep(_AGAIN_S)
        due_s = max(due_s + every_s, time.monotonic() - every_s)
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))


async def _serve(address: str, plan: TrafficPlan) -> None:
    orders = await order_lines()
    traffic = Traffic()
    async with (
        AsyncClient(address, name="prefetches", timeout_s=TIMEOUT_S) as prefetches,
        AsyncClient(address, name="writes", timeout_s=TIMEOUT_S) as writes,
        asyncio.TaskGroup() as group,
    ):
        work = [
            group.create_task(_prefetch(await prefetches.register(plan.prefetched.spec), plan, traffic)),
            group.create_task(_write(await writes.register(plan.written.spec), plan, traffic)),
        ]
        while await orders.readline():
            print(json.dumps(asdict(traffic)), flush=True)
        for task in work:
            task.cancel()


def main() -> None:
    """Runs the clients."""
    asyncio.run(_serve(sys.argv[1], TrafficPlan.from_json(sys.argv[2])))


if __name__ == "__main__":
    main()
