"""`Sampling`: its ranges, and what it means where 0 or nothing is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from prefixd.base.errors import InvalidArgumentError
from prefixd.base.sampling import BeamSearch, Sampling

SEARCH = Sampling(beam_search=BeamSearch(width=4))


def test_what_is_left_out_is_in_range() -> None:
    for sampling in (Sampling(), SEARCH, Sampling(forced_tokens=[1]), Sampling(top_p=0, repetition_penalty=0)):
        sampling.check()
        assert not sampling.penalised
    assert (Sampling().beams, SEARCH.beams) == (0, 4)


def test_forced_tokens_are_ids_or_bytes() -> None:
    assert Sampling().forced_ids.tolist() == []
    for tokens in ([1, 258], b"\1\0\0\0\2\1\0\0"):
        assert Sampling(forced_tokens=tokens).forced_ids.tolist() == [1, 258]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"temperature": float("nan")}, "temperature is nan; it must be 0 (greedy) or positive"),
        ({"top_k": -1}, "top_k is -1; it must be 0 (off) or positive"),
        ({"top_k": 1 << 64}, "top_k is 18446744073709551616; it must be 0 (off) or positive, at most 4294967295"),
        ({"min_p": 1.5}, "min_p is 1.5; it must be between 0 and 1"),
        ({"repetition_penalty": 0.001}, "repetition_penalty is 0.001; it must be between 0.01 and 100, where 1 is off"),
        ({"presence_penalty": 3}, "presence_penalty is 3; it must be between -2 and 2, where 0 is off"),
        ({"logprobs": 21}, "logprobs is 21; ask for at most 20 tokens"),
        ({"stop_token_ids": range(1025)}, "stop_token_ids has 1025 ids; send at most 1024"),
        ({"stop": ["x"] * 17}, "stop has 17 strings; send at most 16"),
        ({"stop": "x" * 257}, "a stop string has 257 characters; send at most 256"),
        ({"forced_tokens": []}, "forced_tokens has 0 bytes"),
        ({"forced_tokens": [1, 2], "max_tokens": 1}, "max_tokens is 1, but forced_tokens has 2 ids"),
        ({"forced_tokens": [1], "stop": "x"}, "stop has 1 strings, but forced_tokens are the whole output"),
    ],
    ids=str,
)
def test_what_is_out_of_range_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        Sampling(**fields).check()
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "fields",
    [{"temperature": 1.0}, {"top_p": 0.5}, {"frequency_penalty": 1.0}, {"logprobs": 0}, {"stop": "x"}],
    ids=str,
)
def test_a_search_takes_nothing_that_draws_or_changes_tokens(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{next(iter(fields))} is .* in a beam search"):
        replace(SEARCH, **fields).check()
