"""Of which commit, day and machine a result is, and whether it may be shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import checks
from benchmarks.results_parts.results import Result

BEFORE_THE_RULE: Mapping[str, tuple[str, str]] = {
    "hostile_before.json": ("2026-11-25", "of a tree without the defences, which is gone"),
    "hostile_unread_before.json": ("2026-11-26", "of a tree without the defences, which is gone"),
    "nvidia_h100_80gb_hbm3.json": ("2026-11-26", "needs an H100"),
}
"""Results with "+changes" from before these were refused: the day of each, and why it is still there. A file that is
measured again has another day, so that it is refused if it has changes again, and leaves this list if it has none."""


def refusals(result: Result) -> Iterator[str]:
    """Why a result is refused, a line each; nothing for one that may be shown."""
    circumstances = result.content.get("circumstances", {})
    day = str(circumstances.get("date", ""))[:10]
    known = BEFORE_THE_RULE.get(result.file)
    changed = any(commit.endswith("+changes") for commit in _commits(result.content))
    if not (day and circumstances.get("commit") and circumstances.get("cpus")):
        yield f"{result.file} does not say its date, commit and machine; measure it again with the benchmark's --json"
    elif changed and (known is None or known[0] != day):
        yield (
            f'{result.file} was measured on {day} with uncommitted changes (its commit ends with "+changes"); commit '
            f"them and measure it again: {command(result)}"
        )
    elif known and not changed:
        yield f"{result.file} is of a commit without changes: take it off BEFORE_THE_RULE in {__name__}"


def commit(result: Result) -> str:
    """The result's commit, short, marked where the tree had changes."""
    full = str(result.content["circumstances"]["commit"])
    return full[:9] + (" + changes" if full.endswith("+changes") else "")


def machine(result: Result) -> str:
    """The result's processor with its number of cores, and the GPU that was measured."""
    circumstances = result.content["circumstances"]
    cpu = f"{circumstances.get('processor') or circumstances.get('machine')}, {circumstances['cpus']} cores"
    return f"{result.content['device']}; {cpu}" if "device" in result.content else cpu


def command(result: Result) -> str:
    """What measures the result again."""
    name, *arguments = result.content["circumstances"].get("command", [result.benchmark])
    if name == "__main__":
        return " ".join(["python -m prefixd", *arguments])
    room = "checks." if (Path(checks.__file__).parent / f"{name}.py").exists() else ""
    return " ".join([f"python -m benchmarks.{room}{name}", *arguments])


def _commits(content: Any) -> Iterator[str]:
    """Every commit that a result names: its own, and those of parts that were measured at other times."""
    if isinstance(content, Mapping):
        for name, value in content.items():
            if name == "commit" and isinstance(value, str):
                yield value
            else:
                yield from _commits(value)
    elif isinstance(content, list):
        for value in content:
            yield from _commits(value)
