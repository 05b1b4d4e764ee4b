"""`prefixd why`: what is printed of a request."""

from __future__ import annotations

import pytest

from prefixd.cli.output.tables.waterfall import print_request_list, print_requests
from prefixd.v1 import admin_pb2 as pb
from prefixd.v1 import cache_pb2

REQUEST = pb.RequestInfo(
    id="r7-4be2a0",
    client_id="chat\x1b[2J",
    trace_id="4bf92f3577b34da6a3ce929d0e0e4736",
    kind="generate",
    method="Generate",
    tenant="a",
    model="m",
    arrived_unix_s=1.8e9,
    age_s=60.0,
    handed_over_s=1.0,
    first_token_s=2.0,
    ended_s=4.0,
    outcome="stop",
    prompt_tokens=4000,
    output_tokens=12,
    found=[pb.TierTokens(tier=cache_pb2.TIER_DISK, tokens=160)],
    stages=[
        pb.StageInfo(name="receive", start_s=0.0, end_s=0.0001),
        pb.StageInfo(name="queue", start_s=0.0, end_s=1.0),
        pb.StageInfo(
            name="load",
            start_s=0.5,
            end_s=1.0,
            attributes={"tier": "disk", "blocks": "10", "bytes": "1048576", "outcome": "given_up"},
        ),
        pb.StageInfo(name="prefill", start_s=1.0, end_s=2.0),
        pb.StageInfo(name="decode", start_s=2.0),
    ],
    waits=[pb.WaitInfo(reason="places", seconds=0.5), pb.WaitInfo(reason="preempted", seconds=0.1, later=True)],
    missing=pb.MissingInfo(
        found_blocks=10,
        missing_blocks=240,
        block_tokens=16,
        difference=pb.TokenDifference(
            token=163,
            block=10,
            expected_id=7,
            actual_id=8,
            expected_text="a",
            actual_text="\n",
            equal_tokens=15,
            compared_tokens=16,
        ),
        evictions=[
            pb.Eviction(blocks=32, before_s=90.0, tier=cache_pb2.TIER_CPU, reason="room", tenant="b", by="r6-11")
        ],
        looked_for=32,
        other_namespace="m",
        other_tenant="a",
        other_differs=["salt"],
    ),
    decisions=[pb.LoadDecision(blocks=9, tier=cache_pb2.TIER_DISK, load_s=3.0, compute_s=0.25)],
    preempted=1,
    preempted_for=["request r9 of tenant c"],
    restarts=1,
    altered_blocks=12,
    degraded=["disk tier"],
    cause="evicted",
    sentence="The first token came after 2.00 s.",
)


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_a_request_is_explained(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    print_requests([REQUEST, REQUEST])
    printed = " ".join(capsys.readouterr().out.split())
    assert "\x1b" not in printed
    for words in (
        "The first token came after 2.00 s.",
        "160 in disk when it came; used: nothing",
        "240 blocks of 16 tokens, from token 160 on",
        r"token 163 (block 10) is 8 '\n', and 7 'a' in the nearest cached prefix; 15 of the block's 16 tokens",
        "32 of 32 looked for, 0:01:30 before, from cpu: room was needed for tenant b, by r6-11",
        "namespace m of tenant a has its first block; it differs in salt",
        "9 blocks in disk: loading was estimated at 3.00 s, computing at 250.0 ms",
        "500.0 ms: all places taken (worker.max_running)",
        "100.0 ms after its first token: gave its memory to others",
        "for request r9 of tenant c",
        "12 blocks were loaded from copies that a lossy codec has altered",
        "disk tier when it came",
        "blocks=10 bytes=1.0 MiB outcome=given_up tier=disk",
    ):
        assert words in printed
    assert "receive" not in printed


def test_the_last_ones_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    runs = pb.RequestInfo(id="r8", prompt_tokens=5, cause="behind_others")
    refused = pb.RequestInfo(id="r9", kind="generate", ended_s=1.0, outcome="refused", cause="refused")
    call = pb.RequestInfo(id="c1", kind="load", ended_s=1.0, outcome="ok", cause="all_cached")
    print_request_list([REQUEST, runs, refused, call])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    first, second, third, fourth = (words for words in lines if words and words[0].startswith(("r7", "r8", "r9", "c1")))
    assert third == ["r9", "-", "0", "0", "refused", "refused"]
    assert fourth[:3] == ["c1", "1.00", "s"]
    assert first[:5] == ["r7-4be2a0", "a", "2.00", "s", "0"] and first[-1] == "evicted"
    assert second == ["r8", "-", "0", "5", "runs", "behind", "others"]
