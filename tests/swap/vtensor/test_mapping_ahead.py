"""Mapping and unmapping ahead of need: what is left of it for a request that comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from prefixd_swap.group_shape import KvGeometry
from prefixd_swap.vmem import FrameId, FramePool, VirtualMemory
from prefixd_swap.vtensor import VirtualTensor, VirtualTensorManager
from prefixd_swap.vtensor.mapping_ahead import _CLEAN_ROWS, _PIECE
from tests.swap.conftest import geometry_for

ROWS, FRAMES, BLOCKS = 8, 80, 20
PREFIX = 20  # blocks: two pieces


class Turns(Executor):
    """A background thread whose work is done when the test says so, in order."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def job() -> None:
            try:
                future.set_result(work(*arguments, **keywords))
            except BaseException as error:
                future.set_exception(error)

        self.jobs.append(job)
        return future

    def run(self) -> None:
        """All work so far, and what it leads to."""
        while self.jobs:
            self.jobs.pop(0)()


class Calls:
    """Counts the chunks that the system maps and unmaps."""

    def __init__(self, memory: VirtualMemory, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mapped = self.unmapped = 0
        map_chunks, unmap = memory._map, memory._unmap

        def counting_map(address: int, chunks: Any) -> None:
            self.mapped += len(chunks)
            map_chunks(address, chunks)

        def counting_unmap(address: int, count: int) -> None:
            self.unmapped += count
            unmap(address, count)

        monkeypatch.setattr(memory, "_map", counting_map)
        monkeypatch.setattr(memory, "_unmap", counting_unmap)

    def of(self, work: Callable[[], object]) -> tuple[int, int]:
        """(mapped, unmapped) during `work`."""
        before = self.mapped, self.unmapped
        work()
        return self.mapped - before[0], self.unmapped - before[1]


class Worker:
    """A manager whose frames come from elsewhere, and requests on it."""

    def __init__(self, memory: VirtualMemory, geometry: KvGeometry, calls: Calls) -> None:
        self.thread, self.calls = Turns(), calls
        self.pool = FramePool(memory, geometry.block_bytes, FRAMES)
        self.manager = VirtualTensorManager(
            memory,
            self.pool.table,
            geometry,
            requests=ROWS,
            max_tokens=BLOCKS * geometry.block_tokens,
            background=self.thread,
        )
        self.chunks = geometry.block_bytes // memory.chunk_bytes

    def frames(self, first: int, count: int) -> list[FrameId]:
        return [FrameId(frame % FRAMES) for frame in range(first, first + count)]

    def attach(self, frames: list[FrameId]) -> VirtualTensor:
        """What a request waits for."""
        tensor = self.manager.create(frames)
        self.manager.extend(tensor, frames)
        self.thread.run()
        self.manager.wait([tensor])
        return tensor

    def beside_a_step(self) -> None:
        self.manager.mapping.map_ahead()
        self.thread.run()

    def end(self, tensor: VirtualTensor) -> None:
        self.manager.release(tensor)
        self.manager.poll(wait=True)


@pytest.fixture(params=["token", "layer"])
def worker(request: pytest.FixtureRequest, memory: VirtualMemory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    made = Worker(memory, geometry_for(memory, request.param), Calls(memory, monkeypatch))
    yield made
    made.thread.run()
    made.manager.check_integrity()
    made.manager.close()


def test_a_request_that_is_expected_maps_nothing(worker: Worker) -> None:
    """It had mapped all of its prefix."""
    prefix = worker.frames(0, PREFIX)
    assert worker.calls.of(lambda: worker.end(worker.attach(worker.frames(30, PREFIX))))[0] == PREFIX * worker.chunks
    worker.manager.mapping.expect(prefix)
    assert worker.calls.of(worker.beside_a_step)[0] == PREFIX * worker.chunks
    assert worker.calls.of(lambda: worker.attach(prefix)) == (0, 0)
    assert worker.manager.mapping.ahead.expected_rows == frozenset()


def test_two_requests_that_are_expected_with_one_prefix_get_a_row_each(worker: Worker) -> None:
    prefix = worker.frames(0, PREFIX)
    for _ in range(2):
        worker.manager.mapping.expect(prefix)
    worker.beside_a_step()
    assert worker.calls.of(lambda: (worker.attach(prefix), worker.attach(prefix))) == (0, 0)


def test_a_request_that_comes_unexpected_unmaps_nothing(worker: Worker) -> None:
    """All rows were used before: without reclamation it would first unmap what another request has left."""
    for tensor in [worker.attach(worker.frames(9 * row, 9)) for row in range(ROWS)]:
        worker.end(tensor)
    new = worker.frames(40, PREFIX)
    unmapped = 9 * worker.chunks
    assert worker.calls.of(worker.beside_a_step)[1] >= _CLEAN_ROWS * unmapped
    assert worker.calls.of(lambda: worker.attach(new)) == (PREFIX * worker.chunks, 0)


def test_above_the_high_watermark_the_longest_idle_rows_are_unmapped_down_to_the_low_one(worker: Worker) -> None:
    tensors = [worker.attach(worker.frames(10 * row, 10)) for row in range(6)]
    for tensor in tensors:
        worker.end(tensor)
    worker.beside_a_step()
    rows = worker.manager.virtual.rows
    assert [rows[tensor.row].mapped_blocks for tensor in tensors] == [0, 0, 0, 0, 10, 10], "a quarter of 80 frames"
    assert worker.manager.mapping.ahead.reclaimed == 40
    assert worker.calls.of(worker.beside_a_step) == (0, 0)


def test_a_requests_own_mapping_goes_before_the_rest(worker: Worker) -> None:
    worker.manager.mapping.expect(worker.frames(0, PREFIX))
    worker.manager.mapping.map_ahead()
    tensor = worker.manager.create()
    worker.manager.extend(tensor, worker.frames(30, 2))
    worker.thread.run()
    assert worker.manager.mapping.ahead.mapped == _PIECE and worker.manager.mapping.counts.mapped == 2
    worker.beside_a_step()
    assert worker.manager.mapping.ahead.mapped == PREFIX


def test_a_row_that_is_taken_meanwhile_has_what_its_request_needs(worker: Worker) -> None:
    worker.manager.mapping.expect(worker.frames(0, PREFIX))
    worker.manager.mapping.map_ahead()
    tensors = [worker.manager.create() for _ in range(ROWS)]
    for number, tensor in enumerate(tensors):
        worker.manager.extend(tensor, worker.frames(10 * number, 10))
    worker.thread.run()
    worker.manager.wait(tensors)
    worker.manager.check_integrity()
    assert worker.manager.mapping.ahead.expected_rows == frozenset()


def test_rows_are_taken_while_the_thread_looks_for_those_to_unmap(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.end(worker.attach(worker.frames(0, BLOCKS)))
    taken: list[VirtualTensor] = []

    class Switching(dict[int, tuple[FrameId, ...]]):
        """Where the interpreter would switch threads: the owner takes a row."""

        def __contains__(self, row: object) -> bool:
            if not taken:
                taken.append(worker.manager.create())
            return super().__contains__(row)

    worker.manager.mapping.map_ahead()
    monkeypatch.setattr(worker.manager.mapping.ahead, "_expected", Switching())
    worker.thread.run()
    monkeypatch.undo()
    worker.manager.mapping.map_ahead()  # raises what the thread has raised
    worker.end(taken[0])


@pytest.mark.parametrize("mapped", [False, True], ids=["before it is mapped", "afterwards"])
def test_frames_that_go_are_not_expected_any_more(worker: Worker, mapped: bool) -> None:
    prefix = worker.frames(0, PREFIX)
    worker.manager.mapping.expect(prefix)
    if mapped:
        worker.beside_a_step()
    worker.manager.unused.reclaim(prefix[3:5])
    worker.beside_a_step()
    assert not worker.manager.unused.still_mapped(prefix[3:5])
    assert worker.manager.mapping.ahead.expected_rows == frozenset()


def test_few_rows_are_kept_for_requests_that_may_never_come(worker: Worker) -> None:
    for first in range(0, 60, 5):
        worker.manager.mapping.expect(worker.frames(first, 5))
    assert len(worker.manager.mapping.ahead.expected_rows) == ROWS // 2
    worker.beside_a_step()
    assert worker.manager.mapping.ahead.mapped == ROWS // 2 * 5, "those expected last"
    assert worker.calls.of(lambda: worker.attach(worker.frames(55, 5))) == (0, 0)
