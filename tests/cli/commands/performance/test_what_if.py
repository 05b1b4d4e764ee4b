"""`prefixd what-if` and `prefixd trace record`: what they print and write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefixd.base.errors import ConfigError
from prefixd.cli.output.tables import grid
from prefixd.cli.output.tables.what_if_table import _table
from prefixd.server.request_records import trace_recording
from prefixd.v1 import admin_pb2 as pb
from prefixd.workloads.mooncake import HASH_TOKENS, read_trace
from prefixd.workloads.recorded_trace import RecordedTrace

Cli = Callable[..., Any]


@pytest.fixture(autouse=True)
def address(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIXD_ADDRESS", daemon.address)


def test_what_if_says_what_more_memory_would_save(cli: Cli, daemon: Any) -> None:
    out = cli("what-if").stdout
    assert daemon.last().tenant == ""
    assert "Watched for 2:13:00: prompts of 10,000,000 tokens. 3 prompts were left out" in out
    assert "now, measured" in out and "now, estimated" in out
    assert "64.0 GiB more CPU memory would have saved 11% of prefill (660,000 tokens, 66 s)." in out
    assert "With other policies and this size: weighing 45.0%, lfu 39.0% (lru: 40.0%)." in out
    assert "Estimated from 5,000 sampled blocks, 2.50% of all." in out


def test_what_if_says_when_it_does_not_know_and_when_more_would_not_help(cli: Cli, daemon: Any) -> None:
    daemon.references = 12
    out = cli("what-if", "--tenant", "a").stdout
    assert daemon.last().tenant == "a"
    assert "cpu: not enough data yet. 12 sampled blocks were asked for" in out
    daemon.references, daemon.filled = 5000, False
    assert "more CPU memory would have found nothing more" in cli("what-if").stdout


def test_a_size_that_saves_nothing_saves_no_less_than_nothing() -> None:
    sizes = [pb.GhostSize(factor=factor, hit_rate=rate, margin=0) for factor, rate in ((1, 0.5), (2, 0.5 - 1e-9))]
    ghosts = pb.GhostStats(asked_tokens=1000, tiers=[pb.GhostTier(tier=3, sizes=sizes, references=1, sampled_share=1)])
    made = grid.console()
    with made.capture() as shown:
        made.print(_table(pb.WhatIfResponse(ghosts=ghosts, token_s=0.1), ghosts.tiers[0]))
    assert "0.0%" in shown.get() and "-0" not in shown.get()


def test_what_if_as_json_and_as_a_picture(cli: Cli, daemon: Any, tmp_path: Path) -> None:
    answer = json.loads(cli("what-if", "--json").stdout)
    assert answer["ghosts"]["tiers"][0]["policy_hit_rates"] == {"weighing": 0.45, "lfu": 0.39}
    result = cli("what-if", "--plot", "x.nothing")
    assert result.exit_code != 0 and "names no kind of picture" in result.stderr
    pytest.importorskip("matplotlib")
    assert cli("what-if", "--plot", str(tmp_path / "what-if.svg")).exit_code == 0
    assert (tmp_path / "what-if.svg").stat().st_size > 1000


def test_a_recorded_trace_is_sorted_private_and_has_no_hashes(cli: Cli, daemon: Any, tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    out = cli("trace", "record", str(file), "--duration", "90s").stdout
    assert daemon.last().duration_s == 90
    assert "2 requests in" in out and "3 different" in out and "1 requests are missing" in out
    assert [(request.timestamp_ms, request.hash_ids) for request in read_trace(file)] == [
        (1000, (0, 2)),
        (2000, (0, 1)),
    ]
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [file]
    refused = cli("trace", "record", str(file))
    assert refused.exit_code != 0 and "exists already" in refused.stderr
    assert json.loads(cli("trace", "record", str(file), "--force", "--json").stdout)["dropped_requests"] == 1
    wrong = cli("trace", "record", str(file), "--duration", "soon")
    assert wrong.exit_code == 2 and "90s, 30m, 1h" in wrong.stderr


def test_a_recording_that_ends_by_an_error_keeps_what_it_has(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    with pytest.raises(RuntimeError), RecordedTrace(file) as trace:
        trace.add(0.5, 512, 1, [7])
        raise RuntimeError
    assert len(list(read_trace(file))) == 1
    with RecordedTrace(tmp_path / "empty.jsonl"):
        pass
    assert not (tmp_path / "empty.jsonl").exists()
    with pytest.raises(ConfigError, match="cannot be written"):
        RecordedTrace(tmp_path / "missing" / "t.jsonl")


def test_daemon_and_traces_agree_on_the_length_of_a_block() -> None:
    assert trace_recording.HASH_TOKENS == HASH_TOKENS
