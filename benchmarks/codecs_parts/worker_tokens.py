"""Greedy tokens of the daemon's own worker behind prefixes from disk, by codec, against those behind computed ones.

computed   a fresh daemon computes each prompt and its answer; the GPU tier has room for one of them
evicted    the same prompts again: their prefixes are on disk only
restarted  the daemon ends and starts again, and the same prompts are sent once more
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.common.harness import BenchmarkError
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client, Finished, Sampling, Tier, Tokens

CODECS: Final = ("exact", "lossless", "int8", "k8v4")
EQUAL: Final = ("exact", "lossless")
"""Codecs behind which all tokens have to be equal."""
BLOCK_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class Served:
    """A model, and prompts for it.

    Attributes:
        settings: which model the worker has: `{"worker.embedded": True}`.
        block_bytes: of a block of `BLOCK_TOKENS` tokens.
        prompts: tokens; three at least, about as long: the GPU tier has room for one and a little of another.
        answer_tokens: of each answer.
    """

    settings: Mapping[str, object]
    block_bytes: int
    prompts: Sequence[Sequence[int]]
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Answers:
    """Tokens of the answers of a daemon with one codec, of each prompt, as the module says.

    `saved_bytes` and `altered_blocks`: what the codec has saved on disk, and how many blocks there it has altered.
    """

    computed: list[list[int]]
    evicted: list[list[int]]
    restarted: list[list[int]]
    saved_bytes: int
    altered_blocks: int


def measure_tokens(
    served: Served, folder: Path, codecs: Sequence[str] = CODECS, step: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """A row for each codec: shares of the tokens and of the answers that are not those of the computed prompts.

    Args:
        served: model and prompts.
        folder: for the daemons; a short path.
        codecs: of `CODECS`.
        step: called after each codec.

    Raises:
        BenchmarkError: a prefix did not come from disk, or two daemons computed different answers.
    """
    rows, expected = [], None
    for codec in codecs:
        answers = worker_answers(codec, served, folder / codec)
        if answers.computed != (expected := expected or answers.computed):
            raise BenchmarkError(f"the daemon with codec {codec} computed other answers than the one before")
        found = {name: compare(expected, getattr(answers, name)) for name in ("evicted", "restarted")}
        rows.append(
            {
                "codec": codec,
                "tokens": sum(map(len, expected)),
                **{f"{name}_{what}": share for name, shares in found.items() for what, share in shares.items()},
                "saved_bytes": answers.saved_bytes,
                "altered_blocks": answers.altered_blocks,
            }
        )
        step()
    return rows


def violations(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What differs though it must not, in words."""
    return [
        f"with {row['codec']} {row[share]:.1%} of the answers differ ({share})"
        for row in rows
        if row["codec"] in EQUAL
        for share in ("evicted_answers_differ", "restarted_answers_differ")
        if row[share]
    ]


def compare(expected: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> dict[str, float]:
    """Shares that differ: `tokens`, place by place, so all after the first one may count; `answers`, at any place."""
    pairs = [list(zip(left, right, strict=True)) for left, right in zip(expected, others, strict=True)]
    differing = [sum(left != right for left, right in pair) for pair in pairs]
    return {
        "tokens_differ": round(sum(differing) / sum(map(len, pairs)), 4),
        "answers_differ": round(sum(map(bool, differing)) / len(pairs), 4),
    }


def worker_answers(codec: str, served: Served, folder: Path) -> Answers:
    """The answers of a fresh daemon in `folder` with this `disk.codec`; raises as `measure_tokens`."""
    blocks = max(len(prompt) + served.answer_tokens for prompt in served.prompts) // BLOCK_TOKENS + 2
    daemon = DaemonProcess(
        {
            "worker.block_tokens": BLOCK_TOKENS,
            "gpu.device": "cpu",
            "gpu.bytes": blocks * served.block_bytes,
            "cpu.bytes": 0,
            "disk.bytes": 1 << 30,
            "scheduler.load": "always",
            "disk.codec": codec,
            **served.settings,
        },
        directory=folder,
    )
    with daemon:
        with Client(daemon.address, memory="streamed") as client:
            computed = _answers(client, served, from_disk=False)
            client.flush()
            stored = client.stats().stored
            evicted = _answers(client, served, from_disk=True)
        daemon.restart()
        with Client(daemon.address, memory="streamed") as client:
            restarted = _answers(client, served, from_disk=True)
    return Answers(computed, evicted, restarted, stored.saved_bytes, stored.blocks["altered"])


def _answers(client: Client, served: Served, *, from_disk: bool) -> list[list[int]]:
    return [_answer(client, prompt, served.answer_tokens, from_disk=from_disk) for prompt in served.prompts]


def _answer(client: Client, prompt: Sequence[int], answer_tokens: int, *, from_disk: bool) -> list[int]:
    tokens: list[int] = []
    for event in client.generate(prompt, sampling=Sampling(max_tokens=answer_tokens, ignore_eos=True)):
        if isinstance(event, Tokens):
            tokens += event.token_ids
        if isinstance(event, Finished):
            blocks = (len(prompt) - 1) // BLOCK_TOKENS if from_disk else 0
            if event.hit_tokens[Tier.DISK] != blocks * BLOCK_TOKENS or event.hit_tokens[Tier.GPU]:
                raise BenchmarkError(
                    f"of {len(prompt)} tokens {event.hit_tokens} were found, not {blocks} blocks on disk"
                )
            return tokens
    raise BenchmarkError("the daemon ended a request without its last event; see its log")
