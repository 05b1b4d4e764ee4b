"""The daemon as the demo, the benchmarks and the tests run it: how it starts, and that nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prefixd.cli.demo.daemon_process import DaemonFailed, DaemonProcess, ended_by_sigterm
from tests.waiting import wait_until

SMALL = {"cpu.bytes": "1MiB", "disk.bytes": "4MiB"}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_it_runs_is_restarted_and_leaves_nothing() -> None:
    with DaemonProcess(SMALL | {"server.tcp": "127.0.0.1:0", "server.insecure_tcp": True}) as daemon:
        first = daemon.pid
        assert alive(first) and daemon.socket.exists()
        assert daemon.tcp is not None and daemon.tcp.startswith("127.0.0.1:")
        with pytest.raises(DaemonFailed, match=f"already runs as process {first}"):
            daemon.start()
        daemon.restart()
        assert not alive(first) and alive(daemon.pid)
        assert daemon.kill() == -signal.SIGKILL
        with pytest.raises(DaemonFailed, match="not running"):
            _ = daemon.pid
        assert daemon.stop() is None
        daemon.start()
        last = daemon.pid
    assert not alive(last)
    assert not daemon.directory.exists()


@pytest.mark.slow
def test_a_directory_that_was_given_stays(folder: Path) -> None:
    with DaemonProcess(SMALL, directory=folder):
        pass
    assert (folder / "data").is_dir()


@pytest.mark.slow
def test_one_that_does_not_start_tells_why_and_leaves_nothing() -> None:
    daemon = DaemonProcess({"cpu.bytes": "12QiB"})
    with pytest.raises(DaemonFailed, match=r"ended before it was ready; its log ends with: .*12QiB"):
        daemon.__enter__()
    assert not daemon.directory.exists()


@pytest.mark.slow
def test_one_that_is_too_slow_is_given_up() -> None:
    daemon = DaemonProcess(SMALL, start_timeout_s=0.001, program=("-c", "import time; time.sleep(600)"))
    with pytest.raises(DaemonFailed, match=r"was not ready within 0\.001 s"):
        daemon.__enter__()
    assert not daemon.directory.exists()


@pytest.mark.slow
def test_one_that_does_not_end_is_killed() -> None:
    with pytest.raises(DaemonFailed, match=r"did not end within 0\.01 s of SIGTERM"):  # noqa: SIM117
        with DaemonProcess(SMALL, stop_timeout_s=0.01) as daemon:
            pid = daemon.pid
            os.kill(pid, signal.SIGSTOP)
    assert not alive(pid)


@pytest.mark.slow
def test_the_callers_configuration_does_not_reach_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIXD_CPU__BYTES", "nonsense from the environment")
    monkeypatch.chdir(folder)
    (folder / "prefixd.toml").write_text("nonsense in a file")
    with DaemonProcess(SMALL) as daemon:
        assert alive(daemon.pid)


@pytest.mark.slow
def test_it_ends_with_a_parent_that_is_killed(folder: Path) -> None:
    program = """if True:
        import os, pathlib, signal, sys
        from prefixd.cli.demo.daemon_process import DaemonProcess
        daemon = DaemonProcess({"cpu.bytes": "1MiB", "disk.bytes": 0}, directory=pathlib.Path(sys.argv[1]))
        daemon.start()
        print(daemon.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, timeout=60)
    assert done.returncode == -signal.SIGKILL
    daemon = int(done.stdout)
    wait_until(lambda: not alive(daemon), "the daemon outlived the process that it was started for")


@pytest.mark.slow
def test_it_does_not_start_for_a_parent_that_is_gone() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "prefixd.cli.tethered", "1", "serve"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and done.stderr == "prefixd: process 1, for which this daemon was started, has ended\n"


@pytest.mark.parametrize("interrupt", [signal.default_int_handler, signal.SIG_IGN])  # SIG_IGN: a script's job
def test_sigterm_unwinds_and_gives_its_own_exit_status(interrupt: Any) -> None:
    before, usual = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(SystemExit) as ended, ended_by_sigterm():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, usual)
    assert ended.value.code == 128 + signal.SIGTERM
    with pytest.raises(KeyboardInterrupt), ended_by_sigterm():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before
