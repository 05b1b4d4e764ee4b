"""Every rule against its definition: a statement about tokens, without blocks that are there or not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.base.rules import rules as in_tokens
from prefixd.cache.rules import (
    ChunkedWindow,
    CrossAttention,
    FullAttention,
    GroupRule,
    RecurrentState,
    SlidingWindow,
    VisionEmbedding,
    expired_groups,
    kv_groups,
    longest_prefix,
    longest_stored,
    needed_groups,
)
from prefixd.cache.rules.in_blocks import in_blocks

Reads = Callable[[int, int], set[int] | None]
"""The blocks that a layer reads to continue a prompt after so many blocks of so many tokens; None where it cannot."""


def blocks_of(tokens: range, block_tokens: int) -> set[int]:
    """The blocks in which these tokens lie."""
    return {token // block_tokens for token in tokens}


def sees_all(blocks: int, block_tokens: int) -> set[int]:
    position = blocks * block_tokens
    return blocks_of(range(position), block_tokens)


def sees_window(window: int) -> Reads:
    def reads(blocks: int, block_tokens: int) -> set[int]:
        position = blocks * block_tokens
        return blocks_of(range(max(position - window + 1, 0), position), block_tokens)

    return reads


def sees_chunk(chunk: int) -> Reads:
    def reads(blocks: int, block_tokens: int) -> set[int]:
        position = blocks * block_tokens
        return blocks_of(range(position // chunk * chunk, position), block_tokens)

    return reads


def sees_state(blocks: int, block_tokens: int) -> set[int]:
    """The state after the token before the next one; there is none before the first token."""
    position = blocks * block_tokens
    return blocks_of(range(position - 1, position), block_tokens) if position else set()


def sees_images(image_blocks: int) -> Reads:
    def reads(blocks: int, block_tokens: int) -> set[int] | None:
        if not blocks:
            return set()
        return set(range(image_blocks)) if blocks >= image_blocks else None

    return reads


@st.composite
def definitions(draw: st.DrawFn) -> tuple[GroupRule, Reads, int]:
    """A rule, what its layers read, and the tokens of a block. (An image has a test of its own.)"""
    block_tokens = draw(st.integers(1, 5))
    tokens = draw(st.integers(2, 24))
    image_blocks = draw(st.integers(1, 4))
    every = draw(st.integers(0, 4))
    rule, reads = draw(
        st.sampled_from(
            [
                (FullAttention(), sees_all),
                (in_blocks(in_tokens.SlidingWindow(tokens), block_tokens), sees_window(tokens)),
                (in_blocks(in_tokens.ChunkedWindow(tokens), block_tokens), sees_chunk(tokens)),
                (RecurrentState(every), sees_state),
                (CrossAttention(image_blocks), sees_images(image_blocks)),
            ]
        )
    )
    return rule, reads, block_tokens


blocks_there = st.lists(st.booleans(), max_size=14).map(lambda found: np.array(found, np.bool_))
lengths = st.integers(0, 20)


@given(definitions(), blocks_there)
def test_a_length_is_possible_when_what_the_next_token_reads_is_there(
    defined: tuple[GroupRule, Reads, int], there: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> None:
    rule, reads, block_tokens = defined
    read = [reads(blocks, block_tokens) for blocks in range(len(there) + 1)]
    expected = [wanted is not None and all(there[block] for block in wanted) for wanted in read]
    assert rule.possible_prefixes(there).tolist() == expected
    assert expected[0], "nothing is always possible"


@given(definitions(), lengths)
def test_needed_is_what_the_next_token_reads_and_no_more(defined: tuple[GroupRule, Reads, int], blocks: int) -> None:
    rule, reads, block_tokens = defined
    read = reads(blocks, block_tokens)
    if read is None:
        return
    assert set(rule.needed(blocks)) == read
    there = np.zeros(blocks, np.bool_)
    there[list(read)] = True
    assert rule.possible_prefixes(there)[blocks], "these blocks are enough"
    for block in read:
        there[block] = False
        assert not rule.possible_prefixes(there)[blocks], "each of them counts"
        there[block] = True


@given(definitions(), st.data(), blocks_there)
def test_what_is_not_needed_changes_nothing(
    defined: tuple[GroupRule, Reads, int], data: st.DataObject, there: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> None:
    rule = defined[0]
    blocks = data.draw(st.integers(0, len(there)))
    others = np.array(data.draw(st.lists(st.booleans(), min_size=len(there), max_size=len(there))), np.bool_)
    needed = rule.needed(blocks)
    others[needed.start : needed.stop] = there[needed.start : needed.stop]
    assert rule.possible_prefixes(there)[blocks] == rule.possible_prefixes(others)[blocks]


@given(definitions(), lengths)
def test_what_expires_is_not_needed(defined: tuple[GroupRule, Reads, int], blocks: int) -> None:
    rule, reads, block_tokens = defined
    expires = rule.expires(blocks)
    assert len(expires) == blocks and not expires[list(reads(blocks, block_tokens) or ())].any()
    if isinstance(rule, RecurrentState) and (every := rule.checkpoint_blocks):
        assert not expires[[block for block in range(blocks) if (block + 1) % every == 0]].any()
    if isinstance(rule, ChunkedWindow) and blocks:  # the same prompt again: it continues before its last token, at most
        assert not expires[list(reads(blocks - 1, block_tokens) or ())].any()


@given(definitions(), lengths)
def test_all_else_expires(defined: tuple[GroupRule, Reads, int], blocks: int) -> None:
    """Blocks stay for a reason: needed, a checkpoint, or the last token's chunk."""
    rule = defined[0]
    stays = set(rule.needed(blocks))
    if isinstance(rule, RecurrentState) and rule.checkpoint_blocks:
        stays |= {block for block in range(blocks) if (block + 1) % rule.checkpoint_blocks == 0}
    if isinstance(rule, ChunkedWindow):
        last_token = blocks * rule.block_tokens - 1
        stays |= blocks_of(
            range(max(last_token, 0) // rule.chunk_tokens * rule.chunk_tokens, last_token + 1), rule.block_tokens
        )
    assert set(np.flatnonzero(~rule.expires(blocks)).tolist()) == stays


@given(definitions(), blocks_there)
def test_lasting_rules_need_more_of_longer_prefixes(
    defined: tuple[GroupRule, Reads, int], there: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> None:
    rule = defined[0]
    grows = all(set(rule.needed(n)) <= set(rule.needed(n + 1)) for n in range(24))
    assert not rule.lasting or grows
    stored, possible = rule.stored_prefixes(there), rule.possible_prefixes(there)
    assert not (stored & ~possible).any(), "a writer leaves nothing out that a reader needs"


@given(blocks_there)
def test_an_image_is_whole_or_of_no_use(there: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
    rule, blocks = VisionEmbedding(), len(there)
    possible = rule.possible_prefixes(there)
    assert np.flatnonzero(possible).tolist() == sorted({0, blocks} if there.all() else {0})
    assert list(rule.needed(blocks)) == list(range(blocks)) and not rule.expires(blocks).any() and rule.lasting


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (2, 1), (17, 1), (18, 2), (1024, 64), (1025, 64), (1026, 65)])
def test_a_window_counts_the_token_that_attends(tokens: int, blocks: int) -> None:
    assert in_blocks(in_tokens.SlidingWindow(tokens), 16) == SlidingWindow(blocks)


def test_a_chunk_that_is_no_multiple_of_the_block() -> None:
    """Llama 4's layers with chunks of 5 tokens in blocks of 2: blocks 2 and 7 lie in two chunks each."""
    rule = in_blocks(in_tokens.ChunkedWindow(5), 2)
    assert [list(rule.needed(blocks)) for blocks in range(7)] == [[], [0], [0, 1], [2], [2, 3], [], [5]]


# -- several groups ---------------------------------------------------------------------------------------------

rules = definitions().map(lambda defined: defined[0])
some_rules = st.lists(rules, min_size=1, max_size=4)


@given(some_rules, st.lists(st.integers(0, 255), max_size=12))
def test_every_group_allows_the_longest_prefix_and_no_longer_one(of_parts: list[GroupRule], masks: list[int]) -> None:
    groups = kv_groups(of_parts)
    available = np.array(masks, np.uint8)

    def fits(length: int) -> bool:
        shortest = max((g.rule.image_blocks for g in groups if isinstance(g.rule, CrossAttention)), default=0)
        return not length or (length >= shortest and not (needed_groups(groups, length) & ~available[:length]).any())

    longest = longest_prefix(groups, available)
    assert fits(longest) and not any(fits(length) for length in range(longest + 1, len(masks) + 1))
    assert longest_stored(groups, available) <= longest


@given(some_rules, lengths, st.data())
def test_a_likely_prefix_keeps_what_it_needs(of_parts: list[GroupRule], blocks: int, data: st.DataObject) -> None:
    groups = kv_groups(of_parts)
    branches = sorted(data.draw(st.sets(st.integers(1, max(blocks - 1, 1)), max_size=4))) if blocks > 1 else []
    wanted = np.zeros(blocks, np.uint8)
    for length in branches:
        wanted[:length] |= needed_groups(groups, length)
    for group in groups:
        wanted[~group.rule.expires(blocks)] |= np.uint8(group.mask)
    expired = expired_groups(groups, blocks, np.array(branches, np.int64))
    assert (expired == ~wanted & np.uint8((1 << len(groups)) - 1)).all()
    assert not (expired & needed_groups(groups, blocks)).any()
