"""Takes a case's steps on a real store, remembers what the store promised when, and holds it to that after a cut."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from benchmarks.checks.power_cuts.power_cut import PAGE_BYTES, PowerCutOps
from benchmarks.checks.power_cuts.power_steps import (
    CAPACITY_PAGES,
    NAMESPACES,
    Overlap,
    Pin,
    Put,
    Register,
    Remove,
    Restart,
    Step,
)
from prefixd_swap import NewBlock, Span
from prefixd_swap.codecs.coded_part import CodedPart
from prefixd_swap.slab.store import SlabStore

_NAMESPACE = b"namespac"
_SPEC_WORDS = 128  # of 8 bytes: with a dozen specs of this size LMDB makes more pages than it then writes


@dataclass(frozen=True, slots=True)
class Block:
    """A block as it should be."""

    parent: int | None
    parts: tuple[bytes | None, ...]


Change = dict[int, Block | None]


@dataclass(slots=True)
class Call:
    """A call's effect, and the positions in the journal where it began and returned."""

    begin: int
    end: int
    blocks: Change
    namespaces: dict[int, bool] = field(default_factory=dict)
    pins: dict[int, bool] = field(default_factory=dict)


@dataclass(slots=True)
class World:
    """What the store should hold."""

    blocks: dict[int, Block] = field(default_factory=dict)
    namespaces: set[int] = field(default_factory=set)
    pins: set[int] = field(default_factory=set)

    def change(self, call: Call) -> None:
        """What a call has done. A pin goes with its block, and stays where the block is written again."""
        for key, block in call.blocks.items():
            if block is None:
                self.blocks.pop(key, None)
                self.pins.discard(key)
            else:
                self.blocks[key] = block
        for now, changes in ((self.namespaces, call.namespaces), (self.pins, call.pins)):
            now |= {number for number, is_there in changes.items() if is_there}
            now -= {number for number, is_there in changes.items() if not is_there}

    def copy(self) -> World:
        return World(dict(self.blocks), set(self.namespaces), set(self.pins))


class Violation(Exception):
    """The store broke a promise."""


