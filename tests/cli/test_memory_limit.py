"""Limits of memory control groups: of folders that look like a system's, and of a real group where one can be made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from prefixd.base.errors import ConfigError
from prefixd.cli.machine_checks import _check_control_group
from prefixd.settings import Settings
from prefixd.settings.checks import check_start
from prefixd.v1 import admin_pb2, cache_pb2
from prefixd_swap.memory_limit import cgroup_limit, memory_bytes

GIB = 1 << 30
V2 = "30 24 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1 = "31 24 0:27 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
CPU = "32 24 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct"
NO_LIMIT = "9223372036854771712"


def system(folder: Path, own: str, mounts: str, files: Mapping[str, object]) -> Path:
    for name, text in {"proc/self/cgroup": own, "proc/self/mountinfo": mounts, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")
    return folder


POD = "sys/fs/cgroup/kubepods/pod1"
CASES = {
    "version 2, a container's own view": (
        "0::/",
        V2.format(root="/"),
        {"sys/fs/cgroup/memory.max": GIB, "sys/fs/cgroup/memory.current": 5},
        (GIB, 5, "memory.max"),
    ),
    "version 2, a group above": (
        "0::/kubepods/pod1/main",
        V2.format(root="/"),
        {f"{POD}/main/memory.max": "max", f"{POD}/memory.max": 2 * GIB, "sys/fs/cgroup/kubepods/memory.max": 3 * GIB},
        (2 * GIB, 0, "memory.max"),
    ),
    "version 2, high is below max": (
        "0::/a",
        V2.format(root="/"),
        {"sys/fs/cgroup/a/memory.max": 2 * GIB, "sys/fs/cgroup/a/memory.high": GIB},
        (GIB, 0, "memory.high"),
    ),
    "version 2, the mount shows a part": (
        "0::/kubepods/pod1",
        V2.format(root="/kubepods/pod1"),
        {"sys/fs/cgroup/memory.max": GIB},
        (GIB, 0, "memory.max"),
    ),
    "version 2, a process of another container": (
        "0::/../pod2",
        V2.format(root="/"),
        {"sys/fs/cgroup/memory.max": GIB},
        (GIB, 0, "memory.max"),
    ),
    "version 1": (
        "4:memory:/docker/1\n3:cpu,cpuacct:/",
        f"{V1.format(root='/')}\n{CPU}",
        {
            "sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes": GIB,
            "sys/fs/cgroup/memory/docker/1/memory.usage_in_bytes": 7,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT,
        },
        (GIB, 7, "memory.limit_in_bytes"),
    ),
    "version 1, a container, limited above what it sees": (
        "4:memory:/docker/1",
        V1.format(root="/docker/1"),
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT,
            "sys/fs/cgroup/memory/memory.stat": f"cache 1\nhierarchical_memory_limit {GIB}\nhierarchical_memsw_limit 9",
        },
        (GIB, 0, "memory.stat"),
    ),
    "both versions, memory in 1": (
        "4:memory:/a\n0::/",
        f"{V1.format(root='/')}\n{V2.format(root='/').replace('/cgroup rw', '/cgroup/unified rw')}",
        {"sys/fs/cgroup/memory/a/memory.limit_in_bytes": GIB},
        (GIB, 0, "memory.limit_in_bytes"),
    ),
    "no limit": (
        "4:memory:/a\n0::/",
        f"{V1.format(root='/')}\n{V2.format(root='/')}",
        {"sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory/a/memory.limit_in_bytes": NO_LIMIT},
        None,
    ),
    "no groups": ("0::/", "24 1 0:22 / / rw - ext4 /dev/root rw", {}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_the_least_limit_counts(tmp_path: Path, case: str) -> None:
    own, mounts, files, expected = CASES[case]
    limit = cgroup_limit(root=system(tmp_path, own, mounts, files))
    assert (limit and (limit.nbytes, limit.used_bytes, limit.source.name)) == expected
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory_bytes(tmp_path) == (machine if expected is None else min(machine, expected[0]))


def test_no_proc_is_no_limit(tmp_path: Path) -> None:
    assert cgroup_limit(root=tmp_path) is None


def limited(folder: Path, nbytes: int) -> Path:
    return system(folder, "0::/", V2.format(root="/"), {"sys/fs/cgroup/memory.max": nbytes})


def test_tiers_beyond_the_limit_are_refused_before_they_are_killed(tmp_path: Path) -> None:
    """ "ready", and then SIGKILL with an empty log."""
    given = {"data_dir": tmp_path / "d", "server.socket": tmp_path / "s", "disk.bytes": 0}
    root = limited(tmp_path, 512 << 20)
    with pytest.raises(
        ConfigError, match=r"536870912 \(.*memory\.max\).*lower cpu\.bytes, set cpu\.bytes = auto, or r"
    ):
        check_start(Settings.load(None, {**given, "cpu.bytes": "512MiB"}, {}), root)
    check_start(Settings.load(None, {**given, "cpu.bytes": "400MiB"}, {}), root)
    with_model = {**given, "worker.embedded": True, "gpu.device": "cpu", "cpu.bytes": "64MiB", "gpu.bytes": "256MiB"}
    with pytest.raises(ConfigError, match=r"for its worker, 268435456 for the GPU tier"):
        check_start(Settings.load(None, with_model, {}), root)


def test_auto_is_half_of_what_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixd_swap.memory_limit.memory_bytes", lambda: 2 * GIB)
    assert Settings.load(None, {"cpu.bytes": "auto"}, {}).cpu.bytes == (2 * GIB - (256 << 20)) // 2
    monkeypatch.setattr("prefixd_swap.memory_limit.memory_bytes", lambda: 256 << 20)
    assert Settings.load(None, {"cpu.bytes": "auto"}, {}).cpu.bytes == 32 << 20


def test_doctor_says_whose_group_pays(tmp_path: Path) -> None:
    tiers: dict[int, admin_pb2.TierStats] = {cache_pb2.TIER_CPU: admin_pb2.TierStats(capacity_bytes=GIB)}
    check = _check_control_group(0, tiers, limited(tmp_path / "small", GIB))
    assert "memory.max" in check.found and "cpu.bytes = auto" in check.remedy
    assert not _check_control_group(0, tiers, limited(tmp_path / "large", 2 * GIB)).remedy
    assert _check_control_group(0, tiers, tmp_path).found == "it limits no memory"


@pytest.fixture
def group() -> Iterator[Path]:
    """A real control group of version 1 or 2 with 256 MiB."""
    for top, name in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        folder = Path(top) / f"prefixd-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / name).write_text(str(256 << 20))
        except OSError:
            folder.rmdir()
            continue
        yield folder
        folder.rmdir()
        return
    pytest.skip("no control group can be made here")


@pytest.mark.slow
def test_in_a_real_group(group: Path, tmp_path: Path) -> None:
    """Refused with the remedy; with auto the daemon starts, and its own group pays for the arena that it populates."""
    inside = [
        "sh",
        "-c",
        f'echo $$ > {group}/cgroup.procs && exec "$@"',
        "sh",
        sys.executable,
        "-m",
        "prefixd",
        "serve",
    ]
    places = ["--data-dir", str(tmp_path / "d"), "--socket", str(tmp_path / "s"), "--config", os.devnull, "--json"]
    done = subprocess.run([*inside, *places, "--cpu-bytes", "1GiB"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "its control group allows 268435456" in done.stderr and "auto" in done.stderr
    daemon = subprocess.Popen([*inside, *places, "--cpu-bytes", "auto"], stdout=subprocess.PIPE)
    try:
        assert daemon.stdout is not None and json.loads(daemon.stdout.readline())["pid"] == daemon.pid
        asked = subprocess.run(
            [sys.executable, "-m", "prefixd", "doctor", "--json", "--address", str(tmp_path / "s")],
            capture_output=True,
            timeout=60,
        )
        checks = {check["name"]: check for check in json.loads(asked.stdout)["environment"]}
        assert "256.0 MiB" in checks["control group"]["found"] and not checks["control group"]["remedy"]
    finally:
        daemon.terminate()
        assert daemon.wait(60) == 0
