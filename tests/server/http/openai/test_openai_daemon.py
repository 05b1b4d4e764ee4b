"""OpenAI's client against a daemon with a worker."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.daemons import Remote

pytestmark = pytest.mark.slow


@pytest.fixture
def client(model_daemon: Remote) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(api_key="none", base_url=f"{model_daemon.daemon.http}/v1", max_retries=0) as client:
        yield client


def model_of(client: openai.OpenAI) -> str:
    return next(iter(client.models.list())).id


def test_a_completion_is_the_same_as_over_grpc(client: openai.OpenAI, model_daemon: Remote) -> None:
    prompt = "the same prompt, twice: " * 4
    expected = model_daemon.generate(prompt, max_tokens=24, seed=5)
    answer = client.completions.create(
        model=model_of(client), prompt=prompt, max_tokens=24, seed=5, logprobs=1, extra_body={"ignore_eos": True}
    )
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (expected.text, "length")
    assert choice.logprobs is not None and choice.logprobs.tokens is not None and len(choice.logprobs.tokens) == 24
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 24)
    assert usage.prompt_tokens_details.cached_tokens == (len(prompt) - 1) // 16 * 16, "its last token is computed"
    pieces = client.completions.create(
        model=model_of(client), prompt=prompt, max_tokens=24, seed=5, stream=True, extra_body={"ignore_eos": True}
    )
    assert "".join(piece.choices[0].text for piece in pieces) == expected.text


def test_a_chat_goes_through_the_models_template(client: openai.OpenAI, model_daemon: Remote) -> None:
    expected = model_daemon.generate("user: hi\n", max_tokens=8, temperature=0.0)
    stream = client.chat.completions.create(
        model=model_of(client),
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        max_completion_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    *pieces, last = list(stream)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected.text
    assert last.usage is not None and last.usage.prompt_tokens == len("user: hi\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(model_daemon: Remote, stream: bool) -> None:
    finished = model_daemon.stats().scheduler.finished_requests
    async with openai.AsyncOpenAI(api_key="none", base_url=f"{model_daemon.daemon.http}/v1") as client:
        asked = asyncio.create_task(
            client.completions.create(
                model="", prompt="x", n=3, max_tokens=1500, stream=stream, extra_body={"ignore_eos": True}
            )
        )
        await asyncio.to_thread(model_daemon.until, lambda stats: stats.worker.running_requests == 3)
        if stream:
            await (await asked).close()  # type: ignore[union-attr]
        else:
            asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    await asyncio.to_thread(model_daemon.settled)
    assert model_daemon.stats().scheduler.finished_requests == finished + 3


def test_the_example_finds_its_turns_in_the_cache(
    model_daemon: Remote, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("openai_chat", Path(__file__).parents[4] / "examples/openai_chat.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert example.main(["--url", f"{model_daemon.daemon.http}/v1"]) == 0
    cached = [int(found) for found in re.findall(r"(\d+) of them cached", capsys.readouterr().out)]
    assert len(cached) == 3 and cached[0] < cached[1] < cached[2]
    monkeypatch.setattr(openai._base_client, "DEFAULT_MAX_RETRIES", 0)
    assert example.main(["--url", "http://127.0.0.1:1/v1"]) == 1
    assert capsys.readouterr().err.startswith("http://127.0.0.1:1/v1 does not answer")
