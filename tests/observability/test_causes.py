"""The main cause of a late first token, from records as the daemon would have written them."""

from __future__ import annotations

from typing import Any

import pytest

from prefixd.base.tiers import Tier
from prefixd.observability.causes import Cause, judge
from prefixd.observability.eviction_journal import Cause as Why
from prefixd.observability.eviction_journal import Reason, Removal
from prefixd.observability.explanations import Difference, Elsewhere, Evicted, Findings
from prefixd.observability.missing_blocks import MissingBlocks
from prefixd.observability.request_record import Kind, LoadDecision, RequestRecord, StageName, Wait


def computed(found: int = 0, used: int | None = None, *, missing: int = 10, **given: Any) -> RequestRecord:
    """A request of 160 tokens, in blocks of 16, that came at 100 s: it computed its prompt for 0.9 s of 1 s."""
    record = RequestRecord(id="r1", arrival_s=100.0, prompt_tokens=160)
    record.found_tokens = [0, 0, 16 * found, 0]
    record.hit_tokens = [0, 0, 16 * (found if used is None else used), 0]
    if missing:
        record.missing = MissingBlocks(b"", 16, found, found + missing, b"", b"", b"")
    record.note(StageName.QUEUE, 100.0, 100.1)
    record.wait_for(Wait.BEHIND, 100.0)
    record.wait_for(None, 100.1)
    record.handed_over_s = 100.1
    record.note(StageName.PREFILL, 100.1, 101.0)
    for name, value in given.items():
        setattr(record, name, value)
    record.first_token_s = 101.0
    record.end("stop", 102.0)
    return record


def named(record: RequestRecord, findings: Findings | None = None) -> tuple[Cause, str]:
    verdict = judge(record, findings or Findings(), 110.0)
    assert 0 <= verdict.seconds <= verdict.total_s
    return verdict.cause, verdict.sentence


def evicted(reason: Reason, tenant: str = "", by: str = "") -> Findings:
    return Findings(evicted=[Evicted(Removal(88.0, Tier.CPU, Why(reason, tenant, by)), 10)], looked_for=10)


def test_a_prompt_that_was_never_seen() -> None:
    cause, sentence = named(computed())
    assert cause is Cause.NEW
    assert sentence == (
        "The first token came after 1.00 s, 90% of that because 160 of its 160 tokens were not cached: no prompt with "
        "this beginning was cached."
    )
    assert named(computed(4, missing=6))[0] is Cause.NEW


@pytest.mark.parametrize(
    ("findings", "cause", "words"),
    [
        (Findings(difference=Difference(3, 0, 7, 8, 15, 16)), Cause.DIFFERS, "token 3 is 8, and 7 in the nearest"),
        (Findings(difference=Difference(3, 0, 7, 8, 4, 16)), Cause.NEW, "no prompt with this beginning"),
        (evicted(Reason.ROOM, "b", "r9"), Cause.EVICTED, "for tenant b, which needed room, by r9 12.0 s before"),
        (evicted(Reason.QUOTA, "a"), Cause.EVICTED, "because tenant a was at its most"),
        (evicted(Reason.NAMESPACES), Cause.EVICTED, "their namespace was forgotten"),
        (evicted(Reason.RESIZE), Cause.EVICTED, "they left the cpu tier as the GPU tier shrank 12.0 s before"),
        (evicted(Reason.OPERATOR), Cause.OPERATOR, "an operator evicted them 12.0 s before"),
        (evicted(Reason.DAMAGED), Cause.DAMAGED, "found damaged in the cpu tier"),
        (
            Findings(elsewhere=Elsewhere("m", "a", ("salt",))),
            Cause.NAMESPACE,
            "for another salt (namespace m of tenant a)",
        ),
    ],
)
def test_why_blocks_are_missing(findings: Findings, cause: Cause, words: str) -> None:
    found, sentence = named(computed(), findings)
    assert found is cause and words in sentence


def test_another_turn_of_a_conversation_differs_where_it_goes_on() -> None:
    findings = Findings(difference=Difference(65, 4, 7, 8, 1, 16))
    assert named(computed(4, missing=6), findings)[0] is Cause.DIFFERS


def test_a_tier_that_was_degraded() -> None:
    assert named(computed(degraded=("disk tier",)))[0] is Cause.DEGRADED
    assert named(computed(uncached=True, missing=0))[0] is Cause.UNCACHED
    assert named(computed(9, missing=0))[0] is Cause.REST
    cause, sentence = named(computed(10, missing=0, prompt_tokens=161))
    assert cause is Cause.REST and "1 token behind the last whole cached block is always computed" in sentence


