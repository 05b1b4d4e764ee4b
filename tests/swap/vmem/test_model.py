"""Random use of two ranges against a plain model of what must be where."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from prefixd_swap.errors import MemoryMisuseError
from prefixd_swap.vmem import VirtualRange, create_memory


def bytes_at(mapped: VirtualRange, slot: int) -> torch.Tensor:
    """The chunk in one slot of a range, as bytes."""
    size = mapped.memory.chunk_bytes
    return mapped.tensor((size,), torch.uint8, offset=slot * size)


class MappingMachine(RuleBasedStateMachine):
    """Two ranges over one set of chunks against a model: which chunk is where, and what was last written to
    it."""

    SLOTS, CHUNKS = 12, 8

    def __init__(self, device: str, chunk_bytes: int | None) -> None:
        super().__init__()
        self.memory = create_memory(device, chunk_bytes)
        self.size = self.memory.chunk_bytes
        self.memory.create(self.CHUNKS)
        self.ranges = [self.memory.reserve(self.SLOTS * self.size) for _ in range(2)]
        self.where: list[dict[int, int]] = [{}, {}]
        self.holds: dict[int, int] = {}

    def settle(self) -> None:
        if self.memory.device != "cpu":
            torch.cuda.synchronize()

    @rule(
        side=st.integers(0, 1),
        slot=st.integers(0, SLOTS),
        chunks=st.lists(st.integers(0, CHUNKS), max_size=5),
    )
    def map(self, side: int, slot: int, chunks: list[int]) -> None:
        wanted = range(slot, slot + len(chunks))
        valid = (
            wanted.stop <= self.SLOTS
            and all(chunk < self.CHUNKS for chunk in chunks)
            and not self.where[side].keys() & set(wanted)
        )
        if valid:
            self.ranges[side].map(slot * self.size, chunks)
            self.where[side].update(zip(wanted, chunks, strict=True))
        else:
            with pytest.raises(MemoryMisuseError):
                self.ranges[side].map(slot * self.size, chunks)

    @rule(side=st.integers(0, 1), slot=st.integers(0, SLOTS), count=st.integers(0, 5))
    def unmap(self, side: int, slot: int, count: int) -> None:
        wanted = range(slot, slot + count)
        self.settle()
        if wanted.stop <= self.SLOTS and set(wanted) <= self.where[side].keys():
            self.ranges[side].unmap(slot * self.size, count * self.size)
            for at in wanted:
                del self.where[side][at]
        else:
            with pytest.raises(MemoryMisuseError):
                self.ranges[side].unmap(slot * self.size, count * self.size)

    @precondition(lambda self: any(self.where))
    @rule(data=st.data(), value=st.integers(1, 255))
    def write(self, data: st.DataObject, value: int) -> None:
        side, slot = data.draw(st.sampled_from([(s, slot) for s in (0, 1) for slot in sorted(self.where[s])]))
        bytes_at(self.ranges[side], slot)[:: self.size // 8].fill_(value)
        self.holds[self.where[side][slot]] = value

    @invariant()
    def every_mapping_shows_its_chunk(self) -> None:
        self.memory.check_integrity()
        for mapped, where in zip(self.ranges, self.where, strict=True):
            assert mapped.mapped_chunks().tolist() == [where[slot] for slot in sorted(where)]
            for slot, chunk in where.items():
                if chunk in self.holds:
                    seen = bytes_at(mapped, slot)[:: self.size // 8]
                    assert seen.eq(self.holds[chunk]).all()

    def teardown(self) -> None:
        self.settle()
        self.memory.close()


def test_mappings_follow_the_model(device: str, chunk_bytes: int | None) -> None:
    run_state_machine_as_test(
        lambda: MappingMachine(device, chunk_bytes),
        settings=settings(max_examples=25, stateful_step_count=30),
    )
