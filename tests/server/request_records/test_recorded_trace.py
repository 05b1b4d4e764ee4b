"""A live daemon's prompts: what `prefixd what-if` estimates of them, and what `prefixd plan` finds in their trace."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from prefixd.v1 import admin_pb2, cache_pb2
from prefixd.workloads.mooncake import read_trace
from tests.daemons import Remote
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

_BLOCK_TOKENS, _PART_BYTES = 16, 2048
_MACHINE = (
    "--model",
    "llama-3.1-8b",
    "--gpu",
    "4GiB",
    "--cpu",
    "16GiB",
    "--disk",
    "0",
    "--speed",
    "0.001",
    "--no-curve",
)


def conversations() -> list[list[int]]:
    """40 prompts with a common beginning; most continue one of the last ones by blocks of 512 tokens."""
    rng = np.random.default_rng(0)
    open_ones = [list(range(512))]
    prompts = []
    for _ in range(40):
        longer = list(open_ones[int(rng.integers(0, len(open_ones)))])
        longer.extend(rng.integers(1000, 100_000, 512 * int(rng.integers(1, 3))).tolist())
        open_ones = [*open_ones[-4:], longer]
        prompts.append(longer)
    return prompts


def prefixd(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "prefixd", *arguments]


def test_a_recorded_trace_has_the_hit_rate_of_the_live_run(launch: Callable[..., Remote], tmp_path: Path) -> None:
    remote, file = launch({"cpu.bytes": "16MiB", "disk.bytes": 0}), tmp_path / "trace.jsonl"
    command = prefixd("trace", "record", str(file), "--address", remote.daemon.address, "--json")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as recording:
        assert recording.stderr is not None and "recording" in recording.stderr.readline()
        with remote.session() as session:
            space = remote.register(session.session_id, "m", _PART_BYTES, block_tokens=_BLOCK_TOKENS)
            for prompt in conversations():
                found, _ = remote.get(session.session_id, space, prompt)
                data = bytes(_PART_BYTES * (len(prompt) // _BLOCK_TOKENS - found))
                remote.put(session.session_id, space, prompt, data, first_block=found)
        stats = remote.until(lambda stats: stats.ghosts.asked_tokens == stats.asked_tokens)
        part = tmp_path / "trace.jsonl.part"
        wait_until(lambda: part.read_bytes().count(b"\n") == len(conversations()), "requests are missing")
        recording.send_signal(signal.SIGINT)
        out, errors = recording.communicate(timeout=60)
    assert recording.returncode == 0, errors
    assert json.loads(out)["dropped_requests"] == 0
    live = stats.hit_tokens / stats.asked_tokens
    assert 0.3 < live < 0.9
    assert [request.input_length for request in read_trace(file)] == [len(prompt) for prompt in conversations()]

    plan = subprocess.run(
        prefixd("plan", "--trace", str(file), *_MACHINE, "--json"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert plan.returncode == 0, plan.stderr
    (point,) = json.loads(plan.stdout)["points"]
    assert point["hit_rate"] == pytest.approx(live, abs=0.01)

    answer = remote.admin.WhatIf(admin_pb2.WhatIfRequest(), timeout=60)
    (tier,) = answer.ghosts.tiers
    assert (tier.tier, tier.sure) == (cache_pb2.TIER_CPU, True)
    now = next(size for size in tier.sizes if size.factor == 1)
    assert tier.measured_hit_rate == pytest.approx(live)
    assert now.hit_rate == pytest.approx(live, abs=0.02)
