"""xxh3_64 in kernels: of bytes that are in the cache because the kernel has just read or written them.

The algorithm for more than 240 bytes, with the default secret and seed (https://github.com/Cyan4973/xxHash,
doc/xxhash_spec.md): eight sums take 64 bytes at a time, and are mixed after each 1024.
"""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

LEAST_BYTES: Final = 241
"""Shorter ones are hashed in another way, which is not here."""

_STRIPE_BYTES: Final = 64
_STRIPES: Final = 16  # of a block
_BLOCK_BYTES: Final = _STRIPE_BYTES * _STRIPES
_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64: Final = (
    *(0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5),
)
_AVALANCHE: Final = np.uint64(0x165667919E3779F9)
_LENGTH: Final = np.uint64(_PRIME64[0])
_BEGIN: Final = np.array([_PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0]], np.uint64)
_LAST_KEY: Final = np.frombuffer(_SECRET, np.uint64, 8, len(_SECRET) - _STRIPE_BYTES - 7)
_MERGE_KEY: Final = np.frombuffer(_SECRET, np.uint64, 8, 11)
_KEYS: Final = np.frombuffer(_SECRET, np.uint64)
_LOW: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)


def _typed(stripes: int, mix: bool) -> Any:
    """An intrinsic: adds stripes at an address to the sums, under one key after the other; then mixes them if `mix`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        lanes = ir.VectorType(word, 8)

        def all_lanes(value: int) -> ir.Constant:
            return ir.Constant(lanes, [value] * 8)

        def load(address: Any) -> Any:
            loaded = builder.load(builder.inttoptr(address, lanes.as_pointer()))
            loaded.align = 1
            return loaded

        def data_of(at: int) -> Any:
            data = context.make_array(signature.args[at])(context, builder, args[at]).data
            return builder.ptrtoint(data, word)

        sums_at, keys_at = data_of(0), data_of(1)
        sums = load(sums_at)
        swap = ir.Constant(ir.VectorType(ir.IntType(32), 8), [lane ^ 1 for lane in range(8)])

        def key(number: int) -> Any:
            return load(builder.add(keys_at, ir.Constant(word, 8 * number)))

        for stripe in range(stripes):
            data = load(builder.add(args[2], ir.Constant(word, _STRIPE_BYTES * stripe)))
            keyed = builder.xor(data, key(stripe))
            product = builder.mul(
                builder.and_(keyed, all_lanes(0xFFFFFFFF)),
                builder.lshr(keyed, all_lanes(32)),
            )
            sums = builder.add(sums, builder.add(product, builder.shuffle_vector(data, data, swap)))
        if mix:
            sums = builder.xor(builder.xor(sums, builder.lshr(sums, all_lanes(47))), key(_STRIPES))
            sums = builder.mul(sums, all_lanes(_PRIME32[0]))
        builder.store(sums, builder.inttoptr(sums_at, lanes.as_pointer()), align=1)
        return context.get_dummy_value()

    def add(_typing: Any, sums: Any, keys: Any, address: Any) -> Any:
        return types.void(sums, keys, types.uint64), generate

    return intrinsic(add)


_add_block: Any = _typed(_STRIPES, True)
_add_stripe: Any = _typed(1, False)


@numba.njit
def _fold(left: Any, right: Any) -> Any:
    """The product's upper 64 bits xor its lower ones."""
    low = (left & _LOW) * (right & _LOW)
    across, other = (left >> _HALF) * (right & _LOW), (left & _LOW) * (right >> _HALF)
    middle = (low >> _HALF) + (across & _LOW) + other
    upper = (across >> _HALF) + (middle >> _HALF) + (left >> _HALF) * (right >> _HALF)
    return upper ^ ((middle << _HALF) | (low & _LOW))


@numba.njit
def hash_at(address: Any, nbytes: int) -> Any:
    """xxh3_64 of `nbytes` bytes, `LEAST_BYTES` or more, at a uint64 address."""
    sums = _BEGIN.copy()
    blocks = (nbytes - 1) // _BLOCK_BYTES
    at = address
    for _ in range(blocks):
        _add_block(sums, _KEYS, at)
        at += np.uint64(_BLOCK_BYTES)
    for stripe in range((nbytes - 1 - blocks * _BLOCK_BYTES) // _STRIPE_BYTES):
        _add_stripe(sums, _KEYS[stripe:], at)
        at += np.uint64(_STRIPE_BYTES)
    _add_stripe(sums, _LAST_KEY, address + np.uint64(nbytes - _STRIPE_BYTES))
    result = np.uint64(nbytes) * _LENGTH
    for i in range(4):
        result += _fold(sums[2 * i] ^ _MERGE_KEY[2 * i], sums[2 * i + 1] ^ _MERGE_KEY[2 * i + 1])
    result = (result ^ (result >> np.uint64(37))) * _AVALANCHE
    return result ^ (result >> _HALF)
