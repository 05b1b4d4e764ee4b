"""Prompts longer than the daemon's memory: how much of what fits is loaded, and how much is said to be found.

A daemon with a disk and a CPU tier of --tier blocks. Prompts of half to four times the tier are stored on disk, and
loaded again: with one lease, of which the longest beginning that fits is expected, and with `load`, which reads in
slices, of which everything is; alone, beside leases of other prompts that take a tenth to nine tenths of the tier, and
several at a time; of full attention and with a sliding window; in shared memory and streamed. Every byte is compared.

loaded_of_fitting is blocks loaded / blocks expected, found_of_loaded the tokens that the daemon counts as found / those
that it has granted.

With --vllm, in vLLM's environment, a real vLLM on the CPU computes, saves and loads prompts of half to four times a
tier of 8 blocks, alone and four at a time: vllm_loaded_of_fitting.
"""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import harness
from benchmarks.common.block_bytes import BlockBytes, Bytes
from benchmarks.common.options import flag, option, seed
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import AsyncCache, AsyncClient, NamespaceSpec, PartSpec, SlidingWindow
from prefixd.client.connecting.session import MemoryMode

BLOCK_TOKENS, PART_BYTES = 16, 16 << 10
FACTORS = (0.5, 0.75, 1.0, 1.1, 1.5, 2.0, 3.0, 4.0)
HELD = (0.1, 0.4, 0.6, 0.9)
VLLM_TIER = 8
_AT_A_TIME = 4
_SAVES = 20
_WINDOW_BLOCKS = 3

SPECS = {
    "full": NamespaceSpec("full", BLOCK_TOKENS, (PartSpec("full", 0, PART_BYTES),)),
    "window": NamespaceSpec(
        "window",
        BLOCK_TOKENS,
        (
            PartSpec("full", 0, PART_BYTES),
            PartSpec("window", 0, PART_BYTES, SlidingWindow(_WINDOW_BLOCKS * BLOCK_TOKENS + 1)),
        ),
    ),
}


@dataclass(slots=True)
class Findings:
    """What was loaded.

    Attributes:
        fitting: by case, blocks that fit.
        loaded: of these, blocks that came.
        wrong: blocks with a wrong byte.
        granted_tokens: what was granted to be read.
        found_tokens: what the daemon says was found.
    """

    fitting: dict[str, int] = field(default_factory=dict)
    loaded: dict[str, int] = field(default_factory=dict)
    wrong: int = 0
    granted_tokens: int = 0
    found_tokens: int = 0

    def add(self, case: str, fitting: int, loaded: int) -> None:
        self.fitting[case] = self.fitting.get(case, 0) + fitting
        self.loaded[case] = self.loaded.get(case, 0) + loaded

    def result(self) -> dict[str, Any]:
        return {
            "loaded_of_fitting": sum(self.loaded.values()) / sum(self.fitting.values()),
            "found_of_loaded": self.found_tokens / self.granted_tokens,
            "wrong_blocks": self.wrong,
            "fitting_blocks": sum(self.fitting.values()),
            "cases": [
                {"case": case, "fitting": fitting, "loaded": self.loaded[case]}
                for case, fitting in self.fitting.items()
            ],
        }


def wrong_blocks(prompt: BlockBytes, into: Sequence[Bytes], blocks: int) -> int:
    """How many of the first blocks, which were loaded as a prefix, have wrong bytes where they are needed."""
    wrong = (into[0][:blocks] != prompt.of_part(0)[:blocks]).any(axis=1)
    for part in range(1, len(into)):
        end = slice(max(0, blocks - _WINDOW_BLOCKS), blocks)
        wrong[end] |= (into[part][end] != prompt.of_part(part)[end]).any(axis=1)
    return int(wrong.sum())


