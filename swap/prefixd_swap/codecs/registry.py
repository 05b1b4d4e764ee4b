"""Codecs by name and by number. Those that need packages are imported when they are first asked for."""

from __future__ import annotations

import os
import threading
from functools import cache

from prefixd_swap.codecs.codec import Codec, cut_short
from prefixd_swap.codecs.exact import ExactCodec
from prefixd_swap.errors import CodecShortageError, UnavailableCodecError

CODECS = {"exact": 0, "lossless": 1, "int8": 2, "k8v4": 3}
"""The number of each codec, as stored bytes have it; a number never gets another meaning."""
NAMES = {number: name for name, number in CODECS.items()}

_importing = threading.Lock()
"""numba's modules import each other: threads that import them at once find halves of them."""
_DESCRIPTORS = 8
"""More than an import has open at a time."""


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
            _require_descriptors()
            return _load(name)
    except (OSError, MemoryError) as error:
        raise CodecShortageError(f"codec {name} cannot be loaded now ({error}); it is tried again") from error
    except Exception as error:
        if cut_short.is_set():
            raise CodecShortageError(
                f"codec {name} was cut short while it was loaded, and what is left of it cannot be used ({error}); "
                "start the process again"
            ) from error
        if not isinstance(error, ImportError):
            raise
        raise UnavailableCodecError(
            f"codec {name}: a package is missing ({error}); run `pip install 'prefixd[codecs]'`"
        ) from error


def _load(name: str) -> Codec:
    try:
        if name == "lossless":
            from prefixd_swap.codecs.lossless import LosslessCodec

            return LosslessCodec()
        from prefixd_swap.codecs.quantized import Int8Codec, K8V4Codec

        return Int8Codec() if name == "int8" else K8V4Codec()
    except (OSError, MemoryError):
        cut_short.set()
        raise


def _require_descriptors() -> None:
    """Raise OSError while the process has no descriptors for an import: one that fails half-way leaves modules behind
    that cannot be imported again."""
    held: list[int] = []
    try:
        for _ in range(_DESCRIPTORS):
            held.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for each in held:
            os.close(each)
