"""Measures the share of the daemon's event loop that the ghosts take while clients ask as fast as they can."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import AsyncClient, Client, ExhaustedError, NamespaceSpec, PartSpec

_BLOCK_TOKENS, _PART_BYTES = 16, 1024
_CONVERSATIONS, _GROWS = 32, 16
_TASKS, _CLIENTS = 8, 2
_TICKS = os.sysconf("SC_CLK_TCK")


def share_of_loop(seconds: float, blocks: int, *, stores: bool) -> dict[str, Any]:
    """CPU time of the ghosts by that of the event loop's thread, at full load.

    Args:
        seconds: of load.
        blocks: of a prompt, of 16 tokens.
        stores: prompts grow, and what is not cached is stored; else all are only looked up.
    """
    settings = {"cpu.bytes": 64 << 20, "disk.bytes": 0}
    context = multiprocessing.get_context("spawn")
    with DaemonProcess(settings) as daemon, Client(daemon.address, name="benchmark what-if") as client:
        ready = context.Barrier(_CLIENTS + 1, timeout=120)
        counts: Any = context.Queue()
        asking = [
            context.Process(
                target=_ask, args=(daemon.address, seconds, blocks, stores, number, ready, counts), daemon=True
            )
            for number in range(_CLIENTS)
        ]
        for each in asking:
            each.start()
        ready.wait()
        time.sleep(seconds / 4)
        before_s, loop_before_s = client.stats().ghosts.busy_s, _thread_s(daemon.pid)
        wall_s = time.monotonic()
        time.sleep(seconds / 2)
        ghosts, loop_s = client.stats().ghosts, _thread_s(daemon.pid) - loop_before_s
        wall_s = time.monotonic() - wall_s
        asked = sum(counts.get(timeout=60 + seconds) for _ in asking)
        for each in asking:
            each.join()
    busy_s = ghosts.busy_s - before_s
    return {
        "prompts": asked,
        "prompts_per_s": round(asked / seconds, 1),
        "ghosts_s": round(busy_s, 4),
        "loop_s": round(loop_s, 3),
        "loop_busy": round(loop_s / wall_s, 3),
        "share": round(busy_s / max(loop_s, 1e-9), 5),
        "skipped_prompts": ghosts.skipped_prompts,
        "sampled_share": round(ghosts.tiers[0].sampled_share, 5),
    }


def _thread_s(pid: int) -> float:
    """CPU seconds of a process's first thread, which runs the event loop."""
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _ask(address: str, seconds: float, blocks: int, stores: bool, number: int, ready: Any, counts: Any) -> None:
    counts.put(asyncio.run(_ask_all(address, seconds, blocks, stores, number, ready)))


async def _ask_all(address: str, seconds: float, blocks: int, stores: bool, number: int, ready: Any) -> int:
    rng = np.random.default_rng(number)
    spec = NamespaceSpec("benchmark-what-if", _BLOCK_TOKENS, (PartSpec("full", 0, _PART_BYTES),))
    prompts = [rng.integers(0, 128_000, blocks * _BLOCK_TOKENS, dtype=np.uint32) for _ in range(_CONVERSATIONS)]
    content = np.zeros(2 * blocks * _PART_BYTES, np.uint8)
    async with AsyncClient(address, name="benchmark what-if") as client:
        cache = await client.register(spec)
        for prompt in prompts[: 1 if stores else _CONVERSATIONS // 2]:  # of the others nothing is found
            await cache.store(prompt, content[: blocks * _PART_BYTES])
        ready.wait()
        ends = time.monotonic() + seconds

        async def task(own: list[int]) -> int:
            asked = 0
            while time.monotonic() < ends:
                at = own[asked % len(own)]
                found = (await cache.match(prompts[at], counted=True)).blocks
                asked += 1
                if stores:
                    length = len(prompts[at]) // _BLOCK_TOKENS
                    try:
                        if found < length:
                            await cache.store(prompts[at], content[: (length - found) * _PART_BYTES], first_block=found)
                    except ExhaustedError:
                        await asyncio.sleep(0.01)
                    if length + _GROWS > 2 * blocks:
                        prompts[at] = rng.integers(0, 128_000, blocks * _BLOCK_TOKENS, dtype=np.uint32)
                    else:
                        more = rng.integers(0, 128_000, _GROWS * _BLOCK_TOKENS, dtype=np.uint32)
                        prompts[at] = np.concatenate([prompts[at], more])
            return asked

        shares = [list(range(first, _CONVERSATIONS, _TASKS)) for first in range(_TASKS)]
        return sum(await asyncio.gather(*map(task, shares)))
