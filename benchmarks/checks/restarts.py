"""Restarts between ordinary operations: what was on disk is there again, and what was dropped is not.

Two tenants store, read, lease, pin, unpin, retain, prefetch and evict prompts by key, by namespace and all
at once, register namespaces and leave them, and change their quotas, in an order drawn from a seed. Between
the operations the daemon ends and starts again on the same directory: most daemons run in this process and
end in order; one in five is a process of its own, and most of those are killed, some of them in the middle
of stores. In two of four directories the disk tier has room for everything; in the others it evicts, and
starts again larger or smaller; there the daemon writes to disk when it is asked to and when it evicts from
memory, and is drained before it is looked at, since in a full tier each write costs another block its copy.

After each start: every block that was on disk before, with all that it continues, is there, each pinned if
it was (lost_blocks, lost_pins; a smaller disk tier may have less), and no block is dropped since it
continues nothing; in a roomy directory every prompt that was acknowledged as durable and not dropped since
is there whole (lost_durable), and nothing that was dropped has come back (resurrected); what is read has the
right bytes (wrong_bytes); and the daemon accounts for all of it.
"""

from __future__ import annotations

import asyncio
import random
import signal
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.checks.tenancy.house import House
from benchmarks.common import harness
from benchmarks.common.block_bytes import wrong_bytes
from benchmarks.common.options import option, seed
from benchmarks.load.world import NAMESPACES, Prompt, content, key_in_namespace, right_bytes
from prefixd.base.tenancy.tenants import Role
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import (
    AsyncCache,
    AsyncClient,
    ClientError,
    ExhaustedError,
    NotFoundError,
    PreconditionError,
    Retention,
)
from prefixd.server.daemon import Daemon
from prefixd.settings import Settings
from prefixd.v1 import cache_pb2

TENANTS = ("default", "other")
_NUMBERS = 10
"""Prompts of each namespace and tenant, beside those that are only once there."""
_CPU_BYTES = 12 << 20
_ROOMY_BYTES = 192 << 20
_TIGHT_BYTES = (6 << 20, 8 << 20, 12 << 20)
_DIRECTORIES = 4
_PROCESSES = 0.2
"""Share of the daemons that are processes of their own."""
_KILLED = 0.7
"""Share of those that are killed."""
_ALL = 100_000
"""Prefixes that are listed at most: all."""
_READ = 4
"""Prompts that are read after each start."""

_ZEROS = ("lost_blocks", "lost_pins", "lost_durable", "resurrected", "wrong_bytes", "failed")
End = Literal["clean", "process", "killed"]
Snapshot = dict[str, tuple[bool, bool]]
"""By key of a block: whether it is on disk with all that it continues, and whether it is pinned."""


@dataclass(slots=True)
class Findings:
    """What came of it."""

    steps: Counter[str] = field(default_factory=Counter)
    """By operation."""
    refused: int = 0
    """Operations for which there was no room, or whose block was gone or in use."""
    restarts: Counter[str] = field(default_factory=Counter)
    """By how the daemon before had ended."""
    compared_blocks: int = 0
    compared_pins: int = 0
    durable_prompts: int = 0
    verified_bytes: int = 0
    lost_blocks: int = 0
    lost_pins: int = 0
    lost_durable: int = 0
    resurrected: int = 0
    wrong_bytes: int = 0
    failed: int = 0
    found: list[str] = field(default_factory=list)

    def result(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in self.__slots__ if name not in ("steps", "restarts", "found")}
        ends = {f"restarts_{end}": count for end, count in self.restarts.items()}
        steps = {"steps": self.steps.total(), "restarts": self.restarts.total(), **ends}
        return {**steps, **plain, "steps_by_kind": dict(self.steps), "found": self.found[:50]}

    @property
    def broken(self) -> list[str]:
        return harness.missed(self.result(), zero=_ZEROS)

    def note(self, kind: str, what: str, count: int = 1) -> None:
        """Counts something of a kind that is a field, and says what."""
        setattr(self, kind, getattr(self, kind) + count)
        self.found.append(f"{kind}: {what}")


