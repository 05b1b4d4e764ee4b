"""Prompts of which some blocks were damaged: what a daemon serves of them, and what came of the damage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from benchmarks.common import harness
from benchmarks.load.world import Prompt, read_prompt, store_prompt
from prefixd.client import Client

B = TypeVar("B")
"""What names a block."""
_ZEROS = ("undetected", "served_wrong", "lost_sound", "integrity_violations")

MOST_NOTES = 100
"""Notes in a result: after a bad run there is one for each lost block."""


@dataclass(slots=True)
class RotFindings:
    """What came of the flips."""

    ZEROS: ClassVar[tuple[str, ...]] = ()
    """Figures of `more` that have to be 0."""

    flips: Counter[str] = field(default_factory=Counter)
    """Blocks hit, by kind."""
    detected: Counter[str] = field(default_factory=Counter)
    """Of them, those that were found, by the way in which they were."""
    served_wrong: int = 0
    lost_sound: int = 0
    read_blocks: int = 0
    recomputed: int = 0
    violations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def broken(self) -> list[str]:
        undetected = self.flips.total() - self.detected.total()
        return harness.missed({**self.result(), "undetected": undetected}, zero=(*_ZEROS, *self.ZEROS))

    def result(self) -> dict[str, Any]:
        return {
            "flips": self.flips.total(),
            "detected": self.detected.total(),
            "served_wrong": self.served_wrong,
            "lost_sound": self.lost_sound,
            "integrity_violations": len(self.violations),
            **self.more(),
            "flips_by_kind": dict(sorted(self.flips.items())),
            "read_blocks": self.read_blocks,
            "recomputed_blocks": self.recomputed,
            "found": [*self.notes[:MOST_NOTES], *self.violations],
        }

    def more(self) -> dict[str, Any]:
        """Figures of one tier alone."""
        raise NotImplementedError


class DamagedPrompts(Generic[B]):
    """Reads prompts and compares every byte.

    Args:
        paths: the prompts, each with its blocks.
        findings: where everything is counted.
    """

    def __init__(self, paths: Mapping[Prompt, Sequence[B]], findings: RotFindings) -> None:
        self._paths = paths
        self._findings = findings

    def read(self, client: Client, prompt: Prompt) -> tuple[int, int]:
        """How many blocks of the prompt were served, and how many of them with a wrong byte."""
        there, wrong = read_prompt(client, prompt)
        self._findings.read_blocks += there
        self._findings.notes += [f"{prompt}: wrong bytes in block {at}" for at in wrong]
        return there, len(wrong)

    def read_damaged(self, client: Client, prompt: Prompt, hit: Set[B]) -> tuple[int, int]:
        """Reads a prompt, of which what comes must be right, and end before the first block that was hit.

        How many blocks came, and how many should have.
        """
        there, wrong = self.read(client, prompt)
        self._findings.served_wrong += wrong
        path = self._paths[prompt]
        sound = next((at for at, block in enumerate(path) if block in hit), len(path))
        if there > sound and not wrong:
            self._findings.notes.append(f"{prompt}: a damaged block was served, with the right bytes?")
            self._findings.served_wrong += 1
        self._lost(prompt, range(there, sound), " came without")
        return there, sound

    def store_again(self, client: Client, hit: Set[B]) -> None:
        """What was dropped is computed again by who asks for it; then it is there, and right."""
        for prompt, path in self._paths.items():
            if not hit.isdisjoint(path):
                self._findings.recomputed += store_prompt(client, prompt)
                there, wrong = self.read(client, prompt)
                self._findings.served_wrong += wrong
                self._lost(prompt, range(there, len(path)), ", stored again, came without")

    def _lost(self, prompt: Prompt, blocks: range, what: str) -> None:
        self._findings.lost_sound += len(blocks)
        self._findings.notes += [f"{prompt}{what} block {at}, a sound one" for at in blocks]
