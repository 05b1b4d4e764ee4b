"""The search, its planned completions and the language server; and the benchmark from end to end with one program."""

from __future__ import annotations

import ast
import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks import tree_search
from benchmarks.tree_parts import language_server
from benchmarks.tree_parts.language_server import Diagnostic, LanguageServer, LanguageServerError, pylsp
from benchmarks.tree_parts.planned import PlannedModel, program_lines, same_program
from benchmarks.tree_parts.programs import PROGRAMS, Program
from benchmarks.tree_parts.search import Node, Search
from benchmarks.ways_of_serving.ways import Room

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Program(
    "small",
    "a task",
    "import math\n\ndef f(x):\n    y = math.sqrt(x)\n    while y:\n        y -= x\n    return y\n",
)
# What a fake server does: reads a message with this, and answers `initialize`, which has the id 1.
READ = """
import json, sys, time
def read():
    length = 0
    while (line := sys.stdin.buffer.readline().strip()):
        length = int(line.split(b":")[1])
    return json.loads(sys.stdin.buffer.read(length))
def send(body):
    sys.stdout.buffer.write(b"Content-Length: %d\\r\\n\\r\\n" % len(body) + body)
    sys.stdout.buffer.flush()
read()
send(b'{"jsonrpc": "2.0", "id": 1, "result": {}}')
"""


def fake(then: str) -> list[str]:
    return [sys.executable, "-c", READ + then]


def mistaken(program: Program, wrong: Mapping[int, str]) -> str:
    return "".join(f"{wrong.get(number, line)}\n" for number, line in enumerate(program.lines))


def parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


@pytest.mark.slow
async def test_pylsp_finds_what_is_planned_to_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """All programs are right; each mistake alone is found in its line, broken syntax included, and all of them together
    where none breaks the syntax."""
    monkeypatch.setattr(language_server, "_END_S", 60.0)
    texts, expected = [program.source for program in PROGRAMS], list[list[int]]([[]] * len(PROGRAMS))
    for program in PROGRAMS:
        mistakes = PlannedModel(program, 99, 1).wrong
        names = {line: wrong for line, wrong in mistakes.items() if parses(mistaken(program, {line: wrong}))}
        assert len(names) > 1
        for lines in (*([line] for line in mistakes), list(names)):
            texts.append(mistaken(program, {line: mistakes[line] for line in lines}))
            expected.append(lines)
    async with LanguageServer(pylsp()) as server:
        found = await asyncio.gather(*map(server.check, texts))
    assert server._process is not None
    assert [sorted({error.line for error in errors}) for errors in found] == expected
    assert server._process.returncode == 0, "it was ended as the protocol says"


@pytest.mark.parametrize(
    ("then", "what"),
    [
        ("read(); read(); sys.exit('no more')", "ended with status 1; it said: no more"),
        ("send(b'[1]'); time.sleep(60)", "what is no message"),
        ("send(b'{'); time.sleep(60)", "what is no message"),
        ("print('Content-Length: many\\r\\n\\r\\n', flush=True); time.sleep(60)", "what is no message"),
        ("print('Content-Length: 99999999999\\r\\n\\r\\n', flush=True); time.sleep(60)", "99999999999 bytes"),
        ("time.sleep(60)", "did not answer within 0.5 s: the diagnostics of a text"),
    ],
)
@pytest.mark.slow
async def test_a_server_that_dies_or_does_not_answer_is_one_line_and_is_ended(
    then: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_server, "_END_S", 0.1)
    server = LanguageServer(fake(then))
    with pytest.raises(LanguageServerError, match=what) as caught:
        async with server:
            if "did not answer" in what:
                server._timeout_s = 0.5  # once it has started, which takes longer on a busy machine
            await server.check("x = 1\n")
    assert "\n" not in str(caught.value)
    assert server._process is not None and server._process.returncode is not None


@pytest.mark.slow
async def test_a_server_that_refuses_or_asks_is_answered() -> None:
    asks = 'read(); read(); send(b\'{"id": 7, "method": "workspace/x"}\'); answer = read()\n'
    refuses = "send(json.dumps({'id': 3, 'error': {'message': str(answer['error']['code'])}}).encode()); read()"
    async with LanguageServer(fake(asks + refuses)) as server:
        server._ids = itertools.count(3)
        with pytest.raises(LanguageServerError, match="refused a request: -32601"):
            await server._request("any/thing", {})


async def test_a_server_that_is_not_there_is_one_line() -> None:
    with pytest.raises(LanguageServerError, match="/no/server cannot be started"):
        await LanguageServer(["/no/server"]).__aenter__()


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        LanguageServerError, match=r"python-lsp-server is not installed: pip install 'prefixd\[bench\]'"
    ):
        pylsp()


