"""Compiling before the first block needs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress

import numpy as np

from prefixd_swap.codecs.codec import Refused
from prefixd_swap.codecs.coding import Coding, code, decode_object
from prefixd_swap.codecs.part_shape import AXES, DTYPE_BYTES, PartShape
from prefixd_swap.codecs.registry import find_codec


def warm_up(names: Iterable[str], dtypes: Iterable[str] = tuple(DTYPE_BYTES)) -> None:
    """Compiles what codecs need for parts of these dtypes; to be called in a thread.

    Compiling all takes 8 s of CPU time, and holds Python's lock for up to half a second at once. So another process
    compiles first, and leaves the code for this one and for later ones, which load it in 0.1 s. Where no folder can be
    written (`kernels/compiling.py`) or no process can be started, this process compiles.

    Raises:
        UnavailableCodecError: there is no such codec, or a package that it needs is not installed.
    """
    names, dtypes = list(names), list(dtypes)
    needed = [name for name in names if find_codec(name).name != "exact"]
    if not needed:
        return
    command = [sys.executable, "-m", "prefixd_swap.codecs.warm_up", ",".join(needed), ",".join(dtypes)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with suppress(OSError):  # no process can be started: what it would have compiled is compiled here
        subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    use_all(needed, dtypes)


def use_all(names: Iterable[str], dtypes: Iterable[str]) -> None:
    """Encodes and decodes a small part of each dtype with each codec."""
    for dtype in dtypes:
        shape = PartShape(dtype, 1, 64, 1, 64, AXES)
        data = np.zeros(shape.nbytes, np.uint8)
        for name in names:
            result = code(data, Coding(find_codec(name), shape))
            if not isinstance(result, Refused):
                decode_object(result.data, data)


if __name__ == "__main__":
    use_all(sys.argv[1].split(","), sys.argv[2].split(","))