class Lives:
    """One data directory: its daemons, one after the other, and what has to be in it.

    Args:
        folder: for the data and the tokens; a short name, since a socket lies in it.
        roomy: whether the disk tier takes everything.
        seed: of the operations and the ends.
        between: called with the directory of the disk tier while no daemon runs; for tests of what is found.
    """

    def __init__(
        self, folder: Path, roomy: bool, seed: int, findings: Findings, between: Callable[[Path], None] | None = None
    ) -> None:
        self._folder = folder
        self._roomy = roomy
        self._rng = random.Random(f"restarts {seed}")
        self._findings = findings
        self._between = between
        self._house = House(folder, dict.fromkeys(TENANTS, _QUOTA), harness.free_port())
        self._disk_bytes = _ROOMY_BYTES if roomy else _TIGHT_BYTES[-1]
        self._durable: dict[Prompt, None] = {}
        """Acknowledged as durable, and not dropped since."""
        self._dropped: dict[Prompt, None] = {}
        """Acknowledged as dropped, and not stored since."""
        self._pinned: dict[Prompt, None] = {}
        """Pinned at some time, and not unpinned since."""
        self._salts = 0
        self._clients: list[AsyncClient] = []
        self._caches: dict[tuple[int, int], AsyncCache] = {}
        self._work: list[tuple[Callable[[], Awaitable[None]], float]] = [
            (self._store, 30),
            (self._read, 16),
            (self._pin, 8),
            (self._unpin, 6),
            (self._evict, 10),
            (self._evict_namespace, 2),
            (self._evict_all, 0.5),
            (self._retain, 6),
            (self._prefetch, 4),
            (self._hold, 4),
            (self._brief, 5),
            (self._flush, 2),
        ]
        if not roomy:
            self._work.append((self._quota, 5))

    async def live(self, steps: int, restarts: int) -> None:
        """So many operations, with so many restarts between them."""
        pieces = [
            steps * (piece + 1) // (restarts + 1) - steps * piece // (restarts + 1) for piece in range(restarts + 1)
        ]
        before: Snapshot = {}
        ended: End | None = None
        shrunk = False
        for piece, count in enumerate(pieces):
            end = self._draw_end()
            async with self._daemon(end) as kill, self._connected():
                if ended is not None:
                    self._findings.restarts[ended] += 1
                    await self._audit(before, ended, shrunk)
                for _ in range(count):
                    await self._step(self._rng.choices(*zip(*self._work, strict=True))[0])
                await self._settle(end)
                before = await self._snapshot()
                if end == "killed":
                    await self._killed(kill)
            ended, shrunk = end, False
            if not self._roomy and piece < restarts and self._rng.random() < 0.2:
                larger = self._rng.choice(_TIGHT_BYTES)
                shrunk, self._disk_bytes = larger < self._disk_bytes, larger
            if self._between is not None:
                self._between(self._folder / "d" / "data" / "blocks")

    def _draw_end(self) -> End:
        if self._rng.random() >= _PROCESSES:
            return "clean"
        return "killed" if self._rng.random() < _KILLED else "process"

    # -- daemons ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _daemon(self, end: End) -> AsyncIterator[Callable[[], object]]:
        """A daemon on the directory; what kills it, if it is a process."""
        sizes = {"cpu.bytes": _CPU_BYTES, "disk.bytes": self._disk_bytes, "disk.shrink": True}
        settings = {**sizes, **self._house.settings, "cache.write_back": self._roomy}
        process = DaemonProcess(settings, directory=self._folder / "d")
        if end != "clean":
            process.start()  # nothing else runs here, and its thread must outlive it
            try:
                yield process.kill
            finally:
                process.stop()
            return
        process.directory.mkdir(exist_ok=True)
        places = {"data_dir": process.directory / "data", "server.socket": process.socket}
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            async with AsyncExitStack() as stack:
                daemon = Daemon(Settings.load(overrides={**settings, **places}, environ={}))
                await daemon.start(stack)
                yield lambda: None
                await daemon.drain.run()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[None]:
        """A client of each tenant, with the role of an operator."""
        address, tcp = f"unix:{self._folder}/d/prefixd.sock", str(self._house.settings["server.tcp"])
        async with (
            AsyncClient(address, name=TENANTS[0], timeout_s=60.0) as own,
            AsyncClient(tcp, name=TENANTS[1], timeout_s=60.0, token=self._house.token(TENANTS[1], Role.ADMIN)) as other,
        ):
            self._clients, self._caches = [own, other], {}
            yield

    async def _settle(self, end: End) -> None:
        """What is to be on disk is there, and in a full tier nothing else gets its room until the daemon ends."""
        if self._roomy or end == "killed":
            await self._flush()
        else:
            await self._admin.drain()

    async def _killed(self, kill: Callable[[], object]) -> None:
        """Kills the daemon; in a roomy directory while stores are under way."""
        storing: list[asyncio.Task[None]] = []
        if self._roomy:
            storing = [asyncio.create_task(self._store()) for _ in range(4)]
            await asyncio.sleep(self._rng.uniform(0, 0.02))
        kill()
        for ended in await asyncio.gather(*storing, return_exceptions=True):
            if ended is not None and not isinstance(ended, ClientError):
                raise ended

    # -- operations -------------------------------------------------------------------------------------------------

    async def _step(self, work: Callable[[], Awaitable[None]]) -> None:
        name = work.__name__.strip("_")
        try:
            await work()
        except (ExhaustedError, NotFoundError, PreconditionError):
            self._findings.refused += 1
        except ClientError as error:
            self._findings.note("failed", f"{name}: {type(error).__name__}: {error}")
        self._findings.steps[name] += 1

    async def _store(self) -> None:
        await self._put(self._draw(), durable=self._rng.random() < 0.6)

    async def _put(self, prompt: Prompt, durable: bool) -> None:
        cache = await self._cache(prompt)
        self._dropped.pop(prompt, None)
        stored = await cache.store(prompt.whole, content(prompt), durable=durable)
        if durable and self._roomy:
            if stored.committed + stored.duplicates < prompt.blocks:
                self._findings.note("failed", f"store of {prompt} in a roomy tier: {stored}")
            self._durable[prompt] = None

    async def _read(self) -> None:
        await self._verify(self._draw())

    async def _pin(self) -> None:
        prompt = self._draw()
        await self._put(prompt, durable=True)
        self._pinned[prompt] = None
        answer = await self._admin.pin(await self._key(prompt, prompt.blocks - 1))
        if self._roomy and not answer.durable:
            self._findings.note("failed", f"pin of {prompt} in a roomy tier: {answer.reason}")

    async def _unpin(self) -> None:
        if not self._pinned:
            return
        prompt = self._rng.choice(list(self._pinned))
        del self._pinned[prompt]
        await self._admin.unpin(await self._key(prompt, prompt.blocks - 1))

    async def _evict(self) -> None:
        prompt = self._draw()
        self._durable.pop(prompt, None)
        evicted = await self._admin.evict(key=await self._key(prompt, prompt.shared_blocks))
        if not evicted.kept_blocks:  # else some of it is pinned
            self._dropped[prompt] = None

    async def _evict_namespace(self) -> None:
        prompt = self._draw()
        namespace_id = (await self._cache(prompt)).namespace_id
        gone = [each for each in self._all() if (each.namespace, each.owner) == (prompt.namespace, prompt.owner)]
        await self._evict_many(gone, self._admin.evict(namespace_id=namespace_id))

    async def _evict_all(self) -> None:
        await self._evict_many(self._all(), self._admin.evict(all=True))

    async def _evict_many(self, prompts: list[Prompt], evict: Awaitable[Any]) -> None:
        for prompt in prompts:
            self._durable.pop(prompt, None)
        if not (await evict).kept_blocks:
            self._dropped.update(dict.fromkeys(prompts))

    async def _retain(self) -> None:
        prompt = self._draw()
        priority, ttl_s = self._rng.choice([-1, 0, 1]), self._rng.choice([None, 0.05, 100.0])
        wish = Retention(priority, 0, self._rng.randint(1, len(prompt.tokens)), ttl_s)
        await (await self._cache(prompt)).retain(prompt.tokens, [wish])

    async def _prefetch(self) -> None:
        prompt = self._draw()
        await (await self._cache(prompt)).prefetch(prompt.tokens)

    async def _hold(self) -> None:
        """Evicts under a lease: what is leased stays."""
        prompt = self._draw(0)  # the other tenant's client maps no memory
        cache = await self._cache(prompt)
        async with await cache.acquire(prompt.tokens):
            self._durable.pop(prompt, None)
            await self._admin.evict(key=await self._key(prompt, prompt.shared_blocks))

    async def _brief(self) -> None:
        """Stores many small prompts in a namespace of their own and drops it, most times whole."""
        self._salts += 1
        owner = self._rng.randrange(len(TENANTS))
        salt = b"brief %d" % self._salts
        spec = NAMESPACES[2]
        cache = await self._clients[owner].register(type(spec)("brief", 4, spec.parts[1:], salt=salt))
        nbytes = spec.parts[1].nbytes
        for _ in range(self._rng.randint(0, 12)):
            blocks = self._rng.randint(1, 8)
            tokens = [self._rng.randrange(1 << 16) for _ in range(4 * blocks)]
            await cache.store(tokens, bytes(blocks * nbytes), durable=self._rng.random() < 0.7)
        if self._rng.random() < 0.9:
            await self._admin.evict(namespace_id=cache.namespace_id)

    async def _flush(self) -> None:
        await self._admin.flush()

    async def _quota(self) -> None:
        most = self._rng.choice([None, 2 << 20, 4 << 20])
        await self._admin.set_tenant(self._rng.choice(TENANTS), tiers={"disk": (0, most)})

    # -- what must hold ---------------------------------------------------------------------------------------------

    async def _snapshot(self) -> Snapshot:
        found: Snapshot = {}
        listed = await self._admin.prefixes(limit=_ALL)
        if listed.next_page_token:
            raise harness.BenchmarkError(f"{listed.total} prefixes are cached, more than the {_ALL} that are compared")
        for leaf in listed.prefixes:
            with suppress(NotFoundError):
                on_disk = True
                for block in (await self._admin.inspect(leaf.key)).blocks:
                    key = f"{leaf.namespace_id.hex()} {block.key}"
                    on_disk &= cache_pb2.TIER_DISK in block.tiers
                    found[key] = (on_disk, block.pinned)
        return found

    async def _audit(self, before: Snapshot, ended: End, shrunk: bool) -> None:
        findings, after = self._findings, await self._snapshot()
        where = f"after restart {findings.restarts.total()} ({ended}{', shrunk' if shrunk else ''})"
        for key, (on_disk, pinned) in before.items():
            if not on_disk or (shrunk and key not in after):
                continue
            findings.compared_blocks += 1
            findings.compared_pins += pinned
            if not after.get(key, (False, False))[0]:
                findings.note("lost_blocks", f"{where}: {key}")
            elif after[key][1] != pinned:
                findings.note("lost_pins", f"{where}: {key} is {'not ' if pinned else ''}pinned")
        dropped = {} if shrunk else (await self._admin.stats()).lost_blocks
        for reason, blocks in dropped.items():
            if reason.startswith("on disk, but"):
                findings.note("lost_blocks", f"{where}: {blocks} {reason}", blocks)
        if ended != "killed":
            for key in after.keys() - before.keys():
                findings.note("resurrected", f"{where}: {key}")
        for prompt in self._durable:
            findings.durable_prompts += 1
            there = (await (await self._cache(prompt)).match(prompt.tokens)).blocks
            if there < prompt.blocks:
                findings.note("lost_durable", f"{where}: {prompt} has {there} of {prompt.blocks} blocks")
        for prompt in self._dropped:
            if (await (await self._cache(prompt)).match(prompt.tokens)).blocks > prompt.shared_blocks:
                findings.note("resurrected", f"{where}: {prompt}")
        for _ in range(_READ):
            await self._verify(self._draw())
        for violation in (await self._admin.check_integrity()).violations:
            findings.note("failed", f"{where}: {violation}")

    async def _verify(self, prompt: Prompt) -> None:
        got = np.zeros_like(content(prompt))
        nbytes = await (await self._cache(prompt)).load(prompt.tokens, got) * prompt.spec.block_bytes
        self._findings.verified_bytes += nbytes
        if wrong := wrong_bytes(got[:nbytes], right_bytes(prompt, got[:nbytes])):
            self._findings.note("wrong_bytes", f"{prompt}: {wrong} of {nbytes}", wrong)

    # -- inside -----------------------------------------------------------------------------------------------------

    @property
    def _admin(self) -> AsyncClient:
        return self._clients[0]

    def _draw(self, tenant: int | None = None) -> Prompt:
        owner = self._rng.randrange(len(TENANTS)) if tenant is None else tenant
        return Prompt(self._rng.randrange(len(NAMESPACES)), 1 + owner, self._rng.randrange(_NUMBERS))

    def _all(self) -> list[Prompt]:
        return [
            Prompt(namespace, 1 + owner, number)
            for namespace in range(len(NAMESPACES))
            for owner in range(len(TENANTS))
            for number in range(_NUMBERS)
        ]

    async def _cache(self, prompt: Prompt) -> AsyncCache:
        place = (prompt.owner - 1, prompt.namespace)
        if place not in self._caches:
            self._caches[place] = await self._clients[place[0]].register(prompt.spec)
        return self._caches[place]

    async def _key(self, prompt: Prompt, block: int) -> str:
        return key_in_namespace((await self._cache(prompt)).namespace_id, prompt, block)