def test_planned_completions_are_right_and_wrong_where_they_say() -> None:
    model = PlannedModel(PROGRAM, 99, 0)
    assert list(model.wrong) == [3, 4, 5, 6]
    again = PlannedModel(PROGRAM, 99, 0)
    assert model.wrong == again.wrong and PlannedModel(PROGRAM, 2, 0).wrong.keys() < model.wrong.keys()

    def wrong(kept: str, candidate: int, attempt: int = 0) -> list[int]:
        text = kept + model.complete(kept, attempt, candidate)
        lines = [line for line in text.splitlines() if "# wrong: " not in line]
        return [number for number, line in enumerate(lines) if line != PROGRAM.lines[number]]

    assert [wrong("", candidate) for candidate in range(3)] == [[3], [3, 4], [4, 5]]
    kept = "".join(f"{line}\n" for line in PROGRAM.lines[:4]) + "    # wrong: while y  -> expected ':'\n"
    assert program_lines(kept) == 4
    assert [wrong(kept, candidate) for candidate in range(3)] == [[5], [4], [6]]
    assert wrong(kept, 1, attempt=1) == [5, 6]
    assert same_program(kept + "".join(f"{line}\n" for line in PROGRAM.lines[4:]), PROGRAM)
    assert not same_program(kept, PROGRAM) and not same_program("def", PROGRAM)


def test_every_error_of_a_candidate_is_followed_once() -> None:
    search = Search(PROGRAM, width=2, attempts=2)
    (root,) = search.level()
    lines = PROGRAM.source.splitlines(keepends=True)
    search.judge(root, PROGRAM.source, [Diagnostic(5, "b"), Diagnostic(3, "undefined\nname"), Diagnostic(5, "b")])
    node, later = search.level()
    assert node.kept == "".join(lines[:3]) + "    # wrong: y = math.sqrt(x)  -> undefined name\n"
    assert later.kept == "".join(lines[:5]) + "        # wrong: y -= x  -> b\n", "the error before it still stands"
    assert search.prompt(node).endswith(node.kept) and search.prompt(node).startswith(search.prompt(root))
    search.judge(later, "".join(lines[5:]), [Diagnostic(3, "undefined name")])  # in what is kept: `node` once more
    assert search.level() == [] and search.counts.known == 1
    search.judge(later, "".join(lines[5:]), [Diagnostic(4, "in what is kept")])
    (returned,) = search.level()
    assert returned.kept == "".join(lines[:4]) + "    # wrong: while y:  -> in what is kept\n"
    rest = "".join(lines[3:])
    search.judge(node, rest, [Diagnostic(4, "again"), Diagnostic(6, "behind it")])
    again, behind = search.level()
    assert again == Node(node.kept + "    # wrong: y = math.sqrt(x)  -> again\n")
    assert (root.attempt, node.attempt, again.attempt, behind.attempt) == (0, 0, 1, 0)
    search.judge(again, rest, [Diagnostic(5, "and again")])
    counts = search.counts
    assert (counts.right, counts.wrong, counts.known, counts.given_up) == (0, 5, 1, 1)
    assert (counts.expanded, counts.retried, counts.returned) == (3, 1, 1)
    for line in (4, 5, 6):
        search.judge(root, PROGRAM.source, [Diagnostic(line, "another")])
    assert len(search.level()) == 2 and len(search.queue) == 1, "a level has as many nodes as the width"
    search.judge(again, rest, [])
    assert search.level() == [] and search.repaired is not None and same_program(search.repaired, PROGRAM)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_search_ends_with_the_program_whatever_is_wrong_in_it(program: Program) -> None:
    """With errors as the server finds them: a syntax error alone, or else all faulty lines that there are."""

    def errors(text: str) -> list[Diagnostic]:
        try:
            ast.parse(text)
        except SyntaxError as error:
            return [Diagnostic((error.lineno or 1) - 1, "syntax")]
        return [Diagnostic(number, "name") for number, line in enumerate(text.splitlines()) if line in wrong]

    for seed, sites in itertools.product(range(5), (1, 2, 4)):
        model = PlannedModel(program, sites, seed)
        wrong = set(model.wrong.values())
        search, requests = Search(program, width=2, attempts=2), 0
        while level := search.level():
            for node, candidate in itertools.product(level, range(3)):
                completion = model.complete(node.kept, node.attempt, candidate)
                search.judge(node, completion, errors(node.kept + completion))
                requests += 1
        assert search.repaired is not None and same_program(search.repaired, program)
        assert requests == search.counts.right + search.counts.wrong < 60


@pytest.mark.slow
def test_hits_repairs_and_answers_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_search, "PROGRAMS", (PROGRAM,))
    # Which hits are computed after all would depend on how fast this machine's disk is at that moment.
    settings, always = Room.settings, {"scheduler.load": "always"}
    monkeypatch.setattr(Room, "settings", lambda *chosen: settings(*chosen) | always)
    file = tmp_path / "result.json"
    sizes = ["--programs=1", "--sites=1", "--candidates=2", "--least-hit-rate=0.5"]
    tree_search.main([f"--json={file}", *sizes, "--policies", "fpf", "--tiers", "gpu+cpu+disk"])
    told = json.loads(file.read_text())
    plain, cached = told["ways"]
    became = told["became"]
    assert told["same_answers"] and told["repaired"] == 1 and became["retried"] > 0
    assert plain["hit_rate"] == 0 and cached["hit_rate"] >= 0.5 and cached["hit_share"] > 0.9
    assert plain["requests"] == cached["requests"] == became["right"] + became["wrong"]


@pytest.mark.slow
def test_more_programs_than_there_are_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.tree_search", "--programs", "99"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "there are 6, not 99" in done.stderr
