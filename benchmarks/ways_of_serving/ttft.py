"""Time to first token of prompts with a cached prefix, in daemons with the embedded model that are asked in turn."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from benchmarks.common.harness import BenchmarkError
from benchmarks.common.options import positive
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client, Finished, Sampling, Tokens
from prefixd.workloads.text_analysis import BLOCK_BYTES, BLOCK_TOKENS

_BODY_TOKENS = 8  # less than a block: what a request computes besides never grows the prefix


def prompt_of(tokens: int, *seed: int) -> list[int]:
    """Returns a prompt with a prefix of `tokens` tokens, and a body."""
    made: list[int] = np.random.default_rng([tokens, *seed]).integers(0, 256, tokens + _BODY_TOKENS).tolist()
    return made


def first_token(client: Client, prompt: Sequence[int], **how: Any) -> tuple[float, Finished]:
    """Seconds from sending the prompt to its first token, and the answer's last event; `how` as for `generate`.

    Raises BenchmarkError: there is none.
    """
    began_s, first_s = time.monotonic(), 0.0
    for event in client.generate(prompt, sampling=Sampling(max_tokens=1, ignore_eos=True), **how):
        if isinstance(event, Tokens) and not first_s:
            first_s = time.monotonic() - began_s
        if isinstance(event, Finished):
            return first_s, event
    raise BenchmarkError("the daemon ended a request without its last event; see its log")


def in_turn(ways: Sequence[str], repeats: int, measure: Callable[[str, int], float]) -> dict[str, list[float]]:
    """Returns the results of `measure(way, repeat)` by way; each repeat begins with the next way."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(repeats):
        for turn in range(len(ways)):
            way = ways[(repeat + turn) % len(ways)]
            found[way].append(measure(way, repeat))
    return found


def quartiles(times_s: Mapping[str, Sequence[float]]) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """The median, the lower and the upper quartile of each way, in ms."""
    of_ways = {way: np.percentile(each, (50, 25, 75)).tolist() for way, each in times_s.items()}
    median, lower, upper = ({way: round(1000 * found[n], 2) for way, found in of_ways.items()} for n in range(3))
    return median, lower, upper


def gpu_bytes(tokens: int) -> int:
    """A GPU tier with room for two prompts, the longer one with a prefix of so many tokens."""
    return 2 * (tokens // BLOCK_TOKENS + 4) * BLOCK_BYTES


def settings(tokens: int) -> dict[str, object]:
    """Settings of a daemon whose prompts have prefixes of so many tokens at the most, and no tier but the GPU's."""
    return {
        "worker.embedded": True,
        "worker.threads": 1,
        "worker.block_tokens": BLOCK_TOKENS,
        "gpu.device": "cpu",
        "gpu.bytes": gpu_bytes(tokens),
        "cpu.bytes": 0,
        "disk.bytes": 0,
    }


def start(daemons: Mapping[str, DaemonProcess], stack: ExitStack) -> dict[str, Client]:
    """Starts all of them at the same time, until the stack is left; a client of each."""
    for daemon in daemons.values():
        daemon.launch()
        stack.callback(daemon.__exit__)
    for daemon in daemons.values():
        daemon.wait_until_ready()
    return {
        way: stack.enter_context(Client(daemon.address, name=way, memory="streamed")) for way, daemon in daemons.items()
    }


def whole_blocks(text: str) -> list[int]:
    """Lengths of prefixes, such as 64,256; an argparse type."""
    lengths = [positive(each) for each in text.split(",")]
    if wrong := [each for each in lengths if each % BLOCK_TOKENS]:
        raise argparse.ArgumentTypeError(f"{wrong[0]} tokens are not whole blocks of {BLOCK_TOKENS}")
    return lengths