class Player:
    """Lives one life: opens the store in `root`, takes the steps, and remembers what was promised when."""

    def __init__(self, root: Path, world: World, drives: int = 1) -> None:
        self.ops = PowerCutOps(root)
        self.calls: list[Call] = []
        self._root = root
        self._drives = drives
        self._world = world.copy()
        self._alive: list[np.ndarray[Any, Any]] = []

    def play(self, steps: Sequence[Step]) -> None:
        """Take the steps; the store's own errors go through."""
        store = open_store(self._root, self.ops, self._drives)
        try:
            for step in steps:
                match step:
                    case Restart(pages):
                        store.close()
                        begin = len(self.ops.journal)
                        store = open_store(self._root, self.ops, self._drives, pages)
                        self._done(begin, self._dropped(store, pages))
                    case Register(numbers, kept):
                        for number in numbers:
                            begin = len(self.ops.journal)
                            store.put_namespace(_namespace(number), b"spec %3d" % number * _SPEC_WORDS)
                            self._done(begin, {}, {number: True})
                        if not kept:
                            begin = len(self.ops.journal)
                            store.remove_namespaces([_namespace(number) for number in numbers])
                            self._done(begin, {}, dict.fromkeys(numbers, False))
                    case Pin(keys, pinned):
                        stored = [key for key in keys if key in self._world.blocks]
                        begin = len(self.ops.journal)
                        if store.pin([(_NAMESPACE, _key(key)) for key in keys], pinned) != len(stored):
                            raise Violation(f"{stored} are stored, and not as many of {keys} can be pinned")
                        self._done(begin, {}, {}, dict.fromkeys(stored, pinned))
                    case Overlap(first, others):
                        self._overlap(store, first, others)
                    case Put() | Remove():
                        self._overlap(store, step, ())
            store.check_integrity()
        finally:
            store.close()

    def _done(
        self,
        begin: int,
        blocks: Change,
        namespaces: dict[int, bool] | None = None,
        pins: dict[int, bool] | None = None,
    ) -> None:
        self.calls.append(Call(begin, len(self.ops.journal), blocks, namespaces or {}, pins or {}))
        self._world.change(self.calls[-1])

    def _dropped(self, store: SlabStore, pages: int) -> Change:
        """What a start with room for so many pages has dropped: nothing, unless that is less than there is."""
        gone = self._world.blocks.keys() - {_number(record.key) for record in store.records()}
        if gone and pages == CAPACITY_PAGES:
            raise Violation(f"after a restart with the power on, blocks {sorted(gone)} are missing")
        return dict.fromkeys(gone)

    def _overlap(self, store: SlabStore, first: Put | Remove, others: Sequence[Put | Remove]) -> None:
        touched: set[int] = set()
        plans = [self._plan(store, step, touched) for step in (first, *others)]
        followers: list[threading.Thread] = []
        failures: list[Exception] = []
        calls = [Call(len(self.ops.journal), 0, {}) for _ in plans]

        def follow(plan: Callable[[], Change], call: Call) -> None:
            try:
                call.blocks = plan()
            except Exception as error:
                failures.append(error)

        def start() -> None:
            self.ops.on_commit = lambda: None
            for plan, call in zip(plans[1:], calls[1:], strict=True):
                call.begin = len(self.ops.journal)
                followers.append(threading.Thread(target=follow, args=(plan, call)))
                followers[-1].start()
                while store.waiting < sum(follower.is_alive() for follower in followers):
                    time.sleep(0)  # each either waits for the commit under way or had nothing to commit
            calls[0].end = len(self.ops.journal) + 1  # nothing but the commit comes before it returns

        self.ops.on_commit = start
        calls[0].blocks = plans[0]()
        if self.ops.on_commit is start:  # there was nothing to commit
            calls[0].end = len(self.ops.journal)
            start()
            calls[0].end -= 1
        for follower in followers:
            follower.join()
        if failures:
            raise failures[0]
        for call in calls[1:]:
            call.end = len(self.ops.journal)
        self.calls += calls
        for call in calls:
            self._world.change(call)

    def _plan(self, store: SlabStore, step: Put | Remove, touched: set[int]) -> Callable[[], Change]:
        """The step against what is stored now, without the keys that calls beside it touch, as a function to call."""
        blocks = self._world.blocks
        if isinstance(step, Remove):
            gone = set(step.keys) & set(blocks)
            for key in sorted(blocks):  # a parent's key is lower
                if blocks[key].parent in gone:
                    gone.add(key)
            if gone & touched:
                gone = set()
            touched |= gone
            return lambda: self._remove(store, sorted(gone, reverse=True))
        wanted: dict[int, Block] = {}
        for key, parent, sizes in step.blocks:
            above = parent if parent in blocks and parent not in touched else None
            if key not in touched:
                parts = tuple(_content(step.fill, key, part, size) for part, size in enumerate(sizes))
                wanted[key] = Block(above, parts)
        touched |= set(wanted) | {block.parent for block in wanted.values() if block.parent is not None}
        return lambda: self._put(store, wanted, step.tokens, step.coded)

    def _remove(self, store: SlabStore, keys: Sequence[int]) -> Change:
        store.remove([(_NAMESPACE, _key(key)) for key in keys])
        return dict.fromkeys(keys)

    def _put(self, store: SlabStore, wanted: dict[int, Block], tokens: int, coded: bool) -> Change:
        new = [
            NewBlock(
                _NAMESPACE,
                _key(key),
                b"" if block.parent is None else _key(block.parent),
                b"tok%d" % (key % 10) * tokens,
                key,
                [self._part(part, coded and not at) for at, part in enumerate(block.parts)],
                errors=(0.5, 0.25) if coded else None,
            )
            for key, block in wanted.items()
        ]
        records = store.write(new)
        return {key: block for (key, block), record in zip(wanted.items(), records, strict=True) if record is not None}

    def _part(self, content: bytes | None, coded: bool) -> Span | CodedPart | None:
        if content is None:
            return None
        array = np.frombuffer(bytearray(content), np.uint8)
        self._alive.append(array)
        if coded:
            return CodedPart(array, xxhash.xxh3_64_intdigest(content))
        return Span(int(array.ctypes.data), len(content))


