"""OpenAI's client against a daemon with tenants: tokens, quotas, many requests at once, and what errors become."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from tests.daemons import Remote

ALICE, BOB, OPERATOR, SCRAPER = (f"{name}-{'0123456789' * 2}" for name in ("alice", "bob", "operator", "scraper"))
LONG = "a prompt that two tenants send: " * 8
AT_ONCE = 60


@pytest.fixture(scope="module")
def remote(
    launch: Callable[..., Remote], with_model: dict[str, str | int], tmp_path_factory: pytest.TempPathFactory
) -> Remote:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.touch(0o600)
    lines = [f"a client {ALICE} alice", f"b client {BOB} bob", f"o admin {OPERATOR}", f"s metrics {SCRAPER}"]
    tokens.write_text("\n".join(lines) + "\n")
    more: dict[str, str | int] = {
        "gpu.bytes": "8MiB",
        "server.http": "127.0.0.1:0",
        "server.tokens": str(tokens),
        "tenants.alice.waiting_requests": 1000,
        "tenants.bob.waiting_requests": 2,
    }
    return launch({**with_model, **more})


def client_of(remote: Remote, key: str, retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key=key, base_url=f"{remote.daemon.http}/v1", max_retries=retries)


async def test_tenants_do_not_share_a_cached_prefix(remote: Remote) -> None:
    cached = []
    for key in (ALICE, ALICE, BOB):
        async with client_of(remote, key) as client:
            answer = await client.completions.create(model="", prompt=LONG, max_tokens=3)
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, (len(LONG) - 1) // 16 * 16, 0]


async def test_who_may_ask(remote: Remote) -> None:
    async with client_of(remote, "sk-nobody") as nobody, client_of(remote, SCRAPER) as scraper:
        for client, error in ((nobody, openai.AuthenticationError), (scraper, openai.PermissionDeniedError)):
            with pytest.raises(error):
                await client.models.list()
            with pytest.raises(error):
                await client.completions.create(model="", prompt="x")
    async with client_of(remote, OPERATOR) as operator:
        assert (await operator.completions.create(model="", prompt="x", max_tokens=1)).choices


async def test_many_streams_at_once_are_what_each_is_alone(remote: Remote) -> None:
    async with client_of(remote, ALICE) as client:

        async def text(number: int) -> str:
            stream = await client.completions.create(
                model="", prompt=f"{number}: once", max_tokens=20, seed=number, n=1 + number % 2, stream=True
            )
            pieces = [choice.text async for chunk in stream for choice in chunk.choices if choice.index == 0]
            return "".join(pieces)

        together = await asyncio.gather(*map(text, range(AT_ONCE)))
        assert [await text(number) for number in range(0, AT_ONCE, 7)] == together[::7]
    assert len(set(together)) > AT_ONCE // 2


async def test_a_tenant_beyond_its_quota_is_told_and_served_when_it_tries_again(remote: Remote) -> None:
    async with client_of(remote, BOB) as impatient:
        answers = await asyncio.gather(
            *(impatient.completions.create(model="", prompt=f"{i}", max_tokens=30) for i in range(40)),
            return_exceptions=True,
        )
    refused = [answer for answer in answers if isinstance(answer, BaseException)]
    assert refused and all(isinstance(error, openai.RateLimitError) for error in refused)
    assert "tenants.bob.waiting_requests" in str(refused[0])
    async with client_of(remote, BOB, retries=30) as patient:
        await asyncio.gather(*(patient.completions.create(model="", prompt=f"{i}", max_tokens=30) for i in range(12)))


def test_the_synchronous_client(remote: Remote, tmp_path: Path) -> None:
    with openai.OpenAI(api_key=ALICE, base_url=f"{remote.daemon.http}/v1", max_retries=0) as client:
        name = next(iter(client.models.list())).id
        answer = client.chat.completions.create(
            model=name,
            messages=[{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}],
            n=3,
            max_completion_tokens=5,
            logprobs=True,
            top_logprobs=4,
            stop=["\x00"],
            extra_headers={"X-Request-Id": "mine"},
        )
        assert answer.id == "chatcmpl-mine" and answer._request_id == "mine"
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        for choice in answer.choices:
            assert choice.logprobs is not None and choice.logprobs.content is not None
            assert all(len(token.top_logprobs) == 4 for token in choice.logprobs.content)
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=name, messages=[{"role": "user", "content": "x" * 5000}], max_tokens=5)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "x"}])
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
