"""`prefixd why`: what it asks the daemon for, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from prefixd.v1 import admin_pb2

Cli = Callable[..., Any]


@pytest.fixture(autouse=True)
def address(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIXD_ADDRESS", daemon.address)


def test_one_request(cli: Cli, daemon: Any) -> None:
    out = cli("why", "r7-4be2a0").stdout
    assert daemon.last() == admin_pb2.WhyRequest(request_id="r7-4be2a0")
    assert "Generate r7-4be2a0" in out and "The first token came after 2.00 s." in out


def test_the_last_requests(cli: Cli, daemon: Any) -> None:
    assert "evicted" in cli("why", "--last", "5", "--calls").stdout
    assert daemon.last() == admin_pb2.WhyRequest(last=5, calls=True)
    assert "no request is remembered" in (said := cli("why", "--last", "1").stdout) and "--calls" in said


def test_json(cli: Cli) -> None:
    (found,) = json.loads(cli("why", "r7-4be2a0", "--json").stdout)
    assert (found["id"], found["cause"]) == ("r7-4be2a0", "evicted")
    assert json.loads(cli("why", "--last", "1", "--json").stdout) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name one request, or say --last N"),
        (["r7", "--last", "3"], "name one request, or say --last N"),
        (["r7", "--calls"], "--calls goes with --last"),
    ],
)
def test_wrong_usage(cli: Cli, arguments: list[str], words: str) -> None:
    result = cli("why", *arguments)
    assert result.exit_code == 2 and words in result.stderr