def audit(root: Path, before: World, calls: Sequence[Call], position: int, drives: int = 1) -> World:
    """Open what a cut at `position` left and hold it against what was promised until then; what the store holds.

    Raises Violation: a promise was broken.
    """
    world = before.copy()
    under_way: dict[int, Block | None] = {}
    unsure_pins: set[int] = set()
    unsure_namespaces: set[int] = set()
    for call in calls:
        if call.end <= position:
            world.change(call)
        elif call.begin <= position:
            under_way |= call.blocks
            unsure_pins |= call.pins.keys()
            unsure_namespaces |= call.namespaces.keys()
    try:
        store = open_store(root, None, drives)
    except Exception as error:
        raise Violation(f"the store cannot be opened again: {error!r}") from error
    try:
        return _audit(store, world, under_way, unsure_pins, unsure_namespaces)
    except Violation:
        raise
    except Exception as error:
        raise Violation(f"the opened store fails: {error!r}") from error
    finally:
        store.close()


def _audit(
    store: SlabStore,
    world: World,
    under_way: dict[int, Block | None],
    unsure_pins: set[int],
    unsure_namespaces: set[int],
) -> World:
    store.check_integrity()
    found: dict[int, Block] = {}
    slots: list[int] = []
    for record in store.records():
        parts = []
        for part in record.parts:
            parts.append(None if part is None else _read(store, part.nbytes, part))
            slots += [] if part is None else [part.slot]
        found[_number(record.key)] = Block(_number(record.parent) if record.parent else None, tuple(parts))
    if len(set(slots)) != len(slots):
        raise Violation(f"two records share a slot: {sorted(slots)}")
    if store.used_bytes > CAPACITY_PAGES * PAGE_BYTES:
        raise Violation(f"{store.used_bytes} bytes are used of {CAPACITY_PAGES * PAGE_BYTES}")
    for key in sorted({*world.blocks, *found, *under_way}):
        allowed = [world.blocks.get(key)] + ([under_way[key]] if key in under_way else [])
        if found.get(key) not in allowed:
            what = "is there" if key in found else "is missing"
            if key in found and any(allowed):
                what = "has other bytes or another parent than were written"
            raise Violation(f"block {key} {what}")
    stored = store.namespaces()
    named = {number for number in range(NAMESPACES) if _namespace(number) in stored}
    if wrong := (named ^ world.namespaces) - unsure_namespaces:
        raise Violation(f"namespaces {sorted(named)} are there, not {sorted(world.namespaces)}: {sorted(wrong)} differ")
    pins = {_number(key) for _, key in store.pins()}
    if wrong := (pins ^ (world.pins & found.keys())) - unsure_pins:
        raise Violation(
            f"pins {sorted(pins)} are there, not {sorted(world.pins & found.keys())}: {sorted(wrong)} differ"
        )
    return World(found, named, pins)


def open_store(root: Path, ops: PowerCutOps | None, drives: int, pages: int = CAPACITY_PAGES) -> SlabStore:
    """The store as every case has it: small slabs, and one thread so that a case can be repeated."""
    return SlabStore.open(
        root / "store",
        pages * PAGE_BYTES,
        slab_bytes=4 * PAGE_BYTES,
        io_threads=1,
        ops=ops,
        more_paths=[root / f"drive{number}" for number in range(1, drives)],
    )


def _read(store: SlabStore, nbytes: int, part: Any) -> bytes:
    target = np.zeros(nbytes, np.uint8)
    store.read(part, Span(int(target.ctypes.data), nbytes))
    return target.tobytes()


def _content(fill: int, key: int, part: int, size: int) -> bytes | None:
    return random.Random(fill * 1000 + key * 10 + part).randbytes(size) if size else None


def _key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def _number(key: bytes) -> int:
    return int.from_bytes(key, "big")


def _namespace(number: int) -> bytes:
    return b"space%03d" % number
