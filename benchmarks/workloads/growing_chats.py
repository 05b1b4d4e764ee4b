"""Chats of several turns as an engine is asked for them, and prompts that are new. Prompts are token ids."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """`conversations` chats of `turns` turns each, which all begin with the same `system_tokens` tokens.

    Every turn adds `user_tokens` of the user, up to `spread` of that more or fewer, and `output_tokens` of the engine;
    a prompt is everything before it.
    """

    conversations: int
    turns: int
    system_tokens: int
    user_tokens: int
    output_tokens: int
    vocabulary: int
    seed: int
    spread: float = 0.0

    def prompt_tokens(self, turn: int) -> int:
        """The most tokens that a prompt of `turn`, counted from 1, has."""
        return self.system_tokens + turn * (self.user_tokens + self.most_more) + (turn - 1) * self.output_tokens

    @property
    def most_more(self) -> int:
        """Tokens by which a user's turn is longer than `user_tokens`, at the most."""
        return int(self.spread * self.user_tokens)


class Chats:
    """The conversations of a plan, as far as they have come with one engine."""

    def __init__(self, plan: ChatPlan) -> None:
        self.plan = plan
        self.turn = 0
        """Turns that were begun."""
        # A generator each, so that what a user says does not depend on who is asked first.
        self._users = [random.Random(f"{plan.seed} user {number}") for number in range(plan.conversations)]
        self._order = random.Random(f"{plan.seed} order")
        system = self._say(random.Random(f"{plan.seed} system"), plan.system_tokens)
        self._histories: list[Tokens] = [system] * plan.conversations
        self._asked: list[int] = []

    def next_turn(self) -> list[Tokens]:
        """The prompts of the next turn, one for every conversation, in another order each turn."""
        if self._asked:
            raise ValueError(f"turn {self.turn} was not answered; call answered() first")
        self.turn += 1
        self._asked = list(range(self.plan.conversations))
        self._order.shuffle(self._asked)
        for number in self._asked:
            user, more = self._users[number], self.plan.most_more
            tokens = self.plan.user_tokens + (user.randint(-more, more) if more else 0)
            self._histories[number] += self._say(user, tokens)
        return [self._histories[number] for number in self._asked]

    def answered(self, outputs: Sequence[Tokens]) -> None:
        """Adds what the engine generated for the prompts of `next_turn`, in their order."""
        if len(outputs) != len(self._asked):
            raise ValueError(f"{len(outputs)} answers to {len(self._asked)} prompts")
        for number, output in zip(self._asked, outputs, strict=True):
            self._histories[number] += output
        self._asked = []

    def _say(self, who: random.Random, tokens: int) -> Tokens:
        return tuple(who.randrange(self.plan.vocabulary) for _ in range(tokens))


def distinct_prompts(count: int, tokens: int, vocabulary: int, seed: str) -> list[Tokens]:
    """`count` prompts of which no two begin alike, and none like a prompt of another seed."""
    source = random.Random(seed)
    return [tuple(source.randrange(vocabulary) for _ in range(tokens)) for _ in range(count)]
