"""What the tests say about SGLang's controllers that prefixd serves."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.engines.sglang_controller import MODULE
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client

DAEMON = {"cpu.bytes": "64MiB", "disk.bytes": "256MiB"}
PATIENCE_S = 30.0

_prompts = itertools.count(1)


def options(address: str, *, v1: bool = True, **prefixd: Any) -> dict[str, Any]:
    """SGLang's extra configuration. Unless a test says otherwise a call may take as long as this machine needs."""
    patient = {"timeout_s": 30.0, "slice_s": 8.0}
    return {**MODULE, "interface_v1": int(v1), "prefixd": {"address": address, **patient, **prefixd}}


def new_prompt(pages: int, page_tokens: int = 16) -> list[int]:
    """Tokens that no prompt has had before."""
    first = next(_prompts) * 1_000_000
    return list(range(first, first + pages * page_tokens))


@contextmanager
def frozen(daemon: DaemonProcess) -> Iterator[None]:
    """The daemon neither answers nor ends."""
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(daemon.pid, signal.SIGCONT)


def accounts(daemon: DaemonProcess) -> list[str]:
    """What does not add up in the daemon, once nothing is under way."""
    with Client(daemon.address) as client:
        return list(client.check_integrity().violations)


def flush(daemon: DaemonProcess) -> None:
    """Has everything written to disk."""
    with Client(daemon.address) as client:
        client.flush()
