from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from prefixd_swap.errors import MemoryMisuseError, OutOfMemoryError, TransferDroppedError
from prefixd_swap.transfers import (
    DeviceLimits,
    Piece,
    Transfers,
    Urgency,
    grouped,
    piece_items,
)
from tests.swap.transfers.fakes import Bench, settle

DEMAND, PREFETCH, WRITE_BACK, SCRUB = Urgency
TWO = DeviceLimits(2, reserved=1, patience_s=1.0)
ONE = DeviceLimits(1, reserved=0, patience_s=1.0)


class Log:
    """Pieces that write down that they ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def pieces(self, name: str, count: int, nbytes: int = 10) -> list[Piece[str]]:
        def work(label: str) -> Callable[[], str]:
            def run() -> str:
                self.ran.append(label)
                return label

            return run

        return [Piece(nbytes, work(f"{name}{at}")) for at in range(count)]


@pytest.fixture
def log() -> Log:
    return Log()


def fail() -> str:
    raise OSError("the device failed")


async def test_a_transfer_gives_the_value_of_every_piece(log: Log) -> None:
    bench = Bench(TWO)
    transfer = bench.transfers.submit("read", log.pieces("a", 5), DEMAND)
    assert bench.begun == 2 and not transfer.finished
    await bench.end_all()
    assert (await transfer.done).values() == ["a0", "a1", "a2", "a3", "a4"]
    assert transfer.finished and transfer.path == "read"


async def test_a_piece_that_fails_is_reported_and_costs_no_other(log: Log) -> None:
    bench = Bench(TWO)
    pieces = log.pieces("a", 3)
    pieces[1] = Piece(10, fail)
    transfer = bench.transfers.submit("read", pieces, DEMAND)
    await bench.end_all()
    result = await transfer.done
    assert [outcome.value for outcome in result.outcomes] == ["a0", None, "a2"]
    assert isinstance(result.outcomes[1].error, OSError) and not result.dropped
    with pytest.raises(OSError, match="the device failed"):
        result.values()
    assert bench.transfers.stats()[0].by_urgency[DEMAND].failed == 1


async def test_the_more_urgent_goes_first_and_equals_by_deadline_then_arrival(log: Log) -> None:
    bench = Bench(ONE)
    submit = bench.transfers.submit
    submit("read", log.pieces("first", 1), SCRUB)
    submit("read", log.pieces("scrub", 1), SCRUB)
    submit("write", log.pieces("back", 1), WRITE_BACK)
    submit("read", log.pieces("later", 1), PREFETCH)
    submit("read", log.pieces("sooner", 1), PREFETCH, deadline_s=5.0)
    submit("read", log.pieces("b", 1), DEMAND)
    submit("write", log.pieces("c", 1), DEMAND)
    await bench.end_all()
    assert log.ran == ["first0", "b0", "c0", "sooner0", "later0", "back0", "scrub0"]


async def test_a_deadline_cannot_keep_others_of_its_urgency_waiting_for_ever(log: Log) -> None:
    bench = Bench(ONE)
    bench.transfers.submit("read", log.pieces("running", 1), DEMAND)
    old = bench.transfers.submit("read", log.pieces("old", 1), DEMAND)
    for at in range(100):
        bench.transfers.submit("read", log.pieces(f"new{at}_", 1), DEMAND, deadline_s=bench.clock.now_s + 2.0)
        await bench.end(after_s=0.5)
        if old.finished:
            break
    assert old.finished and bench.clock.now_s <= 10.5


async def test_demand_starts_at_once_in_the_slot_that_is_reserved_for_it(log: Log) -> None:
    bench = Bench(DeviceLimits(3, reserved=1))
    bench.transfers.submit("read", log.pieces("a", 9), PREFETCH)
    bench.transfers.submit("write", log.pieces("w", 9), WRITE_BACK)
    assert bench.begun == 2
    bench.transfers.submit("read", log.pieces("d", 1), DEMAND)
    assert bench.begun == 3


async def test_while_demand_waits_or_runs_nothing_else_starts(log: Log) -> None:
    bench = Bench(TWO)
    bench.transfers.submit("write", log.pieces("w", 3), WRITE_BACK)
    demand = bench.transfers.submit("read", log.pieces("d", 3), DEMAND)
    await bench.end(1)  # the reserved slot: demand goes on
    await bench.end(0)  # the write: its slot goes to demand as well
    assert bench.begun == 2 and len(log.ran) == 2
    await bench.end(0)
    assert not demand.finished and bench.begun == 1, "a write would now share the device with demand"
    await bench.end(0)
    assert demand.finished
    await bench.end_all()
    assert log.ran == ["d0", "w0", "d1", "d2", "w1", "w2"]


async def test_demand_that_waits_for_its_own_path_holds_the_other_path_back(log: Log) -> None:
    bench = Bench(DeviceLimits(4, reserved=1), write_in_flight=1)
    bench.transfers.submit("write", log.pieces("w", 1), WRITE_BACK)
    bench.transfers.submit("write", log.pieces("d", 1), DEMAND)
    bench.transfers.submit("read", log.pieces("p", 1), PREFETCH)
    assert bench.begun == 1, "a read would delay the end of the write that demand waits for"
    await bench.end_all()
    assert log.ran == ["w0", "d0", "p0"]


async def test_one_piece_at_a_time_is_let_through(log: Log) -> None:
    bench = Bench(DeviceLimits(4, reserved=1, patience_s=1.0))
    bench.transfers.submit("read", log.pieces("d", 100), DEMAND)
    bench.transfers.submit("write", log.pieces("w", 100), WRITE_BACK)
    bench.transfers.submit("write", log.pieces("s", 100), SCRUB)
    await bench.end(0, after_s=5.0)
    for _ in range(20):
        await bench.end(0)  # the piece that was let through is the last of four, and stays
        bench.pools[0].begun.append(bench.pools[0].begun.pop(2))
        assert sum("d" not in str(label) for label in log.ran) == 0


async def test_background_gets_a_piece_through_although_demand_never_ends(log: Log) -> None:
    bench = Bench(DeviceLimits(1, reserved=0, patience_s=1.0, share=0.25))
    bench.transfers.submit("read", log.pieces("d", 1000), DEMAND)
    bench.transfers.submit("write", log.pieces("w", 1000), WRITE_BACK)
    for _ in range(400):
        await bench.end(after_s=1.0)
    written = sum(label.startswith("w") for label in log.ran)
    assert 90 <= written <= 101, "about a quarter of the slot's time, and no more"


async def test_the_longest_waiting_is_let_through_first(log: Log) -> None:
    bench = Bench(DeviceLimits(1, reserved=0, patience_s=1.0, share=0.5))
    bench.transfers.submit("read", log.pieces("d", 1000), DEMAND)
    for name, urgency in (("s", SCRUB), ("w", WRITE_BACK), ("p", PREFETCH)):
        bench.transfers.submit("write", log.pieces(name, 2), urgency)
    for _ in range(20):
        await bench.end(after_s=1.0)
    assert [label for label in log.ran if label[0] != "d"] == ["s0", "w0", "p0", "s1", "w1", "p1"]


async def test_without_urgency_everything_is_one_queue(log: Log) -> None:
    bench = Bench(ONE, urgency_enabled=False)
    bench.transfers.submit("read", log.pieces("s", 2), SCRUB)
    bench.transfers.submit("write", log.pieces("w", 2), WRITE_BACK)
    bench.transfers.submit("read", log.pieces("d", 2), DEMAND)
    await bench.end_all(after_s=100.0)
    assert log.ran == ["s0", "s1", "w0", "w1", "d0", "d1"]


async def test_without_urgency_no_slot_is_reserved(log: Log) -> None:
    bench = Bench(TWO, urgency_enabled=False)
    bench.transfers.submit("read", log.pieces("s", 2), SCRUB)
    assert bench.begun == 2


async def test_a_path_has_its_own_limit_and_keeps_a_place_for_demand(log: Log) -> None:
    bench = Bench(DeviceLimits(8, reserved=2), write_in_flight=3)
    bench.transfers.submit("write", log.pieces("w", 9), WRITE_BACK)
    assert bench.begun == 1
    bench.transfers.submit("write", log.pieces("d", 9), DEMAND)
    assert bench.begun == 3
    bench.transfers.submit("read", log.pieces("r", 9), DEMAND)
    assert bench.begun == 8


async def test_raised_to_demand_a_prefetch_overtakes_and_holds_others_back(log: Log) -> None:
    bench = Bench(TWO)
    bench.transfers.submit("read", log.pieces("a", 2), PREFETCH)
    wanted = bench.transfers.submit("read", log.pieces("b", 3), PREFETCH)
    assert bench.begun == 1
    wanted.raise_to(DEMAND)
    wanted.raise_to(SCRUB)
    assert wanted.urgency is DEMAND and bench.begun == 2
    await bench.end(0)
    await bench.end_all()
    assert log.ran == ["a0", "b0", "b1", "b2", "a1"]
    stats = bench.transfers.stats()[0].by_urgency
    assert stats[DEMAND].started == 3 and stats[PREFETCH].started == 2
    wanted.raise_to(DEMAND)  # nothing is left to raise


async def test_raising_what_is_under_way_frees_its_place_for_nobody_but_demand(log: Log) -> None:
    bench = Bench(DeviceLimits(2, reserved=1))
    running = bench.transfers.submit("read", log.pieces("a", 1), PREFETCH)
    bench.transfers.submit("write", log.pieces("w", 1), WRITE_BACK)
    running.raise_to(DEMAND)
    assert bench.begun == 1
    stats = bench.transfers.stats()[0].by_urgency
    assert (stats[PREFETCH].in_flight, stats[DEMAND].in_flight) == (0, 1)
    await bench.end()
    assert bench.begun == 1


async def test_cancel_drops_what_has_not_started_and_waits_for_the_rest(log: Log) -> None:
    bench = Bench(TWO)
    transfer = bench.transfers.submit("read", log.pieces("a", 10), DEMAND)
    cancelling = asyncio.create_task(transfer.cancel())
    await settle()
    assert not cancelling.done() and bench.begun == 2
    await bench.end_all()
    result = await cancelling
    assert [outcome.get() for outcome in result.outcomes] == ["a0", "a1"] and result.dropped == 8
    with pytest.raises(TransferDroppedError, match="8 of 10 pieces were dropped"):
        result.values()
    assert (await transfer.cancel()) is result
    assert bench.transfers.stats()[0].by_urgency[DEMAND].dropped == 8


@pytest.mark.parametrize("method", ["cancel", "finish"])
async def test_a_caller_that_is_cancelled_still_waits_for_the_threads(log: Log, method: str) -> None:
    bench = Bench(TWO)
    transfer = bench.transfers.submit("read", log.pieces("a", 10), DEMAND)
    task = asyncio.create_task(getattr(transfer, method)())
    await settle()
    for _ in range(3):
        task.cancel()
        await settle()
        assert not task.done()
    await bench.end()
    assert not task.done() and bench.begun == 1
    await bench.end()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert transfer.finished and log.ran == ["a0", "a1"]


async def test_waiting_for_a_transfer_does_not_own_it(log: Log) -> None:
    bench = Bench(TWO)
    transfer = bench.transfers.submit("read", log.pieces("a", 3), DEMAND)

    async def wait() -> None:
        await transfer.done

    task = asyncio.create_task(wait())
    await settle()
    task.cancel()
    await settle()
    assert task.cancelled()
    await bench.end_all()
    assert len((await transfer.finish()).values()) == 3


async def test_cancelling_demand_lets_the_others_go_on(log: Log) -> None:
    bench = Bench(DeviceLimits(4, reserved=1), write_in_flight=1)
    bench.transfers.submit("write", log.pieces("w", 1), SCRUB)
    demand = bench.transfers.submit("write", log.pieces("d", 1), DEMAND)
    bench.transfers.submit("read", log.pieces("p", 1), PREFETCH)
    assert bench.begun == 1
    demand.drop()
    assert demand.finished and bench.begun == 2


async def test_a_transfer_is_over_when_its_last_piece_is_whatever_waits_for_its_path(log: Log) -> None:
    bench = Bench(ONE)
    first = bench.transfers.submit("read", iter(log.pieces("a", 1)), PREFETCH, count=1, nbytes=10)
    bench.transfers.submit("read", log.pieces("d", 2), DEMAND)
    await bench.end()
    assert first.finished and bench.begun == 1


async def test_outcomes_come_as_pieces_end(log: Log) -> None:
    bench = Bench(DeviceLimits(3, reserved=0))
    transfer = bench.transfers.submit("read", log.pieces("a", 4), DEMAND)
    seen: list[tuple[int, str]] = []

    async def follow() -> None:
        async for position, outcome in transfer.outcomes():
            seen.append((position, outcome.get()))

    task = asyncio.create_task(follow())
    await bench.end(2)
    assert seen == [(2, "a2")]
    await bench.end(0)
    assert seen == [(2, "a2"), (0, "a0")]
    await bench.end_all()
    await task
    assert sorted(seen) == [(at, f"a{at}") for at in range(4)]
    assert [position async for position, _ in transfer.outcomes()] == [2, 0, 1, 3]


async def test_pieces_are_taken_when_they_start(log: Log) -> None:
    bench = Bench(TWO)
    taken = 0

    def make() -> Iterator[Piece[str]]:
        nonlocal taken
        for piece in log.pieces("a", 5):
            taken += 1
            yield piece

    transfer = bench.transfers.submit("read", make(), DEMAND, count=5, nbytes=50)
    assert taken == 2
    await bench.end()
    assert taken == 3
    result = asyncio.create_task(transfer.cancel())
    await bench.end_all()
    assert taken == 3 and (await result).dropped == 2


async def test_an_iterator_that_fails_is_reported_in_its_place(log: Log) -> None:
    bench = Bench(TWO)

    def make() -> Iterator[Piece[str]]:
        yield log.pieces("a", 1)[0]
        raise LookupError("the block has gone")

    transfer = bench.transfers.submit("read", make(), DEMAND, count=5, nbytes=50)
    await bench.end_all()
    result = await transfer.done
    assert result.outcomes[0].get() == "a0" and isinstance(result.outcomes[1].error, LookupError)
    assert result.dropped == 3
    figures = bench.transfers.stats()[0].by_urgency[DEMAND]
    assert (figures.waiting_transfers, figures.waiting_pieces, figures.waiting_bytes) == (0, 0, 0)


async def test_pieces_in_order_run_one_at_a_time_and_stop_at_a_failure(log: Log) -> None:
    bench = Bench(DeviceLimits(4, reserved=0))
    pieces = log.pieces("a", 4)
    pieces[2] = Piece(10, fail)
    transfer = bench.transfers.submit("write", pieces, WRITE_BACK, in_order=True)
    for _ in range(3):
        assert bench.begun == 1
        await bench.end()
    result = await transfer.done
    assert [type(outcome.error) for outcome in result.outcomes] == [type(None), type(None), OSError]
    assert result.dropped == 1 and log.ran == ["a0", "a1"]


async def test_pieces_may_run_on_the_event_loop(log: Log) -> None:
    bench = Bench(TWO)
    gate = asyncio.Event()

    async def good() -> str:
        await gate.wait()
        return "good"

    async def bad() -> str:
        raise OSError("no")

    transfer = bench.transfers.submit("read", [Piece(1, good, True), Piece(1, bad, True)], DEMAND)
    await settle()
    assert bench.begun == 0 and not transfer.finished
    gate.set()
    result = await transfer.done
    assert result.outcomes[0].get() == "good" and isinstance(result.outcomes[1].error, OSError)


async def test_a_piece_whose_task_is_cancelled_from_outside_has_an_outcome() -> None:
    bench = Bench(TWO)
    tasks: list[asyncio.Task[Any]] = []

    async def forever() -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        await asyncio.Event().wait()

    transfer = bench.transfers.submit("read", [Piece(1, forever, True)], DEMAND)
    await settle()
    tasks[0].cancel()
    assert isinstance((await transfer.done).outcomes[0].error, asyncio.CancelledError)


async def test_close_drops_what_waits_and_waits_for_what_runs(log: Log) -> None:
    bench = Bench(TWO)
    transfer = bench.transfers.submit("read", log.pieces("a", 9), DEMAND)
    closing = asyncio.create_task(bench.transfers.close())
    await settle()
    assert not closing.done()
    with pytest.raises(MemoryMisuseError, match="closed"):
        bench.transfers.submit("read", log.pieces("b", 1), DEMAND)
    await bench.end_all()
    await closing
    assert (await transfer.done).dropped == 7 and bench.pools[0].closed
    await bench.transfers.close()


async def test_drain_waits_for_everything(log: Log) -> None:
    bench = Bench(TWO)
    await bench.transfers.drain()
    bench.transfers.submit("read", log.pieces("a", 3), SCRUB)
    draining = asyncio.create_task(bench.transfers.drain())
    await settle()
    assert not draining.done()
    await bench.end_all()
    await draining


async def test_a_transfer_of_nothing_is_over_at_once() -> None:
    bench = Bench(TWO)
    assert (await bench.transfers.submit("read", [], SCRUB).done).values() == []
    await bench.transfers.drain()


async def test_what_cannot_be_is_refused_with_its_reason(log: Log) -> None:
    bench = Bench(TWO)
    pieces = log.pieces("a", 1)
    with pytest.raises(MemoryMisuseError, match=r"no path 'up'; there are read, write"):
        bench.transfers.submit("up", pieces, DEMAND)
    with pytest.raises(MemoryMisuseError, match="`count` and `nbytes`"):
        bench.transfers.submit("read", iter(pieces), DEMAND, count=1)
    with pytest.raises(MemoryMisuseError, match="-1 pieces"):
        bench.transfers.submit("read", pieces, DEMAND, count=-1)
    with pytest.raises(MemoryMisuseError, match="already"):
        bench.transfers.add_device("disk", TWO)
    with pytest.raises(MemoryMisuseError, match="already"):
        bench.transfers.add_path("read", "disk")
    with pytest.raises(MemoryMisuseError, match="no device 'tape'"):
        bench.transfers.add_path("tape read", "tape")
    with pytest.raises(MemoryMisuseError, match="at least 1"):
        bench.transfers.add_path("none", "disk", 0)
    for limits in ((0, 0), (1, 1), (2, -1)):
        with pytest.raises(MemoryMisuseError, match="reserve"):
            DeviceLimits(*limits)
    for options in ({"patience_s": float("nan")}, {"share": 0.0}, {"share": 1.5}):
        with pytest.raises(MemoryMisuseError, match="share"):
            DeviceLimits(2, **options)
    assert bench.transfers.has_path("read") and not bench.transfers.has_path("up")


async def test_figures_follow_every_piece(log: Log) -> None:
    bench = Bench(DeviceLimits(2, reserved=1, patience_s=100.0))
    bench.transfers.submit("read", log.pieces("a", 4), PREFETCH)
    bench.clock.now_s = 3.0
    demand = bench.transfers.submit("read", log.pieces("b", 3, 100), DEMAND)
    (read, _) = bench.transfers.stats()
    assert (read.path, read.device) == ("read", "disk")
    waiting = read.by_urgency[DEMAND]
    assert (waiting.waiting_transfers, waiting.waiting_pieces, waiting.waiting_bytes) == (1, 2, 200)
    assert (waiting.in_flight, waiting.waits, waiting.waited_s) == (1, 1, 0.0)
    prefetch = read.by_urgency[PREFETCH]
    assert (prefetch.waiting_pieces, prefetch.waiting_bytes, prefetch.in_flight) == (3, 30, 1)
    bench.transfers.submit("read", log.pieces("c", 1), DEMAND)
    await bench.end_all(after_s=0.5)
    assert demand.finished
    assert waiting.waits == 2 and waiting.waited_s == waiting.longest_wait_s == pytest.approx(1.5)
    assert (waiting.started, waiting.moved_bytes) == (4, 310)
    for figures in read.by_urgency.values():
        assert not (figures.waiting_transfers or figures.waiting_pieces or figures.waiting_bytes or figures.in_flight)


async def test_a_path_is_measured(log: Log) -> None:
    bench = Bench(DeviceLimits(2, reserved=0))
    assert bench.transfers.estimate("read").bytes_per_s is None
    bench.transfers.submit("read", log.pieces("a", 40, 1000), DEMAND)
    await bench.end_all(after_s=0.25)  # two at a time, each takes 0.5 s: 4,000 bytes a second
    estimate = bench.transfers.estimate("read")
    assert estimate.pieces == 40
    assert estimate.bytes_per_s == pytest.approx(4000, rel=0.01)
    assert estimate.piece_s == pytest.approx(0.5, rel=0.1)
    bench.clock.now_s += 1000.0  # an idle path is not a slow one
    bench.transfers.submit("read", log.pieces("b", 2, 1000), DEMAND)
    await bench.end_all(after_s=0.25)
    assert bench.transfers.estimate("read").bytes_per_s == pytest.approx(4000, rel=0.01)


async def test_an_estimate_follows_a_device_that_has_become_slower(log: Log) -> None:
    bench = Bench(ONE)
    for seconds, count in ((0.1, 300), (1.0, 30)):
        bench.transfers.submit("read", log.pieces("a", count, 1000), DEMAND)
        await bench.end_all(after_s=seconds)
    assert bench.transfers.estimate("read").bytes_per_s == pytest.approx(1000, rel=0.5)


async def test_real_threads_do_the_work_and_end() -> None:
    transfers = Transfers()
    transfers.add_device("disk", DeviceLimits(3))
    transfers.add_path("read", "disk")
    threads: set[threading.Thread] = set()
    lock = threading.Lock()

    def work() -> int:
        with lock:
            threads.add(threading.current_thread())
        return 1

    transfer = transfers.submit("read", [Piece(1, work)] * 500, DEMAND)
    assert sum((await transfer.done).values()) == 500
    assert 1 <= len(threads) <= 3 and all(thread.name.startswith("prefixd-disk") for thread in threads)
    await transfers.close()
    assert not threads.intersection(threading.enumerate())


async def test_a_shortage_of_threads_is_an_error_of_this_package() -> None:
    def none(count: int, name: str) -> Any:
        raise OutOfMemoryError("no threads")

    transfers = Transfers(threads=none)
    with pytest.raises(OutOfMemoryError):
        transfers.add_device("disk", TWO)
    await transfers.close()


async def test_submitting_many_pieces_does_not_hold_the_event_loop() -> None:
    bench = Bench(TWO)
    gc.collect()  # none is due in what is measured
    began_s = time.thread_time()
    transfer = bench.transfers.submit(
        "read", (Piece(1, lambda: None) for _ in range(62_500)), DEMAND, count=62_500, nbytes=62_500
    )
    transfer.drop()
    assert time.thread_time() - began_s < 0.005
    await bench.end_all()
    assert (await transfer.done).dropped == 62_498


async def test_a_piece_may_stand_for_several_of_those_that_were_submitted() -> None:
    bench = Bench(ONE)
    pieces = [Piece(20, lambda: "a", joined=2), Piece(20, lambda: "b", joined=2)]
    joined = bench.transfers.submit("read", pieces, DEMAND, count=4, nbytes=40)
    other = bench.transfers.submit("read", [Piece(10, lambda: "c")], WRITE_BACK)
    figures = bench.transfers.stats()[0].by_urgency[DEMAND]
    assert (figures.waiting_pieces, figures.waiting_bytes) == (2, 20)
    await bench.end()
    assert (figures.waiting_transfers, figures.waiting_pieces, figures.waiting_bytes) == (0, 0, 0)
    await bench.end_all()
    assert (await joined.done).values() == ["a", "b"] and other.finished

    cut = bench.transfers.submit("read", [Piece(20, lambda: "a", joined=2)] * 3, DEMAND, count=6, nbytes=60)
    cut.drop()
    await bench.end_all()
    assert (await cut.done).dropped == 4


async def test_an_iterator_is_told_which_of_its_pieces_start_before_more_urgent_ones() -> None:
    bench = Bench(DeviceLimits(1, reserved=0, patience_s=1.0))
    seen: list[bool] = []

    def pieces() -> Iterator[Piece[None]]:
        for _ in range(4):
            seen.append(bench.transfers.out_of_turn("read"))
            yield Piece(1, lambda: None)

    bench.transfers.submit("read", pieces(), WRITE_BACK, count=4, nbytes=4)
    demand = bench.transfers.submit("read", [Piece(1, lambda: None)] * 12, DEMAND)
    while not demand.finished:
        await bench.end(after_s=1.0)
    await bench.end_all()
    assert seen == [False, True, True, False]


def test_items_are_grouped_by_bytes_and_number() -> None:
    groups = list(grouped([3, 3, 3, 9, 1, 1, 1, 1], lambda item: item, most_items=3, most_bytes=6))
    assert groups == [([3, 3], 6), ([3], 3), ([9], 9), ([1, 1, 1], 3), ([1], 1)]
    assert not list(grouped([], lambda item: item))


@pytest.mark.parametrize(
    ("item_bytes", "items", "at_least", "expected"),
    [
        (64 << 10, 1000, 1, 64),
        (1 << 20, 1000, 1, 4),
        (16 << 20, 5, 1, 1),
        (4096, 8, 4, 2),
        (4096, 3, 8, 1),
        (0, 0, 1, 1),
    ],
)
def test_pieces_are_small_and_enough(item_bytes: int, items: int, at_least: int, expected: int) -> None:
    assert piece_items(item_bytes, items, at_least=at_least) == expected
