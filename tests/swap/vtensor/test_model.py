"""Random use of a virtual tensor manager against plain lists of what every request must read."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from prefixd_swap.errors import OutOfMemoryError
from prefixd_swap.group_shape import KvGeometry, Layout
from prefixd_swap.vmem import FrameId, FrameTable, create_memory
from prefixd_swap.vtensor import VirtualTensor, VirtualTensorManager
from prefixd_swap.vtensor.own_memory import grow

BLOCK = 2
REQUESTS, MAX_BLOCKS, FRAMES = 5, 6, 14


class ManagerMachine(RuleBasedStateMachine):
    """Requests that come, match prefixes, grow, write, fork, become others, are preempted and end.

    The model is a list of values a request, one a token. A shared block is made writable before it is written to.
    Prefixes are the full blocks of ended requests that are recorded (`kept`), as a cache would.
    """

    def __init__(self, device: str, chunk_bytes: int | None, layout: Layout, threaded: bool) -> None:
        super().__init__()
        self.memory = create_memory(device, chunk_bytes)
        elements = self.memory.chunk_bytes // 4
        self.geometry = KvGeometry(2, 1, elements // 2 // BLOCK, "float32", BLOCK, layout)
        self.executor = ThreadPoolExecutor(1) if threaded else None
        table = FrameTable(self.geometry.chunks_per_block(self.memory.chunk_bytes))
        self.manager = VirtualTensorManager(
            self.memory,
            table,
            self.geometry,
            requests=REQUESTS,
            max_tokens=MAX_BLOCKS * BLOCK,
            limit=FRAMES,
            background=self.executor,
        )
        self.values: dict[VirtualTensor, list[int]] = {}
        self.kept: list[tuple[tuple[FrameId, ...], list[int]]] = []
        self.next = 0

    def settle(self) -> None:
        if self.memory.device != "cpu":
            torch.cuda.synchronize()

    def pick(self, data: st.DataObject) -> VirtualTensor:
        return data.draw(st.sampled_from(sorted(self.values, key=lambda tensor: tensor.row)))

    def put(self, tensor: VirtualTensor, token: int) -> None:
        self.next += 1
        tensor.kv[token, 0, 0, 0, 0] = float(self.next)
        tensor.kv[token, -1, -1, -1, -1] = float(self.next)
        self.values[tensor][token : token + 1] = [self.next]

    @precondition(lambda self: len(self.values) < REQUESTS)
    @rule(data=st.data())
    def create(self, data: st.DataObject) -> None:
        kept = data.draw(st.sampled_from([((), []), *self.kept]))
        tensor = self.manager.create(kept[0])
        self.manager.match(tensor, kept[0])
        self.values[tensor] = list(kept[1])

    @precondition(lambda self: len(self.values) == REQUESTS)
    @rule()
    def create_too_many(self) -> None:
        with pytest.raises(OutOfMemoryError):
            self.manager.create()

    @precondition(lambda self: self.values)
    @rule(data=st.data(), count=st.integers(1, 5))
    def append(self, data: st.DataObject, count: int) -> None:
        """Decode: make room, copy on write where the last block is shared, and write."""
        tensor = self.pick(data)
        have = len(self.values[tensor])
        count = min(count, MAX_BLOCKS * BLOCK - have)
        if count == 0:
            return
        needed = -(-(have + count) // BLOCK) - tensor.blocks
        partial = have % BLOCK and self.manager.is_shared(tensor, have // BLOCK)
        physical = self.manager.physical
        if needed + partial > physical.free_count + FRAMES - physical._table.count:
            assert physical.p_alloc(needed + partial) is None
            assert partial or not grow(self.manager, tensor, have + count)
            return
        self.settle()
        if partial:
            frames = self.manager.physical.p_alloc(1)
            assert frames is not None
            self.manager.writable(tensor, have // BLOCK, frames[0], have % BLOCK)
            self.manager.physical.release(frames)
        assert grow(self.manager, tensor, have + count)
        self.manager.wait([tensor])
        for token in range(have, have + count):
            self.put(tensor, token)

    @precondition(lambda self: self.values and len(self.values) < REQUESTS)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.pick(data)
        child = self.manager.fork(parent)
        self.values[child] = list(self.values[parent])

    @precondition(lambda self: len(self.values) > 1)
    @rule(data=st.data())
    def become(self, data: st.DataObject) -> None:
        tensor, other = self.pick(data), self.pick(data)
        self.settle()
        self.manager.assign(tensor, other.frames)
        self.values[tensor] = list(self.values[other])

    @precondition(lambda self: self.values)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        """End or preempt a request; with `keep` its full blocks serve as a prefix from now on."""
        tensor = self.pick(data)
        values = self.values.pop(tensor)
        full = len(values) // BLOCK
        frames = tuple(self.manager.record(tensor, 0, full)) if keep else ()
        if frames:
            self.kept.append((frames, values[: full * BLOCK]))
        self.manager.release(tensor)
        self.manager.poll(wait=True)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        kept = data.draw(st.sampled_from(self.kept))
        self.kept.remove(kept)
        self.manager.forget(kept[0])

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), steps=st.integers(0, 2))
    def expect(self, data: st.DataObject, steps: int) -> None:
        """A request may come on this prefix; mapping goes on in the background from the next steps on."""
        self.manager.mapping.expect(data.draw(st.sampled_from(self.kept))[0])
        for _ in range(steps):
            self.manager.mapping.map_ahead()

    @rule()
    def compute(self) -> None:
        self.manager.mapping.map_ahead()

    @rule(keep=st.integers(0, 3))
    def give_memory_back(self, keep: int) -> None:
        self.settle()
        free = self.manager.physical.free_count
        self.manager.unused.reclaim()
        gone = self.manager.physical.p_free(keep)
        assert len(gone) == max(0, free - keep)
        assert not self.manager.unused.still_mapped(gone)

    @rule(limit=st.integers(1, FRAMES))
    def resize(self, limit: int) -> None:
        """The device has less, or again more, for us; what is in use stays."""
        self.manager.physical.limit = limit
        if self.manager.physical._table.count >= limit and not self.manager.physical.free_count:
            assert self.manager.physical.p_alloc(1) is None
        self.manager.physical.limit = FRAMES

    @invariant()
    def everybody_reads_what_is_theirs(self) -> None:
        self.manager.wait(self.values)
        for tensor, values in self.values.items():
            for token, value in enumerate(values):
                seen = [tensor.kv[token, 0, 0, 0, 0].item(), tensor.kv[token, -1, -1, -1, -1].item()]
                assert seen == [value, value], f"token {token} of row {tensor.row}"
        for frames, prefix in self.kept:
            for tensor, values in self.values.items():
                if tensor.frames[: len(frames)] == frames:
                    assert values[: len(prefix)] == prefix, "nobody wrote into a recorded block"
        self.manager.check_integrity()

    def teardown(self) -> None:
        self.settle()
        self.manager.close()
        self.memory.close()
        if self.executor is not None:
            self.executor.shutdown()


@pytest.mark.parametrize("layout", ["token", "layer"])
@pytest.mark.parametrize("threaded", [False, True], ids=["at once", "in the background"])
def test_requests_follow_the_model(device: str, chunk_bytes: int | None, layout: Layout, threaded: bool) -> None:
    run_state_machine_as_test(
        lambda: ManagerMachine(device, chunk_bytes, layout, threaded),
        settings=settings(max_examples=25, stateful_step_count=50),
    )