class Bench:
    """One client of one daemon."""

    def __init__(self, client: AsyncClient, tier: int, findings: Findings, rng: np.random.Generator) -> None:
        self._client = client
        self._tier = tier
        self._findings = findings
        self._rng = rng

    async def measure(self, kind: str, step: Any) -> None:
        cache = await self._client.register(SPECS[kind])
        parts = len(SPECS[kind].parts)
        prompts = [self._prompt(kind, max(1, int(factor * self._tier / parts))) for factor in FACTORS]
        for prompt in prompts:
            await self._store(cache, prompt)
        shared = self._client.arena is not None
        for held in (0.0, *(HELD if shared else ())):
            async with self._others(held) as taken:
                for prompt in prompts:
                    case = f"{kind}, {'shared' if shared else 'streamed'}, {'beside leases' if held else 'alone'}"
                    if shared and kind == "full":
                        await self._lease(cache, prompt, self._tier - taken, case)
                    await self._load(cache, prompt, case)
                    step()
        for prompt in prompts:
            several = [prompt, *self._rng.permutation(np.array(prompts, object))[: _AT_A_TIME - 1]]
            await asyncio.gather(*(self._load(cache, each, f"{kind}, {_AT_A_TIME} at a time") for each in several))
            step()

    @asynccontextmanager
    async def _others(self, share: float) -> AsyncIterator[int]:
        """Leases of other prompts that take this share of the tier; how many blocks that is."""
        cache = await self._client.register(SPECS["full"])
        taken = 0
        async with AsyncExitStack() as leases:
            for blocks in (int(share * self._tier) // 2, int(share * self._tier) - int(share * self._tier) // 2):
                if blocks:
                    other = self._prompt("full", blocks)
                    await self._store(cache, other)
                    lease = await leases.enter_async_context(await cache.acquire(other.tokens, counted=False))
                    taken += lease.blocks
            yield taken

    async def _lease(self, cache: AsyncCache, prompt: BlockBytes, room: int, case: str) -> None:
        fitting = min(prompt.blocks, room)
        async with await cache.acquire(prompt.tokens) as lease:
            into = _room_for(prompt)
            await lease.copy_into(into)
            self._note(prompt, into, f"one lease, {case}", fitting, lease.blocks)

    async def _load(self, cache: AsyncCache, prompt: BlockBytes, case: str) -> None:
        into = _room_for(prompt)
        loaded = await cache.load(prompt.tokens, into)
        self._note(prompt, into, f"load, {case}", prompt.blocks, loaded)

    def _note(self, prompt: BlockBytes, into: Sequence[Any], case: str, fitting: int, loaded: int) -> None:
        self._findings.wrong += wrong_blocks(prompt, into, loaded)
        self._findings.granted_tokens += loaded * BLOCK_TOKENS
        self._findings.add(case, fitting, loaded)

    def _prompt(self, kind: str, blocks: int) -> BlockBytes:
        return BlockBytes(SPECS[kind], self._rng.integers(0, 1 << 31, blocks * BLOCK_TOKENS, np.uint32))

    async def _store(self, cache: AsyncCache, prompt: BlockBytes) -> None:
        """Stores a prompt on disk. Of a window it has the bytes of every block, as an engine does that computes it."""
        done, step = 0, max(1, self._tier // 8)
        kv = [prompt.of_part(part) for part in range(len(prompt.spec.parts))]
        while done < prompt.blocks:
            end = min(done + step, prompt.blocks)
            tokens = prompt.tokens[: end * BLOCK_TOKENS]
            kept = await cache.store(tokens, [of_part[done:end] for of_part in kv], first_block=done, durable=True)
            if kept.dropped:
                raise harness.BenchmarkError(f"{kept.dropped} of {prompt.blocks} blocks could not be stored")
            done = end


def _room_for(prompt: BlockBytes) -> list[Bytes]:
    return [np.zeros((prompt.blocks, part.nbytes), np.uint8) for part in prompt.spec.parts]


async def measure(tier: int, seed: int, step: Any) -> Findings:
    """All cases, over a daemon for each way in which bytes travel."""
    findings = Findings()
    modes: tuple[MemoryMode, ...] = ("shared", "streamed")
    for mode in modes:
        with DaemonProcess({"cpu.bytes": tier * PART_BYTES, "disk.bytes": "2GiB"}) as daemon:
            async with AsyncClient(daemon.address, memory=mode) as client:
                before = (await client.stats()).hit_tokens
                for kind in SPECS:
                    await Bench(client, tier, findings, np.random.default_rng(seed)).measure(kind, step)
                stats = await client.stats()
                findings.found_tokens += stats.hit_tokens - before
                if violations := (await client.check_integrity()).violations:
                    raise harness.BenchmarkError(f"the daemon does not add up: {violations[0]}")
    return findings


def measure_vllm(seed: int, step: Any) -> dict[str, Any]:
    """A real vLLM with a tier of `VLLM_TIER` blocks: prompt tokens loaded of those that could be."""
    from benchmarks.engines.vllm_engine import EngineProcess, EngineRequest, connector
    from benchmarks.engines.vllm_models import VOCABULARY, save_llama

    block_tokens, block_bytes = 64, 64 * 2048
    rng = random.Random(seed)
    loaded = fitting = answers = 0
    with tempfile.TemporaryDirectory(prefix="prefixd-long-") as folder:
        settings = {"cpu.bytes": VLLM_TIER * block_bytes, "disk.bytes": "512MiB"}
        with DaemonProcess(settings) as daemon:
            options = {"block_tokens": block_tokens, "recompute_if_slower": False, "timeout_s": 60.0}
            model = save_llama(Path(folder))
            with EngineProcess(model, kv_transfer=connector(daemon.address, **options)) as engine:
                requests = [
                    EngineRequest(
                        [rng.randrange(4, VOCABULARY) for _ in range(math.ceil(blocks) * block_tokens + 10)], 8
                    )
                    for blocks in (factor * VLLM_TIER for factor in FACTORS)
                ]
                expected = [engine.generate([request])[0].token_ids for request in requests]
                blocks = sum(len(request.prompt) // block_tokens for request in requests)
                for _ in range(_SAVES):  # what has no room at the moment is saved the next time
                    engine.wait_until_idle()
                    if asyncio.run(_cached(daemon.address)) == blocks:
                        break
                    engine.reset_prefix_cache()
                    for request in requests:
                        engine.generate([request])
                else:
                    raise harness.BenchmarkError(f"vLLM has not saved all of {blocks} blocks in {_SAVES} rounds")
                batches = [[request] for request in requests]
                batches += [requests[:_AT_A_TIME], requests[_AT_A_TIME:]]
                before = asyncio.run(_found(daemon.address))
                for batch in batches:
                    engine.wait_until_idle()
                    engine.reset_prefix_cache()
                    hits = engine.metrics().external_hits
                    results = engine.generate(batch)
                    loaded += engine.metrics().external_hits - hits
                    fitting += sum(len(request.prompt) // block_tokens * block_tokens for request in batch)
                    answers += sum(
                        result.token_ids != expected[requests.index(request)]
                        for result, request in zip(results, batch, strict=True)
                    )
                    step()
                engine.wait_until_idle()
                found = asyncio.run(_found(daemon.address)) - before
    return {
        "vllm_loaded_of_fitting": loaded / fitting,
        "vllm_found_of_loaded": found / loaded,
        "vllm_other_answers": answers,
        "vllm_fitting_tokens": fitting,
    }


async def _cached(address: str) -> int:
    async with AsyncClient(address) as client:
        return sum(int(prefix.blocks) for prefix in (await client.prefixes()).prefixes)


async def _found(address: str) -> int:
    async with AsyncClient(address) as client:
        return int((await client.stats()).hit_tokens)


def run(tier: int, seed: int, *, vllm: bool) -> dict[str, Any]:
    """The result."""
    rounds = sum(len(FACTORS) * (2 + (len(HELD) if mode == "shared" else 0)) for mode in ("shared", "streamed"))
    with harness.progress("loads", rounds * len(SPECS)) as step:
        result = asyncio.run(measure(tier, seed, step)).result()
    if vllm:
        with harness.progress("batches of vLLM", len(FACTORS) + 2) as step:
            result |= measure_vllm(seed, step)
    return result


def broken(result: dict[str, Any]) -> list[str]:
    """Promises that were not kept."""
    wanted = {"loaded_of_fitting": 1.0, "found_of_loaded": 1.0, "wrong_blocks": 0}
    if "vllm_loaded_of_fitting" in result:
        wanted |= {"vllm_loaded_of_fitting": 1.0, "vllm_found_of_loaded": 1.0, "vllm_other_answers": 0}
    return [f"{name} is {result[name]}, not {value}" for name, value in wanted.items() if result[name] != value]


@harness.benchmark(
    "long_prefix",
    __doc__,
    option("--tier", 64, "blocks of the CPU tier, of 16 KiB"),
    seed("of prompts and bytes", 1),
    flag("--vllm", "and a real vLLM; run it with .venv-vllm/bin/python"),
    unrecorded=("tier", "vllm"),
)
def main(options: harness.Options) -> harness.Outcome:
    """What was loaded, and what must hold of it."""
    result = {"tier_blocks": options.tier, **run(options.tier, options.seed, vllm=options.vllm)}
    return harness.Outcome(result, broken(result))


if __name__ == "__main__":
    harness.run(main)
