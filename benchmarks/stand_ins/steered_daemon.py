"""A daemon in its own process whose disk obeys a file while it runs.

`python -m MODULE --orders FILE PARENT serve ...` is `prefixd serve ...` that ends with process PARENT and whose disk
tier makes its file calls as FILE, one JSON object, says. A harness uses a `SteeredDaemon`, which starts it and writes
the file. The daemon checks the file before each call, so it obeys new orders from the next call on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd_swap import FileOps


class Orders:
    """A JSON object in a file that is replaced in one step. An absent file is `{}`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int] | None = None

    def write(self, content: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps(dict(content)))
        fresh.rename(self.path)

    def changed(self) -> dict[str, Any] | None:
        """Returns the orders if they changed since the last call; otherwise None."""
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return None
        if (stat.st_ino, stat.st_mtime_ns) == self._seen:
            return None
        content: dict[str, Any] = json.loads(self.path.read_text())
        self._seen = stat.st_ino, stat.st_mtime_ns
        return content


class SteeredDaemon(DaemonProcess):
    """Starts the daemon and writes its orders; used in the harness."""

    MODULE: ClassVar[str]
    """The program: it calls `serve`."""

    def __init__(self, settings: Mapping[str, object] | None = None, **how: Any) -> None:
        super().__init__(settings, **how)
        self._orders = Orders(self.directory / "orders.json")
        self._program = ("-m", self.MODULE, "--orders", str(self._orders.path))


def serve(make: Callable[[Path], FileOps]) -> None:
    """Runs the daemon with the file calls that `make` returns for the file of orders."""
    from prefixd.cli import tethered

    if len(sys.argv) < 3 or sys.argv[1] != "--orders":
        sys.exit("usage: python -m MODULE --orders FILE PARENT serve ...")
    path = Path(sys.argv[2])
    del sys.argv[1:3]
    tethered.main(make(path))
