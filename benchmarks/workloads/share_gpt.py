"""Conversations from ShareGPT's JSON: [{"id": ..., "conversations": [{"from": "human", "value": "..."}, ...]}, ...]."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from benchmarks.common.harness import BenchmarkError
from benchmarks.workloads.conversations import Conversation, Statistics, Turn, system_prompts, think_times

_USERS = ("human", "user")
_MODELS = ("gpt", "chatgpt", "bing", "bard", "assistant")


def read_share_gpt(
    file: Path, count: int, statistics: Statistics, *, scale: float, time_scale: float, seed: int
) -> list[Conversation]:
    """The first `count` conversations in which a user asks and a model answers, as bytes; the answers are replayed.

    Of each text the first part is taken, `scale` of its bytes. The file has no system prompts and no times: both are
    the generator's (section VII.B of "Long-Term Memory" puts a system prompt before ShareGPT's requests too).
    Turns end where one side speaks twice; what the model says before the first question is left out.

    Raises BenchmarkError naming the file, the conversation and what is wrong with it.
    """
    source = random.Random(f"think times {seed}")
    told: list[list[tuple[bytes, bytes]]] = []
    for number, entry in enumerate(_entries(file)):
        if len(told) == count:
            break
        try:
            pairs = _pairs(entry)
        except ValueError as error:
            raise BenchmarkError(f"{file}, conversation {number}: {error}") from error
        if pairs:
            told.append(pairs)
    if not told:
        raise BenchmarkError(f"{file}: no conversation in which a user (from: human) asks and a model (gpt) answers")
    systems = system_prompts(len(told), statistics, scale=scale, seed=seed)
    conversations = []
    for system, pairs in zip(systems, told, strict=True):
        turns = list[Turn]()
        for question, answer in pairs:
            user, said = (*b"\nUser: ", *_cut(question, scale), *b"\nModel: "), tuple(_cut(answer, scale))
            think_s = think_times(source, statistics, time_scale) if turns else 0.0
            turns.append(Turn(user, len(said), said, think_s))
        conversations.append(Conversation(system, tuple(turns)))
    return conversations


def _entries(file: Path) -> list[Any]:
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise BenchmarkError(
            f"there is no file {file}: get ShareGPT_V3_unfiltered_cleaned_split.json from Hugging Face "
            "(anon8231489123/ShareGPT_Vicuna_unfiltered), or leave --sharegpt out"
        ) from error
    except (ValueError, RecursionError) as error:
        raise BenchmarkError(f"{file}: not JSON: {error}") from error
    if not isinstance(content, list):
        raise BenchmarkError(f"{file}: not a list of conversations")
    return content


def _pairs(entry: Any) -> list[tuple[bytes, bytes]]:
    """Questions and answers; raises ValueError."""
    said = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(said, list):
        raise ValueError('no object with a list "conversations"')
    pairs, question = list[tuple[bytes, bytes]](), b""
    for place, part in enumerate(said):
        sender, value = (part.get("from"), part.get("value")) if isinstance(part, dict) else (None, None)
        if not isinstance(sender, str) or not isinstance(value, str):
            raise ValueError(f'part {place} is no object with texts "from" and "value"')
        text = value.encode(errors="replace")
        if sender in _USERS and not question:
            question = text
        elif sender in _MODELS and question and text:
            pairs.append((question, text))
            question = b""
        elif pairs or question:
            break  # a side speaks twice or says nothing, or the speaker is unknown
    return pairs


def _cut(text: bytes, scale: float) -> bytes:
    return text[: max(1, round(len(text) * scale))]
