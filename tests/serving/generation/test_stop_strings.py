"""Stop strings in texts that come in pieces, against a search of the whole text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.serving.generation.stop_strings import StopSearch, StopStrings

TEXTS = st.text(st.sampled_from("ab\n"), max_size=30)


def simply(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text before the stop string that is complete first, the longest of several."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - len(max(found, key=len))], True
    return text, False


@given(
    text=TEXTS,
    stops=st.lists(st.text(st.sampled_from("ab\n"), min_size=1, max_size=6), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=10),
)
def test_any_cutting_finds_what_the_whole_text_has(text: str, stops: list[str], cuts: list[int]) -> None:
    search, shown = StopSearch(StopStrings(stops)), ""
    at = 0
    expected, stopped = simply(text, stops)
    for cut in [*sorted(cuts), len(text)]:
        shown += search.feed(text[at:cut])
        at = max(at, cut)
        assert expected.startswith(shown), "what was shown cannot be taken back"
        if search.found:
            break
        seen = text[:at]
        held = seen[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops), "no more is held back than has to be"
    assert search.found == stopped
    assert shown + search.end() == expected


@pytest.mark.parametrize(
    ("stops", "pieces", "shown"),
    [
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", ""]),
        (["b", "abc"], ["a", "b", "c"], ["", "a"]),
        (["bc", "abc"], ["xabc"], ["x"]),
        (["\U0001f600"], ["\u00e9\U0001f600"], ["\u00e9"]),
    ],
)
def test_examples(stops: list[str], pieces: list[str], shown: list[str]) -> None:
    search = StopSearch(StopStrings(stops))
    found = []
    for piece in pieces:
        found.append(search.feed(piece))
        if search.found:
            break
    assert found == shown and search.found


def test_the_worst_strings_cost_little_a_character() -> None:
    """Sixteen strings of 256 equal characters, and a text that nearly matches them for ever."""
    search = StopSearch(StopStrings(["a" * 255 + chr(ord("b") + i) for i in range(16)]))
    began_s = time.thread_time()
    search.feed("a" * 10_000)
    assert time.thread_time() - began_s < 1.0
