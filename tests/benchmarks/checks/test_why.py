"""`benchmarks.checks.why` fails when `why` does not name a planted cause, or gives another detail."""

from __future__ import annotations

from typing import Any, cast

import pytest

from benchmarks.checks.planted_causes import plants as module
from benchmarks.checks.planted_causes.plants import PROMPT_TOKENS, Plants
from benchmarks.checks.why import failures, result_of
from prefixd.client import Client
from prefixd.v1 import admin_pb2


class Daemon:
    """Gives every request the same cause."""

    def __init__(self, cause: str, token: int = 0) -> None:
        self.info = admin_pb2.RequestInfo(cause=cause, sentence="Because.")
        self.info.missing.difference.token = token
        self.asked: list[str] = []

    def why(self, identity: str) -> list[admin_pb2.RequestInfo]:
        self.asked.append(identity)
        return [self.info]


def planted(daemon: Daemon, kind: str, monkeypatch: pytest.MonkeyPatch, **how: Any) -> dict[str, Any]:
    monkeypatch.setattr(module, "ask", lambda client, prompt, identity, salt: None)
    plants, client = Plants(7), cast("Client", daemon)
    for _ in range(3):
        plants.plant(client, client, kind, plants.prompt(), **how)
    assert len(set(daemon.asked)) == 3
    return result_of(plants)


def test_it_passes_when_all_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    result = planted(Daemon("evicted"), "evicted", monkeypatch)
    assert result == {"planted": 3, "named": 3, "kinds": {"evicted": {"planted": 3, "named": 3}}, "found": []}
    assert failures(result) == []


def test_it_fails_when_another_cause_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    result = planted(Daemon("never_seen"), "evicted", monkeypatch)
    assert (result["named"], result["found"]) == (0, ["evicted was named never_seen: Because."] * 3)
    assert failures(result) == ["named is 0, less than 3"]


def test_it_fails_when_a_detail_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    check = {"check": lambda info: info.missing.difference.token == 5}
    assert not failures(planted(Daemon("differs", token=5), "differs", monkeypatch, **check))
    assert failures(planted(Daemon("differs", token=6), "differs", monkeypatch, **check))


def test_it_fails_without_plants() -> None:
    assert failures(result_of(Plants(7))) == ["nothing was planted"]


def test_one_token_of_a_changed_prompt_is_another() -> None:
    plants = Plants(7)
    for _ in range(200):
        prompt = plants.prompt()
        changed, place = plants.changed(prompt)
        assert len(changed) == PROMPT_TOKENS and place < 64
        assert [at for at, (one, other) in enumerate(zip(prompt, changed, strict=True)) if one != other] == [place]
