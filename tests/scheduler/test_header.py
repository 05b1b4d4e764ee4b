"""A header that all prompts share decides nothing: the order is that of what lies behind it."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, takewhile
from statistics import fmean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd_scheduler import Distance, Header, QueuedRequest, RequestQueue, create_policy, prompt_weight
from prefixd_scheduler.header import RECENT

PROMPTS = st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=100)


def key_of(prompt: Sequence[Hashable]) -> Callable[[int], Hashable]:
    return lambda n: tuple(prompt[:n])


def add(header: Header, *prompts: Sequence[Hashable]) -> list[bool]:
    return [header.add(key_of(prompt), len(prompt)) for prompt in prompts]


def within(header: Header, prompt: Sequence[Hashable]) -> int:
    return header.within(key_of(prompt), len(prompt))


def in_common(prompts: list[list[int]]) -> list[int]:
    return [tokens[0] for tokens in takewhile(lambda tokens: len(set(tokens)) == 1, zip(*prompts, strict=False))]


def test_a_header_counts_after_32_prompts_until_one_does_not_share_it() -> None:
    header = Header()
    changes = add(header, *(f"header{number:02}" for number in range(RECENT - 1)))
    assert within(header, "header40") == 0
    changes += add(header, "header31")
    assert within(header, "header40") == len("header")
    assert changes == [False] * (RECENT - 1) + [True]
    assert within(header, "another prompt") == within(header, "head") == 0, "one that waits since before"
    assert add(header, "header41", "head of another") == [False, True]
    assert within(header, "header40") == len("head")
    assert add(header, "another prompt") == [True]
    assert within(header, "header40") == 0
    assert sum(add(header, *(f"header{number}" for number in range(2 * RECENT)))) == 1, "found again"
    assert within(header, "header40") == len("header")


def test_a_prefix_that_all_ask_about_is_no_header() -> None:
    """Nothing is cached behind it: the paper's workload with one template. The weights stay those of the paper."""
    header = Header()
    assert not any(add(header, *["template"] * 100))
    assert within(header, "template") == 0


@given(PROMPTS)
def test_the_header_is_what_the_last_prompts_have_in_common(prompts: list[list[int]]) -> None:
    header = Header()
    before = 0
    for count, prompt in enumerate(prompts, 1):
        (changed,) = add(header, prompt)
        recent = prompts[max(0, count // RECENT - 1) * RECENT : count]
        common = in_common(recent) if count >= RECENT else []
        length = len(common) if any(len(each) > len(common) for each in recent) else 0
        assert changed == (length != before)
        before = length
        for each in prompts:
            assert within(header, each) == (length if each[:length] == common[:length] else 0)


PROMPT_TOKENS, QUESTION_TOKENS = 4096, 32
REQUESTS = 128
LOAD_PART = 0.1  # what loading a token takes of what computing it takes


class Server:
    """Serves one request at a time in the order of a policy. Half of them ask about documents on disk, half about new
    ones, all behind a header that is on the GPU."""

    def __init__(self, policy: str, header_tokens: int, seed: int) -> None:
        self._source = random.Random(seed)
        self._header_tokens = header_tokens
        self._header = Header()
        self._queue = RequestQueue(create_policy(policy), REQUESTS)
        self._known = [True, False] * (REQUESTS // 2)
        self._source.shuffle(self._known)

    def first_token_p50_s(self, load: float) -> float:
        """`load`: seconds of work that come in a second."""
        behind = PROMPT_TOKENS - self._header_tokens
        works_s = [1e-4 * (QUESTION_TOKENS + behind * (LOAD_PART if known else 1.0)) for known in self._known]
        arrivals_s = list(accumulate(self._source.expovariate(load / fmean(works_s)) for _ in works_s))
        waits_s: list[float] = []
        now_s, coming = 0.0, 0
        while len(waits_s) < REQUESTS:
            now_s = now_s if self._queue else max(now_s, arrivals_s[coming])
            while coming < REQUESTS and arrivals_s[coming] <= now_s:
                self._arrive(coming, arrivals_s[coming])
                coming += 1
            request = self._queue.serve(self._queue.window(1, now_s)[0].id)
            now_s += works_s[request.id]
            waits_s.append(now_s - request.arrival_s)
        return median(waits_s)

    def _arrive(self, number: int, arrival_s: float) -> None:
        changed = self._header.add(self._key(number), self._cached(number))
        self._queue.push(QueuedRequest(number, arrival_s, PROMPT_TOKENS + QUESTION_TOKENS))
        for waiting in list(self._queue) if changed else [self._queue.get(number)]:
            assert waiting is not None
            cached = self._cached(waiting.id)
            header = self._header.within(self._key(waiting.id), cached)
            parts = [(Distance.GPU, self._header_tokens - header), (Distance.DISK, cached - self._header_tokens)]
            weight = prompt_weight(parts, PROMPT_TOKENS + QUESTION_TOKENS - header)
            self._queue.update(waiting.id, weight, cached, self._key(waiting.id)(cached) if cached else None)

    def _cached(self, number: int) -> int:
        return PROMPT_TOKENS if self._known[number] else self._header_tokens

    def _key(self, number: int) -> Callable[[int], Hashable]:
        return lambda tokens: (tokens, -1 if tokens <= self._header_tokens else number)


@pytest.mark.parametrize("policy", ["fpf", "relaxed-fpf"])
@pytest.mark.parametrize("header_32nds", [0, 4, 12, 20, 24, 28, 30, 31])
def test_the_median_first_token_is_no_later_than_first_come_first_served(header_32nds: int, policy: str) -> None:
    """With the header in the weights prompts of 3/4 header and of more than 7/8 ran as they came under both policies,
    and at 5/8 Relaxed-FPF was later in some runs."""
    header_tokens = PROMPT_TOKENS * header_32nds // 32
    for load, at_most in ((0.9, 1.0), (1.5, 0.9)):
        for seed in range(3):
            fcfs_s = Server("fcfs", header_tokens, seed).first_token_p50_s(load)
            assert Server(policy, header_tokens, seed).first_token_p50_s(load) < at_most * fcfs_s
