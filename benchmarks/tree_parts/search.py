"""The breadth-first repair search of LSPDojo ("Long-Term Memory", section VI.A).

A node is a program cut off before a line that was wrong, with remarks on what was wrong. Its candidates are completions
of it, which a language server checks. A candidate without an error is the repaired program. Of another one every error
is followed: the candidate is cut off at the error's line, and the wrong line and the error become a remark. So one
candidate with errors in lines 4 and 7 makes two nodes, and the second one still has the error in line 4:

    error behind what was kept    expanded
    error in the very next line   retried, with another remark, up to a number of attempts
    error in what was kept        returned: an error that an earlier node left standing is repaired now

A node that there was before is not followed again.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.tree_parts.language_server import Diagnostic
from benchmarks.tree_parts.planned import REMARK
from benchmarks.tree_parts.programs import Program

INSTRUCTIONS = """\
You are a careful Python programmer. Write the program that the user asks for: one module, standard library only, plain
functions and classes, no comments, no output. A language server has checked what is there already. Lines that begin
with "# wrong:" show a line that it refused and why; do not repeat such a mistake. Continue right behind the last line
that is given, with the same indentation, to the end of the program, and write nothing else.
"""


@dataclass(frozen=True, slots=True)
class Node:
    """A program as far as it is kept: whole lines, the last of them remarks on the next line."""

    kept: str = ""

    @property
    def remarks(self) -> int:
        """How many remarks there are on the next line."""
        lines = reversed(self.kept.splitlines())
        return sum(1 for _ in itertools.takewhile(lambda line: line.lstrip().startswith(REMARK), lines))

    @property
    def attempt(self) -> int:
        """How often the next line was tried before, with a remark on it."""
        return max(0, self.remarks - 1)


@dataclass(slots=True)
class Counts:
    """What became of candidates (right, wrong) and of the errors of the wrong ones (the others).

    right: without an error; the first of a program is its repair. known: led to a node that there was before. given_up:
    in a line that was wrong too often.
    """

    right: int = 0
    wrong: int = 0
    expanded: int = 0
    retried: int = 0
    returned: int = 0
    known: int = 0
    given_up: int = 0


@dataclass(slots=True)
class Search:
    """The search for one program. width: nodes that a level completes. attempts: of one line, the first included."""

    program: Program
    width: int
    attempts: int
    queue: deque[Node] = field(default_factory=lambda: deque([Node()]))
    counts: Counts = field(default_factory=Counts)
    repaired: str | None = None
    _known: set[str] = field(default_factory=set)

    def level(self) -> list[Node]:
        """The next nodes to complete; none when the program is repaired or there is nothing left to try."""
        if self.repaired is not None:
            return []
        return [self.queue.popleft() for _ in range(min(self.width, len(self.queue)))]

    def prompt(self, node: Node) -> str:
        return f"{INSTRUCTIONS}\nUser: {self.program.task}\n\n{node.kept}"

    def judge(self, node: Node, completion: str, errors: Iterable[Diagnostic]) -> None:
        """Decides what becomes of a candidate by the errors of `node.kept + completion`."""
        text = node.kept + completion
        found = sorted(set(errors))
        if not found:
            self.counts.right += 1
            self.repaired = self.repaired or text
            return
        self.counts.wrong += 1
        lines = text.splitlines(keepends=True)
        for error in found:
            self._follow(node, lines, error)

    def _follow(self, node: Node, lines: Sequence[str], error: Diagnostic) -> None:
        """Queues the candidate's lines before the error, with a remark, as a node."""
        counts, kept = self.counts, len(node.kept.splitlines())
        child = Node("".join(lines[: error.line]) + _remark(lines, error))
        if child.attempt >= self.attempts:
            counts.given_up += 1
        elif child.kept in self._known:
            counts.known += 1
        else:
            self._known.add(child.kept)
            self.queue.append(child)
            if error.line > kept:
                counts.expanded += 1
            elif error.line == kept:
                counts.retried += 1
            else:
                counts.returned += 1


def _remark(lines: Sequence[str], error: Diagnostic) -> str:
    wrong = lines[error.line].rstrip("\n") if error.line < len(lines) else ""
    indentation = wrong[: len(wrong) - len(wrong.lstrip())]
    message = " ".join(error.message.split())
    return f"{indentation}{REMARK}{wrong.strip()}  -> {message}\n"
