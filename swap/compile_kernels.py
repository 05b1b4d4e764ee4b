"""Compile `prefixd_swap/copies/page_moves.cu` to PTX, from which the driver makes code for its GPU, Volta or newer.

    python swap/compile_kernels.py LIBNVRTC

LIBNVRTC is libnvrtc.so.12 of the wheel nvidia-cuda-nvrtc-cu12==12.0.140: a driver loads PTX of its own release of CUDA
or an older one, so the oldest compiler serves the most drivers (525 and newer). No GPU is needed. A test compares the
digest in the first line with the source.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import sys
from pathlib import Path

SOURCE = Path(__file__).parent / "prefixd_swap" / "copies" / "page_moves.cu"
_OPTIONS = (b"--gpu-architecture=compute_70",)


def compile_kernels(library: str, source: bytes) -> str:
    """The PTX of `source`. Raises RuntimeError with the compiler's log."""
    nvrtc = ctypes.CDLL(library)
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, SOURCE.name.encode(), 0, None, None)
    failed = nvrtc.nvrtcCompileProgram(program, len(_OPTIONS), (ctypes.c_char_p * len(_OPTIONS))(*_OPTIONS))

    def text(name: str) -> str:
        getattr(nvrtc, f"nvrtcGet{name}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{name}")(program, buffer)
        return buffer.value.decode()

    if failed:
        raise RuntimeError(text("ProgramLog"))
    return re.sub(r"(?m)^\.global .*nv6target.*\n", "", text("PTX"))  # constants of the compiler's that nothing reads


def main() -> None:
    """The command."""
    source = SOURCE.read_bytes()
    ptx = compile_kernels(sys.argv[1], source)
    SOURCE.with_suffix(".ptx").write_text(f"// sha256 of {SOURCE.name}: {hashlib.sha256(source).hexdigest()}\n{ptx}")


if __name__ == "__main__":
    main()
