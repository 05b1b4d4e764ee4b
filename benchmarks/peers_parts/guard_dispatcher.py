"""`python -m benchmarks.peers_parts.guard_dispatcher`: lets the vLLM of this environment run beside LMCache on a CPU.

vLLM 0.32 for CPUs looks through all attributes of all modules for Triton kernels that it replaces, and takes
`__dict__` of each to be a mapping. LMCache's stand-in for a GPU's module answers to every name, `__dict__` included,
and with a function; so vLLM ends in `AttributeError: '_lib_fn_wrapper' object has no attribute 'get'`. This changes
that one line in the installed file, for all that is measured in this environment alike. Running it again does nothing.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

_FOUND = 'if hasattr(value, "__dict__"):'
_GUARDED = 'if isinstance(getattr(value, "__dict__", None), Mapping):'


def main() -> None:
    """Changes the file. Ends with status 1 and one line where vLLM has another text."""
    vllm = find_spec("vllm")  # found, not imported: that takes seconds
    if vllm is None or vllm.origin is None:
        sys.exit(f"vLLM is not installed in {sys.executable}; run `make bench-peers`")
    file = Path(vllm.origin).parent / "triton_utils" / "dispatcher.py"
    text = file.read_text()
    if _GUARDED in text:
        return
    if text.count(_FOUND) != 1:
        sys.exit(f"{file} does not have the line {_FOUND!r} once: this step was written for vLLM 0.32")
    file.write_text(text.replace(_FOUND, _GUARDED))


if __name__ == "__main__":
    main()
