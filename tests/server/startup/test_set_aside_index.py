"""What the daemon says of indexes that were set aside."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import cast

import pytest

from prefixd.cache import Troubles
from prefixd.server.startup import set_aside_index
from prefixd.server.startup.set_aside_index import LOST, PART, SetAsideCheck
from prefixd_swap import SetAside, SlabStore, StorageError


class Store:
    """Of a `SlabStore` what is set aside; an error is raised."""

    def __init__(self, *answers: list[SetAside] | StorageError) -> None:
        self.answers = list(answers)

    def set_aside(self) -> list[SetAside]:
        answer = self.answers.pop(0)
        if isinstance(answer, StorageError):
            raise answer
        return answer


FOUND = SetAside(Path("/data/index.damaged"), "page 7; is gone", 40)
UNKNOWN = SetAside(Path("/data/index.damaged.2"), "", None)


def check(store: Store, troubles: Troubles, lost: Counter[str]) -> SetAsideCheck:
    return SetAsideCheck(cast(SlabStore, store), troubles, lost)


def test_nothing_was_set_aside() -> None:
    troubles, lost = Troubles(lambda: 0.0), Counter[str]()
    check(Store([]), troubles, lost).start()
    assert not len(troubles) and not lost


def test_the_trouble_says_how_many_are_lost_and_what_to_do() -> None:
    troubles, lost = Troubles(lambda: 0.0), Counter[str]({"damaged": 2})
    check(Store([FOUND, UNKNOWN]), troubles, lost).start()
    (trouble,) = troubles
    assert trouble.part == PART and trouble.what.startswith("40 blocks and an unknown number more are lost")
    assert "index.damaged (page 7, is gone), index.damaged.2 (reason not known)" in trouble.what
    assert "prefixd recover" in trouble.remedy
    assert lost == {"damaged": 2, LOST: 40}


async def test_it_begins_and_ends_while_the_daemon_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_aside_index, "_WATCH_S", 0.0)
    seen: list[tuple[bool, int]] = []
    troubles, lost = Troubles(lambda: 0.0), Counter[str]()
    store = Store([], [FOUND], StorageError("the disk refuses; look at it"), [FOUND, FOUND], [])
    watched = check(store, troubles, lost)
    really = store.set_aside

    def answer() -> list[SetAside]:
        seen.append((PART in troubles, lost[LOST]))
        if not store.answers:
            raise AssertionError("that was all")
        return really()

    store.set_aside = answer  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="that was all"):
        await watched.watch()
    assert seen == [(False, 0), (False, 0), (True, 40), (True, 40), (True, 80), (False, 0)]
