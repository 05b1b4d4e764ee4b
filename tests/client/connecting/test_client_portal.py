"""The thread that drives a blocking client."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from prefixd.client import ClientClosed
from prefixd.client.connecting.portal import Portal


async def nothing() -> None:
    pass


def test_an_iterator_that_its_own_thread_collects_is_ended_without_waiting() -> None:
    portal = Portal()
    ended = threading.Event()

    async def end() -> None:
        ended.set()

    async def collect() -> None:  # as garbage collection does: in the middle of whatever runs
        portal.finish(end())
        assert not ended.is_set()

    portal.run(collect())
    assert ended.wait(30)
    portal.stop()


def test_a_forked_child_is_told_to_make_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    portal = Portal()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        with pytest.raises(ClientClosed, match="before this one was forked"):
            portal.run(nothing())
        portal.stop()  # there is no thread to wait for
    assert portal.run(asyncio.sleep(0, "here")) == "here"
    portal.stop()
