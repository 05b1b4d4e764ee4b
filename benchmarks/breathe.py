"""Two daemons on one device whose GPU tiers grow and shrink: memory follows the requests.

Two daemons run the embedded model, with tiers that have a least, a most and a reserve, in the memory of one device
(`benchmarks.stand_ins.shared_device`: a stand-in in host memory, where both tiers at their most do not fit). Requests
go to the first daemon alone, to the second alone, to both, then to none. A phase begins when the last request of the
one before has ended. Meanwhile the memory that the kernel has given to each tier's file is read five times a second. At
the end the prompts that were answered are run once by a daemon with a tier of a fixed size, without a cache.

What each daemon should have: alone with requests its most (they want more), without requests its least; both with
requests together all of the device but the reserve. follow_s is how long it took, at the worst of all phases, until
the sizes were within 10% of that, and stayed there for --stay-s: at most 5 s. idle_off is how far, after the last
phase, the size of an idle tier is from its least, as a share of it. failed must be 0, and same_tokens true.
smaller_share is the part of the tiers' memory that the daemon with less had, on average, while both had requests; it
is reported, without a bound.

What is possible: a tier is idle after gpu.idle_s, 3 s unless it is set; until then it gives back as the other one asks.

Example: python -m benchmarks.breathe --json benchmarks/results/breathe.json
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.checks.resize import memory_bytes
from benchmarks.common import harness
from benchmarks.common.options import from_options, option
from benchmarks.stand_ins.shared_device import SharedDevice, SharingDaemon
from benchmarks.workloads.asking import generated_tokens
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import AsyncClient, ClientError, Sampling
from prefixd.workloads.text_analysis import BLOCK_BYTES, BLOCK_TOKENS

FOLLOW_S = 5.0
OFF = 0.1
PHASES: Mapping[str, tuple[bool, bool]] = {
    "first": (True, False),
    "second": (False, True),
    "both": (True, True),
    "none": (False, False),
}
_LOOK_S = 0.2
_TIMEOUT_S = 300.0
_PATIENCE_S = 60.0
_SHARED_TOKENS = 2 * BLOCK_TOKENS
_OWN_TOKENS = 6 * BLOCK_TOKENS
_VOCABULARY = 250


@dataclass(frozen=True, slots=True)
class Plan:
    """The parameters of a run."""

    clients: int
    prompts: int
    max_tokens: int
    stay_s: float
    idle_s: float

    @property
    def most_blocks(self) -> int:
        """Fewer than the requests that run at once want."""
        return self.clients * ((_SHARED_TOKENS + _OWN_TOKENS + self.max_tokens) // BLOCK_TOKENS - 2)

    @property
    def least_blocks(self) -> int:
        return self.most_blocks // 8

    @property
    def reserve_blocks(self) -> int:
        return self.most_blocks // 8

    @property
    def device_blocks(self) -> int:
        """One daemon may have its most while the other has its least."""
        return self.most_blocks + self.least_blocks + 3 * self.reserve_blocks // 2

    def tokens(self, prompt: int) -> list[int]:
        """A prompt's tokens; every fourth prompt begins in the same way."""
        shared = random.Random(f"shared {prompt % 4}").choices(range(_VOCABULARY), k=_SHARED_TOKENS)
        return shared + random.Random(f"own {prompt}").choices(range(_VOCABULARY), k=_OWN_TOKENS)

    def settings(self, *, elastic: bool) -> dict[str, object]:
        sizes: dict[str, object] = {"gpu.bytes": self.most_blocks * BLOCK_BYTES, "cache.enabled": False}
        if elastic:
            sizes = {
                "gpu.least_bytes": self.least_blocks * BLOCK_BYTES,
                "gpu.most_bytes": self.most_blocks * BLOCK_BYTES,
                "gpu.reserve_bytes": self.reserve_blocks * BLOCK_BYTES,
                "gpu.idle_s": self.idle_s,
            }
        return {
            "worker.embedded": True,
            "worker.threads": 1,
            "worker.block_tokens": BLOCK_TOKENS,
            "worker.max_running": self.clients,
            "gpu.device": "cpu",
            "cpu.bytes": 2 * self.most_blocks * BLOCK_BYTES,
            "disk.bytes": 0,
            **sizes,
        }

    def off(self, loaded: Sequence[bool], held: Sequence[int]) -> float:
        """How far the bytes that the tiers have are from what they should have, as a share of it."""
        least, most = self.least_blocks * BLOCK_BYTES, self.most_blocks * BLOCK_BYTES
        if all(loaded):
            together = (self.device_blocks - self.reserve_blocks) * BLOCK_BYTES
            return abs(sum(held) - together) / together
        wanted = [most if each else least for each in loaded]
        return max(abs(have - want) / want for have, want in zip(held, wanted, strict=True))


@dataclass(slots=True)
class Phase:
    """One phase.

    settled_s: when the sizes were what they should be, and stayed so; infinite if never. off: the worst deviation from
    then on. smaller_share: of the tiers' bytes, those of the daemon that had less of them on average.
    """

    name: str
    settled_s: float
    off: float
    smaller_share: float
    first_bytes: int
    second_bytes: int


@dataclass(slots=True)
class Load:
    """Requests and answers of all clients."""

    requests: int = 0
    failed: int = 0
    failures: list[str] = field(default_factory=list)
    answers: dict[int, set[tuple[int, ...]]] = field(default_factory=dict)
    """By prompt, every different answer."""


