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

from benchmarks.storage.power_cut import PAGE_BYTES, PowerCutOps
from benchmarks.storage.power_steps import NAMESPACES, Overlap, Put, Register, Remove, Restart, Step
from prefixd_swap import NewBlock, Span
from prefixd_swap.slab.store import SlabStore

_CAPACITY = 24 * PAGE_BYTES
_NAMESPACE = b"namespac"


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
    namespace: int | None = None


@dataclass(slots=True)
class World:
    """What the store should hold."""

    blocks: dict[int, Block] = field(default_factory=dict)
    namespaces: set[int] = field(default_factory=set)


class Violation(Exception):
    """The store broke a promise."""


class Player:
    """Lives one life: opens the store in `root`, takes the steps, and remembers what was promised when."""

    def __init__(self, root: Path, world: World, store_class: type[SlabStore]) -> None:
        self.ops = PowerCutOps(root)
        self.calls: list[Call] = []
        self._root = root
        self._world = World(dict(world.blocks), set(world.namespaces))
        self._store_class = store_class
        self._alive: list[np.ndarray[Any, Any]] = []

    def play(self, steps: Sequence[Step]) -> None:
        """Take the steps; the store's own errors go through."""
        store = open_store(self._root / "store", self._store_class, self.ops)
        try:
            for step in steps:
                match step:
                    case Restart():
                        store.close()
                        store = open_store(self._root / "store", self._store_class, self.ops)
                    case Register(number):
                        begin = len(self.ops.journal)
                        store.put_namespace(_namespace(number), b"spec %d" % number)
                        self.calls.append(Call(begin, len(self.ops.journal), {}, number))
                        self._world.namespaces.add(number)
                    case Overlap(first, others):
                        self._overlap(store, first, others)
                    case Put() | Remove():
                        self._overlap(store, step, ())
            store.check_integrity()
        finally:
            store.close()

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
            _change(self._world.blocks, call.blocks)

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
        return lambda: self._put(store, wanted)

    def _remove(self, store: SlabStore, keys: Sequence[int]) -> Change:
        store.remove([(_NAMESPACE, _key(key)) for key in keys])
        return dict.fromkeys(keys)

    def _put(self, store: SlabStore, wanted: dict[int, Block]) -> Change:
        new = [
            NewBlock(
                _NAMESPACE,
                _key(key),
                b"" if block.parent is None else _key(block.parent),
                b"tok%d" % (key % 10),
                key,
                [self._span(part) for part in block.parts],
            )
            for key, block in wanted.items()
        ]
        records = store.write(new)
        return {key: block for (key, block), record in zip(wanted.items(), records, strict=True) if record is not None}

    def _span(self, content: bytes | None) -> Span | None:
        if content is None:
            return None
        array = np.frombuffer(bytearray(content), np.uint8)
        self._alive.append(array)
        return Span(int(array.ctypes.data), len(content))


def audit(root: Path, before: World, calls: Sequence[Call], position: int, store_class: type[SlabStore]) -> World:
    """Open what a cut at `position` left and hold it against what was promised until then; what the store holds.

    Raises:
        Violation: a promise was broken.
    """
    blocks = dict(before.blocks)
    namespaces = set(before.namespaces)
    under_way: dict[int, Block | None] = {}
    for call in calls:
        if call.end <= position:
            _change(blocks, call.blocks)
            if call.namespace is not None:
                namespaces.add(call.namespace)
        elif call.begin <= position:
            under_way |= call.blocks
    try:
        store = open_store(root / "store", store_class, None)
    except Exception as error:
        raise Violation(f"the store cannot be opened again: {error!r}") from error
    try:
        return _audit(store, blocks, under_way, namespaces)
    except Violation:
        raise
    except Exception as error:
        raise Violation(f"the opened store fails: {error!r}") from error
    finally:
        store.close()


def _audit(
    store: SlabStore, blocks: dict[int, Block], under_way: dict[int, Block | None], namespaces: set[int]
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
    if store.used_bytes > _CAPACITY:
        raise Violation(f"{store.used_bytes} bytes are used of {_CAPACITY}")
    for key in sorted({*blocks, *found, *under_way}):
        allowed = [blocks.get(key)] + ([under_way[key]] if key in under_way else [])
        if found.get(key) not in allowed:
            what = "is there" if key in found else "is missing"
            if key in found and any(allowed):
                what = "has other bytes or another parent than were written"
            raise Violation(f"block {key} {what}")
    named = set(store.namespaces())
    if lost := {_namespace(number) for number in namespaces} - named:
        raise Violation(f"namespaces are lost: {sorted(lost)}")
    return World(found, {number for number in range(NAMESPACES) if _namespace(number) in named})


def open_store(path: Path, store_class: type[SlabStore], ops: PowerCutOps | None) -> SlabStore:
    """The store as every case has it: small slabs, and one thread so that a case can be repeated."""
    return store_class.open(path, _CAPACITY, slab_bytes=4 * PAGE_BYTES, io_threads=1, ops=ops)


def _change(blocks: dict[int, Block], change: Change) -> None:
    for key, block in change.items():
        if block is None:
            blocks.pop(key, None)
        else:
            blocks[key] = block


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
