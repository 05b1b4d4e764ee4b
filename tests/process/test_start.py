"""What a supervisor may start a process with: closed standard descriptors, no UTF-8, no folder for temporary files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from prefixd.client import Client, InvalidArgumentError, Sampling, ServerUnavailable
from prefixd.process.start import ensure_temporary_folder
from prefixd.v1 import admin_pb2

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
CLOSED = '"$@" <&- >&- 2>&-'
READY = admin_pb2.WorkerStats.STATE_READY


@pytest.mark.parametrize("closed", ["<&-", ">&- 2>&-", "<&- >&- 2>&-", "2>&-"])
def test_no_file_gets_the_number_of_a_standard_descriptor(closed: str, tmp_path: Path) -> None:
    script = f"""
import json, os, sys
from prefixd.process.start import prepare_process
prepare_process()
print("lost or not", file=sys.stdout)
print("lost or not", file=sys.stderr)
memory = os.memfd_create("x")
open({str(tmp_path / "seen")!r}, "w").write(json.dumps([memory, sys.stdin.fileno(), os.get_inheritable(2)]))
"""
    subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", sys.executable, "-c", script], check=True, capture_output=True)
    memory, stdin, inherited = json.loads((tmp_path / "seen").read_text())
    assert memory > 2 and stdin == 0 and inherited


def test_paths_are_utf8_whatever_the_locale_says(tmp_path: Path) -> None:
    script = "import sys; from prefixd.process.start import prepare_process; prepare_process(); print(sys.argv[1])"
    command = [sys.executable, "-c", script, str(tmp_path / "ä")]
    done = subprocess.run(command, env={**os.environ, **ASCII}, check=True, capture_output=True)
    assert done.stdout.decode().strip() == str(tmp_path / "ä")


@pytest.mark.slow
def test_a_store_lies_at_any_path_in_any_locale(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from prefixd_swap import SlabStore
SlabStore.open(Path(sys.argv[1]), 1 << 20).close()
"""
    command = [sys.executable, "-c", script, os.fsencode(tmp_path / "ä")]
    subprocess.run(command, env={**os.environ, **ASCII}, check=True)
    assert (tmp_path / "ä" / "index" / "data.mdb").exists()


def test_an_address_that_grpc_cannot_take_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="PYTHONUTF8=1"):
        Client("unix:/tmp/\udcc3\udca4/s")


def test_without_a_temporary_folder_one_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "gone")])
    monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
    ensure_temporary_folder(tmp_path / "data" / "tmp")
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(tmp_path / "data" / "tmp")
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700


def test_a_temporary_folder_that_works_stays(tmp_path: Path) -> None:
    before = tempfile.gettempdir()
    ensure_temporary_folder(tmp_path / "tmp")
    assert tempfile.gettempdir() == before and not (tmp_path / "tmp").exists()


def _worker(client: Client) -> Any:
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        try:
            if (worker := client.stats().worker).state == READY:
                return worker
        except ServerUnavailable:
            pass
        time.sleep(0.1)
    raise AssertionError("no worker became ready")


@pytest.mark.slow
def test_a_daemon_without_descriptors_in_a_path_of_any_letters(tmp_path: Path) -> None:
    """A worker's descriptor 2 was the GPU tier's memory, and the index could not be opened in such a path."""
    with tempfile.TemporaryDirectory(prefix="pfx-ä-") as folder:
        serve = [sys.executable, "-m", "prefixd", "serve", "--embedded", "--gpu-bytes", "16MiB", "--cpu-bytes", "1MiB"]
        places = ["--data-dir", f"{folder}/data", "--socket", f"{folder}/s", "--config", os.devnull]
        daemon = subprocess.Popen(["sh", "-c", f"exec {CLOSED}", "sh", *serve, *places], env={**os.environ, **ASCII})
        try:
            with Client(f"unix:{folder}/s") as client:
                pid = _worker(client).pid
            for process in (daemon.pid, pid):
                assert {os.readlink(f"/proc/{process}/fd/{number}") for number in range(3)} == {os.devnull}
        finally:
            daemon.terminate()
            assert daemon.wait(60) == 0


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounts need root")
def test_a_daemon_with_a_read_only_tmp(tmp_path: Path) -> None:
    script = """
for each in /tmp /var/tmp; do  # what lies there, this Python perhaps, can still be read
    mount --bind $each $each && mount -o remount,ro,bind $each || exit 77
done
cd /sys
unset TMPDIR; export XDG_RUNTIME_DIR=$1 HOME=$1; shift
exec "$@"
"""
    folder = Path(tempfile.mkdtemp(prefix="prefixd-test-", dir="/run"))
    try:
        serve = [sys.executable, "-m", "prefixd", "serve", "--embedded", "--gpu-bytes", "16MiB", "--cpu-bytes", "1MiB"]
        inside = ["unshare", "-m", "sh", "-c", script, "sh", str(folder), *serve, "--data-dir", str(folder / "data")]
        daemon = subprocess.Popen([*inside, "--config", os.devnull])
        try:
            with Client(f"unix:{folder}/prefixd/prefixd.sock") as client:
                assert _worker(client).pid
                assert [event for event in client.generate("hello", sampling=Sampling(max_tokens=2))]
        finally:
            daemon.terminate()
            if daemon.wait(60) == 77:
                pytest.skip("this container may not mount")
        assert daemon.returncode == 0 and (folder / "data" / "tmp").is_dir()
        nowhere = ["unshare", "-m", "sh", "-c", script.replace("XDG_RUNTIME_DIR=$1 ", ""), "sh", str(folder)]
        refused = subprocess.run(
            [*nowhere, "env", "-u", "XDG_RUNTIME_DIR", *serve, "--data-dir", str(folder / "data")],
            capture_output=True,
            text=True,
        )
        assert refused.returncode == 2 and "set XDG_RUNTIME_DIR, or choose another path" in refused.stderr
    finally:
        shutil.rmtree(folder)
