"""Compiling before the first block needs it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np

from prefixd_swap.codecs.codec import Refused
from prefixd_swap.codecs.coding import Coding, code, decode_object
from prefixd_swap.codecs.part_shape import AXES, DTYPE_BYTES, PartShape
from prefixd_swap.codecs.registry import find_codec


class WarmUp:
    """Compiles what codecs need for parts of these dtypes.

    Compiling all takes 10 s of CPU time, and holds Python's lock for up to half a second at once. So another process
    compiles first, and leaves the code for this one and for later ones, which load it in 0.1 s. Where no folder can be
    written (`kernels/compiling.py`) or no process can be started, this process compiles.

    Args:
        names: codecs.
        dtypes: of numbers.
    """

    def __init__(self, names: Iterable[str], dtypes: Iterable[str] = tuple(DTYPE_BYTES)) -> None:
        self.names, self._dtypes = list(names), list(dtypes)
        self._lock = threading.Lock()  # of `_process` and `_ended`
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False

    def run(self) -> None:
        """Compiles; to be called once, in a thread.

        Raises:
            UnavailableCodecError: there is no such codec, or a package that it needs is not installed.
        """
        needed = [name for name in self.names if find_codec(name).name != "exact"]
        if not needed or not self._start(needed):
            return
        if self._process is not None:
            self._process.wait()
        if not self._ended:
            use_all(needed, self._dtypes)

    def end(self) -> None:
        """Has `run` return soon, with what is compiled by then. Any thread may call it, at any time."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                self._process.kill()

    def _start(self, names: Sequence[str]) -> bool:
        """Starts the other process if that can be; False if `end` was called."""
        command = [sys.executable, "-m", "prefixd_swap.codecs.warm_up", ",".join(names), ",".join(self._dtypes)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with self._lock, suppress(OSError):
            if not self._ended:
                nothing = subprocess.DEVNULL
                self._process = subprocess.Popen(
                    command, env=environment, stdin=nothing, stdout=nothing, stderr=nothing
                )
        return not self._ended


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
