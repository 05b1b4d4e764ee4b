"""Every movement of blocks: started in the order of its urgency, raised, cancelled, limited and measured.

All of it runs on one event loop; only the pieces themselves run elsewhere. Each device has as many threads as it may
have pieces under way, so no piece waits in a thread pool behind another.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Sized
from concurrent.futures import Executor, Future
from typing import Any, TypeVar, cast

from prefixd_swap.errors import MemoryMisuseError
from prefixd_swap.threads import started_threads
from prefixd_swap.transfers.device_queue import LATEST_DUE_S, DeviceLimits, DeviceQueue, Waiter
from prefixd_swap.transfers.estimate import PathEstimate, PathMeter
from prefixd_swap.transfers.path_stats import PathStats, UrgencyStats
from prefixd_swap.transfers.pieces import Outcome, Piece, Result, Urgency
from prefixd_swap.transfers.transfer_handle import Transfer

T = TypeVar("T")

Threads = Callable[[int, str], Executor]
"""(number of threads, prefix of their names) -> a pool whose threads run already."""


class _Device:
    def __init__(self, name: str, queue: DeviceQueue, threads: Executor | None) -> None:
        self.name = name
        self.queue = queue
        self.threads = threads
        self.starting = False
        self.out_of_turn = False


class _Path:
    def __init__(self, name: str, device: _Device) -> None:
        self.name = name
        self.device = device
        self.meter = PathMeter()
        self.by_urgency = {urgency: UrgencyStats() for urgency in Urgency}


class Transfers:
    """All transfers of one process.

    Args:
        urgency_enabled: False makes each device one queue, first in, first out: a benchmark's baseline.
        clock: seconds; passed in so that tests control the time. Threads call it, too.
        threads: makes each device's threads.
    """

    def __init__(
        self,
        *,
        urgency_enabled: bool = True,
        clock: Callable[[], float] = time.monotonic,
        threads: Threads = started_threads,
    ) -> None:
        self.urgency_enabled = urgency_enabled
        self._clock = clock
        self._threads = threads
        self._devices: dict[str, _Device] = {}
        self._paths: dict[str, _Path] = {}
        self._live: dict[Waiter, Transfer[Any]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._submitted = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    # -- devices and paths ----------------------------------------------------------------------------------------

    def add_device(self, name: str, limits: DeviceLimits, *, threads: bool = True) -> None:
        """Adds a device, for example a disk, and starts its threads: `limits.in_flight` of them.

        `threads=False` starts none: all its pieces run on the event loop.

        Raises:
            MemoryMisuseError: a device of that name exists, or this is closed.
            OutOfMemoryError: the system gives this process no more threads.
        """
        self._check_open()
        if name in self._devices:
            raise MemoryMisuseError(f"there is a device {name!r} already; give each one its own name")
        queue = DeviceQueue(limits, urgency=self.urgency_enabled)
        pool = self._threads(limits.in_flight, f"prefixd-{name.replace(' ', '-')}") if threads else None
        self._devices[name] = _Device(name, queue, pool)

    def add_path(self, name: str, device: str, in_flight: int | None = None) -> None:
        """Adds a path, for example "disk read"; `in_flight` is the device's by default.

        Raises:
            MemoryMisuseError: a path of that name exists, or no such device, or nothing could start on the path.
        """
        self._check_open()
        if name in self._paths:
            raise MemoryMisuseError(f"there is a path {name!r} already; give each one its own name")
        if device not in self._devices:
            raise MemoryMisuseError(f"there is no device {device!r}; add it before its paths")
        on = self._devices[device]
        on.queue.add_path(name, on.queue.limits.in_flight if in_flight is None else in_flight)
        self._paths[name] = _Path(name, on)

    def has_path(self, name: str) -> bool:
        return name in self._paths

    # -- transfers ------------------------------------------------------------------------------------------------

    def submit(
        self,
        path: str,
        pieces: Iterable[Piece[T]],
        urgency: Urgency,
        *,
        deadline_s: float | None = None,
        in_order: bool = False,
        count: int | None = None,
        nbytes: int | None = None,
    ) -> Transfer[T]:
        """Starts a transfer as soon as its path is free for it.

        Args:
            path: the path of the blocks.
            pieces: an iterator makes each piece when it starts, in order, on the event loop. If it raises, the error is
                the outcome of that piece, and the rest is dropped.
            urgency: see `Urgency`.
            deadline_s: time, by the clock, at which the blocks are needed; orders transfers of one urgency.
            in_order: start each piece after the end of the one before, and none after one that failed.
            count: number of pieces; needed unless `pieces` has a length.
            nbytes: bytes of all pieces together, likewise.

        Raises:
            MemoryMisuseError: no such path, an amount is missing or negative, or this is closed.
        """
        self._check_open()
        if path not in self._paths:
            raise MemoryMisuseError(f"there is no path {path!r}; there are {', '.join(self._paths) or 'none'}")
        if count is None or nbytes is None:
            if not isinstance(pieces, Sized):
                raise MemoryMisuseError("the size of an iterator of pieces is unknown; give `count` and `nbytes`")
            count = len(pieces) if count is None else count
            nbytes = sum(piece.nbytes for piece in pieces) if nbytes is None else nbytes
        if count < 0 or nbytes < 0:
            raise MemoryMisuseError(f"{count} pieces of {nbytes} bytes are not possible; give 0 or more")
        now_s = self._clock()
        due_s = now_s + LATEST_DUE_S
        self._submitted += 1
        waiter = Waiter(path, urgency, due_s if deadline_s is None else min(due_s, deadline_s), self._submitted)
        transfer = Transfer(self, waiter, iter(pieces), count, nbytes)
        transfer._in_order = in_order
        transfer._submitted_s = now_s
        self._live[waiter] = transfer
        self._idle.clear()
        self._count_waiting(transfer, 1)
        if not count:
            self._drop(transfer)
            return transfer
        on = self._paths[path].device
        on.queue.add(waiter, now_s)
        self._start_next(on)
        return transfer

    def out_of_turn(self, path: str) -> bool:
        """Whether the piece that an iterator makes now starts before more urgent ones, by rule 4 of `device_queue`.

        More urgent pieces wait for the end of this piece, so it should be small. Otherwise it may be large.
        """
        return self._paths[path].device.out_of_turn

    async def drain(self) -> None:
        """Waits until no transfer waits or is under way."""
        await self._idle.wait()

    async def close(self) -> None:
        """Drops pieces that have not started, waits for the others, and ends the threads. Can be called twice."""
        self._closed = True
        for transfer in list(self._live.values()):
            transfer.drop()
        await self.drain()
        for device in self._devices.values():
            if device.threads is not None:
                device.threads.shutdown()  # every thread is idle

    # -- figures --------------------------------------------------------------------------------------------------

    def estimate(self, path: str) -> PathEstimate:
        """The measured throughput of the path.

        Raises:
            KeyError: there is no such path.
        """
        return self._paths[path].meter.estimate()

    def stats(self) -> list[PathStats]:
        """The figures of every path."""
        return [
            PathStats(path.name, path.device.name, path.by_urgency, path.meter.estimate())
            for path in self._paths.values()
        ]

    # -- starting and ending --------------------------------------------------------------------------------------

    def _start_next(self, device: _Device) -> None:
        """Starts as many pieces as the device has free slots for."""
        if device.starting:  # an iterator of pieces has submitted or cancelled a transfer: the loop below goes on
            return
        device.starting = True
        try:
            while (choice := device.queue.choose(now_s := self._clock())) is not None:
                waiter, let_through = choice
                self._start(self._live[waiter], let_through, now_s)
        finally:
            device.starting = False

    def _start(self, transfer: Transfer[Any], let_through: bool, now_s: float) -> None:
        waiter, path = transfer._waiter, self._paths[transfer.path]
        path.device.out_of_turn = let_through
        try:
            piece = None if transfer._pieces is None else next(transfer._pieces, None)
        except Exception as error:
            self._take_waiting(transfer, 1, 0)
            transfer._outcomes.append(Outcome(None, error))
            transfer._ended.append(len(transfer._outcomes) - 1)
            transfer._news.set()
            path.by_urgency[waiter.urgency].failed += 1
            piece = None
        if piece is None or not waiter.waiting:  # no piece left, or the iterator has cancelled the transfer
            self._drop(transfer)
            return
        position = len(transfer._outcomes)
        transfer._outcomes.append(None)
        stats = path.by_urgency[waiter.urgency]
        if not position:
            wait_s = max(0.0, now_s - transfer._submitted_s)
            stats.waits += 1
            stats.waited_s += wait_s
            stats.longest_wait_s = max(stats.longest_wait_s, wait_s)
        self._take_waiting(transfer, piece.joined, piece.nbytes)
        stats.started += 1
        stats.in_flight += 1
        path.device.queue.started(waiter, let_through, now_s)
        if transfer._in_order:
            path.device.queue.remove(waiter)
        self._launch(transfer, position, piece, let_through)
        if not transfer._waiting_pieces:
            self._drop(transfer)  # all pieces have started: take it out of the queue at once

    def _launch(self, transfer: Transfer[T], position: int, piece: Piece[T], let_through: bool) -> None:
        loop = asyncio.get_running_loop()
        began_s = self._clock()

        def ended(outcome: Outcome[T], ended_s: float) -> None:
            self._end(transfer, position, piece.nbytes, outcome, let_through, began_s, ended_s)

        if piece.on_loop:
            work = cast("Callable[[], Coroutine[Any, Any, T]]", piece.work)
            task = loop.create_task(_outcome_of(work))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda task: ended(_task_outcome(task), self._clock()))
            return

        def run() -> tuple[Outcome[T], float]:
            try:
                value = cast("Callable[[], T]", piece.work)()
            except BaseException as error:
                _clear_frames(error)
                return Outcome(None, error), self._clock()
            return Outcome(value), self._clock()

        def tell(future: Future[tuple[Outcome[T], float]]) -> None:
            loop.call_soon_threadsafe(ended, *future.result())

        device = self._paths[transfer.path].device
        try:
            if device.threads is None:
                raise MemoryMisuseError(
                    f"device {device.name!r} has no threads; give pieces that run on the event loop"
                )
            future = device.threads.submit(run)
        except (MemoryMisuseError, RuntimeError) as error:  # RuntimeError: the interpreter is shutting down
            failed: Outcome[T] = Outcome(None, error)
            loop.call_soon(ended, failed, began_s)
            return
        future.add_done_callback(tell)

    def _end(
        self,
        transfer: Transfer[T],
        position: int,
        nbytes: int,
        outcome: Outcome[T],
        let_through: bool,
        began_s: float,
        ended_s: float,
    ) -> None:
        waiter, path = transfer._waiter, self._paths[transfer.path]
        stats = path.by_urgency[waiter.urgency]
        stats.in_flight -= 1
        if outcome.error is None:
            stats.moved_bytes += nbytes
            path.meter.ended(began_s, ended_s, nbytes)
        else:
            stats.failed += 1
        transfer._outcomes[position] = outcome
        transfer._ended.append(position)
        transfer._news.set()
        now_s = self._clock()
        path.device.queue.ended(waiter, let_through, now_s)
        if transfer._pieces is not None and transfer._in_order:
            if outcome.error is None:
                path.device.queue.add(waiter, now_s)
            else:
                self._drop(transfer)
        self._finish_if_ended(transfer)
        self._start_next(path.device)

    def _drop(self, transfer: Transfer[Any]) -> None:
        """Start no more pieces of the transfer: it has none left, or it is cancelled."""
        if transfer._pieces is None:
            return
        transfer._pieces = None
        device = self._paths[transfer.path].device
        device.queue.remove(transfer._waiter)
        self._paths[transfer.path].by_urgency[transfer.urgency].dropped += transfer._waiting_pieces
        self._count_waiting(transfer, -1)
        self._finish_if_ended(transfer)
        self._start_next(device)  # if it was DEMAND, other transfers may start now

    def _finish_if_ended(self, transfer: Transfer[Any]) -> None:
        if transfer._pieces is not None or transfer._waiter.in_flight or transfer.finished:
            return
        del self._live[transfer._waiter]
        outcomes = cast("list[Outcome[Any]]", transfer._outcomes)  # each piece has its own by now
        transfer._finished.set_result(Result(outcomes, transfer._waiting_pieces))
        transfer._news.set()
        if not self._live:
            self._idle.set()

    def _raise(self, transfer: Transfer[Any], urgency: Urgency) -> None:
        if urgency >= transfer.urgency or transfer.finished:
            return
        path = self._paths[transfer.path]
        in_flight = transfer._waiter.in_flight
        waits = transfer._pieces is not None
        if waits:
            self._count_waiting(transfer, -1)
        path.by_urgency[transfer.urgency].in_flight -= in_flight
        path.device.queue.raise_to(transfer._waiter, urgency)
        path.by_urgency[urgency].in_flight += in_flight
        if waits:
            self._count_waiting(transfer, 1)
        self._start_next(path.device)

    # -- counting -------------------------------------------------------------------------------------------------

    def _count_waiting(self, transfer: Transfer[Any], sign: int) -> None:
        stats = self._paths[transfer.path].by_urgency[transfer.urgency]
        stats.waiting_transfers += sign
        stats.waiting_pieces += sign * transfer._waiting_pieces
        stats.waiting_bytes += sign * transfer._waiting_bytes

    def _take_waiting(self, transfer: Transfer[Any], count: int, nbytes: int) -> None:
        """Count pieces as waiting no more; an iterator may give more pieces and bytes than were declared."""
        stats = self._paths[transfer.path].by_urgency[transfer.urgency]
        pieces, nbytes = min(count, transfer._waiting_pieces), min(nbytes, transfer._waiting_bytes)
        transfer._waiting_pieces -= pieces
        transfer._waiting_bytes -= nbytes
        stats.waiting_pieces -= pieces
        stats.waiting_bytes -= nbytes

    def _check_open(self) -> None:
        if self._closed:
            raise MemoryMisuseError("these transfers are closed; submit before the end")


def _clear_frames(error: BaseException) -> None:
    """Clears the stack frames of an error and of its causes.

    The thread's frames keep the outcome, and the outcome's error keeps the frames: without this, files and memory in
    their variables stay in use until the garbage collector runs.
    """
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__


async def _outcome_of(work: Callable[[], Coroutine[Any, Any, T]]) -> Outcome[T]:
    try:
        return Outcome(await work())
    except Exception as error:
        return Outcome(None, error)


def _task_outcome(task: asyncio.Task[Outcome[T]]) -> Outcome[T]:
    if task.cancelled():
        return Outcome(None, asyncio.CancelledError("the piece's task was cancelled from outside"))
    error = task.exception()
    return task.result() if error is None else Outcome(None, error)
