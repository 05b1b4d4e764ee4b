"""The disk tier under simulated power cuts.

Runs the real store through random writes, replacements, removals of some and of all, pins, overlapping calls
and restarts, some with less room, over a disk (in half of the cases two, with a directory on each) whose power
is cut at a random point: of what was not synced, any part is left, torn by sectors or pages and out of order,
sizes and names of files included. Then the store is opened on what is left, and must have every block that it
said was stored and none that it said was removed, each with exactly its bytes, in slots of their own, and
pinned as it said; and it goes on from there to the next cut. A case is reproduced by its seed: --seed SEED
--cases 1. A case that fails is made smaller by leaving out what it does not need.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree

from benchmarks.checks.power_cuts.power_player import Player, Violation, World, audit
from benchmarks.checks.power_cuts.power_steps import Life, draw, smaller
from benchmarks.common import harness
from benchmarks.common.options import option, seed

_SHRINK_CHOICES = 4  # ways of losing data to try at each position of a smaller case


@dataclass(frozen=True, slots=True)
class Finding:
    """A case that failed, as it was drawn and as small as it became."""

    seed: int
    problem: str
    lives: tuple[Life, ...]

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.problem}"]
        for life in self.lives:
            lines += [f"    {step}" for step in life.steps]
            where = "commits" if life.in_commit else "journal"
            drives = f", {life.drives} directories" if life.drives > 1 else ""
            lines.append(f"    power cut at {life.cut:.3f} of the {where}, choices {life.choices}{drives}")
        return "\n".join(lines)


def run_case(lives: Sequence[Life], folder: Path) -> int:
    """Live the lives, each on what the cut before left; how many of the calls had returned at the cuts.

    Raises Violation: a promise was broken; its second argument is the ordinal of the life.
    """
    world = World()
    acknowledged = 0
    root = _fresh(folder)
    for ordinal, life in enumerate(lives):
        player = Player(root, world, life.drives)
        try:
            player.play(life.steps)
            position = life.position(player.ops.journal)
            after = _fresh(folder)
            player.ops.cut(position, life.choices, after / "disk")
            world = audit(after / "disk", world, player.calls, position, life.drives)
        except Violation as error:
            raise Violation(str(error), ordinal) from error
        except Exception as error:
            raise Violation(f"with the power on: {error!r}", ordinal) from error
        acknowledged += sum(call.end <= position for call in player.calls)
        rmtree(root)
        root = after / "disk"
    return acknowledged


def shrink(seed: int, problem: str, lives: Sequence[Life]) -> Finding:
    """The case without the lives, steps and blocks that it does not need to fail, tried one after the other."""
    with _folder() as folder:
        found = True
        while found:
            found = False
            for candidate in smaller(lives):
                failed = _fails(candidate, folder)
                if failed is not None:
                    problem, lives, found = *failed, True
                    break
    return Finding(seed, problem, tuple(lives))


def _fails(lives: Sequence[Life], folder: Path) -> tuple[str, tuple[Life, ...]] | None:
    """Whether the case fails at any cut of its last life: how, and the case with that cut."""
    world, root = World(), _fresh(folder)
    try:
        for ordinal, life in enumerate(lives):
            player = Player(root, world, life.drives)
            player.play(life.steps)
            events = len(player.ops.journal)
            last = ordinal == len(lives) - 1
            cuts = [life]
            if last:
                cuts = [
                    Life(life.steps, (at + 0.5) / (events + 1), choices, drives=life.drives)
                    for at in range(events + 1)
                    for choices in range(_SHRINK_CHOICES)
                ]
            for cut in cuts:
                position = cut.position(player.ops.journal)
                after = _fresh(folder)
                player.ops.cut(position, cut.choices, after / "disk")
                try:
                    found = audit(after / "disk", world, player.calls, position, life.drives)
                except Violation as error:
                    return str(error), (*lives[:ordinal], cut)
                if last:
                    rmtree(after)
            world, root = found, after / "disk"
    except Exception as error:
        return f"with the power on: {error!r}", tuple(lives)
    return None


def run_cases(seeds: Sequence[int], shrink_first: int = 1) -> tuple[int, list[Finding]]:
    """Run the cases of these seeds: calls acknowledged, and the cases that failed, the first of them made smaller."""
    findings: list[Finding] = []
    acknowledged = 0
    with _folder() as folder:
        for seed in seeds:
            lives = draw(seed)
            try:
                acknowledged += run_case(lives, folder)
            except Violation as error:
                problem, ordinal = error.args
                finding = Finding(seed, problem, lives[: ordinal + 1])
                if len(findings) < shrink_first:
                    finding = shrink(seed, problem, finding.lives)
                findings.append(finding)
            for left in folder.iterdir():
                rmtree(left)
    return acknowledged, findings


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder in memory where there is one: nothing here waits for a real disk."""
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="prefixd-power-", dir=parent) as name:
        yield Path(name)


def _fresh(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=folder))


@harness.benchmark(
    "checks.power_loss",
    __doc__,
    option("--cases", 5000, "cases to run"),
    seed("seed of the first case; the others follow it"),
    option("--processes", os.cpu_count() or 1, "processes"),
)
def main(options: harness.Options) -> harness.Outcome:
    """All cases, in processes of their own."""
    seeds = range(options.seed, options.seed + options.cases)
    batches = [seeds[start : start + 50] for start in range(0, len(seeds), 50)]
    acknowledged, findings = 0, []
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(min(options.processes, len(batches)), context) as pool,
        harness.progress("cases", len(batches)) as step,
    ):
        for done, failed in pool.map(run_cases, batches):
            acknowledged += done
            findings += failed
            step()
    found = [str(finding) for finding in findings]
    broken = [f"{len(found)} of {options.cases} cases broke a promise, see above"] if found else []
    return harness.Outcome({"violations": len(found), "acknowledged": acknowledged, "found": found}, broken)


if __name__ == "__main__":
    harness.run(main)
