"""prefixd compiles nothing while it runs on a CPU: the machine needs no gcc."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client, Finished

pytestmark = pytest.mark.slow


def test_a_model_is_served_where_no_program_can_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    settings = {"worker.embedded": True, "gpu.bytes": "16MiB", "cpu.bytes": "16MiB", "disk.bytes": "32MiB"}
    with DaemonProcess(settings) as daemon, Client(daemon.address) as client:
        *_, last = client.generate("Once upon a time", max_tokens=8)
    assert isinstance(last, Finished)
