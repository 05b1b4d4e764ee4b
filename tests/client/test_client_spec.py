"""What a client says, before it is on the wire."""

from __future__ import annotations

from typing import Any

import pytest

from prefixd.client import (
    AsyncClient,
    BeamSearch,
    Client,
    InvalidArgumentError,
    NamespaceSpec,
    PartSpec,
    Sampling,
    SlidingWindow,
)
from prefixd.client.inference import generate_request

NOBODY = "unix:/nobody/listens.here"


@pytest.mark.parametrize(
    ("block_tokens", "part"),
    [
        (1 << 32, PartSpec("full", 0, 64)),
        (-1, PartSpec("full", 0, 64)),
        (16, PartSpec("full", 0, 1 << 64)),
        (16, PartSpec("full", -1, 64)),
        (16, PartSpec("window", 0, 64, SlidingWindow(1 << 40))),
    ],
)
def test_numbers_that_the_contract_cannot_hold_are_refused_by_name(block_tokens: int, part: PartSpec) -> None:
    numbers = (block_tokens, part.rank, part.nbytes, part.rule.tokens if part.rule else 0)
    (wrong,) = [number for number in numbers if number < 0 or number >= 1 << 32]
    with pytest.raises(InvalidArgumentError, match=rf"'llama': .* {wrong}; .* 32 bits, bytes of 64"):
        NamespaceSpec("llama", block_tokens, (part,)).to_proto()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"sampling": Sampling(top_k=-1)}, "top_k is -1; it must be an integer from 0 to 4294967295"),
        ({"sampling": Sampling(top_k=1.5)}, "top_k is 1.5; it must be an integer from 0 to 4294967295"),
        ({"sampling": Sampling(max_tokens=-1)}, "max_tokens is -1; it must be an integer from 0 to 4294967295"),
        ({"sampling": Sampling(logprobs=-1)}, "logprobs is -1; it must be an integer from 0 to 4294967295"),
        (
            {"sampling": Sampling(seed=1 << 64)},
            "seed is 18446744073709551616; it must be an integer from 0 to 18446744073709551615",
        ),
        ({"sampling": Sampling(temperature=10**400)}, "temperature is 1000000000"),
        ({"sampling": Sampling(temperature="hot")}, "temperature is 'hot'; it must be a number"),
        ({"sampling": Sampling(ignore_eos="x")}, "ignore_eos is 'x'; it must be True or False"),
        ({"n": -1}, "n is -1; it must be an integer from 0 to 4294967295"),
        ({"best_of": -1}, "best_of is -1; it must be an integer from 0 to 4294967295"),
        ({"priority": 1 << 31}, "priority is 2147483648; it must be an integer from -2147483648 to 2147483647"),
        ({"sampling": Sampling(stop=[1])}, "stop has 1; each element must be a string that UTF-8 can encode"),
        ({"sampling": Sampling(stop=1)}, "stop is 1; it must be a sequence, each element a string"),
        (
            {"sampling": Sampling(stop_token_ids=[*range(20), -7])},
            "stop_token_ids has -7; each element must be an integer",
        ),
        ({"salt": "secret"}, "salt is of type str; it must be bytes"),
        ({"request_id": 1}, "request_id is 1; it must be a string"),
        ({"prompt": "\udcff"}, r"text is '\udcff'; it must be a string that UTF-8 can encode"),
        ({"sampling": {"top_k": 4}}, "sampling is {'top_k': 4}; it must be a Sampling, as Sampling(max_tokens=64)"),
        ({"sampling": Sampling(beam_search=4)}, "beam_search is 4; it must be a BeamSearch, as BeamSearch(width=4)"),
        (
            {"sampling": Sampling(beam_search=BeamSearch(width=-1))},
            "width is -1; it must be an integer from 0",
        ),
    ],
    ids=str,
)
async def test_what_generate_cannot_send_is_refused_by_name(arguments: dict[str, Any], says: str) -> None:
    arguments = {"prompt": [1], **arguments}
    async with AsyncClient(NOBODY) as client:
        with pytest.raises(InvalidArgumentError) as refused:
            await anext(client.generate(**arguments))
    assert str(refused.value).startswith(says)
    with Client(NOBODY) as blocking, pytest.raises(InvalidArgumentError) as again:
        next(iter(blocking.generate(**arguments)))
    assert str(again.value) == str(refused.value)


def test_what_is_left_out_stays_unset() -> None:
    request = generate_request("", Sampling())
    assert request.WhichOneof("prompt") == "text" and not request.HasField("beam_search")
    assert not request.sampling.HasField("seed") and not request.sampling.HasField("logprobs")
    assert generate_request([], Sampling(seed=0, logprobs=0)).sampling.HasField("seed")
    assert generate_request([], Sampling()).WhichOneof("prompt") == "token_ids"


def test_what_other_calls_cannot_send_is_refused_by_name() -> None:
    with Client(NOBODY) as client:
        for call, says in (
            (lambda: client.resize_tier("gpu", 1 << 30), "tier is 'gpu'; it must be Tier.GPU"),  # type: ignore[arg-type]
            (lambda: client.prefixes(limit=-1), "limit is -1; it must be an integer from 0"),
        ):
            with pytest.raises(InvalidArgumentError, match=says):
                call()
