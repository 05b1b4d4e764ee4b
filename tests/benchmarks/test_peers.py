"""What benchmarks.peers judges by, and the step that prepares its environment; without vLLM and LMCache."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from benchmarks.common import harness
from benchmarks.engines.vllm_engine import EngineFailed
from benchmarks.engines.vllm_figures import PromptTokens, Reply, Run, Stage
from benchmarks.peers import draw
from benchmarks.peers_parts import guard_dispatcher
from benchmarks.peers_parts.cache_figures import after_restart, figures, leads, not_ahead, other_tokens, summary
from benchmarks.peers_parts.left_out import Failing


def stage(name: str, waits_s: list[float], elapsed_s: float, tokens: tuple[int, ...] = (1, 2)) -> Stage:
    return Stage(name, tuple(Reply(tokens, wait) for wait in waits_s), elapsed_s, PromptTokens(total=10, local=4))


def run(name: str, factor: float, tokens: tuple[int, ...] = (1, 2)) -> Run:
    """Two turns and one after each of two restarts, all `factor` times as slow."""
    turns = [stage(f"turn {turn}", [0.1 * factor, 0.3 * factor], factor, tokens) for turn in (1, 2)]
    restarts = [stage(after_restart(number), [0.2 * factor], 0.5 * factor, tokens) for number in (1, 2)]
    return Run(name, (*turns, *restarts), ())


def rounds(ours: list[float], theirs: list[float]) -> list[dict[str, Run]]:
    return [
        {"prefixd": run("prefixd", mine), "lmcache": run("lmcache", other)}
        for mine, other in zip(ours, theirs, strict=True)
    ]


def test_the_stages_before_and_after_the_first_restart() -> None:
    assert figures(run("prefixd", 1.0)) == {
        "cold": {"requests_per_s": 2.0, "ttft_p50_s": pytest.approx(0.2), "ttft_p95_s": pytest.approx(0.3)},
        "after restart": {"requests_per_s": 2.0, "ttft_p50_s": pytest.approx(0.2), "ttft_p95_s": pytest.approx(0.2)},
    }


def test_ahead_is_by_more_than_the_lead_differs_between_rounds() -> None:
    clear = leads(rounds([1.0, 1.1, 0.9], [2.0, 2.1, 1.9]), "prefixd", "lmcache")
    assert len(clear) == 6 and all(lead.clear for lead in clear)
    assert not_ahead(rounds([1.0, 1.1, 0.9], [2.0, 2.1, 1.9]), "prefixd", "lmcache") == []
    near = rounds([1.0, 1.5, 0.9], [1.1, 1.1, 1.1])
    assert not any(lead.clear for lead in leads(near, "prefixd", "lmcache"))
    assert len(not_ahead(near, "prefixd", "lmcache")) == 6


def test_a_round_in_which_the_machine_was_slow_for_both_is_no_spread() -> None:
    slow = leads(rounds([1.0, 2.0, 1.0], [1.2, 2.2, 1.2]), "prefixd", "lmcache")
    waits = [lead for lead in slow if lead.figure != "requests_per_s"]
    assert len(waits) == 4 and all(lead.clear for lead in waits)
    assert [lead.by_round for lead in waits if lead.part == "after restart"] == 2 * [pytest.approx((0.04, 0.04, 0.04))]


def test_other_tokens_of_any_cache_are_told() -> None:
    played = rounds([1.0], [2.0])
    assert other_tokens(played) == []
    played[0]["lmcache"] = run("lmcache", 2.0, tokens=(1, 3))
    assert other_tokens(played) == ["round 1: 6 of 6 requests got other tokens with lmcache"]


def test_the_summary_is_drawn(tmp_path: Path) -> None:
    caches = summary(rounds([1.0, 1.1, 0.9], [2.0, 2.1, 1.9]))
    cold = caches["lmcache"]["cold"]
    assert cold["requests_per_s"] == 1.0 and cold["rounds"]["requests_per_s"] == [1.0, 0.9524, 1.0526]
    assert cold["prompt_tokens"] == {"total": 60, "computed": 36, "local": 24, "external": 0}
    harness.plot(tmp_path / "plot.png", lambda panels: draw(panels, caches), columns=3)
    if "matplotlib" in sys.modules:
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


class Engine:
    def __init__(self) -> None:
        self.killed = False

    def kill(self) -> None:
        self.killed = True


def test_a_cache_that_fails_is_left_out_and_the_others_stay() -> None:
    engines = {"vllm": Engine(), "prefixd": Engine(), "lmcache": Engine()}
    lmcache, left_out = engines["lmcache"], {}
    failing = Failing(engines, left_out, tolerant=True)
    with failing("prefixd"):
        pass
    with failing("lmcache"):
        raise EngineFailed("it ended;\nit said: no GPU")
    assert [*engines] == ["vllm", "prefixd"] and lmcache.killed and not engines["prefixd"].killed
    assert left_out == {"lmcache": "it ended; it said: no GPU"}
    with pytest.raises(EngineFailed), failing("vllm"):
        raise EngineFailed("nothing to compare with")
    with pytest.raises(EngineFailed), Failing(engines, left_out, tolerant=False)("prefixd"):
        raise EngineFailed("a failure")


@pytest.mark.parametrize("tolerant", [True, False])
def test_a_cache_that_does_not_end_in_order_loses_no_figures(tolerant: bool) -> None:
    @contextmanager
    def cache() -> Iterator[None]:
        yield
        raise EngineFailed("its server did not end")

    left_out: dict[str, str] = {}
    opened = cache()
    opened.__enter__()
    with nullcontext() if tolerant else pytest.raises(EngineFailed):
        Failing({}, left_out, tolerant=tolerant).close("lmcache", opened)
    assert not left_out


def test_vllm_is_guarded_once_and_another_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "triton_utils" / "dispatcher.py"
    file.parent.mkdir()
    spec = ModuleSpec("vllm", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(guard_dispatcher, "find_spec", lambda _name: spec)
    file.write_text('            if hasattr(value, "__dict__"):\n')
    guard_dispatcher.main()
    guard_dispatcher.main()
    assert file.read_text() == '            if isinstance(getattr(value, "__dict__", None), Mapping):\n'
    file.write_text("pass\n")
    with pytest.raises(SystemExit, match="does not have the line"):
        guard_dispatcher.main()
