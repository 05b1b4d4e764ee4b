"""Conversations: what users and model say turn by turn, and a generator of them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

# Ids that a byte-level vocabulary has for printable characters.
_FIRST, _LAST = 32, 126


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user says, and the answer.

    user: token ids. answer: what the model is made to say; None: it chooses `answer_tokens` tokens itself.
    think_s: seconds from the answer before to this turn; of a first turn, nothing.
    """

    user: tuple[int, ...]
    answer_tokens: int
    answer: tuple[int, ...] | None = None
    think_s: float = 0.0

    @property
    def tokens(self) -> int:
        return len(self.user) + self.answer_tokens


@dataclass(frozen=True, slots=True)
class Conversation:
    """A system prompt, which other conversations may share, and at least one turn."""

    system: tuple[int, ...]
    turns: tuple[Turn, ...]

    @property
    def tokens(self) -> int:
        return len(self.system) + sum(turn.tokens for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Means of what is generated, and where they are from.

    turns: of a conversation: 5.75 in ShareGPT ("Cost-Efficient LLM Serving for Multi-turn Conversations with
        CachedAttention", Gao et al., USENIX ATC 2024, section 4.1). Geometric, so that most are short and few long.
    user_tokens, answer_tokens: of a turn: 161 and 338 in ShareGPT (PagedAttention, Kwon et al., SOSP 2023, section
        6.1). Log-normal with sigma 1, an assumption: the paper's histograms have such tails.
    think_s: from one request of a conversation to its next: a median of 123 s in Mooncake's conversation trace, as
        `traced` reads it. Exponential with this median.
    header_tokens: that all system prompts begin with, in place of tokens of their own. None by default.
    system_tokens, users_per_system: length of a system prompt with its tools and examples, and conversations that share
        one. An assumption; there are no published figures.
    """

    turns: float = 5.75
    user_tokens: float = 161
    answer_tokens: float = 338
    think_s: float = 123
    system_tokens: int = 4096
    users_per_system: int = 4
    header_tokens: int = 0


def generate(count: int, statistics: Statistics, *, scale: float, time_scale: float, seed: int) -> list[Conversation]:
    """`count` conversations, the same for the same arguments; lengths times `scale`, think times times `time_scale`."""
    source = random.Random(f"conversations {seed}")
    systems = system_prompts(count, statistics, scale=scale, seed=seed)
    return [
        Conversation(system, tuple(_turns(source, statistics, scale=scale, time_scale=time_scale)))
        for system in systems
    ]


def system_prompts(count: int, statistics: Statistics, *, scale: float, seed: int) -> list[tuple[int, ...]]:
    """The system prompt of each of `count` conversations: groups of `users_per_system` share one, in mixed order."""
    source = random.Random(f"systems {seed}")
    groups = -(-count // statistics.users_per_system)
    length, shared = scaled(statistics.system_tokens, scale), round(statistics.header_tokens * scale)
    header = random_tokens(random.Random(f"header {seed}"), min(shared, length - 1))
    systems = [header + random_tokens(source, length)[len(header) :] for _ in range(groups)]
    given = [systems[i // statistics.users_per_system] for i in range(count)]
    source.shuffle(given)
    return given


def think_times(source: random.Random, statistics: Statistics, time_scale: float) -> float:
    """Seconds that a user thinks."""
    return source.expovariate(0.6931 / statistics.think_s) * time_scale


def fitting(conversations: Iterable[Conversation], most_tokens: int) -> list[Conversation]:
    """The conversations as far as a context of `most_tokens` reaches; without those whose first turn is too long."""
    fit = []
    for conversation in conversations:
        tokens, turns = len(conversation.system), list[Turn]()
        for turn in conversation.turns:
            tokens += turn.tokens
            if tokens > most_tokens:
                break
            turns.append(turn)
        if turns:
            fit.append(replace(conversation, turns=tuple(turns)))
    return fit


def distinct_tokens(conversations: Sequence[Conversation]) -> int:
    """Tokens of all conversations; a system prompt that several share counts once."""
    systems = {conversation.system for conversation in conversations}
    return sum(map(len, systems)) + sum(turn.tokens for each in conversations for turn in each.turns)


def scaled(tokens: float, scale: float) -> int:
    """A length at the scale of the run, at least one token."""
    return max(1, round(tokens * scale))


def random_tokens(source: random.Random, count: int) -> tuple[int, ...]:
    """Printable characters, as ids of a byte-level vocabulary."""
    return tuple(source.choices(range(_FIRST, _LAST + 1), k=count))


def _turns(source: random.Random, statistics: Statistics, *, scale: float, time_scale: float) -> Sequence[Turn]:
    turns = list[Turn]()
    while not turns or source.random() < 1 - 1 / statistics.turns:
        turns.append(
            Turn(
                user=random_tokens(source, scaled(_log_normal(source, statistics.user_tokens), scale)),
                answer_tokens=scaled(_log_normal(source, statistics.answer_tokens), scale),
                think_s=think_times(source, statistics, time_scale) if turns else 0.0,
            )
        )
    return turns


def _log_normal(source: random.Random, mean: float) -> float:
    """A number around `mean`: of sigma 1 the mean is exp(1/2) times the median."""
    return source.lognormvariate(0.0, 1.0) * mean * 0.6065