_QUOTA: dict[str, object] = {"sessions": 16, "grants": 256, "namespaces": 64, "calls": 128}


async def run(
    steps: int,
    restarts: int,
    seed: int,
    step: Callable[[], None] = lambda: None,
    between: Callable[[Path], None] | None = None,
) -> Findings:
    """So many operations and restarts in all, in four directories after each other, of which every other is roomy.

    `step` is called after each directory.
    """
    findings = Findings()
    for number in range(_DIRECTORIES):
        share = [each * (number + 1) // _DIRECTORIES - each * number // _DIRECTORIES for each in (steps, restarts)]
        with tempfile.TemporaryDirectory(prefix="prefixd-restarts-") as folder:
            await Lives(Path(folder), number % 2 == 0, seed * _DIRECTORIES + number, findings, between).live(*share)
        step()
    return findings


@harness.benchmark(
    "checks.restarts",
    __doc__,
    option("--steps", 10_000, "operations"),
    option("--restarts", 500, "restarts between them"),
    seed("of the operations and of how daemons end"),
)
def main(options: harness.Options) -> harness.Outcome:
    """Operations and restarts."""
    with harness.progress("directories", _DIRECTORIES) as step:
        findings = asyncio.run(run(options.steps, options.restarts, options.seed, step))
    return harness.Outcome(findings.result(), findings.broken)


if __name__ == "__main__":
    harness.run(main)
