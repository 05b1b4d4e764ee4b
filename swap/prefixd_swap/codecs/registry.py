"""Codecs by name and by number. Those that need packages are imported when they are first asked for."""

from __future__ import annotations

import errno
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
_SHORTAGES = tuple(map(os.strerror, (errno.EMFILE, errno.ENFILE, errno.ENOMEM)))
"""What the dynamic linker's errors end with, which come as ImportError."""


@cache
def find_codec(codec: str | int) -> Codec:
    """The codec with a name ("int8") or a number (2).

    Raises:
        UnavailableCodecError: there is none, or a package that it needs is not installed.
        CodecShortageError: the system has no descriptors or memory to load it.
    """
    name = NAMES.get(codec) if isinstance(codec, int) else codec
    if name == "exact":
        return ExactCodec()
    if name not in CODECS:
        raise UnavailableCodecError(f"there is no codec {codec!r}; use one of {', '.join(CODECS)}")
    with _importing:
        if cut_short.is_set():
            raise CodecShortageError(f"codec {name}: its import was cut short; start this process again to use it")
        try:
            _require_descriptors()
        except OSError as error:
            raise CodecShortageError(f"codec {name} cannot be loaded now ({error}); it is tried again") from error
        try:
            return _load(name)
        except (OSError, MemoryError, ImportError) as error:
            if isinstance(error, ImportError) and not any(why in str(error) for why in _SHORTAGES):
                raise UnavailableCodecError(
                    f"codec {name}: a package is missing ({error}); run `pip install 'prefixd[codecs]'`"
                ) from error
            cut_short.set()
            raise CodecShortageError(
                f"codec {name}: its import was cut short ({error}); start this process again to use it"
            ) from error


def _load(name: str) -> Codec:
    if name == "lossless":
        from prefixd_swap.codecs.lossless import LosslessCodec

        return LosslessCodec()
    from prefixd_swap.codecs.quantized import Int8Codec, K8V4Codec

    return Int8Codec() if name == "int8" else K8V4Codec()


def _require_descriptors() -> None:
    """Raise OSError while the process has no descriptors for an import: one that is cut short leaves modules behind
    that cannot be imported again."""
    held: list[int] = []
    try:
        for _ in range(_DESCRIPTORS):
            held.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for each in held:
            os.close(each)
