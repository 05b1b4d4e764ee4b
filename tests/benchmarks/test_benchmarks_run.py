"""Each benchmark as a user runs it, with as little to do as still goes through everything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from prefixd.client import Client

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def result_of(module: str, folder: Path, *arguments: str) -> dict[str, Any]:
    file, name = folder / "result.json", module.rpartition(".")[2]
    # Settings of the caller must not reach the daemon that is measured.
    done = run(f"benchmarks.{module}", "--json", str(file), *arguments, PREFIXD_CPU__BYTES="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result: dict[str, Any] = json.loads(file.read_text())
    assert result["benchmark"] == name
    assert set(result["circumstances"]) >= {"machine", "cpus", "python", "versions", "commit", "command"}
    assert result["circumstances"]["versions"]["grpcio"]
    assert result["circumstances"]["command"][:3] == [name, "--json", file.name], "of a file its name alone"
    return result


def test_match(tmp_path: Path) -> None:
    result = result_of("match", tmp_path, "--blocks", "20", "--repeats", "5")
    assert result["empty_rpc_p50_us"] > 0 and 0 < result["p50_us"] <= result["p99_us"]
    assert (result["blocks"], len(result["samples_us"])) == (20, 5)


def test_what_if(tmp_path: Path) -> None:
    least = ("--requests", "400", "--blocks", "200", "--policies", "lru", "--seeds", "1")
    load = ("--seconds", "4", "--prompt-blocks", "20", "--most-share", "1")
    result = result_of("what_if", tmp_path, *least, *load)
    assert result["worst_error_points"] < 2 and result["sizes"] == 10
    assert all(cost["ghosts_s"] > 0 and cost["prompts"] for cost in result["cost"].values())


def test_shared_memory(tmp_path: Path) -> None:
    sizes = ("--blocks", "4", "--block-bytes", "64KiB", "--rounds", "2", "--threads", "2")
    result = result_of("shared_memory", tmp_path, *sizes)
    assert result["store_ratio"] == pytest.approx(result["store_gbps"] / result["plain_copy_gbps"], rel=0.1, abs=0.01)
    assert result["load_ratio"] == pytest.approx(result["load_gbps"] / result["plain_copy_gbps"], rel=0.1, abs=0.01)


def trace(folder: Path) -> Path:
    requests = [[1, 2, 3], [1, 2, 4], [5], [1, 2, 3, 6], [5, 2]]
    lines = [
        json.dumps({"timestamp": 0, "input_length": 512 * len(ids) + 9, "output_length": 1, "hash_ids": [*ids, 99]})
        for ids in requests
    ]
    file = folder / "trace.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_trace(tmp_path: Path) -> None:
    result = result_of("trace", tmp_path, "--trace", str(trace(tmp_path)), "--disk-bytes", "0")
    assert (result["requests"], result["blocks"], result["wrong_bytes"]) == (5, 13, 0)
    assert result["hit_blocks"] == result["achievable_hit_blocks"] == 2 + 3 + 1
    assert result["hit_rate"] == result["achievable_hit_rate"] == pytest.approx(6 / 13)
    assert result["hits"] == {"gpu": 0, "cpu": 6, "disk": 0}


def test_a_bad_trace_is_one_line_and_status_2(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    for file, what in [(bad, "line 1: hash_ids"), (tmp_path / "none", "Mooncake"), (tmp_path, "Is a directory")]:
        done = run("benchmarks.trace", "--trace", str(file))
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert str(file) in done.stderr and what in done.stderr


def test_nobody_at_the_address_is_one_line_and_status_2(tmp_path: Path) -> None:
    done = run("benchmarks.match", "--address", f"unix:{tmp_path}/nobody")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and "nobody" in done.stderr


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_result_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path, option: str) -> None:
    done = run("benchmarks.urgency", option, str(tmp_path))
    assert done.returncode == 2 and done.stdout == ""
    assert f"cannot write to {tmp_path}; choose another file" in done.stderr


@pytest.mark.parametrize("text", ["lots", "-1", "12QiB"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    done = run("benchmarks.trace", f"--cpu-bytes={text}")
    assert done.returncode == 2
    assert text in done.stderr and "8GiB" in done.stderr


def test_sigterm_ends_a_benchmark_and_its_daemon(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.match", "--repeats", "100000000"],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(folder)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            deadline = time.monotonic() + 120
            while not (sockets := list(folder.glob("*/prefixd.sock"))):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)
            with Client(f"unix:{sockets[0]}") as client:
                while not client.stats().sessions:
                    assert process.poll() is None and time.monotonic() < deadline
                    time.sleep(0.02)
            (lock,) = sockets[0].parent.glob("data/daemon.lock")
            daemon = int(lock.read_text())
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 128 + signal.SIGTERM
            assert process.stderr is not None and process.stderr.read() == ""
        finally:
            process.kill()
    assert list(folder.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(daemon, 0)


def test_salts(tmp_path: Path) -> None:
    result = result_of("checks.salts", tmp_path, "--salts", "500", "--through-daemon", "40", "--in-use", "8")
    assert (result["refused"], result["daemon_refused"], result["daemon_violations"]) == (0, 0, [])
    assert result["found_in_use"] == result["asked_in_use"] > 50 and result["stored"] > 60
    assert result["daemon_found_in_use"] == result["daemon_asked_in_use"] == 3


def test_why(tmp_path: Path) -> None:
    """The plants on disk take four starts: `make test-operator` runs them."""
    result = result_of("checks.why", tmp_path, "--each", "1", "--only", "memory")
    assert result["planted"] == result["named"] == len(result["kinds"]) == 6