async def measure(
    plan: Plan,
    folder: Path,
    step: Callable[[], None] = lambda: None,
    names: Collection[str] = tuple(PHASES),
) -> tuple[Load, list[Phase]]:
    """Runs the phases of these names; `step` is called after each."""
    load, device = Load(), folder / "device.json"
    SharedDevice(device, plan.device_blocks * BLOCK_BYTES)
    settings = plan.settings(elastic=True)
    with SharingDaemon(settings, device) as first, SharingDaemon(settings, device) as second:
        daemons = (first, second)
        for daemon in daemons:  # loads the model
            async with AsyncClient(daemon.address, name="benchmark breathe", timeout_s=_TIMEOUT_S) as client:
                await generated_tokens(client, [1, 2, 3], Sampling(max_tokens=1))
        phases = []
        for name in names:
            phases.append(await _phase(name, PHASES[name], plan, daemons, load))
            step()
    return load, phases


async def _phase(
    name: str, loaded: tuple[bool, bool], plan: Plan, daemons: Sequence[DaemonProcess], load: Load
) -> Phase:
    ended = asyncio.Event()
    clients = [
        asyncio.create_task(_client(daemon.address, plan, each, load, ended))
        for daemon, wanted in zip(daemons, loaded, strict=True)
        for each in range(plan.clients if wanted else 0)
    ]
    began = time.monotonic()
    settled_s, worst = float("inf"), 0.0
    seen: list[list[int]] = []
    while (now_s := time.monotonic() - began) < _PATIENCE_S and now_s - settled_s < plan.stay_s:
        held = [memory_bytes(daemon.pid) for daemon in daemons]
        seen.append(held)
        off = plan.off(loaded, held)
        if off > OFF:
            settled_s, worst = float("inf"), 0.0
        else:
            settled_s, worst = min(settled_s, now_s), max(worst, off)
        await asyncio.sleep(_LOOK_S)
    ended.set()
    await asyncio.gather(*clients)
    sums = [sum(each) for each in zip(*seen, strict=True)]
    return Phase(name, round(settled_s, 2), round(worst, 4), round(min(sums) / sum(sums), 3), *seen[-1])


async def undisturbed(plan: Plan, prompts: Collection[int]) -> dict[int, tuple[int, ...]]:
    """Returns the answers of a daemon with a tier of a fixed size that caches nothing."""
    with DaemonProcess(plan.settings(elastic=False)) as daemon:
        async with AsyncClient(daemon.address, name="benchmark breathe", timeout_s=_TIMEOUT_S) as client:
            answers = await asyncio.gather(*(_answer(client, plan, prompt) for prompt in prompts))
    return dict(zip(prompts, answers, strict=True))


async def _client(address: str, plan: Plan, number: int, load: Load, ended: asyncio.Event) -> None:
    """Sends one request after the other, each prompt in turn, until `ended`."""
    prompt = number
    async with AsyncClient(address, name=f"benchmark breathe {number}", timeout_s=_TIMEOUT_S) as client:
        while not ended.is_set():
            prompt = (prompt + plan.clients + 1) % plan.prompts
            try:
                load.answers.setdefault(prompt, set()).add(await _answer(client, plan, prompt))
            except ClientError as error:
                load.failed += 1
                load.failures.append(str(error))
            load.requests += 1


async def _answer(client: AsyncClient, plan: Plan, prompt: int) -> tuple[int, ...]:
    sampling = Sampling(max_tokens=plan.max_tokens, ignore_eos=True)
    return tuple(await generated_tokens(client, plan.tokens(prompt), sampling))


def summary(plan: Plan, load: Load, phases: Sequence[Phase], expected: Mapping[int, tuple[int, ...]]) -> dict[str, Any]:
    """The result."""
    last, least = phases[-1], plan.least_blocks * BLOCK_BYTES
    return {
        "device_bytes": plan.device_blocks * BLOCK_BYTES,
        "least_bytes": least,
        "most_bytes": plan.most_blocks * BLOCK_BYTES,
        "reserve_bytes": plan.reserve_blocks * BLOCK_BYTES,
        "requests": load.requests,
        "failed": load.failed,
        "failures": load.failures[:10],
        "same_tokens": bool(load.answers) and all(seen == {expected[p]} for p, seen in load.answers.items()),
        "follow_s": max(phase.settled_s for phase in phases),
        "idle_off": round(max(abs(held - least) / least for held in (last.first_bytes, last.second_bytes)), 4),
        "smaller_share": next((phase.smaller_share for phase in phases if phase.name == "both"), 0.0),
        "phases": [asdict(phase) for phase in phases],
    }


def violations(result: Mapping[str, Any]) -> list[str]:
    """Returns the bounds that a result misses, in words."""
    most = {"follow_s": FOLLOW_S, "idle_off": OFF}
    return harness.missed(result, zero=["failed"], true=["same_tokens"], most=most) + list(result["failures"][:1])


@harness.benchmark(
    "breathe",
    __doc__,
    option("--clients", 8, "requests at a time of a daemon"),
    option("--prompts", 48, "different prompts"),
    option("--max-tokens", 32, "tokens of an answer"),
    option("--stay-s", 5.0, "how long the sizes have to stay what they should be", float, metavar="S"),
    option("--idle-s", 3.0, "gpu.idle_s", float, metavar="S"),
    option("--folder", None, "where to work (the temporary folder)", Path),
)
def main(options: harness.Options) -> harness.Outcome:
    """The phases, and the same requests without."""
    plan = from_options(Plan, options)
    with (
        tempfile.TemporaryDirectory(prefix="prefixd-breathe-", dir=options.folder) as folder,
        harness.progress("phases", len(PHASES)) as step,
    ):
        load, phases = asyncio.run(measure(plan, Path(folder), step))
        expected = asyncio.run(undisturbed(plan, load.answers))
    result = summary(plan, load, phases, expected)
    columns = ("name", "settled_s", "off", "first_bytes", "second_bytes", "smaller_share")
    return harness.Outcome(result, violations(result), [harness.Table(result["phases"], columns)])


if __name__ == "__main__":
    harness.run(main)
