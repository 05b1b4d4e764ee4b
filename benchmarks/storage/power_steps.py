"""What happens to a store in a case of `power_loss`: drawn from a seed, and left out piece by piece."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from benchmarks.storage.power_cut import PAGE_BYTES as PAGE
from benchmarks.storage.power_cut import Committed, Event

KEYS = 6
NAMESPACES = 4


@dataclass(frozen=True, slots=True)
class Put:
    """Blocks to write in one call: (key, parent wanted, bytes of each part, 0 for a part that is not stored)."""

    blocks: tuple[tuple[int, int | None, tuple[int, ...]], ...]
    fill: int


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
    """A namespace to store."""

    number: int


@dataclass(frozen=True, slots=True)
class Restart:
    """Close the store and open it again, with the power on."""


Step = Put | Remove | Overlap | Register | Restart


@dataclass(frozen=True, slots=True)
class Life:
    """What happens until the power goes: at `cut` of the journal, 0 to 1; `choices` seeds what is left."""

    steps: tuple[Step, ...]
    cut: float
    choices: int
    in_commit: bool = False
    """`cut` counts the commits alone: the power goes during one of them."""

    def position(self, journal: Sequence[Event]) -> int:
        """The event of the journal during which the power goes; its length when it goes after the last."""
        commits = [at for at, event in enumerate(journal) if isinstance(event, Committed)]
        if self.in_commit and commits:
            return commits[int(self.cut * len(commits))]
        return int(self.cut * (len(journal) + 1))


def draw(seed: int) -> tuple[Life, ...]:
    """The case of this seed."""
    rng = random.Random(seed)
    fills = count(seed * 1000)
    return tuple(
        Life(
            tuple(_draw_step(rng, fills) for _ in range(rng.randint(2, 7))),
            rng.random(),
            rng.getrandbits(32),
            rng.random() < 0.5,
        )
        for _ in range(rng.choice([1, 1, 2, 3]))
    )


def _draw_step(rng: random.Random, fills: Iterator[int]) -> Step:
    kind = rng.random()
    if kind < 0.06:
        return Restart()
    if kind < 0.12:
        return Register(rng.randrange(NAMESPACES))
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
    return Put(tuple((key, rng.choice([None, *range(key)]), tuple(sizes)) for key in keys), next(fills))


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
    if isinstance(step, Remove) and len(step.keys) > 1:
        yield from ((Remove((key,)),) for key in step.keys)
