"""The completions that stand for a trained model's: the right program with mistakes in some of its lines.

A program has a few faulty lines, its sites, and at each a mistake of one kind: an undefined name, an attribute that its
module does not have, or broken syntax. Of the completions that start at one site:

    0: right at this site, wrong at the next          so that a search always comes closer
    1: wrong again at this site
    2: right at this site and the next, wrong at the two behind it
    3 and more: right at this site, wrong at some of those behind it, by the seed

Behind the last site everything is right. A syntax error hides the mistakes before it, which the server finds once it is
gone.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Sequence

from benchmarks.tree_parts.programs import Program

REMARK = "# wrong: "
"""How a line begins that tells of a mistake; such lines are no part of the program."""

_ATTRIBUTE = re.compile(r"\b([a-z_]+)\.([a-z_]+)")


class PlannedModel:
    """Completes a program with mistakes in `sites` of its lines, the same for the same arguments."""

    def __init__(self, program: Program, sites: int, seed: int) -> None:
        self._lines = program.lines
        self._seed = f"{program.name} {seed}"
        source = random.Random(self._seed)
        wrong = {line: mistake for line in range(len(self._lines)) if (mistake := _mistake(self._lines, line, source))}
        self.wrong = {line: wrong[line] for line in sorted(source.sample(sorted(wrong), min(sites, len(wrong))))}
        """The faulty lines, by number."""

    def complete(self, kept: str, attempt: int, candidate: int) -> str:
        """What follows `kept`, whole lines of the program and remarks; `attempt`: how often the next line was wrong."""
        start = program_lines(kept)
        here, ahead = start in self.wrong, [site for site in self.wrong if site > start]
        if candidate == 0:
            wrong = ahead[:1]
        elif candidate == 1:
            wrong = [start] if here and not attempt else ahead[:2]
        elif candidate == 2:
            wrong = ahead[1:3]
        else:
            source = random.Random(f"{self._seed} {start} {attempt} {candidate}")
            wrong = [site for site in ahead if source.random() < 0.5]
        lines = [self.wrong[i] if i in wrong else self._lines[i] for i in range(start, len(self._lines))]
        return "".join(f"{line}\n" for line in lines)


def program_lines(text: str) -> int:
    """How many lines of a program a text has; remarks do not count."""
    return sum(not line.lstrip().startswith(REMARK) for line in text.splitlines())


def same_program(text: str, program: Program) -> bool:
    """Whether a text is the program, apart from remarks and layout."""
    try:
        return ast.dump(ast.parse(text)) == ast.dump(ast.parse(program.source))
    except SyntaxError:
        return False


def _mistake(lines: Sequence[str], number: int, source: random.Random) -> str | None:
    """A line made wrong; None for one that has nothing to get wrong."""
    line = lines[number]
    if not line.strip() or line.startswith(("import", "def", "class")):
        return None
    imported = {word for each in lines if each.startswith("import ") for word in each.split()[1:]}
    ways = []
    for found in _ATTRIBUTE.finditer(line):
        if found[1] in imported:
            ways.append(f"{line[: found.end()]}_of{line[found.end() :]}")
    if line.endswith(":"):
        ways.append(line[:-1])
    ways += [f"{line[:stop]}_value{line[stop:]}" for stop in _names(lines, number)]
    return source.choice(ways) if ways else None


def _names(lines: Sequence[str], number: int) -> list[int]:
    """Where the names end that a line reads; not those of f-strings, whose places older Pythons do not tell."""
    tree = ast.parse("\n".join(lines))
    inside = {id(part) for text in ast.walk(tree) if isinstance(text, ast.JoinedStr) for part in ast.walk(text)}
    return [
        node.end_col_offset
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in inside
        if node.lineno == number + 1 and node.end_col_offset is not None
    ]
