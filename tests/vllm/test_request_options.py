"""What requests ask of prefixd in `kv_transfer_params`: in vLLM's own scheduler, with no model and no workers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.request import Request

from prefixd.client import Client, Retention
from prefixd.integrations.engine.jobs import LoadOutcome, Outcomes, SaveJob
from prefixd.integrations.vllm.request_options import RequestOptions
from tests.vllm.served import make_prompt
from tests.vllm.test_connector_steps import Steps, make_steps
from tests.waiting import wait_until

__all__ = ["make_steps"]

MakeSteps = Callable[..., Steps]
PROMPT = 64 * 3 + 5  # three blocks of prefixd's


def add(steps: Steps, name: str, prompt: list[int], asked: Any, max_tokens: int = 1) -> Request:
    """As vLLM makes a request of `SamplingParams.extra_args`, where the OpenAI server puts its `kv_transfer_params`."""
    sampling = SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args={"kv_transfer_params": asked}
    )
    request = Request(name, prompt, sampling, None, block_hasher=steps.hasher)
    steps.scheduler.add_request(request)
    lookup = steps.half.lookups._lookups[name]
    wait_until(lambda: lookup.asking is None or lookup.asking.done(), "the daemon did not answer")
    return request


def run(steps: Steps, name: str) -> tuple[list[SaveJob], int]:
    """Steps until the request has ended: what was to be saved, and how many blocks were loaded."""
    saves, loaded = [], 0
    while name in steps.scheduler.requests:
        output, orders = steps.schedule()
        saves += orders.saves
        loaded += sum(job.blocks for job in orders.loads)
        outcomes = steps.do(orders.saves)
        outcomes.merge(Outcomes({job.request_id: (1, LoadOutcome(1, 0.1, 0)) for job in orders.loads}))
        steps.answer(output, outcomes, finished_recving={job.request_id for job in orders.loads})
    return saves, loaded


def priorities(steps: Steps, prompt: list[int]) -> list[int]:
    """Of the blocks that the daemon has of a prompt, which begin with tokens that no other prompt has."""
    with Client(steps.address) as client:
        for prefix in client.prefixes(limit=1000).prefixes:
            blocks = client.inspect(prefix.key).blocks
            if list(blocks[0].token_ids) == prompt[: len(blocks[0].token_ids)]:
                return [block.priority for block in blocks]
    return []


def test_a_read_only_request_loads_and_saves_nothing(make_steps: MakeSteps) -> None:
    steps = make_steps()
    prompt = make_prompt(501, PROMPT)
    steps.cached(prompt[:64])
    add(steps, "reads", prompt, {"prefixd": {"read_only": True}})
    assert run(steps, "reads") == ([], 1)
    add(steps, "writes", make_prompt(502, PROMPT), {"prefixd": {"read_only": False}})
    saves, _ = run(steps, "writes")
    assert sum(job.blocks for job in saves) == 3
    assert not steps.half._request_options


def test_retention_goes_with_what_is_saved(make_steps: MakeSteps) -> None:
    steps = make_steps()
    ranges = [{"end": 128, "priority": 50, "ttl_s": 3600}, {"start": 128, "priority": -5}]
    add(steps, "r", make_prompt(503, PROMPT), {"prefixd": {"retention": ranges}}, max_tokens=70)
    saves, _ = run(steps, "r")
    assert sum(job.blocks for job in saves) == 4, "the last one is of the output"
    options = (Retention(50, 0, 128, 3600), Retention(-5, 128, PROMPT))
    assert {job.retention for job in saves} == {options}, "which ends with the prompt"


def test_what_is_cached_already_is_retained_at_the_requests_turn(make_steps: MakeSteps) -> None:
    steps = make_steps()
    prompt = make_prompt(504, PROMPT)
    steps.cached(prompt[:128])
    add(steps, "r", prompt, {"prefixd": {"read_only": True, "retention": [{"end": 64, "priority": 9}]}})
    run(steps, "r")
    wait_until(lambda: priorities(steps, prompt) == [9, 0], "the cached blocks have no priority")


@pytest.mark.parametrize(
    ("asked", "seed"),
    [({"prefixd": 7}, 602), ({"prefixd": {"read_only": "x", "retention": [{"priority": 1e9}]}}, 604)],
)
def test_nonsense_is_ignored_and_told_once(
    make_steps: MakeSteps, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, asked: Any, seed: int
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    steps = make_steps()
    for number in range(2):
        add(steps, f"r{number}", make_prompt(seed + number, PROMPT), asked)
        saves, _ = run(steps, f"r{number}")
        assert sum(job.blocks for job in saves) == 3 and not any(job.retention for job in saves)
    told = {record.getMessage() for record in caplog.records if "kv_transfer_params" in record.getMessage()}
    assert len(told) == 1
    assert all("request 'r0' is ignored: " in line for line in told)


def test_a_refusal_of_the_daemon_costs_the_retention_alone(make_steps: MakeSteps) -> None:
    steps = make_steps()
    prompt = make_prompt(508, PROMPT)
    steps.cached(prompt[:128])
    add(steps, "r", prompt, {"prefixd": {"retention": [{"priority": 1}]}})
    steps.half._request_options["r"] = RequestOptions(retention=(Retention(1),) * 65)  # more than the daemon takes
    saves, loaded = run(steps, "r")
    assert (sum(job.blocks for job in saves), loaded) == (1, 2)
    wait_until(lambda: steps.half._complained_s > 0, "nobody was told")
    assert priorities(steps, prompt)[:2] == [0, 0]


def test_the_callers_span_goes_with_loads_and_saves(make_steps: MakeSteps) -> None:
    steps = make_steps()
    prompt = make_prompt(504, PROMPT)
    steps.cached(prompt[:64])
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    sampling = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
    headers = {"traceparent": parent}
    steps.scheduler.add_request(Request("r", prompt, sampling, None, block_hasher=steps.hasher, trace_headers=headers))
    lookup = steps.half.lookups._lookups["r"]
    wait_until(lambda: lookup.asking is None or lookup.asking.done(), "the daemon did not answer")
    found = {lookup.traceparent}
    while "r" in steps.scheduler.requests:
        output, orders = steps.schedule()
        found |= {job.traceparent for job in (*orders.loads, *orders.saves)}
        outcomes = steps.do(orders.saves)
        outcomes.merge(Outcomes({job.request_id: (1, LoadOutcome(1, 0.1, 0)) for job in orders.loads}))
        steps.answer(output, outcomes, finished_recving={job.request_id for job in orders.loads})
    assert found == {parent}
