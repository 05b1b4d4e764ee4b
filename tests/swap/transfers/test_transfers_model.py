"""Any sequence of submitting, raising, cancelling and ending pieces keeps the rules of `device_queue`."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefixd_swap.transfers import DeviceLimits, Piece, Transfer, Urgency
from tests.swap.transfers.fakes import Bench, settle

DEMAND, PREFETCH = Urgency.DEMAND, Urgency.PREFETCH
PIECE_BYTES = 50


@dataclass(eq=False)
class Known:
    """What must be true of one transfer, by the calls that were made."""

    path: str
    urgency: Urgency
    due_s: float
    number: int
    count: int
    fails: bool
    in_order: bool
    since_s: float
    started: int = 0
    ended: int = 0
    dropped: bool = False
    transfer: Transfer[int] | None = None
    positions: list[int] = field(default_factory=list)

    @property
    def in_flight(self) -> int:
        return self.started - self.ended

    @property
    def more(self) -> bool:
        """Whether it has pieces that will still start."""
        failed = self.in_order and self.fails and self.ended
        return not self.dropped and not failed and self.started < self.count

    @property
    def waits(self) -> bool:
        return self.more and not (self.in_order and self.in_flight)

    @property
    def order(self) -> tuple[int, float, int]:
        return self.urgency, self.due_s, self.number


class TransfersMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.known: list[Known] = []
        self.running: list[tuple[Known, int]] = []  # piece by piece, the oldest first
        self.let_through: tuple[Known, int, float] | None = None
        self.next_turn_s = -math.inf
        self.cancels: list[tuple[Known, asyncio.Task[Any]]] = []
        self.on_loop: dict[tuple[Known, int], asyncio.Event] = {}

    @initialize(in_flight=st.integers(1, 4), reserved=st.integers(0, 2), write=st.integers(1, 4))
    def build(self, in_flight: int, reserved: int, write: int) -> None:
        self.limits = DeviceLimits(in_flight, min(reserved, in_flight - 1), patience_s=1.0, share=0.25)
        self.path_limits = {"read": in_flight, "write": write}
        self.bench = Bench(self.limits, write_in_flight=write)
        self.clock = self.bench.clock

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    # -- what the rules say -----------------------------------------------------------------------------------------

    def in_flight(self, path: str | None = None, *, background: bool = False) -> int:
        return sum(
            known.in_flight
            for known in self.known
            if path in (None, known.path) and not (background and known.urgency is DEMAND)
        )

    def has_room(self, known: Known) -> bool:
        if self.in_flight() >= self.limits.in_flight or self.in_flight(known.path) >= self.path_limits[known.path]:
            return False
        if known.urgency is DEMAND:
            return True
        path_limit = max(1, self.path_limits[known.path] - self.limits.reserved)
        return (
            self.in_flight(background=True) < self.limits.in_flight - self.limits.reserved
            and self.in_flight(known.path, background=True) < path_limit
        )

    def held_back(self, known: Known) -> bool:
        return known.urgency is not DEMAND and any(
            other.urgency is DEMAND and (other.waits or other.in_flight) for other in self.known
        )

    def check_start(self, known: Known) -> None:
        now_s = self.clock.now_s
        assert known.waits and self.has_room(known)
        better = [
            other
            for other in self.known
            if other.waits and other.order < known.order and self.has_room(other) and not self.held_back(other)
        ]
        if not better and not self.held_back(known):
            return
        # Rule 4, and only rule 4.
        assert known.urgency is not DEMAND
        assert self.let_through is None and now_s >= self.next_turn_s
        assert now_s - known.since_s >= self.limits.patience_s
        self.let_through = known, known.started, now_s

    # -- what is done -------------------------------------------------------------------------------------------------

    @rule(
        path=st.sampled_from(["read", "write"]),
        urgency=st.sampled_from(Urgency),
        count=st.integers(0, 6),
        deadline_s=st.none() | st.floats(0, 50),
        fails=st.booleans(),
        in_order=st.booleans(),
        on_loop=st.booleans(),
    )
    def submit(
        self,
        path: str,
        urgency: Urgency,
        count: int,
        deadline_s: float | None,
        fails: bool,
        in_order: bool,
        on_loop: bool,
    ) -> None:
        now_s = self.clock.now_s
        due_s = min(now_s + 10.0, math.inf if deadline_s is None else deadline_s)
        known = Known(path, urgency, due_s, len(self.known), count, fails, in_order, now_s)

        def pieces() -> Iterator[Piece[int]]:
            for position in range(count):
                self.check_start(known)
                known.started += 1
                known.since_s = now_s = self.clock.now_s
                assert now_s >= 0
                self.running.append((known, position))
                yield self.piece(known, position, on_loop)

        async def submit() -> None:
            self.known.append(known)
            known.transfer = self.bench.transfers.submit(
                path,
                pieces(),
                urgency,
                deadline_s=deadline_s,
                in_order=in_order,
                count=count,
                nbytes=count * PIECE_BYTES,
            )
            await settle()

        self.run(submit())

    def piece(self, known: Known, position: int, on_loop: bool) -> Piece[int]:
        def work() -> int:
            known.positions.append(position)
            if known.fails:
                raise OSError(position)
            return position

        gate = asyncio.Event()

        async def work_on_loop() -> int:
            await gate.wait()
            return work()

        if on_loop:
            self.on_loop[known, position] = gate
            return Piece(PIECE_BYTES, work_on_loop, True)
        return Piece(PIECE_BYTES, work)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), after_s=st.sampled_from([0.0, 0.1, 1.0, 5.0]))
    def end(self, data: st.DataObject, after_s: float) -> None:
        position = data.draw(st.integers(0, len(self.running) - 1))
        known, piece = ended = self.running.pop(position)
        self.clock.now_s += after_s
        # The model knows of the end before the queue starts the next piece.
        known.ended += 1
        if known.in_order:
            known.since_s = self.clock.now_s
        if self.let_through is not None and self.let_through[:2] == ended:
            took_s = self.clock.now_s - self.let_through[2]
            self.let_through = None
            self.next_turn_s = self.clock.now_s + max(1.0, 3 * took_s)

        async def end() -> None:
            gate = self.on_loop.pop((known, piece), None)
            if gate is not None:
                gate.set()
            else:
                in_threads = [each for each in self.running if each not in self.on_loop]
                before = sum(1 for each in self.running[:position] if each in in_threads)
                self.bench.pools[0].end(before)
            await settle()

        self.run(end())

    @rule(after_s=st.floats(0.1, 3.0))
    def wait(self, after_s: float) -> None:
        self.clock.now_s += after_s

    @precondition(lambda self: self.known)
    @rule(data=st.data(), urgency=st.sampled_from(Urgency))
    def raise_to(self, data: st.DataObject, urgency: Urgency) -> None:
        known = data.draw(st.sampled_from(self.known))
        transfer = known.transfer
        assert transfer is not None

        async def raise_to() -> None:
            if not transfer.finished:
                known.urgency = min(known.urgency, urgency)
            transfer.raise_to(urgency)
            await settle()

        self.run(raise_to())

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(self.known))
        transfer = known.transfer
        assert transfer is not None

        async def cancel() -> None:
            known.dropped = True
            self.cancels.append((known, asyncio.create_task(transfer.cancel())))
            await settle()

        self.run(cancel())

    @precondition(lambda self: self.cancels)
    @rule(data=st.data())
    def cancel_the_cancelling(self, data: st.DataObject) -> None:
        known, task = data.draw(st.sampled_from(self.cancels))

        async def cancel() -> None:
            task.cancel()
            await settle()

        self.run(cancel())
        assert task.done() == (not known.in_flight)

    # -- what is true when nothing more can happen by itself --------------------------------------------------------

    @invariant()
    def nothing_waits_that_may_start(self) -> None:
        for known in self.known:
            assert not known.waits or not self.has_room(known) or self.held_back(known)

    @invariant()
    def every_piece_has_one_outcome(self) -> None:
        for known in self.known:
            transfer = known.transfer
            assert transfer is not None
            assert transfer.finished == (not known.more and not known.in_flight)
            assert transfer.urgency is known.urgency
            if not transfer.finished:
                continue
            result = self.run(_wait(transfer))
            assert len(result.outcomes) == known.started == len(known.positions)
            assert len(result.outcomes) + result.dropped == known.count
            assert sorted(known.positions) == list(range(known.started))
            for position, outcome in enumerate(result.outcomes):
                assert known.fails == isinstance(outcome.error, OSError)
                assert outcome.value == (None if known.fails else position)

    @invariant()
    def figures_are_right(self) -> None:
        if not hasattr(self, "bench"):
            return
        for stats in self.bench.transfers.stats():
            waiting: Counter[Urgency] = Counter()
            pieces: Counter[Urgency] = Counter()
            running: Counter[Urgency] = Counter()
            for known in self.known:
                if known.path == stats.path:
                    waiting[known.urgency] += known.more
                    pieces[known.urgency] += known.more * (known.count - known.started)
                    running[known.urgency] += known.in_flight
            for urgency, figures in stats.by_urgency.items():
                assert figures.waiting_transfers == waiting[urgency]
                assert figures.waiting_pieces == pieces[urgency]
                assert figures.waiting_bytes == pieces[urgency] * PIECE_BYTES
                assert figures.in_flight == running[urgency]

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            self.loop.close()
            return

        async def close() -> None:
            closing = asyncio.create_task(self.bench.transfers.close())
            for known in self.known:
                known.dropped = True
            await settle()
            for gate in self.on_loop.values():
                gate.set()
            while self.bench.begun:
                self.bench.pools[0].end(0)
            await settle()
            assert closing.done()
            await asyncio.gather(*(task for _, task in self.cancels), return_exceptions=True)

        self.run(close())
        self.loop.close()


async def _wait(transfer: Transfer[int]) -> Any:
    return await transfer.done


TestTransfers = TransfersMachine.TestCase
TestTransfers.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def drive(device: DeviceLimits, waiting: int, piece_s: Callable[[int], float], seconds: float) -> list[list[float]]:
    """When each of `waiting` transfers started its pieces while DEMAND never ended."""

    async def run() -> list[list[float]]:
        bench = Bench(device)
        starts: list[list[float]] = [[] for _ in range(waiting)]

        def pieces(own: list[float]) -> Iterator[Piece[None]]:
            for _ in range(10_000):
                own.append(bench.clock.now_s)
                yield Piece(1, lambda: None)

        def demand() -> Iterator[Piece[None]]:
            for _ in range(100_000):
                yield Piece(1, lambda: None)

        bench.transfers.submit("read", demand(), DEMAND, count=100_000, nbytes=100_000)
        for at, own in enumerate(starts):
            urgency = list(Urgency)[1 + at % 3]
            bench.transfers.submit("write", pieces(own), urgency, count=10_000, nbytes=10_000)
        at = 0
        while bench.clock.now_s < seconds:
            at += 1
            await bench.end(0, piece_s(at))
        return starts

    return asyncio.run(run())


def test_every_transfer_goes_on_within_the_bound_while_demand_never_ends() -> None:
    device = DeviceLimits(2, reserved=1, patience_s=0.5, share=0.25)
    longest = 0.4
    starts = drive(device, 5, lambda at: 0.1 + 0.3 * (at % 7 == 0), 300.0)
    for own in starts:
        gaps = [later - sooner for sooner, later in zip([0.0, *own], own, strict=False)]
        # A turn is due every max(patience, d / share) seconds, d being up to two pieces' time here: pieces overlap.
        bound = 5 * max(device.patience_s, 2 * longest / device.share) + 2 * longest
        assert own and max(gaps) <= bound
