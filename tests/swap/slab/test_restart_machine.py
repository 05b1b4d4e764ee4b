"""The store against a dict: blocks, pins and namespaces after any order of changes and restarts, in order and not."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from prefixd_swap import NewBlock, SlabStore, Span

NS = b"namespac"
PAGE = 4096
LARGE, SMALL = 400 * PAGE, 100 * PAGE
CHAINS, LONGEST = 8, 40
chains = st.integers(0, CHAINS - 1)


@dataclass(frozen=True)
class Stored:
    """A block of the model."""

    content: bytes
    tokens: int


def key(chain: int, block: int) -> bytes:
    return (chain * LONGEST + block + 1).to_bytes(16, "big")


class RestartMachine(RuleBasedStateMachine):
    """`blocks` by chain: a chain's blocks continue each other, and go from its end."""

    drives = 1

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="prefixd-test-")
        self.lives = 0
        self.path = Path(self.folder.name) / "0"
        self.capacity = LARGE
        self.store = self._opened()
        self.blocks: dict[int, list[Stored]] = {chain: [] for chain in range(CHAINS)}
        self.pins: set[bytes] = set()
        self.namespaces: dict[bytes, bytes] = {}

    @rule(
        chain=chains,
        count=st.integers(1, LONGEST),
        size=st.sampled_from([1, 5000]),
        tokens=st.sampled_from([1, 40, 120, 700]),
    )
    def put(self, chain: int, count: int, size: int, tokens: int) -> None:
        """Continues a chain."""
        old = self.blocks[chain]
        places = range(len(old), min(LONGEST, len(old) + count))
        arrays = [np.full(size, (chain * LONGEST + place) % 251, np.uint8) for place in places]
        new = [
            NewBlock(
                NS,
                key(chain, place),
                key(chain, place - 1) if place else b"",
                b"tokn" * tokens,
                place,
                [Span(int(array.ctypes.data), size)],
            )
            for place, array in zip(places, arrays, strict=True)
        ]
        for array, record in zip(arrays, self.store.write(new), strict=True):
            if record is None:
                break
            old.append(Stored(array.tobytes(), tokens))
        whole = len(old)
        self.store.remove([(NS, key(chain, place)) for place in reversed(places) if place >= whole])

    @rule(chain=chains, left=st.integers(0, LONGEST))
    def remove(self, chain: int, left: int) -> None:
        self._remove([chain], left)

    @rule(kept=st.sets(chains, max_size=2))
    def evict_and_restart(self, kept: set[int]) -> None:
        """Most of what there is goes in one transaction, the last one before the store is closed."""
        self._remove([chain for chain in range(CHAINS) if chain not in kept], 0)
        self.restart()

    def _remove(self, chosen: list[int], left: int) -> None:
        gone = [key(chain, place) for chain in chosen for place in reversed(range(left, len(self.blocks[chain])))]
        self.store.remove([(NS, each) for each in gone])
        self.pins -= set(gone)
        for chain in chosen:
            del self.blocks[chain][left:]

    @rule(chain=chains, pinned=st.booleans())
    def pin(self, chain: int, pinned: bool) -> None:
        path = {key(chain, place) for place in range(len(self.blocks[chain]))}
        assert self.store.pin([(NS, each) for each in path], pinned) == len(path)
        self.pins = self.pins | path if pinned else self.pins - path

    @rule(first=st.integers(0, 20), count=st.integers(1, 20), size=st.sampled_from([10, 1000, 9000]))
    def put_namespaces(self, first: int, count: int, size: int) -> None:
        for number in range(first, first + count):
            self.namespaces[b"ns%06d" % number] = bytes(size)
            self.store.put_namespace(b"ns%06d" % number, bytes(size))

    @precondition(lambda self: self.namespaces)
    @rule()
    def remove_namespaces(self) -> None:
        self.store.remove_namespaces(list(self.namespaces))
        self.namespaces = {}

    @rule()
    def restart(self) -> None:
        self.store.close()
        self._open()

    @rule()
    def crash(self) -> None:
        """What has returned is on disk: a copy of the directory at this moment has it."""
        self.lives += 1
        copy = Path(self.folder.name) / str(self.lives)
        shutil.copytree(self.path, copy)
        self.store.close()
        shutil.rmtree(self.path)
        self.path = copy
        self._open()

    @rule()
    def resize(self) -> None:
        """A smaller store loses whole ends of chains, and nothing else."""
        self.store.close()
        self.capacity = LARGE if self.capacity == SMALL else SMALL
        self.store = self._opened()
        there = {record.key for record in self.store.records()}
        for chain, blocks in self.blocks.items():
            kept = sum(key(chain, place) in there for place in range(len(blocks)))
            if self.capacity == LARGE:
                assert kept == len(blocks)
            self.pins -= {key(chain, place) for place in range(kept, len(blocks))}
            del blocks[kept:]
        self._compare()

    def _opened(self) -> SlabStore:
        more = [self.path / f"drive{number}" for number in range(1, self.drives)]
        return SlabStore.open(self.path / "store", self.capacity, slab_bytes=16 * PAGE, more_paths=more)

    def _open(self) -> None:
        self.store = self._opened()
        assert self.store.set_aside() == [] and not self.store.recovery.lost
        self._compare()

    def _compare(self) -> None:
        expected = {
            key(chain, place): (block, key(chain, place - 1) if place else b"")
            for chain, blocks in self.blocks.items()
            for place, block in enumerate(blocks)
        }
        records = list(self.store.records())
        assert {record.key for record in records} == expected.keys()
        for record in records:
            block, parent = expected[record.key]
            assert (record.parent, record.tokens) == (parent, b"tokn" * block.tokens)
            (part,) = record.parts
            assert part is not None
            target = np.zeros(part.nbytes, np.uint8)
            self.store.read(part, Span(int(target.ctypes.data), part.nbytes))
            assert target.tobytes() == block.content
        assert {each for _, each in self.store.pins()} == self.pins
        assert self.store.namespaces() == self.namespaces
        self.store.check_integrity()

    def teardown(self) -> None:
        try:
            self.restart()
            self.store.close()
        finally:
            self.folder.cleanup()


class DrivesMachine(RestartMachine):
    """Slabs in three directories."""

    drives = 3


@pytest.mark.slow
@pytest.mark.parametrize("machine", [RestartMachine, DrivesMachine])
def test_everything_survives_restarts(machine: type[RestartMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=40, deadline=None))
