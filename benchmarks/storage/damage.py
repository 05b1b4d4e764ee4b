"""The ways in which a block's bytes go wrong, on a disk or in a shared store."""

from __future__ import annotations

import random
from collections.abc import Callable

_SECTOR = 512


def changed(kind: str, before: bytes, rng: random.Random, other: Callable[[], bytes], head: int = 0) -> bytes:
    """A block's bytes after one kind of damage: at least one of them differs, or they are more or fewer.

    Args:
        kind: a key of `KINDS` of what is damaged.
        before: the right bytes.
        rng: what is damaged where.
        other: as many bytes of another block, chosen at random, for the kind "stale".
        head: how many bytes at the beginning describe the others.
    """
    after = before
    while after == before:
        after = _changed(kind, before, rng, other, head)
    return after


def _changed(kind: str, before: bytes, rng: random.Random, other: Callable[[], bytes], head: int) -> bytes:
    data = bytearray(before)
    match kind:
        case "bit" | "head":
            data[rng.randrange(head if kind == "head" else len(data))] ^= 1 << rng.randrange(8)
        case "bytes":
            at = rng.randrange(len(data) - 4)
            data[at : at + 4] = bytes(byte ^ rng.randrange(1, 256) for byte in data[at : at + 4])
        case "sector":
            at = rng.randrange(-(-len(data) // _SECTOR)) * _SECTOR
            data[at : at + _SECTOR] = rng.randbytes(len(data[at : at + _SECTOR]))
        case "zeros":
            at, end = sorted(rng.sample(range(head, len(data) + 1), 2))
            data[at:end] = bytes(end - at)
        case "truncated":
            del data[rng.randrange(len(data)) :]
        case "longer":
            data += rng.randbytes(rng.randrange(1, 64))
        case "stale":
            return other()
        case _:
            raise ValueError(f"{kind!r} is no kind of damage to bytes")
    return bytes(data)
