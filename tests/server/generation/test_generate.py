"""Generation over a real socket: the cache changes how fast an answer comes, never what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from prefixd.v1 import admin_pb2, cache_pb2, inference_pb2
from tests.daemons import Remote, collect

REASON = inference_pb2.FinishReason


@pytest.fixture(scope="module")
def remote(model_daemon: Remote) -> Remote:
    return model_daemon


@pytest.fixture(autouse=True)
def adds_up(remote: Remote) -> Iterator[None]:
    yield
    remote.settled()


def evict(remote: Remote) -> None:
    remote.settled()
    remote.evict_all()


def test_text_and_token_ids_say_the_same(remote: Remote) -> None:
    prompt = "To be, or not to be: that is the question."
    asked = remote.generate(prompt)
    ids = [i for i in range(272)]
    assert asked.accepted.prompt_tokens == len(prompt) < len(ids)
    assert asked.finished.reason == REASON.FINISH_REASON_LENGTH
    assert asked.finished.prompt_tokens == len(prompt)
    assert len(asked.tokens) == 12
    assert 0 < asked.finished.queue_s <= asked.finished.ttft_s < 60
    # The tokenizer numbers the bytes in the order of their letters.
    alphabet = sorted(_byte_letters())
    as_ids = [alphabet.index(chr(byte) if byte != 32 else "\u0120") for byte in prompt.encode()]
    again = remote.generate(as_ids)
    assert again.tokens == asked.tokens
    assert again.text == asked.text
    assert again.hits == (32, 0, 0)


def _byte_letters() -> list[str]:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel.alphabet()


def test_a_prompt_is_retained_as_its_caller_wishes(remote: Remote, prompt: Callable[..., list[int]]) -> None:
    evict(remote)
    wish = cache_pb2.Retention(end_token=32, priority=40, ttl_s=600)
    remote.generate(prompt(3 * 16 + 2), max_tokens=20, retention=[wish])
    remote.settled()
    (listed,) = remote.admin.ListPrefixes(admin_pb2.ListPrefixesRequest()).prefixes
    blocks = remote.admin.Inspect(admin_pb2.InspectRequest(key=listed.key)).blocks
    assert [block.priority for block in blocks] == [40, 40, 0, 0]
    assert 500 < blocks[0].priority_s <= 600
    with pytest.raises(grpc.RpcError) as refused:
        remote.generate(prompt(20), retention=[cache_pb2.Retention(priority=200)])
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "retention[0], for tokens 0 to the end, has priority 200" in refused.value.details()


def test_tokens_are_streamed_one_by_one(remote: Remote, prompt: Callable[..., list[int]]) -> None:
    events = list(remote.begin(prompt(20), max_tokens=9))
    assert (events[0].WhichOneof("event"), events[-1].WhichOneof("event")) == ("accepted", "finished")
    sent = [len(event.tokens.token_ids) for event in events[1:-1]]
    assert sent[:9] == [1] * 9
    assert sent[9:] in ([], [0])  # half a character is left: the last message has no token


@pytest.mark.slow
def test_cold_warm_and_without_a_cache(
    remote: Remote,
    launch: Callable[..., Remote],
    with_model: dict[str, str | int],
    prompt: Callable[..., list[int]],
) -> None:
    plain = launch({**with_model, "cache.enabled": "false"})
    for length in (1, 15, 16, 17, 32, 33, 200):
        tokens = prompt(length, length)
        cold = remote.generate(tokens, max_tokens=20)
        warm = remote.generate(tokens, max_tokens=20)
        without = [plain.generate(tokens, max_tokens=20) for _ in range(2)]
        usable = (length - 1) // 16 * 16
        assert cold.hits == (0, 0, 0)
        assert warm.hits == (usable, 0, 0)
        assert [answer.hits for answer in without] == [(0, 0, 0)] * 2
        assert cold.tokens == warm.tokens == without[0].tokens == without[1].tokens
    stats = plain.settled()
    assert (stats.hit_tokens, [tier.blocks for tier in stats.tiers]) == (0, [0, 0, 0])


def test_an_answer_is_cached_for_the_next_turn(remote: Remote, prompt: Callable[..., list[int]]) -> None:
    first = prompt(30)
    answer = remote.generate(first, max_tokens=40)
    turn = [*first, *answer.tokens, *prompt(10, 1)]
    again = remote.generate(turn)
    assert again.hits == (64, 0, 0)  # 30 + 40 tokens, of which the last was never computed: 4 full blocks
    assert again.tokens == remote.generate(turn, salt=b"nothing cached").tokens


def test_hits_are_told_by_tier(remote: Remote, prompt: Callable[..., list[int]]) -> None:
    """Written to disk, then crowded out of the GPU tier's 512 frames by other prompts."""
    evict(remote)
    tokens = prompt(161)
    first = remote.generate(tokens)
    assert remote.admin.Flush(admin_pb2.FlushRequest()).blocks == 10
    before = remote.stats()

    def blocks_on_gpu() -> int:
        prefixes = remote.admin.ListPrefixes(admin_pb2.ListPrefixesRequest(limit=1000)).prefixes
        return sum(prefix.gpu_blocks for prefix in prefixes if prefix.tokens == 160)

    others = 0
    while blocks_on_gpu() or others < 5:  # write-back may hold the oldest blocks when room is made
        others += 1
        assert others < 50
        remote.generate(prompt(2000, others), max_tokens=1)
    assert remote.tier(1).evicted_blocks > 0
    again = remote.generate(tokens)
    assert again.hits[0] == 0
    assert sum(again.hits) == 160
    assert again.tokens == first.tokens
    after = remote.stats()
    for index, (now, then) in enumerate(zip(after.tiers, before.tiers, strict=True)):
        assert now.hit_tokens - then.hit_tokens == again.hits[index]
    assert after.asked_tokens - before.asked_tokens == 161 + others * 2000
    assert after.hit_tokens - before.hit_tokens == 160


