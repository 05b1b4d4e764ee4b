"""Halves of staging: filled and emptied by two streams, whose work runs in any order that their waits allow."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefixd_swap.codecs.on_device import staged_moves
from prefixd_swap.codecs.on_device.staged_moves import StagedMoves

HALF_BYTES = 256
CPU = torch.device("cpu")


@dataclass
class Streams:
    """Two streams; what is submitted runs late, in an order that `random` chooses."""

    random: Random
    every: list[Stream] = field(default_factory=list)
    current: Stream | None = None

    @contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        self.current = stream
        yield
        self.current = None

    def submit(self, work: Callable[[], None]) -> None:
        assert self.current is not None
        self.current.work.append(work)

    def run_some(self) -> None:
        """Runs the next work of a stream that does not wait."""
        self.random.choice([each for each in self.every if each.work and not each.blocked]).run_next()


class Stream:
    """The calls of a CUDA stream that `StagedMoves` makes."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.work: list[Any] = []
        self.done = 0
        self._waits: dict[int, list[tuple[Stream, int]]] = {}
        streams.every.append(self)

    @property
    def submitted(self) -> int:
        return self.done + len(self.work)

    @property
    def blocked(self) -> bool:
        """Whether the next work waits for another stream."""
        return any(stream.done < until for stream, until in self._waits.get(self.done, []))

    def run_next(self) -> None:
        self.work.pop(0)()
        self.done += 1

    def record_event(self) -> tuple[Stream, int]:
        return self, self.submitted

    def wait_event(self, event: tuple[Stream, int]) -> None:
        self._waits.setdefault(self.submitted, []).append(event)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        while self.work:
            self._streams.run_some()


@given(
    parts=st.integers(0, 12), nbytes=st.integers(1, HALF_BYTES), kernels_first=st.booleans(), seed=st.integers(0, 99)
)
def test_a_half_is_filled_when_it_has_been_emptied_and_emptied_when_it_has_been_filled(
    parts: int, nbytes: int, kernels_first: bool, seed: int
) -> None:
    random = Random(seed)
    streams = Streams(random)
    moves = StagedMoves(CPU, HALF_BYTES, "test")
    kernels, copies = Stream(streams), Stream(streams)
    moves._kernels, moves._copies = kernels, copies  # type: ignore[assignment]
    source = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (parts, nbytes), np.uint8))
    result = torch.zeros_like(source)

    def stage(stream: Stream, filling: bool) -> staged_moves.Stage:
        def submit(at: int, count: int, staged: torch.Tensor) -> None:
            assert streams.current is stream
            outside = (source if filling else result)[at : at + count]
            into, of = (staged, outside) if filling else (outside, staged)
            streams.submit(lambda: into.copy_(of))
            while random.random() < 0.3 and any(each.work and not each.blocked for each in streams.every):
                streams.run_some()

        return submit

    filler, emptier = (kernels, copies) if kernels_first else (copies, kernels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staged_moves, "_within", streams.within)
        moves.move(parts, nbytes, stage(filler, True), stage(emptier, False), kernels_first=kernels_first)
    assert not any(each.work for each in streams.every), "all has ended"
    assert torch.equal(result, source)
    moves.close()


def test_one_half_is_filled_while_the_other_is_emptied() -> None:
    streams = Streams(Random(0))
    moves = StagedMoves(CPU, HALF_BYTES, "test")
    kernels, copies = Stream(streams), Stream(streams)
    moves._kernels, moves._copies = kernels, copies  # type: ignore[assignment]
    alone: list[int] = []

    def submit(at: int, count: int, _staged: torch.Tensor) -> None:
        streams.submit(lambda: None)
        if at == 3 and streams.current is copies:
            while kernels.work and not kernels.blocked:
                kernels.run_next()
            alone.append(kernels.done)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staged_moves, "_within", streams.within)
        moves.move(4, HALF_BYTES, submit, submit, kernels_first=True)
    assert alone == [2], "both halves, and no further before one is emptied"
    moves.close()


@pytest.mark.parametrize("stage", [0, 1])
def test_after_an_error_nothing_moves_any_more(stage: int) -> None:
    streams = Streams(Random(0))
    moves = StagedMoves(CPU, HALF_BYTES, "test")
    moves._kernels, moves._copies = Stream(streams), Stream(streams)  # type: ignore[assignment]
    ran: list[str] = []

    def submit(at: int, _count: int, _staged: torch.Tensor) -> None:
        streams.submit(lambda: ran.append("late"))

    def fail(at: int, _count: int, _staged: torch.Tensor) -> None:
        if at:
            raise ValueError("the second half")
        submit(at, 1, _staged)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staged_moves, "_within", streams.within)
        with pytest.raises(ValueError, match="second half"):
            moves.move(3, HALF_BYTES, *[(fail, submit), (submit, fail)][stage], kernels_first=True)
    assert ran == ["late"] * (2 + stage) and not any(each.work for each in streams.every)
    moves.close()


def test_work_that_is_cancelled_is_waited_for() -> None:
    moves = StagedMoves(CPU, HALF_BYTES, "test")
    began, go, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        assert go.wait(60)
        ended.set()
        raise ValueError("not seen: it was cancelled")

    async def cancel() -> None:
        run = asyncio.ensure_future(moves.run(work))
        assert await asyncio.to_thread(began.wait, 60)
        for _ in range(2):
            run.cancel()
            await asyncio.sleep(0)
        assert not run.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert ended.is_set()
        with pytest.raises(ZeroDivisionError):
            await moves.run(lambda: print(1 // 0))

    asyncio.run(cancel())
    moves.close()
    moves.close()
