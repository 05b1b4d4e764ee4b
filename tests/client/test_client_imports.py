"""An engine that installs the client must not load what the daemon needs."""

from __future__ import annotations

import subprocess
import sys

import prefixd.client

HEAVY = ("torch", "transformers", "lmdb", "cuda", "pydantic", "prefixd_swap", "prefixd_scheduler")
DAEMON = ("prefixd.server", "prefixd.cache", "prefixd.worker", "prefixd.settings", "prefixd.cli.")


def test_the_client_loads_neither_torch_nor_the_daemon() -> None:
    listing = subprocess.run(
        [sys.executable, "-c", "import sys, prefixd.client; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.split()
    assert [name for name in listing if name.startswith((*HEAVY, *DAEMON))] == []


def test_public_names_exist() -> None:
    assert all(hasattr(prefixd.client, name) for name in prefixd.client.__all__)
