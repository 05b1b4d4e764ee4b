"""Token ids as prefixd is told them, where images stand in the prompt."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from prefixd.integrations.vllm.naming.media import MediaTokens
from prefixd.integrations.vllm.naming.media_content import Medium

BLOCK = 8
PLACEHOLDER = 500


def an_image(content: str, offset: int, length: int) -> Medium:
    return Medium(content, offset, length)


def a_prompt(*images: Medium, tokens: int = 40) -> list[int]:
    prompt = list(range(tokens))
    for image in images:
        prompt[image.offset : image.offset + image.length] = [PLACEHOLDER] * image.length
    return prompt


def told(*images: Medium, tokens: int = 40) -> list[int]:
    return MediaTokens(a_prompt(*images, tokens=tokens), images, BLOCK)[:]


def blocks_in_common(one: Sequence[int], other: Sequence[int]) -> int:
    common = 0
    while (common + 1) * BLOCK <= min(len(one), len(other)):
        if one[common * BLOCK : (common + 1) * BLOCK] != other[common * BLOCK : (common + 1) * BLOCK]:
            break
        common += 1
    return common


def test_images_are_told_apart_by_their_content_and_nothing_else() -> None:
    cat, dog = an_image("cat", 10, 12), an_image("dog", 10, 12)
    assert a_prompt(cat) == a_prompt(dog)
    assert told(cat) == told(an_image("cat", 10, 12))
    assert blocks_in_common(told(cat), told(dog)) == 1, "the block before the image, and none that it reaches into"


def test_a_single_token_of_an_image_makes_the_whole_block_another() -> None:
    """All ids of the block change: one id of 32 bits would not tell many images apart."""
    cat, dog = told(an_image("cat", 15, 9)), told(an_image("dog", 15, 9))
    assert all(mine != other for mine, other in zip(cat[8:16], dog[8:16], strict=True))
    assert cat[:8] == dog[:8] and cat[24:] == dog[24:] == list(range(24, 40))


def test_where_an_image_begins_counts() -> None:
    """As in vLLM: the part of the image that lies in the block is another."""
    early, late = told(an_image("cat", 4, 20)), told(an_image("cat", 5, 19))
    assert a_prompt(an_image("cat", 4, 20))[8:16] == a_prompt(an_image("cat", 5, 19))[8:16]
    assert early[8:16] != late[8:16]


def test_two_images_in_a_block_count_both() -> None:
    pairs = [(an_image(one, 8, 4), an_image(other, 12, 4)) for one in "ab" for other in "ab"]
    assert len({tuple(told(*pair)) for pair in pairs}) == 4
    assert len({tuple(a_prompt(*pair)) for pair in pairs}) == 1


def test_the_text_beside_an_image_counts() -> None:
    image = an_image("cat", 10, 4)
    prompt = a_prompt(image)
    other = [*prompt[:9], 99, *prompt[10:]]
    assert MediaTokens(prompt, [image], BLOCK)[:] != MediaTokens(other, [image], BLOCK)[:]


def test_a_piece_is_a_piece_of_the_whole() -> None:
    images = (an_image("cat", 3, 7), an_image("dog", 12, 15))
    tokens = MediaTokens(a_prompt(*images, tokens=43), images, BLOCK)
    whole = tokens[:]
    assert len(tokens) == len(whole) == 43
    for start in range(0, 44):
        for stop in range(start, 44):
            assert tokens[start:stop] == whole[start:stop]
    assert [tokens[place] for place in (0, 11, -1)] == [whole[place] for place in (0, 11, -1)]
    with pytest.raises(ValueError, match="step 2"):
        tokens[::2]
    with pytest.raises(IndexError):
        tokens[43]


def test_a_block_that_is_not_full_is_told_once_it_is() -> None:
    """An image at the end of a prompt, whose last block the first tokens of the answer fill."""
    image = an_image("cat", 10, 8)
    prompt = a_prompt(image, tokens=18)
    short = MediaTokens(prompt, [image], BLOCK)[:]
    longer = MediaTokens([*prompt, *range(6)], [image], BLOCK)[:]
    assert short[16:] == prompt[16:] and longer[:16] == short[:16]
    other = MediaTokens([*prompt, *range(6)], [an_image("dog", 10, 8)], BLOCK)[:]
    assert longer[16:] != other[16:] and all(0 <= each < 2**32 for each in longer)
