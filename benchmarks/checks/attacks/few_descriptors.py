"""`... few_descriptors ARGUMENTS`: `python ARGUMENTS` that may open 1,024 files, root or not."""

from __future__ import annotations

import os
import resource
import sys

DESCRIPTORS = 1024


def main() -> None:
    """Becomes the other program."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


if __name__ == "__main__":
    main()
