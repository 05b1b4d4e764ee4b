"""Clients and daemons of other versions understand each other: no field, value or call changes or is used again."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("proto_fields", Path(__file__).with_name("fields.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


contracts = load()


def broken(promised: set[str]) -> list[str]:
    """The promises that the contracts of today do not keep."""
    retired = contracts.retired()
    return sorted(
        line
        for line in promised - contracts.lines()
        if not ((field := re.match(r"field (\S+) (\d+) ", line)) and (field[1], int(field[2])) in retired)
    )


def test_nothing_of_the_contracts_was_changed_or_taken_out() -> None:
    """To take a field out, reserve its number: `reserved 7;`. Messages, values of enums and calls stay."""
    assert broken(set(contracts.SNAPSHOT.read_text().splitlines())) == []


def test_what_is_new_in_the_contracts_is_promised_from_now_on() -> None:
    new = contracts.lines() - set(contracts.SNAPSHOT.read_text().splitlines())
    assert not new, f"run `python {contracts.SNAPSHOT.with_name('fields.py')}` and commit fields.txt"


@pytest.mark.parametrize(
    "line",
    [
        "field prefixd.v1.MatchRequest 9 token_ids: bytes",  # renumbered
        "field prefixd.v1.MatchRequest 2 tokens: bytes",  # renamed
        "field prefixd.v1.MatchRequest 2 token_ids: repeated uint32",  # another type
        "value prefixd.v1.Tier 1 TIER_CPU",
        "call prefixd.v1.PrefixCache.Match(prefixd.v1.MatchRequest): stream prefixd.v1.MatchResponse",
    ],
)
def test_a_changed_line_is_seen(line: str) -> None:
    assert broken({line}) == [line]