def test_a_prefix_in_cpu_memory_comes_layer_by_layer(remote: Remote, prompt: Callable[..., list[int]]) -> None:
    """It leaves the GPU tier for the CPU tier, since that shrinks for a moment. Of a load so small all layers may have
    come before its run begins; not each time."""
    evict(remote)
    tokens = prompt(161)
    first = remote.generate(tokens)
    before = remote.settled().scheduler.layerwise_loads
    for _ in range(5):
        for nbytes in (32 << 10, 4 << 20):
            *_, resized = remote.admin.ResizeTier(admin_pb2.ResizeTierRequest(tier=cache_pb2.TIER_GPU, nbytes=nbytes))
            assert resized.done
        again = remote.generate(tokens)
        assert again.hits == (64, 96, 0), "the smaller tier had room for four blocks"
        assert again.tokens == first.tokens
        if remote.stats().scheduler.layerwise_loads > before:
            return
    pytest.fail("no run began before the last layers had come")


def test_many_at_once_with_shared_prefixes(remote: Remote, prompt: Callable[..., list[int]]) -> None:
    """The blocks that several need are computed once: each later one waits for the first and finds them."""
    evict(remote)
    shared = prompt(161)
    prompts = [[*shared[: 160 - 16 * (variant % 3)], *prompt(25, variant)] for variant in range(1, 13)]
    before = remote.stats()
    together = remote.generate_all(prompts, max_tokens=24)
    after = remote.stats()
    assert after.hit_tokens - before.hit_tokens == sum(sum(answer.hits) for answer in together)
    assert after.hit_tokens - before.hit_tokens >= 11 * 128
    for tokens, answer in zip(prompts, together, strict=True):
        assert answer.tokens == remote.generate(tokens, max_tokens=24).tokens
        assert answer.tokens == remote.generate(tokens, max_tokens=24, salt=b"one at a time").tokens
    assert len({tuple(answer.tokens) for answer in together}) == len(prompts)


def test_the_same_prompt_twelve_times_at_once(remote: Remote, prompt: Callable[..., list[int]]) -> None:
    tokens = prompt(100)
    answers = remote.generate_all([tokens] * 12)
    assert len({tuple(answer.tokens) for answer in answers}) == 1
    assert sorted(sum(answer.hits) for answer in answers) == [0, *[96] * 11]


def test_sampling_depends_on_the_seed_alone(remote: Remote, prompt: Callable[..., list[int]]) -> None:
    tokens = prompt(40)
    greedy = remote.generate(tokens, temperature=0.0, seed=1).tokens
    assert remote.generate(tokens, temperature=0.0, seed=2).tokens == greedy
    seeds = (0, 1, 2**63, 2**64 - 1)
    sampled = [remote.generate(tokens, temperature=3.0, seed=seed).tokens for seed in seeds]
    assert [remote.generate(tokens, temperature=3.0, seed=seed).tokens for seed in seeds] == sampled
    assert len(set(map(tuple, sampled))) == len(seeds)
    assert remote.generate(tokens, temperature=3.0, seed=1, top_p=1e-9).tokens == greedy


