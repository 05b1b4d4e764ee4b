"""Two engines need the same prompts at the same time: each prompt is computed once, and the tokens are the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client
from tests.vllm.served import Expected, NewRequests, StartEngine, cacheable, run


def test_two_engines_compute_each_prompt_once(
    llama: Path, daemon: DaemonProcess, make_engine: StartEngine, expected: Expected, new_requests: NewRequests
) -> None:
    requests = new_requests(1000, 900, 800, 700)
    with (
        make_engine(llama, daemon, {"compute_once_s": 0}) as one,
        make_engine(llama, daemon, {"compute_once_s": 0}) as other,
        ThreadPoolExecutor(2) as threads,
    ):
        answers = [
            threads.submit(run, one, requests, forget=False),
            threads.submit(run, other, requests[::-1], forget=False),
        ]
        (tokens, hits), (reversed_tokens, other_hits) = (answer.result() for answer in answers)
    assert tokens == reversed_tokens[::-1] == expected(requests)
    assert hits + other_hits == cacheable(requests), "what one engine computed, the other loaded"
    with Client(daemon.address) as client:
        claims = client.stats().claims
    assert claims.granted == len(requests) and not claims.open
