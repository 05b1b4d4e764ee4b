"""Sampling, stop strings, logprobs and several sequences, through a real daemon and worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from prefixd.client import Client, Finished, FinishReason, Sampling, SequenceFinished, Tokens
from prefixd.serving.generation import sequence_seed
from prefixd.v1 import inference_pb2
from tests.daemons import Remote

REASON = inference_pb2.FinishReason


@pytest.fixture(scope="module")
def remote(model_daemon: Remote) -> Remote:
    return model_daemon


@pytest.fixture(scope="module")
def reference(model_directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_directory).eval()


@pytest.fixture(autouse=True)
def adds_up(remote: Remote) -> Iterator[None]:
    yield
    remote.settled()


def test_sequences_are_what_single_requests_with_their_seeds_give(
    remote: Remote, prompt: Callable[..., list[int]]
) -> None:
    """Their prompt of 6 full blocks and a bit is computed once: the others wait for it, and find it."""
    tokens = prompt(100)
    before = remote.stats()
    together = remote.sequences(tokens, n=4, seed=11, max_tokens=40)
    after = remote.settled()
    assert after.asked_tokens - before.asked_tokens == 4 * 100
    assert after.hit_tokens - before.hit_tokens == 3 * 96
    assert together[0].hits == (0, 0, 0)
    singles = [remote.generate(tokens, seed=sequence_seed(11, index), max_tokens=40) for index in range(4)]
    assert [answer.tokens for answer in together] == [answer.tokens for answer in singles]
    assert [answer.text for answer in together] == [answer.text for answer in singles]
    assert len({tuple(answer.tokens) for answer in together}) == 4
    assert together[0].finished.output_tokens == 160
    assert all(answer.ended is not None and answer.ended.reason == REASON.FINISH_REASON_LENGTH for answer in together)
    assert not any(answer.ended and answer.ended.HasField("cumulative_logprob") for answer in together)


def test_a_request_for_one_sequence_has_the_messages_it_always_had(
    remote: Remote, prompt: Callable[..., list[int]]
) -> None:
    for n in (0, 1):
        events = list(remote.begin(prompt(20), max_tokens=5, n=n))
        kinds = [event.WhichOneof("event") for event in events if event.tokens.token_ids or not event.tokens.text]
        assert kinds == ["accepted", *["tokens"] * 5, "finished"]
        assert all(not event.tokens.index and not event.tokens.logprobs for event in events)
        assert not events[-1].finished.HasField("cumulative_logprob")


def test_the_best_of_many_are_those_with_the_highest_sums(remote: Remote, prompt: Callable[..., list[int]]) -> None:
    tokens = prompt(30)
    singles = [
        remote.generate(tokens, seed=sequence_seed(3, index), logprobs=0, temperature=2.0, stop_token_ids=[9, 10, 11])
        for index in range(6)
    ]
    singles.sort(key=lambda answer: -answer.finished.cumulative_logprob)
    best = remote.sequences(tokens, n=2, best_of=6, seed=3, temperature=2.0, stop_token_ids=[9, 10, 11])
    assert [answer.tokens for answer in best] == [answer.tokens for answer in singles[:2]]
    for found, single in zip(best, singles, strict=False):
        assert found.ended is not None and not found.logprobs, "they only decided"
        assert found.ended.cumulative_logprob == pytest.approx(single.finished.cumulative_logprob)
        assert found.ended.cumulative_logprob == pytest.approx(sum(each.logprob for each in single.logprobs), rel=1e-5)
    assert best[0].finished.output_tokens == sum(len(answer.tokens) for answer in singles)
    (one,) = remote.sequences(tokens, best_of=6, seed=3, temperature=2.0, stop_token_ids=[9, 10, 11])
    assert one.tokens == singles[0].tokens


def test_logprobs_are_those_of_transformers(remote: Remote, prompt: Callable[..., list[int]], reference: Any) -> None:
    tokens = prompt(33)
    answer = remote.generate(tokens, temperature=1.5, top_k=50, logprobs=5)
    with torch.inference_mode():
        logits = reference(torch.tensor([[*tokens, *answer.tokens]])).logits[0, len(tokens) - 1 : -1]
    expected = torch.log_softmax(logits, -1)
    for row, (token, told) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
        best = expected[row].topk(5)
        assert told.logprob == pytest.approx(expected[row, token].item(), abs=1e-3)
        assert list(told.top_ids) == best.indices.tolist()
        assert list(told.top_logprobs) == pytest.approx(best.values.tolist(), abs=1e-3)
    total = sum(told.logprob for told in answer.logprobs)
    assert answer.finished.cumulative_logprob == pytest.approx(total, rel=1e-5)


def test_penalties_and_filters_reach_the_worker(
    remote: Remote, prompt: Callable[..., list[int]], reference: Any
) -> None:
    tokens = prompt(25)
    with torch.inference_mode():
        expected = reference.generate(
            torch.tensor([tokens]), max_new_tokens=20, do_sample=False, repetition_penalty=1.4, eos_token_id=None
        )
    greedy: dict[str, Any] = {"max_tokens": 20, "temperature": 0.0}
    assert remote.generate(tokens, repetition_penalty=1.4, **greedy).tokens == expected[0, 25:].tolist()
    plain = remote.generate(tokens, **greedy).tokens
    for filtered in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-9}):
        assert remote.generate(tokens, max_tokens=20, temperature=2.0, **filtered).tokens == plain
    for penalty in ("presence_penalty", "frequency_penalty"):
        assert remote.generate(tokens, **{penalty: 2.0}, **greedy).tokens != plain


def test_a_stop_string_ends_a_request_in_the_middle_of_its_tokens(
    remote: Remote, prompt: Callable[..., list[int]]
) -> None:
    """A token is a byte here, so the string lies across several."""
    tokens = prompt(40)
    free = remote.generate(tokens, max_tokens=60, temperature=0.3)
    stop = free.text[20:24]
    answer = remote.generate(tokens, max_tokens=1900, temperature=0.3, stop=["no such text", stop])
    assert answer.text == free.text[: free.text.index(stop)]
    assert answer.finished.reason == REASON.FINISH_REASON_STOP
    assert answer.tokens == free.tokens[: len(answer.tokens)] and len(answer.tokens) < 60
    remote.settled()  # long before 1900 tokens


def test_cancelling_ends_every_sequence(remote: Remote, prompt: Callable[..., list[int]]) -> None:
    stream = remote.begin(prompt(50), request_id="several", n=3, max_tokens=1900)
    next(stream)
    next(stream)
    assert remote.inference.Cancel(inference_pb2.CancelRequest(request_id="several")).cancelled
    *events, last = list(stream)
    ended = [event.sequence_finished for event in events if event.WhichOneof("event") == "sequence_finished"]
    assert [each.reason for each in ended] == [REASON.FINISH_REASON_CANCELLED] * 3
    assert last.finished.reason == REASON.FINISH_REASON_CANCELLED
    waiting = remote.begin(prompt(60), n=12, max_tokens=1900)
    next(waiting)
    waiting.cancel()
    remote.until(lambda stats: not stats.worker.running_requests and not stats.scheduler.waiting_requests)


def test_what_is_out_of_range_is_refused(
    remote: Remote, prompt: Callable[..., list[int]], refused: Callable[..., Any]
) -> None:
    for wrong, words in (
        ({"n": 33}, "n is 33"),
        ({"n": 4, "best_of": 3}, "best_of is 3"),
        ({"n": 4, "temperature": 0.0}, "temperature 0"),
        ({"logprobs": 21}, "logprobs is 21"),
        ({"stop": ["a"] * 17}, "17 strings"),
        ({"repetition_penalty": -1.0}, "repetition_penalty is -1"),
        ({"min_p": 2.0}, "min_p is 2"),
    ):
        with refused("INVALID_ARGUMENT", words):
            remote.generate(prompt(3), **wrong)
    for temperature in (1e-300, 1e39):
        assert len(remote.generate(prompt(3), temperature=temperature).tokens) == 12


def test_the_sdk_has_all_of_it(remote: Remote, prompt: Callable[..., list[int]]) -> None:
    with Client(remote.daemon.address) as client:
        sampling = Sampling(max_tokens=6, temperature=1.0, seed=4, ignore_eos=True, top_k=200)
        events = list(client.generate(prompt(20), sampling=replace(sampling, logprobs=2), n=2, best_of=3))
        ended = [event for event in events if isinstance(event, SequenceFinished)]
        assert [event.index for event in ended] == [0, 1] and all(event.output_tokens == 6 for event in ended)
        for sequence in ended:
            told = [event for event in events if isinstance(event, Tokens) and event.index == sequence.index]
            logprobs = [each for event in told for each in event.logprobs]
            assert sum(each.logprob for each in logprobs) == pytest.approx(sequence.cumulative_logprob, rel=1e-5)
            assert [len(each.top) for each in logprobs] == [2] * 6
        assert isinstance(events[-1], Finished) and events[-1].output_tokens == 18
        answer = client.generate(prompt(9), sampling=sampling)
        free = "".join(event.text for event in answer if isinstance(event, Tokens))
        *told, last = client.generate(prompt(9), sampling=replace(sampling, stop=free[2:4]))
        assert "".join(event.text for event in told if isinstance(event, Tokens)) == free[: free.index(free[2:4])]
        assert isinstance(last, Finished) and last.reason is FinishReason.STOP


@pytest.mark.parametrize("width", [2, 4, 6])
def test_a_beam_search_finds_what_transformers_finds(
    remote: Remote, prompt: Callable[..., list[int]], reference: Any, width: int
) -> None:
    tokens = prompt(70)
    with torch.inference_mode():
        expected = reference.generate(
            torch.tensor([tokens]), num_beams=width, num_return_sequences=2, max_new_tokens=20, do_sample=False,
            eos_token_id=None, output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
    search = inference_pb2.BeamSearch(width=width)
    found = remote.sequences(tokens, n=2, beam_search=search, max_tokens=20, temperature=0.0)
    assert [answer.tokens for answer in found] == expected.sequences[:, 70:].tolist()
    scores = [answer.ended.cumulative_logprob for answer in found if answer.ended]
    assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)
    alone = remote.generate(tokens, beam_search=search, max_tokens=20, temperature=0.0)
    assert alone.tokens == found[0].tokens and alone.hits[0] == 64
    assert alone.finished.cumulative_logprob == pytest.approx(scores[0])


def test_a_search_shares_memory_and_says_so(remote: Remote, prompt: Callable[..., list[int]]) -> None:
    before = remote.stats().worker
    remote.generate(prompt(90), beam_search=inference_pb2.BeamSearch(width=4), max_tokens=30, temperature=0.0)
    after = remote.settled().worker
    assert after.copied_blocks - before.copied_blocks >= 3, "the prompt's last block, for three beams"
    assert after.mapped_blocks > before.mapped_blocks


def test_several_sequences_copy_the_end_of_a_prompt(remote: Remote, prompt: Callable[..., list[int]]) -> None:
    """16 tokens a block: the first sequence computes the last 4 of 100, the others copy 3 and compute one."""
    before = remote.stats().worker
    remote.sequences(prompt(100), n=3, seed=5, max_tokens=60)
    assert remote.settled().worker.copied_blocks - before.copied_blocks == 2