def test_hot_output_never_breaks_the_text(remote: Remote, prompt: Callable[..., list[int]]) -> None:
    """Nearly uniform bytes, most of them no UTF-8: what is streamed is text all the same."""
    answer = remote.generate(prompt(10), temperature=50.0, max_tokens=300)
    assert len(answer.tokens) == 300
    assert answer.text


def test_stop_tokens_and_end_of_sequence(remote: Remote, prompt: Callable[..., list[int]]) -> None:
    tokens = prompt(40)
    free = remote.generate(tokens, max_tokens=40)
    stop = free.tokens[5]
    cut = free.tokens.index(stop) + 1
    stopped = remote.generate(tokens, max_tokens=40, stop_token_ids=[stop])
    assert stopped.finished.reason == REASON.FINISH_REASON_STOP
    assert stopped.tokens == free.tokens[:cut]
    assert free.text.startswith(stopped.text)
    assert remote.generate(tokens, max_tokens=1).finished.reason == REASON.FINISH_REASON_LENGTH


def test_forced_tokens_are_the_answer_and_are_cached_for_the_next_turn(
    remote: Remote, prompt: Callable[..., list[int]]
) -> None:
    first, answer = prompt(30, 7), prompt(40, 8)
    ids = inference_pb2.TokenIds(ids=np.asarray(answer, "<u4").tobytes())
    forced = remote.generate(first, forced_tokens=ids, max_tokens=40)
    assert forced.tokens == answer and forced.finished.reason == REASON.FINISH_REASON_LENGTH
    turn = [*first, *answer, *prompt(10, 9)]
    again = remote.generate(turn)
    assert again.hits == (64, 0, 0)
    assert again.tokens == remote.generate(turn, salt=b"nothing cached").tokens


def test_the_models_longest_context_ends_a_request(remote: Remote, prompt: Callable[..., list[int]]) -> None:
    answer = remote.generate(prompt(2040), max_tokens=2**32 - 1)
    assert answer.finished.reason == REASON.FINISH_REASON_LENGTH
    assert len(answer.tokens) == 8


def test_salts_never_share(remote: Remote, prompt: Callable[..., list[int]]) -> None:
    tokens = prompt(64)
    answers = [remote.generate(tokens, salt=salt) for salt in (b"", b"a", b"b", b"a")]
    assert [sum(answer.hits) for answer in answers] == [0, 0, 0, 48]
    assert len({tuple(answer.tokens) for answer in answers}) == 1


def test_cancelled_by_its_id(remote: Remote, prompt: Callable[..., list[int]], refused: Callable[..., Any]) -> None:
    tokens = prompt(50)
    stream = remote.begin(tokens, request_id="mine", max_tokens=1900)
    first = next(stream)
    assert first.accepted.request_id == "mine"
    some = next(stream).tokens.token_ids
    with refused("ALREADY_EXISTS", "'mine' is running", "another"):
        remote.generate(tokens, request_id="mine")
    cancel = inference_pb2.CancelRequest(request_id="mine")
    assert remote.inference.Cancel(cancel).cancelled
    *events, last = list(stream)
    assert last.finished.reason == REASON.FINISH_REASON_CANCELLED
    assert last.finished.output_tokens == len(some) + sum(len(event.tokens.token_ids) for event in events)
    assert not remote.inference.Cancel(cancel).cancelled
    # The name is free again, and what was computed is kept.
    again = collect(remote.begin(tokens, request_id="mine"))
    assert again.hits == (48, 0, 0)


def test_hanging_up_ends_the_request(remote: Remote, prompt: Callable[..., list[int]]) -> None:
    """In the queue, in the middle, and between two tokens: nothing keeps running."""
    streams = [remote.begin(prompt(30, variant), max_tokens=1900) for variant in range(12)]
    for stream in streams:
        next(stream)
    remote.until(lambda stats: stats.worker.running_requests == 8 and stats.scheduler.waiting_requests == 4)
    for stream in streams:
        stream.cancel()
    remote.until(lambda stats: not stats.worker.running_requests and not stats.scheduler.waiting_requests)
    for variant in range(20):
        remote.begin(prompt(30, variant), max_tokens=1900).cancel()
    remote.settled()
