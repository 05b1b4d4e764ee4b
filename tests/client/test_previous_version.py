"""Clients and daemons of this version and of the one before, in every pair; and the data that either has left behind.

The version before is the last commit's, built into a wheel; PREFIXD_PREVIOUS names another (`v0.1.0`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefixd.cli.demo.daemon_process import DaemonProcess

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
HERE = os.pathsep.join(str(ROOT / folder) for folder in (".", "swap", "scheduler"))
SETTINGS = {"cpu.bytes": "4MiB", "disk.bytes": "16MiB"}


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the wheel of the version before is unpacked."""
    revision = os.environ.get("PREFIXD_PREVIOUS", "HEAD~1")
    folder = tmp_path_factory.mktemp("previous")
    archive = subprocess.run(["git", "-C", ROOT, "archive", revision], capture_output=True)
    if archive.returncode:
        pytest.skip(f"no commit {revision} here: {archive.stderr.decode().strip()}")
    (source := folder / "source").mkdir()
    subprocess.run(["tar", "-x", "-C", source], input=archive.stdout, check=True)
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=source, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "installed")
    return str(folder / "installed")


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs tests/client/version_client.py with a version and says what it printed, but for the version."""

    def run(version: str, *arguments: str) -> dict[str, Any]:
        with monkeypatch.context() as patch:
            patch.setenv("PYTHONPATH", version)
            ended = subprocess.run(
                [sys.executable, ROOT / "tests/client/version_client.py", *arguments], capture_output=True, text=True
            )
        assert ended.returncode == 0, ended.stderr
        said: dict[str, Any] = json.loads(ended.stdout)
        assert Path(said.pop("version")).samefile(version.partition(os.pathsep)[0])
        return said

    return run


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., DaemonProcess]:
    """A daemon of a version; with `of`, on the directory of another one that has ended."""

    def make(version: str, of: DaemonProcess | None = None) -> DaemonProcess:
        monkeypatch.setenv("PYTHONPATH", version)
        moved = (Path(version.partition(os.pathsep)[0]) / "prefixd/cli/tethered.py").exists()
        # -P: not the version of the folder that the tests run in.
        program = ("-P", "-m", "prefixd.cli.tethered" if moved else "prefixd.workloads.tethered")
        return DaemonProcess(SETTINGS, directory=None if of is None else of.directory, program=program)

    return make


@pytest.mark.parametrize("memory", ["shared", "streamed"])
@pytest.mark.parametrize("newer", ["daemon", "client"])
def test_a_client_and_a_daemon_of_two_versions(
    newer: str, memory: str, previous: str, client: Callable[..., Any], daemon: Callable[..., DaemonProcess]
) -> None:
    served, used = (HERE, previous) if newer == "daemon" else (previous, HERE)
    with daemon(served) as running:
        assert client(used, running.address, "store", memory) == {"done": [12, 12], "namespaces": 2}
        loaded = client(used, running.address, "load", memory)
        assert loaded == client(served, running.address, "load", memory)
    found = [12, 12]
    assert loaded["done"] == ([found, 12, found, 12] if memory == "shared" else [found, found])


@pytest.mark.parametrize("newer", ["second", "first"])
def test_what_one_version_has_stored_the_other_loads(
    newer: str, previous: str, client: Callable[..., Any], daemon: Callable[..., DaemonProcess]
) -> None:
    """An upgrade, and the way back."""
    first, second = (previous, HERE) if newer == "second" else (HERE, previous)
    with daemon(first) as begun:
        client(first, begun.address, "store", "shared")
        begun.stop()
        continued = daemon(second, of=begun)
        with continued:
            assert client(second, continued.address, "load", "shared")["done"] == [[12, 12], 12, [12, 12], 12]
