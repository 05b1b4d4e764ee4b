"""Mixed work of one client with verifiable bytes, for the harnesses of crashes, deaths and long runs."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.common.block_bytes import Bytes, wrong_bytes
from benchmarks.load.world import NAMESPACES, Prompt, brief_namespace, content, key_in_namespace, right_bytes
from prefixd.client import (
    AsyncCache,
    AsyncClient,
    CallTimeout,
    ClientError,
    ExhaustedError,
    LeaseLost,
    NotFoundError,
    PreconditionError,
    Retention,
    Sampling,
    ServerUnavailable,
    Tokens,
)

_SHOWN_FAILURES = 20
_GENERATE_PROMPTS = 64
_PINNED = 3
"""Prompts that an operator has pinned at a time."""


@dataclass(slots=True)
class Tally:
    """Counts of a client's calls and of the bytes that it read."""

    calls: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    """Calls that the daemon refused for want of room; they can be repeated."""
    interrupted: Counter[str] = field(default_factory=Counter)
    """Calls during which the daemon ended."""
    failed_calls: int = 0
    failures: list[str] = field(default_factory=list)
    """The first of them."""
    verified_bytes: int = 0
    wrong_bytes: int = 0
    wrong: list[str] = field(default_factory=list)
    """The first blocks that were wrong."""

    def add(self, other: Tally) -> None:
        for name in ("calls", "refused", "interrupted"):
            getattr(self, name).update(getattr(other, name))
        self.failed_calls += other.failed_calls
        self.verified_bytes += other.verified_bytes
        self.wrong_bytes += other.wrong_bytes
        self.failures = (self.failures + other.failures)[:_SHOWN_FAILURES]
        self.wrong = (self.wrong + other.wrong)[:_SHOWN_FAILURES]

    def fail(self, what: str) -> None:
        """Counts a call that should not have failed."""
        self.failed_calls += 1
        self.failures = [*self.failures, what][:_SHOWN_FAILURES]

    def verify(self, what: str, got: Bytes, expected: Bytes) -> None:
        """Compares bytes that were read with the right ones."""
        self.verified_bytes += len(expected)
        differing = wrong_bytes(got, expected)
        if differing:
            self.wrong_bytes += differing
            self.wrong = [*self.wrong, f"{what}: {differing} of {len(expected)} bytes"][:_SHOWN_FAILURES]

    def to_plain(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Tally:
        counters = {name: Counter(plain[name]) for name in ("calls", "refused", "interrupted")}
        return cls(**(plain | counters))


@dataclass(slots=True)
class Audit:
    """Findings of a client about the prompts that it knows."""

    durable: int
    """Prompts of its own that must be cached."""
    pinned: int
    """Prompts that must be pinned."""
    found: int = 0
    """Blocks that were read."""
    lost_blocks: int = 0
    lost: list[str] = field(default_factory=list)
    unpinned: list[str] = field(default_factory=list)
    """Prompts that were pinned and are not any more."""
    back: list[str] = field(default_factory=list)
    """Prompts that were forgotten and are cached again, though no client stored them."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The work of one client; two clients with the same plan and seed choose the same calls.

    `owner` is above 0 and differs between clients. `outages`: the daemon may end at any time, which alone is no
    failure.
    """

    owner: int
    seed: int
    tasks: int = 4
    """Calls under way at once."""
    numbers: int = 32
    """Prompts of each namespace that all clients ask for."""
    own_durable: int = 16
    """Durable prompts of its own that it has at a time."""
    outages: bool = False
    generate: bool = False
    """Also ask the daemon's worker for tokens."""
    operator: bool = False
    """Also pin, retain, and fill a namespace and evict it as a whole."""
    memory: str = "auto"
    timeout_s: float = 30.0
    token: str = ""
    """Over TCP: a tenant's, with the role admin, since clients may not evict."""


class MixedLoad:
    """Works through `plan` between `go` and `pause`; an async context manager."""

    def __init__(self, address: str, plan: LoadPlan) -> None:
        self.plan = plan
        self.tally = Tally()
        self.durable: dict[Prompt, None] = {}
        """Prompts of its own that the daemon acknowledged as durable and that it has not asked to forget."""
        self.forgotten: dict[Prompt, None] = {}
        """Prompts that the daemon acknowledged as forgotten."""
        self.pinned: dict[Prompt, None] = {}
        """Prompts that the daemon acknowledged as pinned across restarts and that it has not asked to unpin."""
        self._pinning: set[Prompt] = set()
        self._client = AsyncClient(
            address,
            name=f"load {plan.owner}",
            memory=plan.memory,  # type: ignore[arg-type]
            timeout_s=plan.timeout_s,
            token=plan.token,
        )
        self._caches: dict[int, AsyncCache] = {}
        self._generated: dict[int, list[int]] = {}
        self._next_own = 0
        self._going = asyncio.Event()
        self._busy = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: list[asyncio.Task[None]] = []
        work: list[tuple[Callable[[random.Random], Awaitable[None]], int]] = [
            (self._store, 24),
            (self._load, 30),
            (self._store_own, 12),
            (self._hold, 8),
            (self._store_part, 4),
            (self._give_up, 4),
            (self._match, 6),
            (self._prefetch, 4),
            (self._evict, 2),
        ]
        if plan.generate:
            work.append((self._generate, 6))
        if plan.operator:
            work += [(self._pin, 5), (self._retain, 4), (self._brief, 4)]
        self._work = [do for do, _ in work]
        self._weights = [weight for _, weight in work]

    async def __aenter__(self) -> MixedLoad:
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(self.plan.tasks)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()

    def go(self) -> None:
        self._going.set()

    async def pause(self) -> None:
        """Returns when no call is under way; none begins before `go`."""
        self._going.clear()
        await self._idle.wait()

    async def audit(self, shared: Iterable[Prompt]) -> Audit:
        """Reads and verifies all there is of `shared` and of its own durable prompts, which must be there whole."""
        audit = Audit(durable=len(self.durable), pinned=len(self.pinned))
        for prompt in [*self.durable, *shared]:
            there = await self._read_all(prompt)
            audit.found += there
            if prompt.owner and there < prompt.blocks:
                audit.lost_blocks += prompt.blocks - there
                audit.lost.append(f"{prompt}: {there} of {prompt.blocks} blocks are there")
                del self.durable[prompt]  # reported once
        for prompt in list(self.pinned):
            with suppress(NotFoundError):
                if (await self._client.inspect(await self._last_key(prompt))).prefix.pinned:
                    continue
            audit.unpinned.append(f"{prompt}")
            del self.pinned[prompt]
        for prompt in self.forgotten:
            if (await (await self._cache(prompt)).match(prompt.tokens)).blocks > prompt.shared_blocks:
                audit.back.append(f"{prompt}")
        return audit

    # -- the work ---------------------------------------------------------------------------------------------------

    async def _run(self, number: int) -> None:
        rng = random.Random(f"{self.plan.seed} {self.plan.owner} {number}")
        while True:
            await self._going.wait()
            (do,) = rng.choices(self._work, self._weights)
            name = do.__name__.strip("_")
            self._busy += 1
            self._idle.clear()
            try:
                await do(rng)
                self.tally.calls[name] += 1
            except ExhaustedError:
                self.tally.refused[name] += 1
            except (ServerUnavailable, LeaseLost, CallTimeout) as error:
                if self.plan.outages and not isinstance(error, CallTimeout):
                    self.tally.interrupted[name] += 1
                else:
                    self.tally.fail(f"{name}: {type(error).__name__}: {error}")
            except ClientError as error:
                self.tally.fail(f"{name}: {type(error).__name__}: {error}")
            finally:
                self._busy -= 1
                if not self._busy:
                    self._idle.set()

    async def _store(self, rng: random.Random) -> None:
        prompt = self._shared(rng)
        durable = rng.random() < 0.2
        await (await self._cache(prompt)).store(prompt.whole, content(prompt), durable=durable)

    async def _load(self, rng: random.Random) -> None:
        await self._read_all(self._shared(rng))

    async def _store_own(self, rng: random.Random) -> None:
        """Stores a prompt of its own, durable; forgets the oldest when there are enough."""
        if len(self.durable) >= self.plan.own_durable:
            prompt = next((each for each in self.durable if each not in self.pinned), next(iter(self.durable)))
            del self.durable[prompt]  # before the call: whether it was forgotten is unknown when the call breaks off
            try:
                evicted = await self._client.evict(key=await self._own_key(prompt))
                gone = not evicted.kept_blocks
            except NotFoundError:  # evicted for room
                gone = True
            except PreconditionError:  # some of it is being written back; it stays, and is not checked
                gone = False
            if gone:
                self.forgotten[prompt] = None
            if len(self.forgotten) > self.plan.own_durable:
                del self.forgotten[next(iter(self.forgotten))]
        self._next_own += 1
        prompt = Prompt(rng.randrange(len(NAMESPACES)), self.plan.owner, self._next_own)
        cache, at_once = await self._cache(prompt), rng.random() < 0.7
        stored = await cache.store(prompt.whole, content(prompt), durable=at_once)
        there = stored.committed + stored.duplicates if at_once else await cache.persist(prompt.whole)
        if there == prompt.blocks:
            self.durable[prompt] = None

    async def _hold(self, rng: random.Random) -> None:
        """Leases, reads in place, keeps the lease for a while and reads again: what is leased does not change."""
        prompt = self._shared(rng)
        cache = await self._cache(prompt)
        if (await self._client.session()).arena is None:
            return
        async with await cache.acquire(prompt.tokens, max_blocks=rng.choice((0, 1, 2))) as lease:
            got = np.empty(lease.blocks * prompt.spec.block_bytes, np.uint8)
            for delay_s in (0.0, rng.uniform(0, 0.03)):
                await asyncio.sleep(delay_s)
                if lease.blocks and rng.random() < 0.3:
                    await lease.renew()
                got[:] = 0
                await lease.copy_into(got)
        self.tally.verify(f"lease of {prompt}", got, right_bytes(prompt, got))

    async def _store_part(self, rng: random.Random) -> None:
        """Stores one part of the blocks; a later call stores the other part."""
        prompt = Prompt(2, 0, rng.randrange(self.plan.numbers))
        part = rng.randrange(len(prompt.spec.parts))
        await (await self._cache(prompt)).store(prompt.whole, content(prompt, 0, (part,)), parts=[part])

    async def _give_up(self, rng: random.Random) -> None:
        """Reserves, fills some of it and gives it up, or commits only the beginning."""
        prompt = self._shared(rng)
        cache = await self._cache(prompt)
        if (await self._client.session()).arena is None:
            return
        async with await cache.reserve(prompt.whole) as reservation:
            if reservation.blocks:
                await reservation.copy_from(content(prompt, reservation.first_block)[: _bytes_of(reservation, prompt)])
                if rng.random() < 0.5:
                    await reservation.commit(rng.randint(0, reservation.blocks), durable=rng.random() < 0.2)

    async def _match(self, rng: random.Random) -> None:
        prompt = self._shared(rng)
        await (await self._cache(prompt)).match(prompt.tokens)

    async def _prefetch(self, rng: random.Random) -> None:
        prompt = self._shared(rng)
        await (await self._cache(prompt)).prefetch(prompt.tokens)

    async def _evict(self, rng: random.Random) -> None:
        """Drops the blocks that a prompt does not share with others, if they are not in use."""
        prompt = self._shared(rng)
        with suppress(NotFoundError, PreconditionError):
            await self._client.evict(key=await self._own_key(prompt))

    async def _pin(self, rng: random.Random) -> None:
        """Pins a durable prompt of its own; lets the oldest go when there are enough."""
        if len(self.pinned) >= _PINNED and (free := [each for each in self.pinned if each not in self._pinning]):
            prompt = free[0]
            del self.pinned[prompt]  # before the call: whether it is pinned is unknown when the call breaks off
            with self._alone_with(prompt), suppress(NotFoundError):
                await self._client.unpin(await self._last_key(prompt))
        if not (free := [each for each in self.durable if each not in self._pinning]):
            return
        prompt = rng.choice(free)
        with self._alone_with(prompt), suppress(NotFoundError):  # evicted for room
            if (await self._client.pin(await self._last_key(prompt))).durable and prompt in self.durable:
                self.pinned[prompt] = None

    @contextmanager
    def _alone_with(self, prompt: Prompt) -> Iterator[None]:
        """Keeps other tasks from pinning or unpinning the prompt: the order of two such calls would be unknown."""
        self._pinning.add(prompt)
        try:
            yield
        finally:
            self._pinning.discard(prompt)

    async def _retain(self, rng: random.Random) -> None:
        """Asks for another priority of a prompt for a while."""
        prompt = self._shared(rng)
        wish = Retention(rng.choice((-1, 1)), 0, rng.randint(1, len(prompt.tokens)), rng.choice((0.05, 1.0)))
        await (await self._cache(prompt)).retain(prompt.tokens, [wish])

    async def _brief(self, rng: random.Random) -> None:
        """Stores many small blocks in a namespace and evicts it as a whole."""
        spec = brief_namespace(self.plan.owner)
        cache = await self._client.register(spec)
        for _ in range(rng.randint(1, 6)):
            blocks = rng.randint(1, 12)
            tokens = [rng.randrange(1 << 16) for _ in range(blocks * spec.block_tokens)]
            await cache.store(tokens, bytes(blocks * spec.block_bytes), durable=rng.random() < 0.5)
        await self._client.evict(namespace_id=cache.namespace_id)

    async def _generate(self, rng: random.Random) -> None:
        """A greedy request for the daemon's own worker: always the same tokens for a prompt. Some are broken off."""
        number, patience = rng.randrange(_GENERATE_PROMPTS), rng.choice((1, 3, 99))
        family, own = np.random.default_rng([number % 8]), np.random.default_rng([8, number])
        prompt = [*family.integers(0, 256, 180).tolist(), *own.integers(0, 256, 1 + number % 40).tolist()]
        got: list[int] = []
        length = rng.randint(1, 10)
        async with aclosing(
            self._client.generate(prompt, sampling=Sampling(max_tokens=length, ignore_eos=True), timeout_s=90.0)
        ) as events:
            async for event in events:
                if isinstance(event, Tokens):
                    got += event.token_ids
                    patience -= 1
                    if not patience:
                        break
        known = self._generated.setdefault(number, got)
        common = min(len(known), len(got))
        if known[:common] != got[:common]:
            self.tally.fail(f"generate: prompt {number} gave {got} and before {known}")
        if len(got) > len(known):
            self._generated[number] = got

    # -- inside -----------------------------------------------------------------------------------------------------

    async def _cache(self, prompt: Prompt) -> AsyncCache:
        cache = self._caches.get(prompt.namespace)
        if cache is None:
            cache = self._caches[prompt.namespace] = await self._client.register(prompt.spec)
        return cache

    async def _own_key(self, prompt: Prompt) -> str:
        """Returns the key of the first block that a prompt does not share with others."""
        return key_in_namespace((await self._cache(prompt)).namespace_id, prompt, prompt.shared_blocks)

    async def _last_key(self, prompt: Prompt) -> str:
        return key_in_namespace((await self._cache(prompt)).namespace_id, prompt, prompt.blocks - 1)

    async def _read_all(self, prompt: Prompt) -> int:
        """Reads the cached blocks of a prompt and verifies them; returns their number."""
        got = np.zeros_like(content(prompt))
        there = await (await self._cache(prompt)).load(prompt.tokens, got)
        read = got[: there * prompt.spec.block_bytes]
        self.tally.verify(f"{prompt}", read, right_bytes(prompt, read))
        return there

    def _shared(self, rng: random.Random) -> Prompt:
        """Returns a prompt that all clients ask for, the first ones more often."""
        number = min(int(rng.expovariate(3 / self.plan.numbers)), self.plan.numbers - 1)
        return Prompt(rng.randrange(len(NAMESPACES)), 0, number)


def _bytes_of(reservation: Any, prompt: Prompt) -> int:
    return int(reservation.blocks) * prompt.spec.block_bytes
