"""The ids that stand for a prompt with images: equal exactly where its tokens and images are."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.images.identity import (
    ImageSpan,
    drawn_block,
    identity_tokens,
    last_cut,
    next_uncut_blocks,
    uncut_blocks,
)

BLOCK = 8
PLACEHOLDER = 9
DIGESTS = [bytes([number]) * 32 for number in range(3)]

# A prompt as pieces: a text of tokens, or an image (digest, number of its tokens).
texts = st.lists(st.integers(1, 3), min_size=0, max_size=12)
images = st.tuples(st.sampled_from(DIGESTS), st.sampled_from([1, 3, 4, 7, 8, 9, 20]))
prompts = st.lists(st.one_of(texts, images), min_size=1, max_size=6)
single = st.tuples(st.sampled_from(DIGESTS), st.just(1))  # a cross-attention model's placeholder
cross_prompts = st.lists(st.one_of(texts, single), min_size=1, max_size=6)


def lay_out(pieces):
    """Tokens and spans, and what each token is: itself, or its place in which image."""
    tokens, spans, facts = [], [], []
    for piece in pieces:
        if isinstance(piece, tuple):
            digest, count = piece
            spans.append(ImageSpan(len(tokens), count, digest))
            tokens += [PLACEHOLDER] * count
            facts += [(digest, place) for place in range(count)]
        else:
            tokens += piece
            facts += piece
    return np.array(tokens, np.uint32), spans, facts


@settings(max_examples=400)
@given(prompts, prompts, st.integers(0, 6))
def test_two_prompts_share_a_block_exactly_if_tokens_and_images_up_to_its_end_agree(one, other, shared):
    other = one[:shared] + other
    (tokens, spans, facts), (tokens_2, spans_2, facts_2) = lay_out(one), lay_out(other)
    ids, ids_2 = identity_tokens(tokens, spans, BLOCK), identity_tokens(tokens_2, spans_2, BLOCK)
    for end in range(BLOCK, min(len(ids), len(ids_2)) + 1, BLOCK):
        assert np.array_equal(ids[:end], ids_2[:end]) == (facts[:end] == facts_2[:end])


@settings(max_examples=200)
@given(cross_prompts, cross_prompts, st.integers(0, 6))
def test_with_cross_attention_no_block_is_shared_with_other_images(one, other, shared):
    other = one[:shared] + other
    (tokens, spans, facts), (tokens_2, spans_2, facts_2) = lay_out(one), lay_out(other)
    ids = identity_tokens(tokens, spans, BLOCK, cross=True)
    ids_2 = identity_tokens(tokens_2, spans_2, BLOCK, cross=True)
    for end in range(BLOCK, min(len(ids), len(ids_2)) + 1, BLOCK):
        assert np.array_equal(ids[:end], ids_2[:end]) == (spans == spans_2 and facts[:end] == facts_2[:end])


@given(prompts, st.lists(st.integers(1, 3), max_size=20), st.booleans())
def test_tokens_that_follow_change_an_incomplete_block_alone(pieces, output, cross):
    tokens, spans, _ = lay_out(pieces)
    before = identity_tokens(tokens, spans, BLOCK, cross=cross)
    longer = np.concatenate([tokens, np.array(output, np.uint32)])
    after = identity_tokens(longer, spans, BLOCK, cross=cross)
    full = len(tokens) // BLOCK
    assert np.array_equal(before[: full * BLOCK], after[: full * BLOCK])
    if not drawn_block(spans, full, BLOCK, cross=cross):
        assert np.array_equal(before[full * BLOCK :], after[full * BLOCK : len(before)])
        assert np.array_equal(after[len(before) :], output)


@given(prompts, st.integers(0, 30))
def test_no_cut_lies_inside_an_image_and_none_is_missed(pieces, wanted):
    _, spans, facts = lay_out(pieces)
    inside = {span.first + place for span in spans for place in range(1, span.tokens)}
    assert last_cut(wanted, spans) == max(length for length in range(wanted + 1) if length not in inside)
    whole = [blocks for blocks in range(wanted + 30) if blocks * BLOCK not in inside]
    assert uncut_blocks(wanted, spans, BLOCK) == max(blocks for blocks in whole if blocks <= wanted)
    assert next_uncut_blocks(wanted, spans, BLOCK) == min(blocks for blocks in whole if blocks > wanted)
    assert len(facts) == sum(span.tokens for span in spans) + sum(len(p) for p in pieces if isinstance(p, list))


def test_each_block_of_one_image_after_the_other_differs():
    tokens = np.full(2 * BLOCK, PLACEHOLDER, np.uint32)
    orders = [
        [ImageSpan(0, BLOCK, one), ImageSpan(BLOCK, BLOCK, other)] for one, other in itertools.permutations(DIGESTS, 2)
    ]
    ids = {identity_tokens(tokens, spans, BLOCK).tobytes() for spans in orders}
    assert len(ids) == len(orders)


def test_blocks_of_fewer_than_8_tokens_are_refused():
    with pytest.raises(ValueError, match="blocks of 4 tokens cannot distinguish images; use 8 or more"):
        identity_tokens(np.zeros(8, np.uint32), [ImageSpan(0, 2, DIGESTS[0])], 4)


def test_an_image_behind_the_prompt_is_refused():
    with pytest.raises(ValueError, match=r"images at \[\(6, 4\)\] in 8 tokens"):
        identity_tokens(np.zeros(8, np.uint32), [ImageSpan(6, 4, DIGESTS[0])], BLOCK)
