"""The breathe benchmark in short, and that it sees what it looks for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from benchmarks import breathe
from benchmarks.stand_ins.shared_device import DeviceMemory, SharedDevice
from prefixd.workloads.text_analysis import BLOCK_BYTES
from prefixd_swap import OutOfMemoryError

PLAN = breathe.Plan(clients=3, prompts=8, max_tokens=8, stay_s=0.5, idle_s=0.3)


@pytest.mark.slow
def test_a_short_run(tmp_path: Path) -> None:
    """How fast it is depends on the machine, so that is not looked at."""
    load, phases = asyncio.run(breathe.measure(PLAN, tmp_path, names=("first", "second")))
    assert load.requests >= 6 and not load.failed and all(len(answers) == 1 for answers in load.answers.values())
    assert load.answers and all(phase.off <= breathe.OFF for phase in phases)
    most, least = PLAN.most_blocks * BLOCK_BYTES, PLAN.least_blocks * BLOCK_BYTES
    sizes = [(phase.first_bytes, phase.second_bytes) for phase in phases]
    assert sizes == [(most, least), (least, most)]


def test_what_each_should_have() -> None:
    least, most = PLAN.least_blocks * BLOCK_BYTES, PLAN.most_blocks * BLOCK_BYTES
    device, reserve = PLAN.device_blocks * BLOCK_BYTES, PLAN.reserve_blocks * BLOCK_BYTES
    assert 2 * most > device >= most + least + reserve * 5 // 4
    assert PLAN.off((True, False), (most, least)) == PLAN.off((False, False), (least, least)) == 0
    assert PLAN.off((True, False), (most, 2 * least)) == 1
    assert PLAN.off((True, True), (most, device - reserve - most)) == 0


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"failed": 2, "failures": ["no room"]}, "failed is 2; no room"),
        ({"same_tokens": False}, "same_tokens is False"),
        ({"follow_s": 5.1}, "follow_s is 5.1, more than 5"),
        ({"idle_off": 0.2}, "idle_off is 0.2, more than 0.1"),
    ],
)
def test_each_figure_has_a_limit(broken: dict[str, Any], words: str) -> None:
    phases = [breathe.Phase("both", 3.0, 0.05, 0.4, 30, 30), breathe.Phase("none", 2.0, 0.0, 0.5, 30, 30)]
    load = breathe.Load(requests=1, answers={0: {(1,)}})
    good = breathe.summary(PLAN, load, phases, {0: (1,)})
    good = {**good, "idle_off": 0.0}
    assert breathe.violations(good) == [] and (good["follow_s"], good["smaller_share"]) == (3.0, 0.4)
    assert "; ".join(breathe.violations({**good, **broken})) == words
    assert not breathe.summary(PLAN, load, phases, {0: (2,)})["same_tokens"]


def test_processes_of_one_device_have_no_more_than_it_has(tmp_path: Path) -> None:
    device = SharedDevice(tmp_path / "device", 8 * 4096)
    (tmp_path / "device").write_text('{"nbytes": 32768, "taken": {"1": 12288, "999999999": 8192}}')
    with DeviceMemory(4096, SharedDevice(tmp_path / "device")) as memory:
        assert (memory.available_bytes(), memory.total_bytes()) == (5 * 4096, 8 * 4096), "a dead process has none"
        chunks = memory.create(4)
        with pytest.raises(OutOfMemoryError, match="8192 bytes are wanted, 4096 of the device's 32768 are free"):
            memory.create(2)
        memory.destroy(chunks)
        assert device.free_bytes() == 5 * 4096
