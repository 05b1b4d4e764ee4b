"""Several engines need one prefix at the same time: one computes it, the others wait and load it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from prefixd.base.rules.rules import SlidingWindow
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import ClaimedByOther, ClaimResult, ExhaustedError, NamespaceSpec, PartSpec, UnsupportedError
from prefixd.integrations.engine.connector_counters import ConnectorCounters
from prefixd.integrations.engine.daemon_link import Link, LinkDown
from prefixd.integrations.engine.geometry import Geometry, Group
from prefixd.integrations.engine.waiting.computing_once import Claiming, ComputingOnce
from prefixd.integrations.engine.waiting.prefix_lookups import Lookups
from prefixd_scheduler import CostModel, Distance, LookAhead
from tests.integrations.engine.conftest import DEADLINE_S, LOG, PATIENT_S
from tests.waiting import wait_until

BLOCK = 16
GEOMETRY = Geometry((Group(0, 4, 64),), block_tokens=BLOCK, unit_tokens=4, ranks=1, layout="test")
WINDOWED = Geometry(
    (Group(0, 4, 64), Group(1, 4, 64, SlidingWindow(20))), block_tokens=BLOCK, unit_tokens=4, ranks=1, layout="test"
)
SPEC = NamespaceSpec("model", BLOCK, (PartSpec("all", 0, 64),))
PROMPT = np.arange(10 * BLOCK, dtype=np.uint32)


def cost_of(token_s: float = 1.0, load_bytes_per_s: float = 1e9) -> CostModel:
    """A model of an engine that needs so long for a token."""
    cost = CostModel()
    for tokens in (100, 200, 400):
        cost.observe_compute(tokens, tokens * token_s)
    for nbytes in (1 << 20, 1 << 22):
        cost.observe_load(Distance.CPU, nbytes, nbytes / load_bytes_per_s)
    return cost


@dataclass
class ScriptedClaims:
    """Stands for `Link`: claims are answered by the test."""

    up: bool = True
    log: logging.Logger = LOG
    timeout_s: float = 1.0
    now_s: float = 1000.0
    calls: list[tuple[str, Future[Any], dict[str, Any]]] = field(default_factory=list)

    def start(self, work: Callable[[], Coroutine[Any, Any, Any]], timeout_s: float | None = None) -> Future[Any]:
        names = zip(work.__code__.co_freevars, work.__closure__ or (), strict=True)
        asked = {name: cell.cell_contents for name, cell in names if name in ("wait_s", "ttl_s", "in_s")}
        self.calls.append((work.__name__, Future(), asked | {"timeout_s": timeout_s}))
        return self.calls[-1][1]

    def limit_s(self, nbytes: int) -> float:
        return self.timeout_s + nbytes

    def clock(self) -> float:
        return self.now_s

    def answer(self, value: ClaimResult | Exception) -> None:
        future = self.calls[-1][1]
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value)


@pytest.fixture
def link() -> ScriptedClaims:
    return ScriptedClaims()


def once_over(
    link: ScriptedClaims, cost: CostModel | None = None, geometry: Geometry = GEOMETRY, least_s: float = 0.0
) -> ComputingOnce:
    return ComputingOnce(cast(Link, link), geometry, cost or cost_of(), link.clock, ConnectorCounters(), least_s)


def counted(once: ComputingOnce) -> dict[str, float]:
    return once._counters.take()


def other(first: int = 0, end: int = 10, prompt: int = 10, age_s: float = 0.0, left_s: float = 1e6) -> ClaimResult:
    return ClaimResult(first, other=ClaimedByOther(first, end, prompt, age_s, left_s))


def begun(once: ComputingOnce, known_tokens: int = 0) -> Claiming:
    return once.begin(SPEC, PROMPT, known_tokens)


def test_a_granted_claim_lets_the_request_compute_at_once(link: ScriptedClaims) -> None:
    once = once_over(link)
    claiming = begun(once, 2 * BLOCK)
    assert not once.read(claiming)
    assert link.calls[0][2] == {"wait_s": 0.0, "ttl_s": 4.0 * 8 * BLOCK, "timeout_s": 1.0}
    link.answer(ClaimResult(2, "claim", 60.0))
    assert once.read(claiming) and claiming.claim is not None and counted(once) == {}
    once.end(claiming, 0)
    assert link.calls[-1][0] == "end" and link.calls[-1][2]["in_s"] == 0.0, "it was given up"
    once.end(claiming, 0)
    assert len(link.calls) == 2, "once"


def test_a_claim_stays_until_what_was_computed_is_saved(link: ScriptedClaims) -> None:
    once = once_over(link)
    claiming = begun(once)
    link.answer(ClaimResult(2, "claim", 60.0))
    assert once.read(claiming)
    once.end(claiming, 10 * BLOCK)
    assert link.calls[-1][2]["in_s"] == link.limit_s(GEOMETRY.nbytes(8))


def test_a_request_waits_for_another_engine_and_loads(link: ScriptedClaims) -> None:
    once = once_over(link)
    claiming = begun(once)
    link.answer(other(age_s=5.0))
    assert not once.read(claiming)
    assert link.calls[-1][2]["wait_s"] == pytest.approx(2 * 160 + 0.1 - 5)
    assert link.calls[-1][2]["timeout_s"] == 1.0 + link.calls[-1][2]["wait_s"]
    link.now_s += 30
    link.answer(ClaimResult(10))
    assert once.read(claiming) and claiming.cached_tokens == 10 * BLOCK
    assert counted(once) == {"claim_waits": 1, "claim_wait_seconds": 30.0, "spared_tokens": 160}


@pytest.mark.parametrize("answer", [other(), ExhaustedError("many"), LinkDown("away"), ClaimResult(0)])
def test_after_one_wait_the_request_computes(link: ScriptedClaims, answer: Any) -> None:
    once = once_over(link)
    claiming = begun(once)
    link.answer(other())
    assert not once.read(claiming)
    link.answer(answer)
    assert once.read(claiming) and len(link.calls) == 2 and claiming.claim is None


def test_the_wait_is_no_longer_than_the_claim(link: ScriptedClaims) -> None:
    once = once_over(link)
    claiming = begun(once)
    link.answer(other(left_s=7.0))
    once.read(claiming)
    assert link.calls[-1][2]["wait_s"] == 7.0


@pytest.mark.parametrize(
    ("claim", "cost", "known", "geometry"),
    [
        (other(age_s=400.0), cost_of(), 0, GEOMETRY),  # it should have come long ago
        (other(), cost_of(load_bytes_per_s=1.0), 0, GEOMETRY),  # loading takes longer than computing
        (other(end=3), cost_of(), 3 * BLOCK, GEOMETRY),  # the engine has it itself
        (other(end=8), cost_of(), 0, WINDOWED),  # this prompt leaves the other where no window is saved
        (other(prompt=12), cost_of(), 0, WINDOWED),  # the other goes on
    ],
)
def test_where_waiting_does_not_pay_the_request_computes(
    link: ScriptedClaims, claim: ClaimResult, cost: CostModel, known: int, geometry: Geometry
) -> None:
    once = once_over(link, cost, geometry)
    claiming = begun(once, known)
    link.answer(claim)
    assert once.read(claiming) and len(link.calls) == 1 and counted(once) == {}


def test_without_a_cost_model_it_waits_as_long_as_the_claim_lasts(link: ScriptedClaims) -> None:
    once = ComputingOnce(cast(Link, link), GEOMETRY, None, link.clock, ConnectorCounters(), 0.0)
    claiming = begun(once)
    assert link.calls[-1][2]["ttl_s"] == 30.0
    link.answer(other(left_s=7.0, age_s=1e3))
    assert not once.read(claiming) and link.calls[-1][2]["wait_s"] == 7.0


def test_with_windows_equal_prompts_wait(link: ScriptedClaims) -> None:
    once = once_over(link, geometry=WINDOWED)
    claiming = begun(once)
    link.answer(other())
    assert not once.read(claiming)


def test_short_work_is_not_claimed(link: ScriptedClaims) -> None:
    assert once_over(link, least_s=161.0).read(begun(once_over(link, least_s=161.0)))
    once = once_over(link, CostModel(), least_s=0.01)
    assert once.read(begun(once, 7 * BLOCK)) and not link.calls, "48 tokens count as 4.8 ms before the first step"
    assert not once.read(begun(once))
    assert once.read(begun(once, 10 * BLOCK)), "nothing is missing"


def test_an_older_daemon_is_asked_once(link: ScriptedClaims, caplog: pytest.LogCaptureFixture) -> None:
    once = once_over(link)
    claiming = begun(once)
    link.answer(UnsupportedError("no such call"))
    assert once.read(claiming) and once.read(begun(once)) and len(link.calls) == 1
    assert "too old for compute_once_s" in caplog.text


def test_a_request_that_ends_while_it_waits_gives_up(link: ScriptedClaims) -> None:
    once = once_over(link)
    claiming = begun(once)
    once.end(claiming, 0)
    assert link.calls[0][1].cancelled() and len(link.calls) == 1


# -- eight engines and a real daemon -------------------------------------------------------------------------------


class Engine:
    """An engine's scheduler side: it computes whatever `Lookups` does not load, and stores it."""

    def __init__(self, address: str, spec: NamespaceSpec, *, once: bool) -> None:
        self.spec = spec
        self.link = Link(address, "engine", PATIENT_S, LOG)
        wait_until(lambda: self.link.up)
        cost, self.counters = cost_of(), ConnectorCounters()
        claims = ComputingOnce(self.link, GEOMETRY, cost, time.monotonic, self.counters, 0.0) if once else None
        self.lookups = Lookups(self.link, GEOMETRY, LookAhead(cost, time.monotonic, 0), None, once=claims)
        self.loaded: int | None = None
        self.computing = False

    def add(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.lookups.add("r", self.spec, tokens)

    def step(self) -> None:
        """Decides what to load; the blocks are computed in a later step."""
        if self.loaded is None:
            self.loaded = self.lookups.loadable_tokens("r", 0, len(self.tokens) // BLOCK * BLOCK)

    @property
    def waits(self) -> bool:
        """Whether it waits for another engine."""
        claiming = self.lookups._lookups["r"].claiming
        return claiming is not None and claiming.began_s is not None

    def compute(self) -> int:
        """Computes and stores what was not loaded; returns the number of blocks."""
        blocks, loaded = len(self.tokens) // BLOCK, (self.loaded or 0) // BLOCK

        async def store() -> None:
            await (await self.link.cache(self.spec)).store(self.tokens, bytes(blocks * 64))

        self.lookups.refuse("r")
        if loaded < blocks:
            self.link.start(store).result(DEADLINE_S)
        self.lookups.forget("r", len(self.tokens))
        return blocks - loaded


def serve(engines: list[Engine]) -> int:
    """Steps all engines until each has its prompt; returns how many blocks were computed."""
    waiting, computed = list(engines), 0
    deadline_s = time.monotonic() + DEADLINE_S
    while waiting:
        assert time.monotonic() < deadline_s
        for engine in waiting:
            engine.step()
        ready = [engine for engine in waiting if engine.loaded is not None]
        if len(waiting) == len(engines) and any(engine.loaded is None and not engine.waits for engine in engines):
            continue  # the first computes for long enough
        computed += sum(engine.compute() for engine in ready)
        waiting = [engine for engine in waiting if engine.loaded is None]
        time.sleep(0.001)
    return computed


@pytest.mark.slow
@pytest.mark.parametrize("once", [True, False])
def test_eight_engines_compute_a_prefix_once_instead_of_eight_times(daemon: DaemonProcess, once: bool) -> None:
    spec = NamespaceSpec(f"eight, {once}", BLOCK, (PartSpec("all", 0, 64),))
    engines = [Engine(daemon.address, spec, once=once) for _ in range(8)]
    own = 2  # blocks of each prompt that no other has
    for number, engine in enumerate(engines):
        engine.add([*range(10 * BLOCK), *[1000 + number] * own * BLOCK])
        wait_until(lambda engine=engine: engine.lookups.seen("r") is not None)  # all see that nothing is cached
    assert serve(engines) == (10 + 8 * own if once else 8 * (10 + own))
    counts = [engine.counters.take() for engine in engines]
    assert sum(count.get("spared_tokens", 0) for count in counts) == (7 * 10 * BLOCK if once else 0)
    for engine in engines:
        engine.link.close()


@pytest.mark.slow
def test_when_the_engine_that_computes_dies_one_other_computes(daemon: DaemonProcess) -> None:
    spec = NamespaceSpec("deaths", BLOCK, (PartSpec("all", 0, 64),))
    engines = [Engine(daemon.address, spec, once=True) for _ in range(4)]
    for engine in engines:
        engine.add(list(range(10 * BLOCK)))

    def first() -> Engine | None:
        for engine in engines:
            engine.step()
        return next((engine for engine in engines if engine.loaded is not None), None)

    dying = wait_until(first)
    dying.link.close()
    engines.remove(dying)
    assert serve(engines) == 10
    for engine in engines:
        engine.link.close()
