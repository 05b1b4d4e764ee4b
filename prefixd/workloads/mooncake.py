"""Request traces in the format of Mooncake's FAST'25 release."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixd.base.errors import ConfigError

HASH_TOKENS = 512
"""Tokens of a block, which one hash id of the trace stands for."""
_ID_LIMIT = 1 << 32
_MOST = 1 << 53  # a float represents all integers up to this one
_DISJOINT_IDS = (1 << 32) // HASH_TOKENS  # hash ids below this one have 512 token ids of their own below 2**32


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: its arrival and the ids of its full blocks of 512 tokens."""

    timestamp_ms: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(file: Path, limit: int | None = None) -> Iterator[TraceRequest]:
    """Yields the first `limit` requests. Leaves out ids of partly filled blocks, and empty lines.

    Raises ConfigError with the file, the line and its fault; if the file is missing, with where to get one.
    """
    try:
        lines = file.open("rb")
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no trace at {file}: record one with `prefixd trace record`, or get one from "
            "https://github.com/kvcache-ai/Mooncake (FAST25-release/traces), and name it with --trace"
        ) from error
    with lines:
        found = 0
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            if found == limit:
                return
            try:
                request = _parse_request(line)
            except (ValueError, TypeError) as error:
                raise ConfigError(f"{file}, line {number}: {error}") from error
            found += 1
            yield request


def _parse_request(line: bytes) -> TraceRequest:
    try:
        content: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    ids = content.get("hash_ids")
    if not isinstance(ids, list) or not all(_is_count(i) and i < _ID_LIMIT for i in ids):
        raise ValueError(f"hash_ids is not a list of integers from 0 to {_ID_LIMIT - 1}")
    for name in ("timestamp", "input_length", "output_length"):
        if not _is_count(content.get(name)):
            raise ValueError(f"{name} is {content.get(name)!r}, not a non-negative integer")
        if content[name] > _MOST:
            raise ValueError(f"{name} is more than {_MOST}")
    full = content["input_length"] // HASH_TOKENS
    if not full <= len(ids) <= full + 1:
        raise ValueError(
            f"{len(ids)} hash_ids for input_length {content['input_length']}, which has {full} full blocks of "
            f"{HASH_TOKENS} tokens"
        )
    return TraceRequest(content["timestamp"], content["input_length"], content["output_length"], tuple(ids[:full]))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def tokens_of(hash_ids: Sequence[int]) -> npt.NDArray[np.uint32]:
    """Returns 512 token ids for each hash id; equal hash ids, and only they, give equal token ids.

    Blocks of hash ids below 8,388,608 have no token id in common; a block of a larger one differs from all other blocks
    in its first token.
    """
    over, ids = np.divmod(np.asarray(hash_ids, np.uint32), np.uint32(_DISJOINT_IDS))
    firsts = ids[:, None] * np.uint32(HASH_TOKENS)
    tokens: npt.NDArray[np.uint32] = np.add(firsts, np.arange(HASH_TOKENS, dtype=np.uint32), dtype=np.uint32)
    tokens[over > 0, 0] = over[over > 0]
    return tokens.reshape(-1)


class PrefixCount:
    """Counts the hits of a cache without limits, which keeps every prefix."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], int] = {}

    def hits_of(self, hash_ids: tuple[int, ...]) -> int:
        """Returns the number of leading blocks of a request that earlier requests had, and adds all its blocks."""
        node, hits, on_path = -1, 0, True
        for hash_id in hash_ids:
            known = self._seen.get((node, hash_id))
            on_path = on_path and known is not None
            hits += on_path
            node = self._seen.setdefault((node, hash_id), len(self._seen)) if known is None else known
        return hits

    @property
    def blocks(self) -> int:
        """Number of different blocks so far."""
        return len(self._seen)
