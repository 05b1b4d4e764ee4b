"""Decodes many objects in one call, which waits for Python's lock once; one by one each waits for it three times."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba.core import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from prefixd_swap.codecs.kernels.compiling import compiled
from prefixd_swap.codecs.kernels.number_tiles import decode_tiles
from prefixd_swap.codecs.kernels.xxh3 import hash_at


def _typed_pointer(_typing: Any, address: Any, like: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    pointer: Any = types.CPointer
    return pointer(like.dtype)(address, like), generate


_BYTES: Final = np.empty(0, np.uint8)
_pointer: Any = intrinsic(_typed_pointer)
"""A pointer to the elements of an array such as `like`."""


@compiled()
def decode_objects(
    objects: Any,
    nbytes: Any,
    payload_nbytes: int,
    sizes: Any,
    strides: Any,
    group: int,
    wide: bool,
    targets: Any,
    count: int,
    like: Any,
    checksums: Any,
    good: Any,
) -> None:
    """Decodes objects of one shape that have their checksums; each is hashed when its bytes are in the cache.

    The only kernel that decodes: another one for an object alone would be another second to compile.

    Args:
        objects: uint64 [n], where they are.
        nbytes: int64 [n], bytes of each.
        payload_nbytes: how many of its last bytes are what was encoded.
        sizes, strides, group, wide: as of `encode_part`.
        targets: uint64 [n], where the decoded numbers go.
        count: of these numbers, of each part.
        like: an empty array of the type that `WORDS` says.
        checksums: uint64 [n, 2], xxh3_64 of each object and of what it is decoded to; [0, 2]: not known.
        good: bool [n], gets whether both are right.
    """
    known = checksums.shape[0] > 0
    for i in range(objects.size):
        good[i] = not known or hash_at(objects[i], nbytes[i]) == checksums[i, 0]
        if good[i]:
            encoded = carray(_pointer(objects[i] + types.uint64(nbytes[i] - payload_nbytes), _BYTES), payload_nbytes)
            decode_tiles(encoded, sizes, strides, group, wide, carray(_pointer(targets[i], like), count))
            good[i] = not known or hash_at(targets[i], count * like.itemsize) == checksums[i, 1]
