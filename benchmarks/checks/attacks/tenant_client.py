"""An honest tenant's client in a process of its own: `... bystander PLAN`, where PLAN is JSON of a `Plan`.

It matches, loads, stores and generates at fixed times, independent of the daemon's load, and compares all bytes and all
answers. It answers each line on its standard input with one line of JSON: the calls that ended since the last line, and
the begin of the oldest call that has not ended. After the line "pause" it begins no calls until the line "go". It ends
with its input.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.checks.attacks.people import Person, become
from benchmarks.load.companion import Companion, order_lines
from benchmarks.workloads.asking import generated_tokens
from prefixd.client import AsyncCache, AsyncClient, ClientError, NamespaceSpec, PartSpec, Sampling

BLOCK_TOKENS = 16
_PART_BYTES = 8192
_PROMPTS, _BLOCKS = 24, 8
_ASKED = 8
"""Prompts of its generate calls, of 2 to 5 blocks."""
_OUTPUT_TOKENS = 2
EVERY_S = {"match": 0.08, "load": 0.12, "store": 0.16, "generate": 0.4}
_MOST_WAITING = 100
_CALL_S = 60.0
_STARTED_S = 120.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The client's identity and the daemon's address. `memory` is the SDK's: `shared` reserves and commits, `streamed`
    puts and gets."""

    name: str
    address: str
    token: str
    uid: int
    memory: str
    seed: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One call."""

    kind: str
    begin_s: float
    """By `time.monotonic`, which all processes of a machine share."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Failure:
    """A call that failed, had wrong bytes or another answer, or found fewer blocks of its own than it had stored."""

    begin_s: float
    what: str


class Bystander(Companion):
    """Starts and controls a bystander's process; used in the harness."""

    def __init__(self, person: Person, address: str, token: str, memory: str) -> None:
        plan = Plan(person.name, address, token, person.uid, memory, person.uid)
        super().__init__("benchmarks.checks.attacks.tenant_client", json.dumps(asdict(plan)))
        self.name = person.name
        self.samples: list[Sample] = []
        self.failures: list[Failure] = []

    def look(self, order: str = "") -> float:
        """Fetches the calls that have ended; returns the begin of the oldest call that has not, or infinity.

        Waits for the process to be ready.
        """
        self.tell(order)
        answer = self.answer()
        self.samples += [Sample(*sample) for sample in answer["ended"]]
        self.failures += [Failure(begin_s, f"{self.name}: {what}") for begin_s, what in answer["failures"]]
        return float("inf") if answer["oldest_s"] is None else float(answer["oldest_s"])


