"""`prefixd plan`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefixd.planner.machine.calibration import Calibration
from tests.waiting import wait_until

Cli = Callable[..., Any]
MACHINE = ("--model", "llama-3.1-8b", "--gpu", "2GiB")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twelve requests, of which each second one begins as the one before does."""
    file = tmp_path / "trace.jsonl"
    lines = []
    for at in range(12):
        ids = [at // 2, 50 + at // 2, 90 + at, 200]
        lines.append({"timestamp": 1000 * at, "input_length": 1600, "output_length": 3, "hash_ids": ids})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_a_plan_says_what_is_found_and_what_it_assumes(cli: Cli, trace: Path, tmp_path: Path) -> None:
    done = cli("plan", "--trace", str(trace), *MACHINE, "--cpu", "4GiB", "--disk", "8GiB", "--out", "plan.json")
    assert done.exit_code == 0, done.stderr
    for words in (
        "Assumed:",
        "h100: 989 TFLOP/s of which 50% are reached",
        "12 requests of trace.jsonl, arriving in 11 s",
        "no prompt contains generated tokens of earlier requests",
        "32.0%",  # six requests find two of their blocks: 6 * 1024 of 12 * 1600
        "A cache without limits would find 32.0% of the prompt tokens.",
        "optimum",
    ):
        assert words in done.stdout
    plan = json.loads((tmp_path / "plan.json").read_text())
    (point,) = plan["points"]
    assert f" {1e3 * point['ttft_s']['p50']:.3g} ms " in done.stdout and 0 < point["ttft_s"]["p50"] < 0.5
    assert point["hit_rate"] == 0.32 and point["requests"] == 12 and point["cpu_bytes"] == 4 << 30
    assert plan["curve"]["hit_rates"]["lru"][-1] == plan["curve"]["hit_rates"]["optimum"][-1] == 12 / 36
    assert plan["assumptions"]


@pytest.mark.slow
def test_a_sweep_says_how_much_is_enough(cli: Cli, trace: Path, tmp_path: Path) -> None:
    done = cli(
        *("plan", "--trace", str(trace), *MACHINE, "--sweep", "--cpu", "1GiB,4GiB", "--disk", "0"),
        *("--policy", "fcfs", "--no-curve", "--jobs", "2", "--out", "plan.json", "--plot", "plan.png"),
    )
    assert done.exit_code == 0, done.stderr
    assert "Enough: 1.0 GiB of CPU memory" in done.stdout
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert [point["cpu_bytes"] >> 30 for point in plan["points"]] == [1, 4]
    assert plan["enough"]["cpu_bytes"] == 1 << 30 and plan["curve"] is None
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_codec_is_planned_beside_exact_at_four_sizes_of_the_disk(cli: Cli, trace: Path, tmp_path: Path) -> None:
    done = cli(
        *("plan", "--trace", str(trace), *MACHINE, "--cpu", "128MiB", "--disk", "1GiB", "--codec", "int8"),
        *("--gpu", "512MiB"),
        *("--no-curve", "--jobs", "2", "--out", "plan.json", "--plot", "plan.png"),
    )
    assert done.exit_code == 0, done.stderr
    assert "int8: a block takes 0.5" in done.stdout and "saved" in done.stdout
    points = json.loads((tmp_path / "plan.json").read_text())["points"]
    assert [(point["disk_bytes"] >> 20, point["codec"]) for point in points] == [
        (mib, codec) for mib in (256, 512, 1024, 2048) for codec in ("exact", "int8")
    ]
    for exact, coded in zip(points[::2], points[1::2], strict=True):
        assert coded["hit_rate"] >= exact["hit_rate"] and exact["disk_saved_bytes"] == 0 < coded["disk_saved_bytes"]
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_sweep_names_the_policy_with_the_soonest_first_token(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short prompts behind long ones, all at once: `shortest-ready` lets the short ones go first."""
    lines = []
    for at in range(24):
        ids = [1000 * at + block for block in range(1 if at % 4 else 24)]
        lines.append({"timestamp": 0, "input_length": 512 * len(ids), "output_length": 3, "hash_ids": ids})
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ("plan", "--trace", str(tmp_path / "mixed.jsonl"), *MACHINE, "--sweep", "--cpu", "1GiB,2GiB", "--no-curve")
    line = "With these sizes the first token comes soonest with shortest-ready and lru: after"
    for chosen, told in ((0, True), (1, False)):  # what is enough is fcfs, then shortest-ready itself
        monkeypatch.setattr("prefixd.cli.output.tables.plan_tables.enough", lambda points, at=chosen: points[at])
        done = cli(*words, "--jobs", "2", "--max-running", "1", "--policy", "fcfs,shortest-ready")
        assert done.exit_code == 0, done.stderr
        said = " ".join(done.stdout.split())
        assert (line in said) is told
        assert "Hits by tier: the tier that had the tokens when the daemon loaded them" in said


def test_the_curve_is_of_all_requests_where_only_some_are_timed(cli: Cli, trace: Path, tmp_path: Path) -> None:
    words = ("plan", "--trace", str(trace), *MACHINE, "--cpu", "1GiB", "--out", "plan.json", "--jobs", "1")
    done = cli(*words, "--timed", "4")
    assert done.exit_code == 0, done.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["points"][0]["requests"] == 4 and any(line.startswith("4 requests of") for line in plan["assumptions"])
    assert plan["curve"]["hit_rates"]["optimum"][-1] == 12 / 36, "as of the whole trace"
    done = cli(*words, "--timed", "4", "--limit", "3")
    assert json.loads((tmp_path / "plan.json").read_text())["points"][0]["requests"] == 3


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--cpu", "lots"), "--cpu lots: write a size"),
        (("--cpu", "1GiB,2GiB"), "several sizes need --sweep"),
        (("--cpu", "1GiB", "--policy", "fcfs,fpf"), "several policies need --sweep"),
        (("--cpu", "1GiB", "--policy", "best"), "scheduler.policy"),
        (("--cpu", "1GiB", "--set", "cpu.bytes=3"), "cpu.bytes is given by its flag and by --set"),
        (("--cpu", "1GiB", "--set", "gpu.bytes=3GiB"), "gpu.bytes is given by its flag and by --set"),
        (("--cpu", "1GiB", "--look-ahead", "1", "--set", "scheduler.look_ahead=2"), "scheduler.look_ahead is given by"),
        (("--cpu", "1GiB", "--gpu", "1000000TiB"), "at most 4,194,304 are planned"),
        (("--cpu", "1GiB", "--hardware", "h10"), "did you mean h100?"),
        (("--cpu", "1GiB", "--calibration", "none.json"), "make one with `prefixd doctor --calibrate"),
        (("--cpu", "1GiB", "--out", "no/dir/plan.json"), "cannot write to"),
        (("--cpu", "1GiB", "--gpu", "64MiB"), "the smallest request needs 2"),
        (("--cpu", "1GiB", "--disk", "1GiB", "--codec", "int4"), "use one of exact, lossless, int8, k8v4"),
        (("--cpu", "1GiB", "--codec", "int8"), "--codec int8: the plan has no disk tier; give one with --disk"),
        (("--cpu", "4KiB"), "cpu.bytes = 4096 holds no block"),
        (("--cpu", "200"), "write a unit, such as 200GiB"),
        (("--cpu", "1GiB", "--disk", "1MiB"), "disk.bytes = 1048576 holds no block"),
        (("--cpu", "9000000TiB"), "more than 1 EiB"),
        (("--cpu", "1GiB", "--look-ahead", "9" * 30), "from 0 to 1,000,000"),
        (("--cpu", "1GiB", "--plot", "plan.foo"), "names no kind of picture"),
    ],
)
def test_what_cannot_be_planned_is_one_line(cli: Cli, trace: Path, arguments: tuple[str, ...], line: str) -> None:
    done = cli("plan", "--trace", str(trace), *MACHINE, "--no-curve", *arguments)
    assert done.exit_code in (1, 2) and line in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("prefixd: ")


def test_a_trace_that_cannot_be_read_is_named(cli: Cli, trace: Path, tmp_path: Path) -> None:
    def said(file: Path, *more: str) -> str:
        done = cli("plan", "--trace", str(file), "--model", "llama-3-8b", "--gpu", "2GiB", "--cpu", "1GiB", *more)
        assert done.exit_code == 2
        return str(done.stderr)

    assert "record one with `prefixd trace record`, or get one from https://github.com" in said(tmp_path / "none.jsonl")
    trace.write_text('{"timestamp": 0}\n')
    assert "line 1: hash_ids is not a list" in said(trace)
    trace.write_text("")
    assert "has no request" in said(trace)
    trace.write_text("[" * 100_000)
    assert "line 1: not JSON" in said(trace)
    assert "reads its trace more than once" in said(Path("/dev/null"))
    lines = [{"timestamp": at, "input_length": 512, "output_length": 1, "hash_ids": [1]} for at in (5000, 0, 1 << 50)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "request 2 has timestamp 0, less than the 5000 of the one before it; sort the trace" in said(trace)
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines[1:]))
    assert "comes 1,125,899,906,843 s after the first" in said(trace)


def test_a_daemon_is_planned_with_its_own_configuration(cli: Cli, trace: Path, tmp_path: Path) -> None:
    (tmp_path / "daemon.toml").write_text(
        '[worker]\nmodel = "/models/one"\nmore_models = "/models/two"\nmax_running = 7\nblock_tokens = 256\n'
        '[scheduler]\npolicy = "lpm"\n[cache]\neviction = "fifo"\n[disk]\ncodec = "k8v4"\n'
    )
    words = ("plan", "--trace", str(trace), *MACHINE, "--cpu", "1GiB", "--no-curve", "--config", "daemon.toml")
    done = cli(*words)
    assert done.exit_code == 0, done.stderr
    assert "7 requests run at once, passes of 2048 tokens, blocks of 256 tokens" in done.stdout
    assert "lpm" in done.stdout and "fifo" in done.stdout and "k8v4: a block takes 0." in done.stdout
    assert "3 requests run at once" in cli(*words, "--max-running", "3").stdout, "a flag goes first"
    done = cli(*words, "--max-running", "3", "--set", "worker.max_running=4")
    assert done.exit_code == 2 and "worker.max_running is given by its flag and by --set" in done.stderr


def test_figures_stand_below_their_headings_without_a_disk(cli: Cli, trace: Path) -> None:
    done = cli("plan", "--trace", str(trace), *MACHINE, "--sweep", "--cpu", "4GiB", "--disk", "0,8GiB", "--no-curve")
    assert done.exit_code == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(" 4.0 GiB")]
    assert [row[-1] for row in rows] == ["0", "0"] and len({len(row) for row in rows}) == 1, rows


def test_what_is_assumed_names_what_does_not_fit_together(cli: Cli, trace: Path, tmp_path: Path) -> None:
    measured = Calibration(
        machine="here",
        disk_read_bytes_per_s=1e9,
        disk_write_bytes_per_s=1e9,
        disk_latency_s=1e-4,
        copy_bytes_per_s=1e10,
        copy_latency_s=1e-5,
        model="another",
        pass_s=1e-3,
        token_s=1e-5,
        decoded_s=2.5e-3,
        attended_s=1e-9,
        begun_s=1e-3,
    )
    (tmp_path / "here.json").write_text(measured.to_json())
    words = ("--cpu", "0", "--disk", "8GiB", "--no-curve", "--calibration", str(tmp_path / "here.json"))
    done = cli("plan", "--trace", str(trace), *MACHINE, *words)
    assert done.exit_code == 0, done.stderr
    assert "those of another, NOT of llama-3.1-8b" in done.stdout and "the disk stays empty" in done.stdout
    assert "1 ms a pass, 10 us a token of a prompt, 2,500 us a token decoded" in done.stdout
    # A daemon calls a model by its directory's name.
    for served, name in (("Llama-3.1-8B", "llama-3.1-8b"), ("embedded-v2", "embedded")):
        (tmp_path / "here.json").write_text(replace(measured, model=served).to_json())
        done = cli("plan", "--trace", str(trace), "--model", name, "--gpu", "2GiB", *words)
        assert done.exit_code == 0 and f"measured, {served} on here" in done.stdout and "NOT of" not in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.slow
def test_a_plan_that_is_ended_takes_its_processes_along(tmp_path: Path, number: signal.Signals) -> None:
    file = tmp_path / "trace.jsonl"
    lines = ({"timestamp": at, "input_length": 2048, "output_length": 9, "hash_ids": [at] * 4} for at in range(20_000))
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["plan", "--trace", str(file), *MACHINE, "--cpu", "1GiB,2GiB", "--sweep", "--jobs", "2", "--no-curve"]
    plan = subprocess.Popen([sys.executable, "-m", "prefixd", *words], stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: len(_spawned_by(plan.pid)) == 2, "both work")
        workers = _spawned_by(plan.pid)
        time.sleep(1)  # past their start
        plan.send_signal(number)
        _, said = plan.communicate(timeout=30)
    finally:
        plan.kill()
    assert "Traceback" not in said
    wait_until(lambda: not any(map(_runs, workers)), "workers are left")


def _spawned_by(parent: int) -> list[int]:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [pid for pid in map(int, children.split()) if "spawn_main" in _read(pid, "cmdline")]


def _runs(pid: int) -> bool:
    status = _read(pid, "status")
    return bool(status) and "\nState:\tZ" not in status


def _read(pid: int, file: str) -> str:
    """Of what the system says of a process; nothing of one that is gone."""
    try:
        return Path(f"/proc/{pid}/{file}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
