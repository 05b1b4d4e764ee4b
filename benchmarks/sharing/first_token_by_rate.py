"""Time to first token of a prompt that another host has computed: with the store, and computed again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import harness
from benchmarks.common.plots import lines
from benchmarks.sharing.hosts import Secrets, sharing, wait_until_shared
from benchmarks.sharing.valkey_server import ValkeyServer
from benchmarks.stand_ins.slow_link import SlowLink
from benchmarks.ways_of_serving.ttft import first_token, in_turn, prompt_of, quartiles, settings, start
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client, Tier
from prefixd.workloads.text_analysis import BLOCK_TOKENS

WORST_RATIO = 1.1
LOADED = ("auto", "always")
ARMS = (*LOADED, "recompute")
_STORED, _COMPUTED = 0, 1  # whether a prompt is one that the first host has shared
_SHORT_TOKENS = 256
_MORE_REPEATS = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Attributes:
        gbit_per_s: rates of the link to the store.
        tokens: lengths of the prompts' prefixes, multiples of `BLOCK_TOKENS`.
        repeats: prompts of each length that are measured; twice as many where they are short.
        warm_up: prompts of each length, before those, from which a daemon learns what loads and computing take.
    """

    gbit_per_s: Sequence[float] = (0.1, 1.0, 10.0)
    tokens: Sequence[int] = (64, 256, 1024)
    repeats: int = 15
    warm_up: int = 2

    def repeats_of(self, tokens: int) -> int:
        """Returns the number of measured prompts of a length."""
        return self.repeats * (_MORE_REPEATS if tokens <= _SHORT_TOKENS else 1)


@dataclass(frozen=True, slots=True)
class Point:
    """Medians and quartiles, in ms, at one rate and one length; and how much of its prompts auto loaded."""

    gbit_per_s: float
    tokens: int
    ttft_ms: dict[str, float]
    lower_ms: dict[str, float]
    upper_ms: dict[str, float]
    loaded_share: float

    @property
    def ratio(self) -> float:
        """Auto's median over that of the better of the others."""
        return self.ttft_ms["auto"] / min(self.ttft_ms["always"], self.ttft_ms["recompute"])


class Subject:
    """A daemon that has seen none of the prompts."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.loaded_tokens = 0

    def first_token_s(self, prompt: Sequence[int]) -> float:
        """Seconds from sending the prompt to its first token.

        Raises BenchmarkError: some of it was in the daemon's own tiers.
        """
        first_s, ended = first_token(self._client, prompt)
        if own := sum(tokens for tier, tokens in ended.hit_tokens.items() if tier is not Tier.REMOTE):
            raise harness.BenchmarkError(f"{own} of {len(prompt)} tokens were on this host, and none may be")
        self.loaded_tokens += ended.hit_tokens[Tier.REMOTE]
        return first_s


def measure(plan: Plan, folder: Path, step: Callable[[], None]) -> list[Point]:
    """A point for each rate and length. `step` is called after each."""
    points: list[Point] = []
    secrets = Secrets(folder)
    with ValkeyServer(folder / "valkey") as valkey:
        _fill(plan, sharing(valkey.port, secrets))
        for rate in plan.gbit_per_s:
            with SlowLink("127.0.0.1", valkey.port, bytes_per_s=rate * 1e9 / 8) as link, ExitStack() as stack:
                # Computed prompts would be written over the link that is measured.
                shared = sharing(link.port, secrets) | {"remote.share": "none"}
                base = settings(max(plan.tokens))
                arms = {arm: base | shared | {"scheduler.load": arm} for arm in LOADED} | {"recompute": base}
                clients = start({arm: DaemonProcess(each) for arm, each in arms.items()}, stack)
                subjects = {arm: Subject(client) for arm, client in clients.items()}
                _warm_up(plan, subjects)
                for tokens in plan.tokens:
                    points.append(_measure(plan, subjects, rate, tokens))
                    step()
    return points


def _fill(plan: Plan, shared: dict[str, object]) -> None:
    """The first host computes and shares all prompts."""
    with DaemonProcess(settings(max(plan.tokens)) | shared) as a, Client(a.address, memory="streamed") as client:
        subject, blocks = Subject(client), 0
        for tokens in plan.tokens:
            for number in range(plan.warm_up + plan.repeats_of(tokens)):
                subject.first_token_s(prompt_of(tokens, _STORED, number))
                blocks += tokens // BLOCK_TOKENS
                wait_until_shared(client, blocks)  # its GPU tier is small


def _warm_up(plan: Plan, subjects: Mapping[str, Subject]) -> None:
    for number in range(plan.warm_up):
        for tokens in plan.tokens:
            for subject in subjects.values():
                subject.first_token_s(prompt_of(tokens, _COMPUTED, number))
                subject.first_token_s(prompt_of(tokens, _STORED, number))


def _measure(plan: Plan, subjects: Mapping[str, Subject], rate: float, tokens: int) -> Point:
    repeats = plan.repeats_of(tokens)
    prompts = [prompt_of(tokens, _STORED, plan.warm_up + repeat) for repeat in range(repeats)]
    loaded_before = subjects["auto"].loaded_tokens
    times = in_turn(ARMS, repeats, lambda arm, repeat: subjects[arm].first_token_s(prompts[repeat]))
    loaded = subjects["auto"].loaded_tokens - loaded_before
    return Point(rate, tokens, *quartiles(times), round(loaded / (repeats * tokens), 3))


def summary(points: Sequence[Point]) -> dict[str, Any]:
    """The result."""
    worst = max(points, key=lambda point: point.ratio)
    return {
        "worst_ratio": round(worst.ratio, 3),
        "worst_point": f"{worst.gbit_per_s:g} Gbit/s, {worst.tokens} tokens",
        "points": [{**asdict(point), "ratio": round(point.ratio, 3)} for point in points],
    }


violations = partial(harness.missed, most={"worst_ratio": WORST_RATIO})
"""Returns the bounds that a result misses, in words."""


def draw(axes: Any, result: Mapping[str, Any]) -> None:
    """Of each rate, the time with the store and of computing, by length."""
    series = {}
    for rate in sorted({point["gbit_per_s"] for point in result["points"]}):
        points = [point for point in result["points"] if point["gbit_per_s"] == rate]
        for arm, name in (("auto", "with the store"), ("recompute", "computed")):
            times = [point["ttft_ms"][arm] for point in points]
            series[f"{rate:g} Gbit/s, {name}"] = [point["tokens"] for point in points], times
    lines(axes, series, "tokens of the prefix", "time to first token, ms", "A cold host, by the rate of the store")
