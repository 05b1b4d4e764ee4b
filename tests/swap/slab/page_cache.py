"""How much of a file is in memory."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

PAGE = 4096


def cached_bytes(path: Path) -> int:
    """Of the file in the page cache."""
    size = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as view:
        pages = (ctypes.c_ubyte * (size // PAGE))()
        start = ctypes.addressof(ctypes.c_char.from_buffer(view))
        assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), pages)
    return PAGE * sum(page & 1 for page in pages)


def resident_bytes(path: Path) -> int:
    """Of all mappings of the file in this process."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            ours = rest[-1:] == [str(path)]
        elif ours and first == "Rss:":
            total += int(rest[0]) << 10
    return total
