"""Forks while a client is open, and after; prints a line of JSON for each child: what became of it. For a process of
its own: `python -m tests.client.connecting.fork_child ADDRESS`."""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

from prefixd.client import AsyncClient, Client, NamespaceSpec, PartSpec

SPEC = NamespaceSpec("forks", 2, (PartSpec("all", 0, 64),))
TOKENS = [1, 2, 3, 4]


def use(address: str) -> int:
    with Client(address) as client:
        return client.register(SPEC).match(TOKENS).blocks


async def use_async(address: str) -> int:
    async with AsyncClient(address) as client:
        return (await (await client.register(SPEC)).match(TOKENS)).blocks


def forked(case: str, work: Callable[[], Any]) -> None:
    """Does `work` in a forked child; prints its answer or its error, and how the child ended."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            said = repr(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        said = answer.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(json.dumps({"case": case, "said": said, "status": status}), flush=True)


def main(address: str) -> None:
    forked("nothing used before", lambda: use(address))
    client = Client(address)
    cache = client.register(SPEC)
    forked("made in the child", lambda: use(address))
    forked("made in the child, async", lambda: asyncio.run(use_async(address)))
    forked("inherited", lambda: cache.match(TOKENS))
    forked("inherited, closed in the child", client.close)
    for _ in range(10):
        forked("idle", lambda: len([str(each) for each in range(100_000)]) and gc.collect() * 0)

    async def inherited() -> None:
        async with AsyncClient(address) as other:
            registered = await other.register(SPEC)
            slots = await registered.reserve(TOKENS)
            forked("inherited, async", lambda: asyncio.run(registered.match(TOKENS)))
            forked("inherited reservation", lambda: asyncio.run(slots.renew()))
            forked("inherited, async, closed in the child", lambda: asyncio.run(other.close()))
            await registered.match(TOKENS)  # the parent's goes on

    asyncio.run(inherited())
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        print(json.dumps({"case": "spawned", "said": repr(pool.apply(use, (address,))), "status": 0}), flush=True)
    print(json.dumps({"case": "the parent", "said": repr(cache.match(TOKENS).blocks), "status": 0}), flush=True)
    client.close()


if __name__ == "__main__":
    main(sys.argv[1])
