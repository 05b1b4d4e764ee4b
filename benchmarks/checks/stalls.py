"""How long the daemon's event loop is held by one callback, at a million blocks.

Runs a daemon with a million blocks, and a bystander that matches a prompt of 16 blocks every 5 ms, while
another client makes one call after the other: it matches, acquires, reserves and commits prompts of a
sixteenth of the blocks (1M tokens), has a full tier evicted and damaged blocks found, asks for figures and
lists, checks the integrity, and evicts.

The daemon runs in a process of its own that measures each callback of its event loop. For each call:
longest_hold_ms is the longest time that one callback held the loop, until the next call began, as CPU time
of the loop's thread; callback and where say which one it was; longest_wait_ms is the same as time passed, which
also counts waits for a file, for the GIL or for a core; longest_gc_ms is the longest garbage collection;
bystander_p99_ms is what the bystander waited for its match, bystander_failures how many of its matches ended
with an error instead. Fails when worst_hold_ms is above --limit-ms, or a match failed.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common import harness
from benchmarks.common.options import only, option
from benchmarks.load.loop_watch import LoopHold, WatchedDaemon
from benchmarks.load.matching_client import Bystander, Sample
from benchmarks.storage import slabs
from prefixd.cache import BlockChain
from prefixd.client import AsyncCache, AsyncClient, NamespaceSpec, PartSpec

_SHORT = 4  # blocks of most prompts: a quarter of the blocks end a prompt
_TIMEOUT_S = 600.0
_SETTLE_S = 0.3  # after a call, and then until no more than a few matches wait
_POLL_S = 0.05
_FEW = 2
_REPEAT_S = 0.5  # short calls are repeated for as long, and at most so many times:
_REPEATS = 10
_LISTED = 1000
_GROWTH = 1.5  # columns grow by half at the most


@dataclass(frozen=True, slots=True)
class Scale:
    """What the sizes of a run are for so many blocks."""

    blocks: int

    @property
    def long(self) -> int:
        """Blocks of a long prompt: 62,500 of a million."""
        return self.blocks // slabs.TOKENS

    @property
    def damaged(self) -> int:
        return min(512, self.blocks // 64)

    @property
    def prompts(self) -> slabs.Prompts:
        """The prompts on disk: one to be damaged, a long one, and many short ones."""
        return slabs.Prompts(_SHORT, (16 * self.damaged, self.long))

    @property
    def cpu_bytes(self) -> int:
        """Size of the CPU tier: full after the first prompt, the one from disk, and those that have tables grow."""
        return (2 + self.growing) * self.long * slabs.SLOT_BYTES

    @property
    def growing(self) -> int:
        """Long prompts that are committed for the table of blocks to grow."""
        return int((_GROWTH - 1) * slabs.TOKENS) + 1


@dataclass(slots=True)
class Call:
    """One call and what it did to the others."""

    name: str
    begin_s: float
    seconds: float
    """Of one call, the slowest where it was repeated."""
    longest_hold_ms: float = 0.0
    longest_wait_ms: float = 0.0
    longest_gc_ms: float = 0.0
    bystander_p99_ms: float = 0.0
    bystander_failures: int = 0
    callback: str = ""
    where: str = ""

    def judge(self, holds: Sequence[LoopHold], matches: Sequence[Sample]) -> None:
        callbacks = [hold for hold in holds if not hold.name.startswith("garbage")]
        if callbacks:
            longest = max(callbacks, key=lambda hold: hold.cpu_ms)
            self.longest_hold_ms = round(longest.cpu_ms, 2)
            self.callback, self.where = longest.name, longest.where
            if longest.gc_ms > 1:
                self.callback += f" (of which {longest.gc_ms:.1f} ms garbage collection)"
            self.longest_wait_ms = round(max(hold.wall_ms for hold in callbacks), 2)
        collections = [hold.cpu_ms for hold in holds if hold.name.startswith("garbage")]
        self.longest_gc_ms = round(max(collections, default=0.0), 2)
        if matches:
            waits_s = [match.seconds for match in matches]
            self.bystander_p99_ms = round(float(np.percentile(waits_s, 99)) * 1e3, 2)
            self.bystander_failures = sum(match.failed for match in matches)


@dataclass(slots=True)
class Scene:
    """The client that makes the calls, and what they are about."""

    scale: Scale
    daemon: WatchedDaemon
    client: AsyncClient
    cache: AsyncCache
    """Its own namespace."""
    stored: AsyncCache
    """The namespace that was on disk at the start."""
    blocks_path: Path
    prompts: list[npt.NDArray[np.uint32]] = field(default_factory=list)
    """Long prompts that it has committed."""

    async def commit(self) -> None:
        tokens = np.random.default_rng(len(self.prompts)).integers(
            0, 128_000, self.scale.long * slabs.TOKENS, dtype=np.uint32
        )
        async with await self.cache.reserve(tokens, ttl_s=_TIMEOUT_S) as reservation:
            if reservation.blocks != self.scale.long:
                raise harness.BenchmarkError(f"{reservation.blocks} of {self.scale.long} blocks could be reserved")
            await reservation.commit()
        self.prompts.append(tokens)

    async def match(self) -> None:
        found = await self.cache.match(self.prompts[0])
        if found.blocks != self.scale.long:
            raise harness.BenchmarkError(f"{found.blocks} of {self.scale.long} blocks matched")

    async def acquire(self) -> None:
        async with await self.cache.acquire(self.prompts[0], ttl_s=_TIMEOUT_S) as lease:
            if lease.blocks != self.scale.long:
                raise harness.BenchmarkError(f"{lease.blocks} of {self.scale.long} blocks were leased")

    async def acquire_from_disk(self) -> None:
        async with await self.stored.acquire(self._stored_tokens(1), ttl_s=_TIMEOUT_S) as lease:
            if lease.blocks != self.scale.long:
                raise harness.BenchmarkError(f"{lease.blocks} of {self.scale.long} blocks came from disk")

    async def read_damaged(self) -> None:
        """Blocks on disk, of which every sixteenth has a wrong byte, from the second on."""
        for number in range(self.scale.damaged):
            file, offset = slabs.place(self.blocks_path, self.scale.prompts.start(0) + 16 * number + 1)
            with file.open("r+b") as slab:
                slab.seek(offset + number % slabs.SLOT_BYTES)
                slab.write(b"\x01")
        async with await self.stored.acquire(self._stored_tokens(0), ttl_s=_TIMEOUT_S) as lease:
            if lease.blocks != 1:
                raise harness.BenchmarkError(f"{lease.blocks} blocks were leased; the second one is damaged")

    async def stats(self) -> None:
        await self.client.stats()

    async def scrape(self) -> None:
        assert self.daemon.metrics is not None, "the daemon has the setting"
        url = f"{self.daemon.metrics}/metrics"
        await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=_TIMEOUT_S).read())

    async def list(self) -> None:
        wanted = min(_LISTED, self.scale.blocks // 8)
        answer = await self.client.prefixes(limit=wanted)
        if len(answer.prefixes) != wanted:
            raise harness.BenchmarkError(f"{len(answer.prefixes)} of {wanted} prefixes were listed")

    async def inspect(self) -> None:
        await self.client.inspect(self._key(-1)[:16])

    async def pin(self) -> None:
        await self.client.pin(self._key(-1))
        await self.client.unpin(self._key(-1))

    async def doctor(self) -> None:
        found = await self.client.check_integrity()
        if found.violations:
            raise harness.BenchmarkError(f"the daemon does not add up: {'; '.join(found.violations)}")

    async def grow(self) -> None:
        """As many new blocks as make the table grow, however much room it had left."""
        for _ in range(self.scale.growing):
            await self.commit()

    async def end_session(self) -> None:
        """A client goes that had a long lease and a long reservation."""
        async with AsyncClient(self.client.address, name="goes", timeout_s=_TIMEOUT_S) as client:
            cache = await client.register(self.cache.spec)
            await cache.acquire(self.prompts[-1], ttl_s=_TIMEOUT_S)
            await cache.reserve(self.prompts[-1][::-1], ttl_s=_TIMEOUT_S)

    async def evict_key(self) -> None:
        """A long prompt, by its first block. What is being written to disk stays until it is asked for again."""
        deadline = time.monotonic() + _TIMEOUT_S
        while (await self.client.evict(key=self._key(0))).kept_blocks:
            if time.monotonic() > deadline:
                raise harness.BenchmarkError(f"a prefix could not be evicted within {_TIMEOUT_S:g} s")
            await asyncio.sleep(_POLL_S)

    async def evict_namespace(self) -> None:
        answer = await self.client.evict(namespace_id=self.stored.namespace_id)
        if answer.evicted_blocks < self.scale.blocks // 2:
            raise harness.BenchmarkError(f"only {answer.evicted_blocks} blocks of a namespace were evicted")

    def _key(self, block: int) -> str:
        """The key of a block of the long prompt that was committed first."""
        seed = int.from_bytes(self.cache.namespace_id, "little")
        chain = BlockChain(self.prompts[0].tobytes(), slabs.TOKENS, seed)
        return chain.key(range(len(chain))[block]).hex()

    def _stored_tokens(self, prompt: int) -> npt.NDArray[np.uint32]:
        return np.frombuffer(self.scale.prompts.tokens(prompt), np.uint32)


Act = Callable[[Scene], Awaitable[None]]

CALLS: Mapping[str, tuple[Act, bool]] = {
    "reserve and commit": (Scene.commit, False),
    "match": (Scene.match, True),
    "acquire": (Scene.acquire, True),
    "acquire from disk": (Scene.acquire_from_disk, False),
    "read damaged blocks": (Scene.read_damaged, False),
    "stats": (Scene.stats, True),
    "scrape": (Scene.scrape, True),
    "list": (Scene.list, True),
    "inspect": (Scene.inspect, True),
    "pin and unpin": (Scene.pin, True),
    "doctor": (Scene.doctor, False),
    "table grows": (Scene.grow, False),
    "reserve and commit, full tier": (Scene.commit, False),
    "session ends": (Scene.end_session, False),
    "evict a prefix": (Scene.evict_key, False),
    "evict a namespace": (Scene.evict_namespace, False),
}
"""What is called, in this order, and whether it can be repeated."""

_FIRST = "reserve and commit"
"""Always called: it makes what the others need."""


def run(
    blocks: int,
    names: Sequence[str] = tuple(CALLS),
    step: Callable[[Call], None] = lambda call: None,
    daemon_type: type[WatchedDaemon] = WatchedDaemon,
) -> list[Call]:
    """The calls with these names, in the order of CALLS, on a daemon with `blocks` blocks.

    Args:
        blocks: at least 1,024.
        names: of CALLS.
        step: called with each of them, once it is measured.
        daemon_type: replaced in tests.
    """
    scale = Scale(blocks)
    with tempfile.TemporaryDirectory(prefix="prefixd-stalls-") as folder:
        blocks_path = Path(folder) / "data/blocks"
        blocks_path.mkdir(parents=True)
        slabs.fill(blocks_path, blocks, scale.prompts)
        settings = {
            "cpu.bytes": scale.cpu_bytes,
            "disk.bytes": 2 * blocks * slabs.SLOT_BYTES,
            "disk.write_queue_bytes": scale.cpu_bytes,  # the disk is not what is measured
            "server.metrics": "127.0.0.1:0",
        }
        with daemon_type(settings, directory=Path(folder)) as daemon, Bystander(daemon.address) as bystander:
            wanted = {*names, _FIRST}
            chosen = {name: call for name, call in CALLS.items() if name in wanted}
            try:
                calls = asyncio.run(_make_calls(scale, daemon, bystander, chosen, blocks_path, names, step))
            finally:
                daemon.kill()  # in order it would write back what is left
    return [call for call in calls if call.name in names]


async def _make_calls(
    scale: Scale,
    daemon: WatchedDaemon,
    bystander: Bystander,
    chosen: Mapping[str, tuple[Act, bool]],
    blocks_path: Path,
    names: Sequence[str],
    step: Callable[[Call], None],
) -> list[Call]:
    calls = []
    async with AsyncExitStack() as stack:
        client = AsyncClient(daemon.address, name="benchmark stalls", timeout_s=_TIMEOUT_S)
        await stack.enter_async_context(client)
        spec = NamespaceSpec("benchmark-stalls", slabs.TOKENS, (PartSpec("full", 0, slabs.SLOT_BYTES),))
        stored = NamespaceSpec(slabs.SPEC.name, slabs.TOKENS, spec.parts)
        scene = Scene(
            scale,
            daemon,
            client,
            await client.register(spec),
            await client.register(stored),
            blocks_path,
        )
        for name, (act, repeatable) in chosen.items():
            await asyncio.to_thread(bystander.look)  # it matches again
            call = await _time(name, act, scene, repeatable)
            await asyncio.sleep(_SETTLE_S)
            while await asyncio.to_thread(bystander.rest) > _FEW:
                await asyncio.sleep(_POLL_S)
            holds = await asyncio.to_thread(daemon.holds, call.begin_s, time.monotonic())
            call.judge(holds, [sample for sample in bystander.samples if sample.begin_s >= call.begin_s])
            calls.append(call)
            if name in names:
                step(call)
    return calls


async def _time(name: str, act: Act, scene: Scene, repeatable: bool) -> Call:
    call = Call(name, time.monotonic(), 0.0)
    for _ in range(_REPEATS if repeatable else 1):
        begin_s = time.monotonic()
        await act(scene)
        now_s = time.monotonic()
        call.seconds = round(max(call.seconds, now_s - begin_s), 4)
        if now_s - call.begin_s > _REPEAT_S:
            break
    return call


def plain(call: Call) -> dict[str, object]:
    """A call as it stands in the result."""
    return {name: value for name, value in asdict(call).items() if name != "begin_s"}


def broken(calls: Sequence[Call], limit_ms: float) -> list[str]:
    """What a run has broken, a sentence each: holds of the event loop above the limit, failed matches."""
    found = []
    if above := [call for call in calls if call.longest_hold_ms > limit_ms]:
        named = "; ".join(
            f"{call.name}: {call.longest_hold_ms:g} ms in {call.callback}, {call.where}" for call in above
        )
        found.append(f"the event loop was held for more than {limit_ms:g} ms: {named}")
    if failures := sum(call.bystander_failures for call in calls):
        found.append(f"{failures} of the bystander's matches failed")
    return found


@harness.benchmark(
    "checks.stalls",
    __doc__,
    option("--blocks", 1_000_000, "blocks in the daemon"),
    option("--limit-ms", 10.0, "the longest hold allowed", float, metavar="MS"),
    only(CALLS, "only this call"),
    harness.PLOT,
)
def main(options: harness.Options) -> harness.Outcome:
    """The calls. Raises BenchmarkError for too few blocks."""
    if options.blocks < 1024:
        raise harness.BenchmarkError(f"--blocks {options.blocks} are too few for a prompt of 512 blocks; give 1024")
    names = tuple(options.only or CALLS)
    with harness.progress("calls", len(names)) as step:
        calls = run(options.blocks, names, lambda call: step())
    worst = max(calls, key=lambda call: call.longest_hold_ms)
    result: dict[str, Any] = {
        "worst_hold_ms": worst.longest_hold_ms,
        "worst_call": worst.name,
        "worst_gc_ms": max(call.longest_gc_ms for call in calls),
        "calls": [plain(call) for call in calls],
    }

    def draw(axes: Any) -> None:
        axes.barh([call.name for call in calls][::-1], [call.longest_hold_ms for call in calls][::-1])
        axes.axvline(options.limit_ms, color="grey", linestyle="--", label="limit")
        axes.set_xscale("log")
        axes.set_xlabel(f"longest hold of the event loop at {options.blocks:,} blocks, ms of CPU time")
        axes.set_ylabel("call")
        axes.set_title("How long each call holds the event loop")
        axes.legend()

    columns = ("name", "longest_hold_ms", "longest_wait_ms", "longest_gc_ms", "bystander_p99_ms", "seconds")
    table = harness.Table(result["calls"], columns)
    return harness.Outcome(result, broken(calls, options.limit_ms), [table], draw)


if __name__ == "__main__":
    harness.run(main)
