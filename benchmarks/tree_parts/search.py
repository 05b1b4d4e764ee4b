"""The breadth-first repair search of LSPDojo ("Long-Term Memory", section VI.A).

A node is a program cut off before a line that was wrong, with remarks on what was wrong. Its candidates are completions
of it, which a language server checks:

    no error                                  the program is repaired
    the first error is behind what was kept   expanded: cut off there, the wrong line and the error become a remark
    the error is in the very next line        retried, with another remark, up to a number of attempts
    the error is in what was kept             cut: no completion can repair it
"""

from __future__ import annotations

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
    """A program as far as it is kept: whole lines. attempt: how often its next line was wrong before."""

    kept: str = ""
    attempt: int = 0


@dataclass(slots=True)
class Counts:
    """What became of candidates. right: without an error; the first of a program is its repair."""

    right: int = 0
    expanded: int = 0
    retried: int = 0
    cut: int = 0


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
        first = min(errors, default=None)
        if first is None:
            self.counts.right += 1
            self.repaired = self.repaired or text
            return
        lines, kept = text.splitlines(keepends=True), len(node.kept.splitlines())
        again = first.line == kept
        child = Node("".join(lines[: first.line]) + _remark(lines, first), node.attempt + 1 if again else 0)
        if first.line < kept or child.attempt >= self.attempts or child.kept in self._known:
            self.counts.cut += 1
            return
        self._known.add(child.kept)
        self.queue.append(child)
        if again:
            self.counts.retried += 1
        else:
            self.counts.expanded += 1


def _remark(lines: Sequence[str], error: Diagnostic) -> str:
    wrong = lines[error.line].rstrip("\n") if error.line < len(lines) else ""
    indentation = wrong[: len(wrong) - len(wrong.lstrip())]
    message = " ".join(error.message.split())
    return f"{indentation}{REMARK}{wrong.strip()}  -> {message}\n"
