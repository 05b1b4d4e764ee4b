"""The commands as a user types them, against a real daemon with the model that comes with prefixd."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_until

pytestmark = pytest.mark.slow

PREFIXD = [sys.executable, "-m", "prefixd"]
SIZES = ["--gpu-bytes", "32MiB", "--cpu-bytes", "32MiB", "--disk-bytes", "64MiB"]
PROMPT = "It was the best of times, it was the worst of times. " * 4

Prefixd = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """An empty home, in a short path: a socket's is limited."""
    with tempfile.TemporaryDirectory(prefix="pfx-") as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def environment(home: Path) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("PREFIXD_", "XDG_"))}
    return ours | {"HOME": str(home), "XDG_RUNTIME_DIR": str(home / "run"), "OMP_WAIT_POLICY": "PASSIVE"}


@pytest.fixture(scope="module")
def prefixd(environment: dict[str, str], home: Path) -> Prefixd:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*PREFIXD, *arguments],
            env=environment,
            cwd=home,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )

    return run


@pytest.fixture(scope="module")
def serving(environment: dict[str, str], home: Path) -> Iterator[subprocess.Popen[str]]:
    """`prefixd serve` on the default socket."""
    with subprocess.Popen(
        [*PREFIXD, "serve", "--embedded", *SIZES, "--log-level", "warning"],
        env=environment,
        cwd=home,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            assert ready.startswith(f"prefixd is ready at unix:{home}/run/prefixd/prefixd.sock")
            yield process
        finally:
            process.terminate()
            process.wait(60)


def answer(result: subprocess.CompletedProcess[str]) -> Any:
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_generate_finds_its_prompt_again(serving: object, prefixd: Prefixd) -> None:
    first = prefixd("generate", PROMPT, "--max-tokens", "8")
    assert first.returncode == 0, first.stderr
    assert first.stdout.endswith("\n") and len(first.stdout) == 9
    assert "cached: none]" in first.stderr
    again = prefixd("generate", PROMPT, "--max-tokens", "8")
    assert again.stdout == first.stdout
    assert "from gpu]" in again.stderr
    events = prefixd("generate", PROMPT, "--max-tokens", "8", "--json").stdout.splitlines()
    finished = json.loads(events[-1])
    assert finished["hit_tokens"]["gpu"] >= len(PROMPT) - 16
    assert "".join(json.loads(event).get("text", "") for event in events) == first.stdout.rstrip("\n")


def test_what_is_cached_can_be_seen_pinned_and_dropped(serving: object, prefixd: Prefixd) -> None:
    text = "Call me Ishmael. Some years ago, never mind how long precisely. " * 2
    assert prefixd("generate", text, "--max-tokens", "2").returncode == 0
    newest = answer(prefixd("ls", "--json"))["prefixes"][0]
    assert newest["tokens"] >= len(text) - 16
    key = newest["key"]
    assert key[:12] in prefixd("ls").stdout
    inspected = answer(prefixd("inspect", key, "--json"))
    assert [block["index"] for block in inspected["blocks"]] == list(range(newest["blocks"]))
    assert bytes(inspected["blocks"][0]["token_ids"]).decode() == text[:16]
    assert answer(prefixd("pin", key, "--json"))["blocks"] == newest["blocks"]
    assert answer(prefixd("inspect", key[:8], "--json"))["prefix"]["pinned"] is True
    refused = prefixd("evict", key)
    assert refused.returncode == 1 and "is pinned; unpin it first" in refused.stderr
    assert answer(prefixd("unpin", key, "--json"))["blocks"] == newest["blocks"]
    assert answer(prefixd("evict", key, "--json"))["evicted_blocks"] >= 1
    gone = prefixd("inspect", key)
    assert gone.returncode == 1 and key in gone.stderr and gone.stderr.count("\n") == 1


def test_a_prompt_is_looked_up_as_text_and_its_hits_are_counted(serving: object, prefixd: Prefixd) -> None:
    text = "All happy families are alike. " * 3
    for _ in range(2):
        assert prefixd("generate", text, "--max-tokens", "2").returncode == 0
    inspected = answer(prefixd("inspect", "--prompt", text, "--text", "--json"))
    assert "".join(block["text"] for block in inspected["blocks"]) == text[: inspected["prefix"]["tokens"]]
    assert inspected["prefix"]["hits"] == 1
    assert inspected["prefix"]["key"] in {
        each["key"] for each in answer(prefixd("ls", "--by", "hits", "--json"))["prefixes"]
    }
    unknown = prefixd("pin", "--prompt", "never sent before, so nothing is cached")
    assert unknown.returncode == 1 and "nothing of the prompt's" in unknown.stderr


def test_a_cold_daemon_is_warmed_up_from_a_file(serving: object, prefixd: Prefixd, tmp_path: Path) -> None:
    text = "It was the best of times, it was the worst of times. " * 2
    assert prefixd("generate", text, "--max-tokens", "2").returncode == 0
    file = str(tmp_path / "warm.jsonl")
    wait_until(lambda: prefixd("inspect", "--prompt", text).returncode == 0)
    assert answer(prefixd("warm", "record", file, "--tokens", "--json"))["prefixes"] >= 1
    warm = answer(prefixd("warm", "load", file, "--json"))
    assert warm["missing_tokens"] == warm["computed_tokens"] == 0 and sum(warm["found_tokens"].values()) > 0
    assert answer(prefixd("evict", "--all", "--yes", "--json"))["kept_blocks"] == 0
    assert answer(prefixd("warm", "load", file, "--no-compute", "--json"))["missing_tokens"] == warm["tokens"]
    computed = answer(prefixd("warm", "load", file, "--json"))
    assert computed["computed_tokens"] > 0 and computed["missing_tokens"] == 0 and not computed["failed"]


def test_a_drained_daemon_takes_work_again(serving: object, prefixd: Prefixd) -> None:
    assert prefixd("drain").returncode == 0
    refused = prefixd("generate", PROMPT)
    assert refused.returncode == 1 and "drain" in refused.stderr
    assert answer(prefixd("undrain", "--json")) == {"was_draining": True}
    assert prefixd("generate", PROMPT, "--max-tokens", "2").returncode == 0


def test_stats_and_flush(serving: object, prefixd: Prefixd) -> None:
    assert prefixd("generate", PROMPT, "--max-tokens", "2").returncode == 0
    answer(prefixd("flush", "--json"))
    stats = answer(prefixd("stats", "--json"))
    tiers = {tier["tier"]: tier for tier in stats["tiers"]}
    assert set(tiers) == {"gpu", "cpu", "disk"}
    assert tiers["disk"]["blocks"] >= len(PROMPT) // 16
    assert stats["worker"]["state"] == "ready"
    assert "relaxed-fpf" in prefixd("stats").stdout


def test_mistakes_are_answered_in_one_line(serving: object, prefixd: Prefixd) -> None:
    for status, *arguments in (
        (1, "inspect", "ffff"),
        (2, "inspect", "f"),
        (2, "generate", ""),
        (2, "generate", "--token-ids", "99999"),
    ):
        result = prefixd(*arguments)
        assert result.returncode == status, arguments
        assert result.stderr.startswith("prefixd: ") and result.stderr.count("\n") == 1


def test_a_second_daemon_on_the_same_socket_is_refused(serving: object, prefixd: Prefixd) -> None:
    result = prefixd("serve", *SIZES[2:], "--log-level", "error")
    assert result.returncode == 2
    assert result.stderr.startswith("prefixd: ") and result.stderr.count("\n") == 1
    assert "in use" in result.stderr
    assert prefixd("stats").returncode == 0


def test_drain_with_shutdown_ends_the_daemon(serving: subprocess.Popen[str], prefixd: Prefixd) -> None:
    """Last: it ends the daemon of this module."""
    assert prefixd("drain", "--shutdown").returncode == 0
    assert serving.wait(60) == 0
    result = prefixd("stats")
    assert result.returncode == 1 and "`prefixd serve`" in result.stderr


def test_ctrl_c_ends_a_daemon_without_a_model(environment: dict[str, str], home: Path) -> None:
    with subprocess.Popen(
        [*PREFIXD, "serve", "--json", *SIZES[2:], "--data-dir", "other", "--socket", "other.sock"],
        env=environment,
        cwd=home,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            ready = json.loads(process.stdout.readline())
            assert ready.pop("opening_s") >= 0
            ports = {"tcp": None, "metrics": None, "http": None}
            assert ready == {"socket": str(home / "other.sock"), **ports, "pid": process.pid}
            process.send_signal(signal.SIGINT)
            errors = process.stderr.read()
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert "Traceback" not in errors


def test_the_demo(prefixd: Prefixd, home: Path) -> None:
    result = prefixd("demo", "--prefixes", "4", "--requests", "12", "--prefix-tokens", "64", "--out", "demo.json")
    assert result.returncode == 0, result.stderr
    assert "All answers are the same, token for token." in result.stdout
    assert "of the prefix tokens came from the blocks that were left on disk" in result.stdout
    assert "prefixd serve --embedded" in result.stdout
    assert "requests/s)" in result.stdout and " won" in result.stdout
    assert "up to about" in result.stderr and "to go" in result.stderr
    figures = json.loads((home / "demo.json").read_text())
    assert figures["same_answers"] is True
    names = ["no-cache", "fcfs", "fpf", "relaxed-fpf", "restarted"]
    assert [run["name"] for run in figures["configs"]] == names
    no_cache, *cached = figures["configs"]
    assert (sum(no_cache["hit_tokens"].values()), no_cache["miss_rate"]) == (0, 1.0)
    for run in cached:
        # Not 0: where loading would take longer than computing, the daemon computes.
        assert run["miss_rate"] < 0.5, run
    assert cached[-1]["hit_tokens"]["disk"] > 0


def test_a_demo_that_is_ended_takes_its_daemon_with_it(environment: dict[str, str], home: Path) -> None:
    temporary = home / "tmp"
    temporary.mkdir()
    with subprocess.Popen(
        [*PREFIXD, "demo", "--prefixes", "2", "--requests", "2"],
        env=environment | {"TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            while "no-cache: 2 requests" not in (line := process.stderr.readline()):
                assert line, "the demo ended by itself"
            (lock,) = temporary.glob("*/no-cache/data/daemon.lock")
            daemon = int(lock.read_text())
            os.kill(daemon, 0)
            process.send_signal(signal.SIGTERM)
            errors = process.stderr.read()
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()
    assert "Traceback" not in errors
    assert list(temporary.glob("prefixd*")) == []
    with pytest.raises(ProcessLookupError):
        os.kill(daemon, 0)
