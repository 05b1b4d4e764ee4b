"""deploy/prefixd.service before systemd's own judge, and a daemon under what it forbids."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from prefixd.cli.demo.daemon_process import DaemonProcess
from tests.operator.programs import ROOT, find_program, run_program

UNIT = ROOT / "deploy/prefixd.service"
GPU = ROOT / "deploy/prefixd.service.d/gpu.conf"
CLIENT = ROOT / "tests/client/version_client.py"
RESTRICTED = """if True:
    import ctypes, runpy
    PR_SET_NO_NEW_PRIVS, PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN = 38, 65, 1
    libc = ctypes.CDLL(None, use_errno=True)
    assert not libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN, 0, 0, 0):
        print("Linux 6.3 or newer is needed to refuse executable memory", file=__import__("sys").stderr)
    runpy.run_module("prefixd.cli.tethered", run_name="__main__")
"""
"""A daemon under NoNewPrivileges= and MemoryDenyWriteExecute=."""


def values(name: str, text: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", text, re.MULTILINE)


def test_systemd_finds_no_fault(tmp_path: Path) -> None:
    text = UNIT.read_text()
    (command,) = values("ExecStart", text)
    unit = tmp_path / UNIT.name
    unit.write_text(text.replace(command.split()[0], "/bin/true"))  # the installation that it expects is not here
    folder = tmp_path / f"{UNIT.name}.d"
    folder.mkdir()
    (folder / GPU.name).write_text(GPU.read_text())
    done = run_program("systemd-analyze", "verify", "--man=no", unit)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("gpu", [False, True])
def test_its_exposure_is_below_3(tmp_path: Path, gpu: bool) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text() + (GPU.read_text() if gpu else ""))
    done = run_program("systemd-analyze", "security", "--offline=true", "--threshold=29", "--no-pager", unit)
    assert done.returncode == 0, done.stdout
    score = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert score is not None and float(score[1]) < 3.0


@cache
def calls_of(group: str) -> frozenset[str]:
    """The system calls of a set such as `@network-io`."""
    lines = run_program("systemd-analyze", "--no-pager", "syscall-filter", group).stdout.splitlines()
    names = [line.strip() for line in lines if line.startswith("    ") and not line.strip().startswith("#")]
    return frozenset().union(*(calls_of(name) if name.startswith("@") else {name} for name in names))


def traced(text: str) -> Iterator[tuple[str, str]]:
    """The system calls that strace wrote down, with their lines."""
    for line in text.splitlines():
        if found := re.match(r"\d+ +(\w+)\(", line):
            yield found[1], line


def test_the_daemon_needs_nothing_that_the_unit_forbids(tmp_path: Path) -> None:
    text = UNIT.read_text()
    allowed = set[str]()
    for value in values("SystemCallFilter", text):
        if value.startswith("~"):
            allowed -= calls_of(value[1:])
        else:
            allowed |= calls_of(value)
    assert len(allowed) > 200
    calls = tmp_path / "calls"
    tracer = ("-D", "-f", "-qq", "-s", "8", "-o", str(calls), sys.executable, "-c", RESTRICTED)
    settings = {"cpu.bytes": "4MiB", "disk.bytes": "16MiB"}
    with DaemonProcess(settings, python=find_program("strace"), program=tracer) as daemon:
        for action in ("store", "load"):
            for memory in ("shared", "streamed"):
                command = [sys.executable, CLIENT, daemon.address, action, memory]
                done = subprocess.run(command, capture_output=True, text=True, timeout=120)
                assert done.returncode == 0, done.stderr
                assert json.loads(done.stdout)["done"]
        log = daemon.log.read_text()
    assert log == ""
    used = dict(traced(calls.read_text()))
    assert "memfd_create" in used and "sendmsg" in used
    assert {name: line for name, line in used.items() if name not in allowed} == {}
    families = {found[1] for line in map(str, calls.open()) if (found := re.search(r" socket\((AF_\w+)", line))}
    assert families <= set(*map(str.split, values("RestrictAddressFamilies", text)))
