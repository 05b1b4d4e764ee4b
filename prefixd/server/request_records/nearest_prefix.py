"""Finds what the cache has that is nearest to a prompt's first missing block: a sibling that differs in a token, or the
same block in another namespace."""

from __future__ import annotations

from itertools import islice

import numpy as np
import numpy.typing as npt

from prefixd.base.errors import NotFoundError
from prefixd.base.long_work.pacer import give_way
from prefixd.cache import Namespace, TieredCache, Trie
from prefixd.cache.index.children import NO_ROW
from prefixd.cache.index.keys.block_keys import xxh3_digest
from prefixd.cache.index.trie import Rows
from prefixd.observability.explanations import Difference, Elsewhere
from prefixd.observability.missing_blocks import MissingBlocks

_MOST_SIBLINGS = 4096
_SCANNED_AT_ONCE = 4096  # rows of the trie
_COMPARED_AT_ONCE = 1 << 16  # tokens, in 0.5 ms
_MOST_NAMESPACES = 4096
_NAMESPACES_AT_ONCE = 64


async def find_difference(cache: TieredCache, missing: MissingBlocks) -> Difference | None:
    """The first token that differs from the nearest cached prefix; None if no prefix goes on where this one ends.

    Compares the first missing block with up to 4,096 blocks behind the last found one, or with the first blocks of all
    prompts of the namespace. A block with the same tokens does not count: the request has stored it itself.
    """
    try:
        namespace = cache.namespaces.get(missing.namespace)
    except NotFoundError:
        return None
    trie, wanted = cache.trie(namespace), np.frombuffer(missing.tokens, "<u4")
    best: tuple[int, int, int] | None = None  # tokens before the difference, equal tokens, the cached token there
    for each in (namespace, namespace.common):
        if each is None:
            continue
        if not missing.parent_key:
            for start in range(0, trie.rows, _SCANNED_AT_ONCE):
                part = slice(start, min(start + _SCANNED_AT_ONCE, trie.rows))
                rows = start + np.flatnonzero(trie.parent[part] == each.root)
                best = _nearer(best, await _compare_all(trie, rows, each, each.root, wanted))
                await give_way()
        elif (parent := trie.find(each.ordinal, missing.parent_key)) is not None:
            best = _nearer(best, await _compare_all(trie, _children(trie, parent), each, parent, wanted))
    if best is None:
        return None
    place, equal, expected = best
    return Difference(
        token=missing.found * missing.block_tokens + place,
        block=missing.found,
        expected=expected,
        actual=int(wanted[place]),
        equal=equal,
        compared=len(wanted),
    )


def _children(trie: Trie, parent: int) -> Rows:
    found, row = list[int](), int(trie.first_child[parent])
    while row != NO_ROW and len(found) < _MOST_SIBLINGS:
        found.append(row)
        row = ~int(trie.next_sibling[row])
    return np.array(found, np.int64)


async def _compare_all(
    trie: Trie, rows: Rows, namespace: Namespace, parent: int, wanted: npt.NDArray[np.uint32]
) -> tuple[int, int, int] | None:
    """`_compare` in slices, between which others run; of each slice only blocks that are still children of `parent`."""
    best, step = None, max(1, _COMPARED_AT_ONCE // len(wanted))
    for start in range(0, len(rows), step):
        if start:
            await give_way()
        part = rows[start : start + step]
        part = part[(trie.parent[part] == parent) & (trie.namespace[part] == namespace.ordinal)]
        best = _nearer(best, _compare(trie, part, wanted))
    return best


def _compare(trie: Trie, rows: Rows, wanted: npt.NDArray[np.uint32]) -> tuple[int, int, int] | None:
    """The block among `rows` that is nearest to the tokens `wanted` and not equal: see `best` above."""
    if not len(rows):
        return None
    tokens = trie.tokens[rows, : len(wanted)]
    same = tokens == wanted
    equal = same.sum(axis=1)
    other = equal < len(wanted)
    if not other.any():
        return None
    tokens, same, equal = tokens[other], same[other], equal[other]
    place = same.argmin(axis=1)
    nearest = int(np.lexsort((equal, place))[-1])
    at = int(place[nearest])
    return at, int(equal[nearest]), int(tokens[nearest, at])


def _nearer(one: tuple[int, int, int] | None, other: tuple[int, int, int] | None) -> tuple[int, int, int] | None:
    if one is None or other is None:
        return one or other
    return max(one, other)


async def find_elsewhere(cache: TieredCache, missing: MissingBlocks) -> Elsewhere | None:
    """Another namespace that has the prompt's first block, which its own lacks; one of its own tenant if there is one.

    None if the block has more tokens than its record kept. Looks into 4,096 namespaces at most.
    """
    if missing.found or len(missing.tokens) != 4 * missing.block_tokens:
        return None
    try:
        own = cache.namespaces.get(missing.namespace)
    except NotFoundError:
        return None
    found: Elsewhere | None = None
    for number, other in enumerate(islice(list(cache.namespaces), _MOST_NAMESPACES)):
        if number % _NAMESPACES_AT_ONCE == _NAMESPACES_AT_ONCE - 1:
            await give_way()
        if other.id == own.id or other is own.common or other.spec.block_tokens != missing.block_tokens:
            continue
        if _has_first_block(cache.trie(other), other, missing.tokens):
            here = Elsewhere(other.spec.name, other.spec.tenant, _differences(own, other))
            if other.spec.tenant == own.spec.tenant:
                return here
            found = found or here
    return found


def _has_first_block(trie: Trie, namespace: Namespace, tokens: bytes) -> bool:
    row = trie.find(namespace.ordinal, xxh3_digest(tokens, namespace.seed))
    return row is not None and trie.parent[row] == namespace.root and trie.tokens[row].tobytes() == tokens


def _differences(own: Namespace, other: Namespace) -> tuple[str, ...]:
    """In what two namespaces differ."""
    mine, theirs = own.spec, other.spec
    pairs = {
        "tenant": (mine.tenant, theirs.tenant),
        "name": (mine.name, theirs.name),
        "salt": (mine.salt, theirs.salt),
        "layout": ((mine.parts, mine.dtype, mine.layout), (theirs.parts, theirs.dtype, theirs.layout)),
    }
    return tuple(name for name, (one, two) in pairs.items() if one != two)
