"""What happens to a store in a case of `power_loss`: drawn from a seed, and left out piece by piece."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from benchmarks.checks.power_cuts.power_cut import PAGE_BYTES as PAGE
from benchmarks.checks.power_cuts.power_cut import Committed, Event

KEYS = 6
NAMESPACES = 12
CAPACITY_PAGES = 24
_FEWER_PAGES = (8, 16)
_LONG = 1500
"""Token ids of a block whose record takes pages of its own in the index."""


@dataclass(frozen=True, slots=True)
class Put:
    """Blocks to write in one call: (key, parent wanted, bytes of each part, 0 for a part that is not stored)."""

    blocks: tuple[tuple[int, int | None, tuple[int, ...]], ...]
    fill: int
    tokens: int = 1
    """Token ids of each block."""
    coded: bool = False
    """The first part is what a codec has made, and the block says how far it is from the exact bytes."""


@dataclass(frozen=True, slots=True)
class Remove:
    """Blocks to remove, with all that continue them."""

    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Overlap:
    """Calls that come while the first is in its index transaction. Where they meet the same blocks, the first wins."""

    first: Put | Remove
    others: tuple[Put | Remove, ...]


@dataclass(frozen=True, slots=True)
class Register:
    """Namespaces to store, in a call each, and then to forget, in one call, unless they are kept."""

    numbers: tuple[int, ...]
    kept: bool


@dataclass(frozen=True, slots=True)
class Pin:
    """Blocks to pin, or to let go; those that are not stored are ignored."""

    keys: tuple[int, ...]
    pinned: bool


@dataclass(frozen=True, slots=True)
class Restart:
    """Close the store and open it again, with the power on, maybe with another capacity."""

    pages: int = CAPACITY_PAGES


Step = Put | Remove | Overlap | Register | Pin | Restart


@dataclass(frozen=True, slots=True)
class Life:
    """What happens until the power goes: at `cut` of the journal, 0 to 1; `choices` seeds what is left."""

    steps: tuple[Step, ...]
    cut: float
    choices: int
    in_commit: bool = False
    """`cut` counts the commits alone: the power goes during one of them."""
    drives: int = 1
    """Directories of slabs, the same number in all lives of a case."""

    def position(self, journal: Sequence[Event]) -> int:
        """The event of the journal during which the power goes; its length when it goes after the last."""
        commits = [at for at, event in enumerate(journal) if isinstance(event, Committed)]
        if self.in_commit and commits:
            return commits[int(self.cut * len(commits))]
        return int(self.cut * (len(journal) + 1))


def draw(seed: int) -> tuple[Life, ...]:
    """The case of this seed."""
    rng = random.Random(seed)
    drives = random.Random(f"drives {seed}").choice([1, 2])
    fills = count(seed * 1000)
    return tuple(
        Life(
            tuple(_draw_step(rng, fills) for _ in range(rng.randint(2, 7))),
            rng.random(),
            rng.getrandbits(32),
            rng.random() < 0.5,
            drives,
        )
        for _ in range(rng.choice([1, 1, 2, 3]))
    )


def _draw_step(rng: random.Random, fills: Iterator[int]) -> Step:
    kind = rng.random()
    if kind < 0.06:
        return Restart(rng.choice([CAPACITY_PAGES, CAPACITY_PAGES, *_FEWER_PAGES]))
    if kind < 0.12:
        count = rng.choice([1, NAMESPACES - 1, NAMESPACES])
        return Register(tuple(rng.sample(range(NAMESPACES), count)), rng.random() < 0.6)
    if kind < 0.2:
        return Pin(tuple(rng.sample(range(KEYS), rng.randint(1, 3))), rng.random() < 0.7)
    if kind < 0.24:  # as an operator who evicts a namespace
        return Remove(tuple(range(KEYS)))
    if kind < 0.4:
        others = tuple(_draw_call(rng, fills) for _ in range(rng.randint(1, 2)))
        return Overlap(_draw_remove(rng) if rng.random() < 0.6 else _draw_call(rng, fills), others)
    return _draw_call(rng, fills)


def _draw_remove(rng: random.Random) -> Remove:
    return Remove(tuple(rng.sample(range(KEYS), rng.randint(1, 3))))


def _draw_call(rng: random.Random, fills: Iterator[int]) -> Put | Remove:
    if rng.random() < 0.35:
        return _draw_remove(rng)
    sizes = [rng.choice([1, 700, PAGE, PAGE, PAGE, 3 * PAGE - 5]) for _ in range(rng.choice([1, 1, 1, 2]))]
    if len(sizes) > 1 and rng.random() < 0.3:
        sizes[1] = 0
    keys = sorted(rng.sample(range(KEYS), rng.randint(1, 4)))
    blocks = tuple((key, rng.choice([None, *range(key)]), tuple(sizes)) for key in keys)
    fill = next(fills)
    return Put(blocks, fill, rng.choice([1, 1, 1, _LONG]), coded=fill % 5 < 2)


def smaller(lives: Sequence[Life]) -> Iterator[tuple[Life, ...]]:
    """The case with one thing less, in each way there is."""
    for at in range(len(lives)):
        if len(lives) > 1:
            yield (*lives[:at], *lives[at + 1 :])
    for at, life in enumerate(lives):
        for number, step in enumerate(life.steps):
            for instead in _less(step):
                steps = (*life.steps[:number], *instead, *life.steps[number + 1 :])
                yield (*lives[:at], replace(life, steps=steps), *lives[at + 1 :])


def _less(step: Step) -> Iterator[tuple[Step, ...]]:
    yield ()
    if isinstance(step, Overlap):
        yield from ((call,) for call in (step.first, *step.others))
        if len(step.others) > 1:
            yield from ((replace(step, others=(other,)),) for other in step.others)
    if isinstance(step, Put) and len(step.blocks) > 1:
        yield from ((replace(step, blocks=(block,)),) for block in step.blocks)
    if isinstance(step, Put) and step.coded:
        yield (replace(step, coded=False),)
    if isinstance(step, Put) and step.tokens > 1:
        yield (replace(step, tokens=1),)
    if isinstance(step, Remove | Pin) and len(step.keys) > 1:
        yield from ((replace(step, keys=(key,)),) for key in step.keys)
    if isinstance(step, Register) and len(step.numbers) > 1:
        yield from ((replace(step, numbers=part),) for part in (step.numbers[::2], step.numbers[1::2]))
    if isinstance(step, Restart) and step.pages != CAPACITY_PAGES:
        yield (Restart(),)
