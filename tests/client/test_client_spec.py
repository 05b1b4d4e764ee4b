"""What a client says about its model, before it is on the wire."""

from __future__ import annotations

import pytest

from prefixd.client import InvalidArgumentError, NamespaceSpec, PartSpec, SlidingWindow


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
