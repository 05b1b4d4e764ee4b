"""Whoever listens to prompts does not hurt the calls that bring them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.rig import Rig


async def test_a_listener_that_fails_fails_no_call(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    rig, told = make_rig(), list[int]()
    prompts = rig.cache.prompts

    def fail(*_: object) -> None:
        raise MemoryError("a shortage")

    prompts.asked += [fail, lambda namespace, chain, lookup: told.append(lookup.blocks)]
    prompts.stored.append(fail)
    await rig.put([1, 2, 3])
    lease = await rig.lease([1, 2, 3])
    assert lease is not None and told[-1:] == [3]
    assert "a prompt could not be noted" in caplog.text and "a shortage" in caplog.text
