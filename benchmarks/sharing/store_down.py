"""The cost of a store that is down: times of engines' calls, compared with a daemon without a remote tier."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common import harness
from benchmarks.sharing.hosts import Secrets, cache_host, remote_stats, sharing
from benchmarks.sharing.valkey_server import ValkeyServer
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client, NamespaceSpec, PartSpec

MOST_RATIO = 1.02
BASE = "none"
ARMS = (BASE, "none_again", "closed", "frozen")
"""Two daemons without a remote tier, which say how far two equal ones are apart; one whose store's port is closed; one
whose store has stopped answering."""
DOWN = ("closed", "frozen")
CALLS = ("store", "load")
"""store: a lookup that finds nothing, and storing the prompt. load: a prompt from the CPU tier."""
_BLOCK_TOKENS, _BLOCK_BYTES, _PROMPT_BLOCKS = 16, 64 << 10, 8
_CPU_BYTES = 64 << 20
_KNOWN = 16  # prompts that may be loaded: those stored last
_WAIT_S = 30.0

Times = dict[str, dict[str, npt.NDArray[np.float64]]]
"""Seconds of each call, by arm and kind."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Daemons are started `sessions` times, in an order that turns, since the first one is a hundredth slower;
    each time every one gets `rounds` of calls, one after the other."""

    sessions: int = 12
    rounds: int = 250
    warm_up: int = 40


class Engine:
    """An engine that uses one daemon."""

    def __init__(self, client: Client) -> None:
        self._cache = client.register(NamespaceSpec("engine", _BLOCK_TOKENS, (PartSpec("full", 0, _BLOCK_BYTES),)))
        self._data = np.random.default_rng(0).integers(0, 256, _PROMPT_BLOCKS * _BLOCK_BYTES, np.uint8)
        self._got = np.empty_like(self._data)

    def store_s(self, number: int) -> float:
        """Seconds of looking for a prompt that is nowhere, and of storing it."""
        tokens, began_s = _tokens(number), time.perf_counter()
        missing = self._cache.match(tokens).blocks == 0
        stored = self._cache.store(tokens, self._data).committed
        took_s = time.perf_counter() - began_s
        if not missing or stored != _PROMPT_BLOCKS:
            raise harness.BenchmarkError(
                f"prompt {number}: {stored} blocks were stored, and it was there: {not missing}"
            )
        return took_s

    def load_s(self, number: int) -> float:
        """Seconds of loading a prompt that was stored a moment ago."""
        tokens, began_s = _tokens(number), time.perf_counter()
        loaded = self._cache.load(tokens, self._got)
        took_s = time.perf_counter() - began_s
        if loaded != _PROMPT_BLOCKS:
            raise harness.BenchmarkError(f"{loaded} of {_PROMPT_BLOCKS} blocks of prompt {number} were loaded")
        return took_s


def measure(plan: Plan, folder: Path, step: Callable[[], None]) -> dict[str, Any]:
    """All sessions; `step` is called after each."""
    sessions: list[Times] = []
    first_s: dict[str, list[float]] = {arm: [] for arm in DOWN}
    for number in range(plan.sessions):
        turn = number % len(ARMS)
        times, first = _session(plan, folder / f"session{number}", ARMS[turn:] + ARMS[:turn])
        sessions.append(times)
        for arm, took_s in first.items():
            first_s[arm].append(took_s)
        step()
    return summary(sessions, first_s)


def _session(plan: Plan, folder: Path, order: Sequence[str]) -> tuple[Times, dict[str, float]]:
    secrets = Secrets(folder)
    with ExitStack() as stack:
        closed = stack.enter_context(ValkeyServer(folder / "closed"))
        frozen = stack.enter_context(ValkeyServer(folder / "frozen"))
        settings = {"closed": sharing(closed.port, secrets), "frozen": sharing(frozen.port, secrets)}
        daemons: dict[str, DaemonProcess] = {}
        for arm in order:
            daemons[arm] = stack.enter_context(cache_host(_CPU_BYTES, settings.get(arm, {})))
        clients = {arm: stack.enter_context(Client(daemon.address)) for arm, daemon in daemons.items()}
        engines = {arm: Engine(client) for arm, client in clients.items()}
        rng = np.random.default_rng(0)
        _rounds(engines, 0, plan.warm_up, rng)
        closed.end()
        frozen.freeze()
        first_s = {arm: engines[arm].store_s(plan.warm_up) for arm in DOWN}
        for arm in ARMS:
            if arm not in DOWN:
                engines[arm].store_s(plan.warm_up)
        _wait_until_out(clients)
        before = {arm: remote_stats(clients[arm]) for arm in DOWN}
        times = _rounds(engines, plan.warm_up + 1, plan.rounds, rng)
        for arm in DOWN:
            after = remote_stats(clients[arm])
            if after.asked_prompts != before[arm].asked_prompts or after.failures != before[arm].failures:
                raise harness.BenchmarkError(f"the store of {arm!r} was asked while it was down")
        frozen.thaw()
    return times, first_s


def _wait_until_out(clients: Mapping[str, Client]) -> None:
    """Waits until the daemons know that their stores are down."""
    if not harness.wait_until(lambda: all(remote_stats(clients[arm]).failures for arm in DOWN), _WAIT_S):
        raise harness.BenchmarkError(f"a daemon has not noticed within {_WAIT_S:g} s that its store is down")


def _rounds(engines: Mapping[str, Engine], first: int, rounds: int, rng: np.random.Generator) -> Times:
    """A round is a call of each kind to each daemon, in an order that changes: what disturbs one disturbs all."""
    times = {arm: {call: np.zeros(rounds) for call in CALLS} for arm in ARMS}
    for round_ in range(rounds):
        number = first + round_
        known = int(rng.integers(max(0, number - _KNOWN), number + 1))
        for turn in rng.permutation(len(ARMS)).tolist():
            times[ARMS[turn]]["store"][round_] = engines[ARMS[turn]].store_s(number)
        for turn in rng.permutation(len(ARMS)).tolist():
            times[ARMS[turn]]["load"][round_] = engines[ARMS[turn]].load_s(known)
    return times


def _tokens(number: int) -> npt.NDArray[np.uint32]:
    return np.arange(_PROMPT_BLOCKS * _BLOCK_TOKENS, dtype=np.uint32) + np.uint32(number << 12)


def summary(sessions: Sequence[Times], first_s: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The result. Ratios are to the daemon without a remote tier; spread is a session's lowest and highest."""
    result: dict[str, Any] = {"calls": sum(len(each[BASE][call]) for each in sessions for call in CALLS)}
    for arm in ARMS[1:]:
        for call in CALLS:
            each = [_p50_ratio(times, arm, call) for times in sessions]
            pooled = [np.concatenate([times[which][call] for times in sessions]) for which in (arm, BASE)]
            result[f"{arm}_{call}_p50_ratio"] = round(float(np.median(pooled[0]) / np.median(pooled[1])), 4)
            result[f"{arm}_{call}_p50_spread"] = [round(min(each), 4), round(max(each), 4)]
        each = [_throughput_ratio([times], arm) for times in sessions]
        result[f"{arm}_time_ratio"] = round(_throughput_ratio(sessions, arm), 4)
        result[f"{arm}_time_spread"] = [round(min(each), 4), round(max(each), 4)]
    for call in CALLS:
        base = np.concatenate([times[BASE][call] for times in sessions])
        result[f"{call}_p50_ms"] = round(1000 * float(np.median(base)), 4)
    for arm in DOWN:
        result[f"{arm}_first_call_ms"] = round(1000 * max(first_s[arm]), 2)
    result["worst_ratio"] = max(value for name, value in _bounded(result).items())
    return result


def _p50_ratio(times: Times, arm: str, call: str) -> float:
    return float(np.median(times[arm][call]) / np.median(times[BASE][call]))


def _throughput_ratio(sessions: Sequence[Times], arm: str) -> float:
    """The median, over all rounds, of the time of a round's calls to one daemon over that to the other."""
    ratios = [sum(times[arm][call] for call in CALLS) / sum(times[BASE][call] for call in CALLS) for times in sessions]
    return float(np.median(np.concatenate(ratios)))


def _bounded(result: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in result.items() if name.startswith(DOWN) and name.endswith("_ratio")}


def violations(result: Mapping[str, Any]) -> list[str]:
    """Returns the bounds that a result misses, in words."""
    return harness.missed(result, most=dict.fromkeys(_bounded(result), MOST_RATIO))
