"""Conversations from a trace in Mooncake's format, whose requests name their blocks by hash ids and have no text.

A request continues the latest one whose full blocks are the first of its own, if that has at least two (the first one
is the system prompt of thousands) and nobody has continued it:

    [0, 7, 8]           input 1600  output 300    first turn
    [0, 7, 8, 9]        input 2100  output 200    second turn: what is new, and the answer before, is in block 9
    [0, 7, 8, 9, 12]    ...
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.harness import BenchmarkError
from benchmarks.workloads.conversations import Conversation, Turn, random_tokens, scaled
from prefixd.workloads.mooncake import HASH_TOKENS, TraceRequest, read_trace

_LEAST_BLOCKS = 2


@dataclass(slots=True)
class _Chain:
    """The requests of a conversation."""

    requests: list[TraceRequest]


def read_conversations(
    file: Path, count: int, *, scale: float, time_scale: float, least_turns: int = 1
) -> list[Conversation]:
    """The first `count` conversations of at least `least_turns` turns; their answers are replayed.

    A block of the trace, 512 tokens, becomes `512 * scale` tokens that follow from its id (rounded, at least one), and
    the other lengths follow from that: 1/32 makes a block of the trace one of 16 tokens. Think times are those between
    the requests, times `time_scale`.

    Raises BenchmarkError as `read_trace`, and for a trace without such conversations.
    """
    block = scaled(HASH_TOKENS, scale)
    chains = [chain for chain in _chains(file, block) if len(chain.requests) >= least_turns]
    if not chains:
        raise BenchmarkError(f"{file}: no conversation of {least_turns} turns or more")
    return [_conversation(chain, block, number, time_scale) for number, chain in enumerate(chains[:count])]


def _chains(file: Path, block: int) -> list[_Chain]:
    chains: list[_Chain] = []
    last: dict[tuple[int, ...], _Chain] = {}  # conversations by the full blocks of their last request
    for request in read_trace(file):
        if not request.input_length:
            continue
        ids = request.hash_ids
        for blocks in range(len(ids), _LEAST_BLOCKS - 1, -1):
            chain = last.get(ids[:blocks])
            # Something must have been answered and said in between.
            if chain is not None and _tokens(chain.requests[-1].input_length, block) + 2 <= _tokens(
                request.input_length, block
            ):
                del last[ids[:blocks]]
                chain.requests.append(request)
                break
        else:
            chain = _Chain([request])
            chains.append(chain)
        if len(ids) >= _LEAST_BLOCKS:
            last[ids] = chain
    return chains


def _conversation(chain: _Chain, block: int, number: int, time_scale: float) -> Conversation:
    """Its turns are cuts through the tokens of its last request and what follows them."""
    prompts = [_tokens(request.input_length, block) for request in chain.requests]
    answers = [max(1, _tokens(request.output_length, block)) for request in chain.requests]
    tokens: list[int] = []
    for hash_id in chain.requests[-1].hash_ids:
        tokens += random_tokens(random.Random(f"block {hash_id}"), block)
    tokens += random_tokens(random.Random(f"end {number}"), prompts[-1] + answers[-1] - len(tokens))
    turns, said, before_ms = list[Turn](), 0, chain.requests[0].timestamp_ms
    for index, request in enumerate(chain.requests):
        stop = prompts[index] + answers[index]
        if index + 1 < len(prompts):
            stop = min(stop, prompts[index + 1] - 1)
        answer = tuple(tokens[prompts[index] : stop])
        think_s = max(0, request.timestamp_ms - before_ms) / 1e3 * time_scale
        turns.append(Turn(tuple(tokens[said : prompts[index]]), len(answer), answer, think_s))
        said, before_ms = stop, request.timestamp_ms
    return Conversation((), tuple(turns))


def _tokens(length: int, block: int) -> int:
    """A length of the trace in tokens of the run; whole blocks stay whole blocks."""
    return max(1, length * block // HASH_TOKENS)
