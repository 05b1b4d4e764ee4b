"""Carries out the searches of all programs against a daemon, a level at a time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from benchmarks.tree_parts.language_server import Diagnostic, LanguageServer
from benchmarks.tree_parts.planned import PlannedModel, same_program
from benchmarks.tree_parts.programs import Program
from benchmarks.tree_parts.search import Search
from benchmarks.workloads.asking import Asked, ask, together
from benchmarks.workloads.seen_blocks import SeenBlocks
from prefixd.cli.demo.runner import Progress
from prefixd.client import AsyncClient
from prefixd.workloads.text_analysis import BLOCK_TOKENS, FIRST_TOKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is searched for, and how far. candidates: completions of a node. sites: faulty lines of a program."""

    programs: Sequence[Program]
    width: int
    candidates: int
    attempts: int
    sites: int
    seed: int


class Checker:
    """Checks texts with a language server; each once, though every way of serving leads to the same ones."""

    def __init__(self, server: LanguageServer) -> None:
        self._server = server
        self._known: dict[str, list[Diagnostic]] = {}

    def __len__(self) -> int:
        return len(self._known)

    async def check(self, texts: Sequence[str]) -> list[list[Diagnostic]]:
        """The errors of each text. Raises LanguageServerError."""
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        self._known.update(zip(new, await together([self._server.check(text) for text in new]), strict=True))
        return [self._known[text] for text in texts]


@dataclass(slots=True)
class Grown:
    """What the searches came to.

    asked: all requests, in their order. elapsed_s: seconds in which requests were under way. repaired: names of the
    programs that the searches ended with. depth: levels. became: how many candidates of all programs became what, see
    `Counts`. distinct_tokens: of all prompts and completions, what several begin with counted once.
    """

    asked: list[Asked] = field(default_factory=list)
    elapsed_s: float = 0.0
    repaired: list[str] = field(default_factory=list)
    depth: int = 0
    became: Counter[str] = field(default_factory=Counter)
    distinct_tokens: int = 0


async def grow(address: str, plan: Plan, checker: Checker, progress: Progress, name: str) -> Grown:
    """All searches side by side; the requests of a level are sent at once. Raises ClientError, LanguageServerError."""
    models = {program.name: PlannedModel(program, plan.sites, plan.seed) for program in plan.programs}
    searches = [Search(program, plan.width, plan.attempts) for program in plan.programs]
    grown, seen = Grown(), SeenBlocks(BLOCK_TOKENS)
    async with AsyncClient(address, name="benchmark tree search", memory="streamed") as client:
        progress.begin(f"{name}: loading the model", 0)
        await ask(client, [FIRST_TOKEN], answer_tokens=1)  # less than a block: nothing of it is cached
        while nodes := [(search, node) for search in searches for node in search.level()]:
            grown.depth += 1
            wanted = [
                (search, node, models[search.program.name].complete(node.kept, node.attempt, candidate))
                for search, node in nodes
                for candidate in range(plan.candidates)
            ]
            progress.begin(f"{name}: level {grown.depth}", len(wanted))
            began = time.monotonic()
            grown.asked += await together(
                [_complete(client, seen, search.prompt(node), text, progress) for search, node, text in wanted]
            )
            grown.elapsed_s += time.monotonic() - began
            found = await checker.check([node.kept + text for _, node, text in wanted])
            for (search, node, text), errors in zip(wanted, found, strict=True):
                search.judge(node, text, errors)
    grown.distinct_tokens = len(seen) * BLOCK_TOKENS
    for search in searches:
        if search.repaired is not None and same_program(search.repaired, search.program):
            grown.repaired.append(search.program.name)
        for fate, number in asdict(search.counts).items():
            grown.became[fate] += number
    return grown


async def _complete(client: AsyncClient, seen: SeenBlocks, prompt: str, text: str, progress: Progress) -> Asked:
    tokens, answer = list(prompt.encode()), list(text.encode())  # a byte is a token of the small model
    asked = await ask(client, tokens, possible_tokens=seen.prompt(tokens), answer=answer)
    seen.answered(tokens, answer)
    progress.advance()
    return asked
