"""Conversations that are generated or read, and the chat benchmark from end to end with a few of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

from benchmarks.chat import main
from benchmarks.common.harness import BenchmarkError
from benchmarks.workloads.conversations import Conversation, Statistics, Turn, distinct_tokens, fitting, generate
from benchmarks.workloads.share_gpt import read_share_gpt
from benchmarks.workloads.traced import read_conversations

ROOT = Path(__file__).resolve().parents[2]
HOW: dict[str, Any] = {"scale": 1.0, "time_scale": 1.0}


def test_conversations_follow_their_seed_and_have_the_statistics() -> None:
    statistics = Statistics(system_tokens=40, users_per_system=5)
    conversations = generate(3000, statistics, scale=0.5, time_scale=0.1, seed=3)
    again = generate(3000, statistics, scale=0.5, time_scale=0.1, seed=3)
    assert conversations == again != generate(3000, statistics, scale=0.5, time_scale=0.1, seed=4)
    turns = [turn for each in conversations for turn in each.turns]
    later = [turn.think_s for each in conversations for turn in each.turns[1:]]
    assert len(turns) / 3000 == pytest.approx(5.75, rel=0.05)
    assert mean(len(turn.user) for turn in turns) == pytest.approx(161 / 2, rel=0.05)
    assert mean(turn.answer_tokens for turn in turns) == pytest.approx(338 / 2, rel=0.05)
    assert median(later) == pytest.approx(12.3, rel=0.05)
    assert all(not each.turns[0].think_s for each in conversations)
    assert set(Counter(each.system for each in conversations).values()) == {5}
    assert {len(each.system) for each in conversations} == {20}
    assert {turn.answer for turn in turns} == {None}, "the model chooses"
    everything = sum(map(len, {each.system for each in conversations})) + sum(turn.tokens for turn in turns)
    assert distinct_tokens(conversations) == everything


def test_a_header_begins_every_system_prompt() -> None:
    statistics = Statistics(system_tokens=40, users_per_system=5, header_tokens=16)
    systems = {each.system for each in generate(50, statistics, scale=0.5, time_scale=0.1, seed=3)}
    assert len(systems) == 10 and {len(system) for system in systems} == {20}
    assert len({system[:8] for system in systems}) == 1 < len({system[:9] for system in systems})
    longer = Statistics(system_tokens=40, header_tokens=4000)
    assert {len(each.system) for each in generate(9, longer, scale=0.5, time_scale=0.1, seed=3)} == {20}


def test_turns_beyond_the_context_are_cut_and_a_first_turn_beyond_it_leaves_the_conversation_out() -> None:
    turn = Turn((1, 2), 3)
    conversations = [Conversation((9,), (turn, turn, turn)), Conversation((9,) * 7, (turn,))]
    assert fitting(conversations, 11) == [Conversation((9,), (turn, turn))]


def share_gpt(folder: Path, content: object) -> Path:
    file = folder / "share_gpt.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def said(*parts: tuple[str, str]) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": sender, "value": value} for sender, value in parts]}


def test_share_gpts_questions_and_answers_are_replayed(tmp_path: Path) -> None:
    file = share_gpt(
        tmp_path,
        [
            said(("gpt", "of no question")),
            said(("system", "s"), ("human", "abcd"), ("gpt", "efgh"), ("human", "é"), ("gpt", "ij"), ("human", "lost")),
            said(("human", "one"), ("gpt", "two"), ("gpt", "twice"), ("human", "three"), ("gpt", "four")),
            said(("human", "not wanted"), ("gpt", "any more")),
        ],
    )
    first, second = read_share_gpt(file, 2, Statistics(system_tokens=10), scale=0.5, time_scale=1.0, seed=0)
    assert [(bytes(turn.user), bytes(turn.answer or ()), turn.answer_tokens) for turn in first.turns] == [
        (b"\nUser: ab\nModel: ", b"ef", 2),
        (b"\nUser: " + "é".encode()[:1] + b"\nModel: ", b"i", 1),
    ]
    assert [bytes(turn.answer or ()) for turn in second.turns] == [b"tw"]
    assert len(first.system) == 5 and not first.turns[0].think_s < first.turns[1].think_s == 0
    assert first.turns[1].think_s > 0


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("{", "not JSON"),
        ({}, "not a list of conversations"),
        ([], "no conversation in which a user"),
        ([said(("gpt", "x"))], "no conversation in which a user"),
        ([said(("human", "x"), ("gpt", "y")), 3], "conversation 1: no object with a list"),
        ([{"conversations": {}}], "conversation 0: no object with a list"),
        ([{"conversations": [{"from": "human"}]}], "conversation 0: part 0 is no object with texts"),
        ([{"conversations": [{"from": "human", "value": "x"}, 7]}], "part 1 is no object"),
    ],
)
def test_a_bad_share_gpt_file_is_one_line(tmp_path: Path, content: object, what: str) -> None:
    file = share_gpt(tmp_path, content)
    with pytest.raises(BenchmarkError, match=what) as caught:
        read_share_gpt(file, 9, Statistics(), **HOW, seed=0)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_share_gpt_file_says_where_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="Hugging Face"):
        read_share_gpt(tmp_path / "none.json", 9, Statistics(), **HOW, seed=0)


def trace(folder: Path, *requests: tuple[int, int, int, list[int]]) -> Path:
    file = folder / "trace.jsonl"
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    file.write_text("".join(json.dumps(dict(zip(names, request, strict=True))) + "\n" for request in requests))
    return file


def test_a_chain_of_growing_prefixes_is_a_conversation(tmp_path: Path) -> None:
    file = trace(
        tmp_path,
        (0, 1600, 320, [0, 7, 8, 20]),
        (1000, 1100, 64, [0, 5, 21]),
        (5000, 2112, 64, [0, 7, 8, 9, 22]),
        (6000, 1100, 64, [0, 6, 23]),  # the first block alone makes no conversation
        (9000, 3200, 640, [0, 7, 8, 9, 11, 12, 24]),
    )
    first, second, third = read_conversations(file, 9, scale=1 / 32, time_scale=0.1)
    assert [len(each.turns) for each in (first, second, third)] == [3, 1, 1]
    assert [round(turn.think_s, 6) for turn in first.turns] == [0, 0.5, 0.4]
    prompts, text = [], list[int]()
    for turn in first.turns:
        text += turn.user
        prompts.append(len(text))
        assert turn.answer is not None and turn.answer_tokens == len(turn.answer)
        text += turn.answer
    assert prompts == [50, 66, 100] and [turn.answer_tokens for turn in first.turns] == [10, 2, 20]
    assert first.turns[0].user[:16] == second.turns[0].user[:16] == third.turns[0].user[:16], "block 0"
    assert first.turns[0].user[16:32] != second.turns[0].user[16:32]
    (only,) = read_conversations(file, 9, scale=1 / 32, time_scale=0.1, least_turns=2)
    assert only == first
    with pytest.raises(BenchmarkError, match="no conversation of 4 turns"):
        read_conversations(file, 9, scale=1 / 32, time_scale=0.1, least_turns=4)


def test_an_answer_that_the_next_prompt_has_no_room_for_is_shortened(tmp_path: Path) -> None:
    file = trace(tmp_path, (0, 1024, 3200, [0, 1]), (1, 1600, 32, [0, 1, 2, 3]), (2, 1610, 32, [0, 1, 2, 4]))
    first, second = read_conversations(file, 9, scale=1 / 32, time_scale=1.0)
    assert [(len(turn.user), turn.answer_tokens) for turn in first.turns] == [(32, 17), (1, 1)]
    assert len(second.turns) == 1, "two requests for the same text are no two turns"


def test_without_a_fitting_conversation_the_benchmark_says_so() -> None:
    with pytest.raises(BenchmarkError, match="no conversation fits into 8192 tokens"):
        main(["--scale", "1", "--system-tokens", "9000", "--conversations", "2"])


@pytest.mark.slow
def test_hits_answers_and_figures_from_end_to_end(tmp_path: Path) -> None:
    """With replayed answers; how long anything takes is not looked at."""
    more = [part for number in "12" for part in (("human", number * 18), ("gpt", "ok" * 9))]
    questions = [said(("human", name * 18), ("gpt", "ok" * 9), *more) for name in "abc"]
    file, result = share_gpt(tmp_path, questions), tmp_path / "result.json"
    sizes = ["--scale=0.5", "--system-tokens=96", "--time-scale=0", "--users=2", "--running=2", "--least-speedup=0"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.chat", f"--sharegpt={file}", f"--json={result}"),
            *(*sizes, "--policies", "fpf", "--tiers", "gpu+cpu+disk"),
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    parts = [line.partition(": ")[0] for line in done.stderr.splitlines()]
    assert set(parts) == {"no-cache", "fpf gpu+cpu+disk"}, done.stderr  # a line for each part of a way's run
    told = json.loads(result.read_text())
    plain, cached = told["ways"]
    assert (plain["name"], cached["name"]) == ("no-cache", "fpf gpu+cpu+disk") and told["same_answers"]
    assert plain["requests"] == cached["requests"] == 9 and plain["output_tokens"] == 81
    assert plain["hit_rate"] == 0 < cached["hit_share"] <= 1 and plain["possible_tokens"] > 0
    assert "fpf gpu+cpu+disk" in done.stdout
