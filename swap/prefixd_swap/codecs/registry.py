"""Codecs by name and by number. Those that need packages are imported when they are first asked for."""

from __future__ import annotations

import threading
from functools import cache

from prefixd_swap.codecs.codec import Codec
from prefixd_swap.codecs.exact import ExactCodec
from prefixd_swap.errors import CodecShortageError, UnavailableCodecError

CODECS = {"exact": 0, "lossless": 1, "int8": 2, "k8v4": 3}
"""The number of each codec, as stored bytes have it; a number never gets another meaning."""
NAMES = {number: name for name, number in CODECS.items()}

_importing = threading.Lock()
"""numba's modules import each other: threads that import them at once find halves of them."""


@cache
def find_codec(codec: str | int) -> Codec:
    """The codec with a name ("int8") or a number (2).

    Raises:
        UnavailableCodecError: there is none, or a package that it needs is not installed.
        CodecShortageError: it cannot be loaded now.
    """
    name = NAMES.get(codec) if isinstance(codec, int) else codec
    if name == "exact":
        return ExactCodec()
    if name not in CODECS:
        raise UnavailableCodecError(f"there is no codec {codec!r}; use one of {', '.join(CODECS)}")
    try:
        with _importing:
            if name == "lossless":
                from prefixd_swap.codecs.lossless import LosslessCodec

                return LosslessCodec()
            from prefixd_swap.codecs.quantized import Int8Codec, K8V4Codec

            return Int8Codec() if name == "int8" else K8V4Codec()
    except ImportError as error:
        raise UnavailableCodecError(
            f"codec {name}: a package is missing ({error}); run `pip install 'prefixd[codecs]'`"
        ) from error
    except (OSError, MemoryError) as error:
        raise CodecShortageError(f"codec {name} cannot be loaded now ({error}); it is tried again") from error
