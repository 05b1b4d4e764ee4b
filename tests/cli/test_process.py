"""The command as a process: how fast it starts, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; sys.argv = ['prefixd', 'stats', '--help']\n"
        "from prefixd.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = ('torch', 'transformers', 'grpc', 'numpy', 'lmdb')\n"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stderr == "[]\n"


@pytest.mark.slow
def test_a_sidecar_starts_without_torch(tmp_path: Path) -> None:
    """Loading torch and transformers takes longer than all else of a start, and a restart is a time without a cache."""
    program = (
        "import asyncio, os, signal, sys\n"
        "from pathlib import Path\n"
        "from prefixd.server.daemon import serve\n"
        "from prefixd.settings import Settings\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "names = {'data_dir': folder, 'server.socket': folder / 's', 'cpu.bytes': '1MiB', 'disk.bytes': '1MiB'}\n"
        "end = lambda _: os.kill(os.getpid(), signal.SIGTERM)\n"
        "asyncio.run(serve(Settings.load(None, names, {}), ready=end))\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


@pytest.mark.slow
def test_version() -> None:
    result = subprocess.run([sys.executable, "-m", "prefixd", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("prefixd 0.")


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error(daemon: Any) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [sys.executable, "-m", "prefixd", "stats", "--json", "--address", daemon.address],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert "Traceback" not in result.stderr and "Exception ignored" not in result.stderr
    assert result.returncode == 0


@pytest.mark.slow
def test_ctrl_c_cancels_the_request_without_a_traceback(daemon: Any) -> None:
    daemon.endless = True
    with subprocess.Popen(
        [sys.executable, "-m", "prefixd", "generate", "x", "--address", daemon.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        begun = process.stdout.read(4)
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read()
        code = process.wait(60)
    assert (begun, code, errors) == ("Hell", 130, "")
    assert daemon.cancelled.wait(60), "the daemon's request was not cancelled"


@pytest.mark.slow
def test_a_resize_that_ctrl_c_ends_says_what_the_tier_has(daemon: Any) -> None:
    daemon.endless = True
    with subprocess.Popen(
        [sys.executable, "-m", "prefixd", "tier", "resize", "gpu", "4GiB", "--address", daemon.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert daemon.asked.wait(60)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "prefixd: cancelled; the gpu tier has 6.0 GiB\n")
    assert daemon.cancelled.wait(60)
