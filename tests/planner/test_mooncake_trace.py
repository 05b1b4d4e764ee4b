"""Reading traces, and what a perfect cache would make of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.base.errors import ConfigError
from prefixd.workloads.mooncake import PrefixCount, read_trace, tokens_of

GOOD = {"timestamp": 7, "input_length": 1030, "output_length": 2, "hash_ids": [4, 5, 6]}


def write(folder: Path, *lines: object) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def test_only_full_blocks_count(tmp_path: Path) -> None:
    (request,) = read_trace(write(tmp_path, GOOD))
    assert (request.timestamp_ms, request.output_length, request.hash_ids) == (7, 2, (4, 5))


def test_the_limit_is_in_requests_and_later_lines_are_not_read(tmp_path: Path) -> None:
    assert len(list(read_trace(write(tmp_path, GOOD, GOOD, "nonsense"), 2))) == 2


def test_empty_lines_are_no_requests(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD, GOOD, GOOD)
    file.write_text("\n" + file.read_text().replace("\n", "\n \n"))
    assert len(list(read_trace(file))) == 3 and len(list(read_trace(file, 2))) == 2


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "not JSON"),
        ([1], "not a JSON object"),
        (GOOD | {"timestamp": -1}, "timestamp is -1"),
        (GOOD | {"timestamp": 10**400}, "timestamp is more than 9007199254740992"),
        (GOOD | {"output_length": 1 << 54}, "output_length is more than"),
        (GOOD | {"input_length": "9"}, "input_length is '9'"),
        (GOOD | {"output_length": None}, "output_length is None"),
        (GOOD | {"hash_ids": 3}, "hash_ids"),
        (GOOD | {"hash_ids": [1, 2**40]}, "hash_ids"),
        (GOOD | {"hash_ids": [True, 1]}, "hash_ids"),
        (GOOD | {"input_length": 5000}, "3 hash_ids for input_length 5000"),
        (GOOD | {"input_length": 1000}, "3 hash_ids for input_length 1000, which has 1 full blocks"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, what: str) -> None:
    file = write(tmp_path, GOOD, line, GOOD)
    with pytest.raises(ConfigError) as caught:
        list(read_trace(file))
    assert str(file) in str(caught.value) and "line 2" in str(caught.value) and what in str(caught.value)


def test_bytes_that_are_no_text_are_a_bad_line(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe\n")
    with pytest.raises(ConfigError, match="line 2: not JSON"):
        list(read_trace(file))


def test_a_missing_trace_says_where_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"github\.com/kvcache-ai/Mooncake"):
        list(read_trace(tmp_path / "none.jsonl"))


@given(st.lists(st.lists(st.integers(0, 3), max_size=5).map(tuple), max_size=20))
def test_the_achievable_hits_are_those_of_a_set_of_prefixes(requests: list[tuple[int, ...]]) -> None:
    count, seen = PrefixCount(), set[tuple[int, ...]]()
    for ids in requests:
        prefixes = [ids[: length + 1] for length in range(len(ids))]
        assert count.hits_of(ids) == sum(prefix in seen for prefix in prefixes)
        seen.update(prefixes)
        assert count.blocks == len(seen)


def test_equal_ids_have_equal_tokens_and_others_have_none_in_common() -> None:
    tokens = tokens_of([3, 8_388_607, 3]).reshape(3, 512)
    assert tokens.dtype == np.uint32
    assert np.array_equal(tokens[0], tokens[2])
    assert not set(tokens[0]) & set(tokens[1])


def test_ids_of_a_long_trace_have_tokens_of_their_own() -> None:
    ids = [0, 1, 8_388_607, 8_388_608, 8_388_609, 2 * 8_388_608, (1 << 32) - 1]
    blocks = {tokens_of([number]).tobytes() for number in ids}
    assert len(blocks) == len(ids)
