"""Finds tokens for any block key: a dozen operations invert XXH3-128 of 64 bytes, for any known seed.

Of the eight 64-bit words of a block, words 0 and 6 are chosen so that a factor of their products is 0, for any words 1
and 7. Those two are then added to the two halves of the accumulator by exclusive or, so it can be given any value.
"""

from __future__ import annotations

import numpy as np

BLOCK_TOKENS = 16

_MASK = 2**64 - 1
_PRIME_1, _PRIME_2, _PRIME_4 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x85EBCA77C2B2AE63
_SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
        "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
        "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    ),
    np.uint64,
).tolist()


def blocks_with_equal_first_half(count: int, seed: int) -> list[bytes]:
    """Returns token ids of `count` first blocks of 16 tokens. Their keys all differ, but have the same first 8
    bytes."""
    factor = -_PRIME_4 * pow(_PRIME_1, -1, 2**64)  # the first half is a hash of the sum of their products
    return [_block(number * factor & _MASK, number, seed) for number in range(count)]


def block_with_key(key: bytes, seed: int, parent: bytes = b"") -> bytes | None:
    """Returns token ids of a block of 16 tokens that has this key, after a block with the key `parent` or as a first
    block.

    Returns None if no tokens give this key. The key of a first block with another seed is possible if both seeds have
    the same last 2 bits.
    """
    half, whole = int.from_bytes(key[:8], "big"), int.from_bytes(key[8:], "big")
    of_sum, of_both = _unmix(whole), _unmix(-half & _MASK)
    rest = of_both - (len(parent) + 64 - seed) * _PRIME_2 - of_sum * _PRIME_4 & _MASK
    factor = _PRIME_1 - _PRIME_4  # a multiple of 4
    if rest % 4:
        return None
    wanted_low = (rest >> 2) * pow(factor >> 2, -1, 2**62) & (_MASK >> 2)
    wanted_high = of_sum - wanted_low & _MASK
    return _next_block(wanted_low, wanted_high, seed, parent) if parent else _block(wanted_low, wanted_high, seed)


def crowded_chain(blocks: int, seed: int) -> bytes:
    """Returns token ids of a prompt of `blocks` blocks of 16 tokens; all their keys begin with the same 8 bytes."""
    chain: list[bytes] = []
    parent, number = b"", 0
    while len(chain) < blocks:
        number += 1
        key = bytes(8) + number.to_bytes(8, "little")
        block = block_with_key(key, seed, parent)
        if block is not None:
            chain.append(block)
            parent = key
    return b"".join(chain)


def _block(wanted_low: int, wanted_high: int, seed: int) -> bytes:
    low, high = 64 * _PRIME_1 & _MASK, 0
    low = low + _folded(_SECRET[4] + seed, _SECRET[5] - seed) & _MASK  # words 2 to 5 are 0
    high = high + _folded(_SECRET[6] + seed, _SECRET[7] - seed) & _MASK
    fixed = (_SECRET[0] + seed & _MASK, _SECRET[2] + seed & _MASK)  # words 0 and 6
    words = [fixed[0], (high ^ wanted_high) - fixed[0], 0, 0, 0, 0, fixed[1], (low ^ wanted_low) - fixed[1]]
    return b"".join((word & _MASK).to_bytes(8, "little") for word in words)


def _next_block(wanted_low: int, wanted_high: int, seed: int, parent: bytes) -> bytes:
    """Returns the block after `parent` that gives the accumulator these two halves.

    Of the ten words that are hashed, the parent's key is words 0 and 1. Words 4 and 5 are mixed first, then 2, 3, 6
    and 7, then 0, 1, 8 and 9. Words 2, 6 and 8 each make a factor 0; 3 and 7 are added by exclusive or, as in `_block`.
    """
    first, second = np.frombuffer(parent, np.uint64).tolist()
    low = 80 * _PRIME_1 + _folded(_SECRET[8] + seed, _SECRET[9] - seed) & _MASK
    high = _folded(_SECRET[10] + seed, _SECRET[11] - seed)
    fixed = [_SECRET[index] + seed & _MASK for index in (4, 6, 2)]  # words 2, 6 and 8
    before_high = wanted_high ^ (first + second & _MASK)
    folded = _folded(first ^ (_SECRET[0] + seed & _MASK), second ^ (_SECRET[1] - seed & _MASK))
    before_low = (wanted_low ^ fixed[2]) - folded & _MASK
    words = [fixed[0], (high ^ before_high) - fixed[0], 0, 0, fixed[1], (low ^ before_low) - fixed[1], fixed[2], 0]
    return b"".join((word & _MASK).to_bytes(8, "little") for word in words)


def _unmix(mixed: int) -> int:
    mixed ^= mixed >> 32
    mixed = mixed * pow(0x165667919E3779F9, -1, 2**64) & _MASK
    return mixed ^ mixed >> 37


def _folded(one: int, other: int) -> int:
    product = (one & _MASK) * (other & _MASK)
    return (product ^ product >> 64) & _MASK