def test_a_prompt_without_a_block_that_could_be_cached() -> None:
    cause, sentence = named(computed(0, missing=0, prompt_tokens=16))
    assert cause is Cause.SHORT
    assert sentence.endswith(
        "because none of its 16 tokens can be cached: the cache has whole blocks, and it is no longer than one."
    )
    assert named(computed(0, missing=0, kind=Kind.STORE))[0] is Cause.REST


def not_loaded(**given: Any) -> RequestRecord:
    return computed(9, 0, missing=1, **given)


def test_blocks_that_were_found_and_not_loaded() -> None:
    slow = LoadDecision(100.0, 9, "disk", 3.5, 0.9)
    cause, sentence = named(not_loaded(decisions=[slow]))
    assert cause is Cause.NOT_LOADED and "from disk was expected to take 3.50 s, and computing 0.90 s" in sentence
    never = LoadDecision(100.0, 9, "disk", None, None, by_setting=True)
    assert "scheduler.load = never" in named(not_loaded(decisions=[never]))[1]
    assert named(not_loaded(decisions=[LoadDecision(100.0, 9, "disk", None, 0.9)]))[0] is Cause.NOT_LOADED
    given_up, failed = not_loaded(), not_loaded()
    for record, outcome in ((given_up, "given_up"), (failed, "failed")):
        record.note(StageName.LOAD, 100.0, 100.05, tier="disk", outcome=outcome, arrived_blocks=2)
    assert "given up after 2 blocks" in named(given_up)[1]
    assert named(failed)[0] is Cause.LOAD_FAILED
    damaged = Findings(failed_load=Removal(100.05, Tier.DISK, Why(Reason.DAMAGED)))
    assert named(failed, damaged)[0] is Cause.DAMAGED
    assert named(not_loaded())[0] is Cause.EVICTED, "it was evicted while the request waited"


@pytest.mark.parametrize(
    ("wait", "cause"),
    [
        (Wait.BEHIND, Cause.BEHIND),
        (Wait.PLACES, Cause.PLACES),
        (Wait.TENANT, Cause.TENANT),
        (Wait.MEMORY, Cause.MEMORY),
        (Wait.LOAD, Cause.LOAD),
        (Wait.OTHER, Cause.OTHER),
        (Wait.PREEMPTED, Cause.PREEMPTED),
        (Wait.WORKER, Cause.WORKER),
    ],
)
def test_waiting(wait: Wait, cause: Cause) -> None:
    record = RequestRecord(arrival_s=100.0, prompt_tokens=160)
    record.wait_for(wait, 100.0)
    found, sentence = named(record)
    assert found is cause and sentence.startswith("It has waited for 10.0 s, 10.0 s of it because")
    record.wait_for(None, 104.0)
    record.note(StageName.PREFILL, 104.0, 105.0)
    record.first_token_s = 105.0
    record.wait_for(Wait.PREEMPTED, 106.0)
    record.end("stop", 900.0)
    found, sentence = named(record)
    assert found is cause and sentence.startswith("The first token came after 5.00 s, 80% of that")


@pytest.mark.parametrize(
    ("stage", "cause"),
    [
        (StageName.RECEIVE, Cause.RECEIVED),
        (StageName.MODEL, Cause.MODEL),
        (StageName.TOKENIZE, Cause.TOKENIZED),
        (StageName.IMAGES, Cause.IMAGES),
        (StageName.STORE_LOOKUP, Cause.STORE_LOOKUP),
    ],
)
def test_before_the_queue(stage: StageName, cause: Cause) -> None:
    record = computed()
    record.arrival_s = 95.0
    record.note(stage, 95.0, 100.0)
    assert named(record)[0] is cause


def test_an_engines_call() -> None:
    record = RequestRecord(kind=Kind.LOOKUP, arrival_s=100.0, prompt_tokens=160)
    record.note(StageName.LOAD, 100.1, 102.0, tier="disk", bytes=1 << 20)
    record.end("ok", 102.1)
    cause, sentence = named(record)
    assert cause is Cause.LOAD
    assert (
        sentence
        == "The answer came after 2.10 s, 90% of that because 1,048,576 bytes of cached blocks were loaded from disk."
    )


def test_a_refusal_has_its_own_reason() -> None:
    record = RequestRecord(arrival_s=100.0)
    record.end("refused", 100.1, status="RESOURCE_EXHAUSTED", reason="the queue is full")
    assert named(record) == (Cause.REFUSED, "The request was refused: the queue is full.")
