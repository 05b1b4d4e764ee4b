"""The record of a request: stages, what it waited for, its end."""

from __future__ import annotations

import pytest

from prefixd.observability.request_record import MOST_STAGES, RequestRecord, StageName, Wait


def test_stages_begin_and_end() -> None:
    record = RequestRecord(arrival_s=1.0)
    record.note(StageName.RECEIVE, 1.0, 1.5)
    load = record.begin(StageName.LOAD, 2.0, tier="disk", blocks=4)
    load.end(3.0, outcome="complete")
    load.end(9.0, outcome="withdrawn")
    with pytest.raises(ValueError, match="not tokenized"), record.timed(StageName.TOKENIZE, iter([4.0, 4.25]).__next__):
        raise ValueError("not tokenized")
    queue = record.begin(StageName.QUEUE, 5.0)
    record.end("cancelled", 7.0)
    assert [(stage.name, stage.start_s, stage.end_s) for stage in record.stages] == [
        (StageName.RECEIVE, 1.0, 1.5),
        (StageName.LOAD, 2.0, 3.0),
        (StageName.TOKENIZE, 4.0, 4.25),
        (StageName.QUEUE, 5.0, 7.0),
    ]
    assert load.attributes == {"tier": "disk", "blocks": 4, "outcome": "complete"}
    assert queue.end_s == 7.0
    assert record.seconds(StageName.LOAD) == 1.0


def test_stages_are_bounded() -> None:
    record = RequestRecord()
    for number in range(MOST_STAGES + 5):
        record.begin(StageName.QUEUE, float(number)).end(number + 0.5)
    assert (len(record.stages), record.left_out) == (MOST_STAGES, 5)


def test_waits_add_up_to_the_time_in_the_queue() -> None:
    record = RequestRecord()
    for reason, now_s in ((Wait.BEHIND, 1.0), (Wait.BEHIND, 2.0), (Wait.PLACES, 3.0), (Wait.BEHIND, 3.5), (None, 4.0)):
        record.wait_for(reason, now_s)
    assert record.waits == {Wait.BEHIND: 2.5, Wait.PLACES: 0.5}
    record.wait_for(Wait.PREEMPTED, 6.0)
    record.end("stop", 8.0)
    assert record.waits[Wait.PREEMPTED] == 2.0


def test_a_record_ends_once() -> None:
    told: list[RequestRecord] = []
    record = RequestRecord(arrival_s=2.0, _on_end=told.append)
    record.handed_over_s, record.first_token_s = 3.0, 4.5
    record.end("failed", 5.0, status="UNAVAILABLE", reason="x" * 1000)
    record.end("stop", 6.0)
    assert told == [record]
    assert (record.outcome, record.status, record.ended_s, len(record.reason)) == ("failed", "UNAVAILABLE", 5.0, 400)
    assert (record.queue_s, record.ttft_s, record.cached_tokens) == (1.0, 2.5, 0)
