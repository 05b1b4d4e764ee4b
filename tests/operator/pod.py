"""A container of a manifest as a process: its own PID, mount and IPC namespace, a read-only root, its volumes, its
user, no capability but those that it adds, no new privilege, and its memory limit in a control group of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.operator.programs import ROOT

_START = """
set -e
mount -t tmpfs tmpfs "$WORK"
mkdir "$WORK/upper" "$WORK/work" "$WORK/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$WORK/upper,workdir=$WORK/work" "$WORK/root"
cd "$WORK/root"
chmod go+x root
mount -t proc proc proc
mount --rbind /dev dev
mount --rbind /sys sys
mount -t tmpfs tmpfs run
for volume in $VOLUMES; do
    mkdir -p ".${volume##*:}"
    mount --bind "${volume%%:*}" ".${volume##*:}"
done
mount -o remount,ro .
[ -z "$CGROUP" ] || echo 0 > "$CGROUP/cgroup.procs"
exec chroot . setpriv --reuid="$USER_ID" --regid="$USER_ID" --groups="$USER_ID" --bounding-set="$CAPABILITIES" \
    --inh-caps=-all --no-new-privs --pdeathsig=keep env --chdir=/ "$@"
"""
_NAMESPACES = ("unshare", "--mount", "--pid", "--ipc", "--fork", "--kill-child")
_GROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
)


class MemoryGroup:
    """A control group with a limit; removed by `close`. Skips the test where none can be made."""

    def __init__(self, nbytes: int) -> None:
        for top, limit, used in _GROUPS:
            folder = top / f"prefixd-test-{os.getpid()}-{time.monotonic_ns()}"
            try:
                folder.mkdir()
            except OSError:
                continue
            try:
                (folder / limit).write_text(str(nbytes))
            except OSError:
                folder.rmdir()
                continue
            self.folder, self._used = folder, folder / used
            return
        pytest.skip("no control group with a memory limit can be made here")

    @property
    def used_bytes(self) -> int:
        """Bytes that are charged to it."""
        return int(self._used.read_text())

    def close(self) -> None:
        """Removes it once its processes have ended."""
        give_up = time.monotonic() + 10
        while self.folder.exists():
            with suppress(OSError):
                self.folder.rmdir()
            assert time.monotonic() < give_up, f"{self.folder} has processes"
            time.sleep(0.01)


class Node:
    """A folder for each hostPath, and what Kubernetes fills in."""

    def __init__(self, folder: Path, config: str) -> None:
        self._folder = folder
        (folder / "config").mkdir()
        (folder / "config/prefixd.toml").write_text(config)

    def volumes(self, pod: Mapping[str, Any], container: Mapping[str, Any]) -> list[str]:
        """`SOURCE:TARGET` of each mount."""
        sources = {}
        for volume in pod.get("volumes", []):
            if "hostPath" in volume:
                sources[volume["name"]] = self._folder / volume["hostPath"]["path"].strip("/").replace("/", "-")
                sources[volume["name"]].mkdir(exist_ok=True)
            elif "configMap" in volume:
                sources[volume["name"]] = self._folder / "config"
        return [f"{sources[m['name']]}:{m['mountPath']}" for m in container["volumeMounts"] if m["name"] in sources]


class Container:
    """A running container; `python` stands for the image's programs."""

    def __init__(
        self,
        container: Mapping[str, Any],
        volumes: Sequence[str],
        words: Sequence[str | Path],
        log: Path,
        group: MemoryGroup | None = None,
    ) -> None:
        security = container.get("securityContext", {})
        assert not security or security["readOnlyRootFilesystem"]
        added = (f"+{name.lower()}" for name in security.get("capabilities", {}).get("add", ()))
        self._work = tempfile.mkdtemp(prefix="pfx-pod-")
        self.log = log
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "swap", ROOT / "scheduler"))),
            "PYTHONDONTWRITEBYTECODE": "1",
            "WORK": self._work,
            "VOLUMES": " ".join(volumes),
            "CGROUP": "" if group is None else str(group.folder),
            "USER_ID": str(security.get("runAsUser", 0)),
            "CAPABILITIES": ",".join(("-all", *added)) if security else "+all",
        }
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", *_NAMESPACES, "sh", "-c", _START, "sh", *words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self) -> int:
        """The container's first process, as the node numbers it."""
        of = self._process.pid
        return int(Path(f"/proc/{of}/task/{of}/children").read_text().split()[0])

    def terminate(self) -> None:
        """What the kubelet does first."""
        os.kill(self.pid, signal.SIGTERM)

    def wait(self, seconds: float) -> int:
        """Its exit status; kills it after so many seconds."""
        try:
            return self._process.wait(seconds)
        finally:
            self.kill()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends it, if it still runs."""
        self._process.kill()
        self._process.wait()
        with suppress(OSError):
            os.rmdir(self._work)


def daemon_words(container: Mapping[str, Any]) -> list[str]:
    """The container's command, with this tree in place of the image."""
    program, *rest = [*container["command"], *container["args"]]
    assert program == "prefixd"
    return [sys.executable, "-m", "prefixd", *rest]
