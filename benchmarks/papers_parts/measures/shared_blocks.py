"""Blocks that the sequences of a request save because they share memory (the talk's "Memory saving via sharing").

The share is that of PagedAttention's figure 15: blocks saved by sharing, of all blocks without sharing, summed over the
passes of the requests. Lengths and blocks are a quarter of ShareGPT's and of vLLM's, so that the share is the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

import numpy as np

from benchmarks.common.harness import BenchmarkError
from benchmarks.kv.designs import random_tokens
from benchmarks.kv.rig import VIRTUAL, EngineRig, Frames, Request, load_embedded_model
from benchmarks.papers_parts.measures.engine_pairs import STEP_TOKENS
from prefixd.base.sampling import BeamSearch, Sampling
from prefixd.worker.engine import Engine
from prefixd.worker.memory.kv_memory import KvMemory
from prefixd.worker.model import CausalModel
from prefixd.worker_protocol.protocol import Done, Start, blocks_needed

SCALE = 4
_BLOCK_TOKENS = 16 // SCALE
_SIGMA = 1.0  # of lengths, log-normal as in `workloads.conversations`
_PROMPT_TOKENS, _OUTPUT_TOKENS = 161 / SCALE, 338 / SCALE


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a request: its prompt, and what each of its sequences generates."""

    prompt: int
    output: int


def share_gpt_lengths(count: int, longest: int) -> list[Lengths]:
    """Lengths with ShareGPT's means, a quarter of them each; none is longer than `longest`."""
    source = Random("lengths")

    def draw(mean: float) -> int:
        length = source.lognormvariate(math.log(mean) - _SIGMA**2 / 2, _SIGMA)
        return min(max(_BLOCK_TOKENS, round(length)), longest)

    return [Lengths(draw(_PROMPT_TOKENS), draw(_OUTPUT_TOKENS)) for _ in range(count)]


@dataclass(slots=True)
class Blocks:
    """Summed over passes: blocks that sharing saved, and blocks without sharing."""

    saved: int = 0
    without: int = 0

    @property
    def share(self) -> float:
        """Saved, of all."""
        return self.saved / max(1, self.without)


@lru_cache(maxsize=1)
def small_block_model() -> CausalModel:
    """The model that comes with prefixd, in blocks of 4 tokens."""
    return load_embedded_model(block_tokens=_BLOCK_TOKENS)


def of_samples(sequences: int, requests: Sequence[Lengths]) -> Blocks:
    """Of parallel samples of each prompt: its full blocks are shared, as the daemon has them share (`Generate.n`)."""
    model, blocks, source = small_block_model(), Blocks(), Random(sequences)
    for lengths in requests:
        full = (lengths.prompt - 1) // _BLOCK_TOKENS
        own = -(-(lengths.prompt + lengths.output) // _BLOCK_TOKENS) - full + 1
        frames = Frames(model.spec, full + sequences * own + 1)
        kv = frames.kv(VIRTUAL, sequences)
        rig = EngineRig(model, kv, frames, concurrent=sequences, max_step_tokens=STEP_TOKENS)
        try:
            prompt = random_tokens(source, lengths.prompt)
            cached = frames.take(full)
            if full:
                rig.compute(prompt[: full * _BLOCK_TOKENS], cached)

            def count(frames: Frames = frames, kv: KvMemory = kv) -> None:
                saved = kv.usage().shared_blocks
                blocks.saved += saved
                blocks.without += frames.pool.used_count + saved

            rig.run([Request(prompt, lengths.output, cached)] * sequences, count)
        finally:
            rig.close()
            frames.close()
    return blocks


def of_beams(width: int, requests: Sequence[Lengths]) -> Blocks:
    """Of a beam search from each prompt: beams share what their hypotheses have in common, by mapping.

    Raises BenchmarkError when a search fails.
    """
    model, blocks, source = small_block_model(), Blocks(), Random(width)
    for number, lengths in enumerate(requests):
        needed = blocks_needed(lengths.prompt, lengths.output, width, _BLOCK_TOKENS)
        frames = Frames(model.spec, needed)
        kv = frames.kv(VIRTUAL, 2 * width)
        engine = Engine(model, kv, STEP_TOKENS, time.monotonic)
        start = Start(
            id=number,
            tokens=np.array(random_tokens(source, lengths.prompt), dtype="<u4").tobytes(),
            generated=0,
            cached_blocks=0,
            frames=[int(frame) for frame in frames.take(needed)],
            sampling=Sampling(max_tokens=lengths.output, ignore_eos=True, seed=0, beam_search=BeamSearch(width=width)),
        )
        try:
            messages, tokens = engine.start(start), lengths.prompt
            while not (done := [each for each in messages if isinstance(each, Done)]):
                messages = engine.step()
                tokens += 1
                if not engine.runnable:
                    continue
                blocks.saved += kv.usage().shared_blocks
                blocks.without += width * -(-tokens // _BLOCK_TOKENS)
            if not done[0].beams or done[0].reason not in ("length", "stop"):
                raise BenchmarkError(f"a beam search ended with {done[0].reason}: {done[0].detail}")
        finally:
            engine.close()
            kv.end()
            frames.close()
    return blocks