class _Client:
    """The client in the bystander's process."""

    def __init__(self, plan: Plan, client: AsyncClient) -> None:
        self._client = client
        self._rng = random.Random(plan.seed)
        self._owner = plan.seed
        self._fresh = 0
        self._spec = NamespaceSpec(f"{plan.name}-model", BLOCK_TOKENS, (PartSpec("full", 0, _PART_BYTES),))
        self._cache: AsyncCache
        self._answers: dict[int, list[int]] = {}
        self.ended: list[tuple[str, float, float]] = []
        self.failures: list[tuple[float, str]] = []
        self.under_way: list[float] = []
        """Begins of the calls that have not ended, the oldest first."""
        self.going = asyncio.Event()

    async def prepare(self) -> None:
        """Stores all prompts, and records all answers."""
        self._cache = await self._client.register(self._spec)
        for number in range(_PROMPTS):
            await self._cache.store(_tokens(self._owner, number, _BLOCKS), _content(self._owner, number, _BLOCKS))
        for number in range(_ASKED):
            self._answers[number] = await self._answer(number)
        for number in range(_ASKED):  # from the cache
            self._check_answer(number, await self._answer(number))
        self.going.set()

    async def at_fixed_times(self, kind: str, group: asyncio.TaskGroup) -> None:
        """Makes calls of one kind without an end. The first begins at a random moment: calls that begin together would
        wait for each other."""
        do: Callable[[], Awaitable[None]] = getattr(self, kind)
        due_s = time.monotonic() + self._rng.uniform(0, EVERY_S[kind])
        waiting: set[asyncio.Task[None]] = set()
        while True:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            if not self.going.is_set():
                await self.going.wait()
                due_s = time.monotonic() + self._rng.uniform(0, EVERY_S[kind])
                continue
            if len(waiting) < _MOST_WAITING:
                task = group.create_task(self._measure(kind, do))
                waiting.add(task)
                task.add_done_callback(waiting.discard)
            due_s = max(due_s + EVERY_S[kind], time.monotonic() - 1.0)

    async def _measure(self, kind: str, do: Callable[[], Awaitable[None]]) -> None:
        begin_s = time.monotonic()
        self.under_way.append(begin_s)
        try:
            await do()
        except (ClientError, _Wrong) as error:
            self.failures.append((begin_s, f"{kind}: {type(error).__name__}: {error}"[:300]))
        self.under_way.remove(begin_s)
        self.ended.append((kind, begin_s, time.monotonic() - begin_s))

    async def match(self) -> None:
        number = self._rng.randrange(_PROMPTS)
        found = await self._cache.match(_tokens(self._owner, number, _BLOCKS))
        if found.blocks < _BLOCKS:
            raise _Wrong(f"{_BLOCKS - found.blocks} of its own {_BLOCKS} blocks are gone, within what it is guaranteed")

    async def load(self) -> None:
        number = self._rng.randrange(_PROMPTS)
        expected = _content(self._owner, number, _BLOCKS)
        got = np.zeros_like(expected)
        blocks = await self._cache.load(_tokens(self._owner, number, _BLOCKS), got)
        if blocks < _BLOCKS:
            raise _Wrong(f"{_BLOCKS - blocks} of its own {_BLOCKS} blocks are gone, within what it is guaranteed")
        if wrong := int(np.count_nonzero(got != expected)):
            raise _Wrong(f"{wrong} of {len(expected)} bytes are wrong")

    async def store(self) -> None:
        self._fresh += 1
        number = _PROMPTS + self._fresh
        stored = await self._cache.store(_tokens(self._owner, number, 1), _content(self._owner, number, 1))
        if stored.dropped:
            raise _Wrong("there was no room for a block, within what it is guaranteed")

    async def generate(self) -> None:
        """Generates from a prompt, and checks that it gives the same tokens as before."""
        number = self._rng.randrange(_ASKED)
        self._check_answer(number, await self._answer(number))

    async def _answer(self, number: int) -> list[int]:
        prompt = (_tokens(self._owner, 1_000_000 + number, 2 + number % 4) % 256).tolist()
        sampling = Sampling(max_tokens=_OUTPUT_TOKENS, ignore_eos=True)
        return await generated_tokens(self._client, prompt, sampling, timeout_s=_CALL_S)

    def _check_answer(self, number: int, got: list[int]) -> None:
        if got != self._answers[number]:
            raise _Wrong(f"prompt {number} gave {got} and before {self._answers[number]}")


class _Wrong(Exception):
    """An answer that is not the right one."""


def _tokens(owner: int, number: int, blocks: int) -> npt.NDArray[np.uint32]:
    rng = np.random.default_rng([owner, number])
    return rng.integers(0, 1 << 32, blocks * BLOCK_TOKENS, dtype=np.uint32)


def _content(owner: int, number: int, blocks: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng([owner, number, 1]).integers(0, 256, blocks * _PART_BYTES, dtype=np.uint8)


async def _serve(plan: Plan) -> None:
    orders = await order_lines()
    how: dict[str, Any] = {"memory": plan.memory, "token": plan.token, "timeout_s": _CALL_S}
    async with AsyncClient(plan.address, name=plan.name, **how) as client, asyncio.TaskGroup() as group:
        work = _Client(plan, client)
        try:
            async with asyncio.timeout(_STARTED_S):
                await work.prepare()
        except (ClientError, TimeoutError, _Wrong) as error:
            print(json.dumps({"error": f"not ready within {_STARTED_S:g} s: {error!r}"}), flush=True)
            return
        tasks = [group.create_task(work.at_fixed_times(kind, group)) for kind in EVERY_S]
        while line := await orders.readline():
            match line.strip():
                case b"pause":
                    work.going.clear()
                case b"go":
                    work.going.set()
            oldest_s = work.under_way[0] if work.under_way else None
            print(json.dumps({"ended": work.ended, "failures": work.failures, "oldest_s": oldest_s}), flush=True)
            work.ended.clear()
            work.failures.clear()
        for task in tasks:
            task.cancel()


def main() -> None:
    """Runs the bystander."""
    plan = Plan(**json.loads(sys.argv[1]))
    become(plan.uid)
    asyncio.run(_serve(plan))


if __name__ == "__main__":
    main()
