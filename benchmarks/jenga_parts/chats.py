"""What is asked: chats of several turns, and in which order the turns come."""

from __future__ import annotations

import io
import random
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Plan:
    """The chats: the same arguments give the same ones. Lengths are in tokens.

    chats: with each model. Those with the first model come first: of 8 with two models, 0 to 7 and 8 to 15.
    share: of the memory that the baseline would take.
    page_order: `worker.page_order` of the ways with block tables.
    """

    chats: int
    turns: int
    user_tokens: int
    output_tokens: int
    at_once: int
    share: float
    rounds: int = 1
    seed: int = 0
    images: int = 4
    page_order: str = "few_free"

    @property
    def last_tokens(self) -> int:
        return self.turns * (self.user_tokens + self.output_tokens)

    def said(self, chat: int, turn: int) -> list[int]:
        source = random.Random(f"jenga {self.seed} {chat} {turn}")
        return [source.randint(3, 500) for _ in range(self.user_tokens)]

    def shown(self, chat: int, turn: int) -> int:
        """The number of the image that the user shows in a turn, where the model reads images: each in its turn."""
        return (chat * self.turns + turn) % self.images

    def phases(self, models: int) -> list[list[int]]:
        """Whose turn is next, phase by phase: in its phase every chat as often as it has turns, in an order by chance.

        With one model there is one phase. Of two models the first is busy, then the second, then both:

            phase   chats with the first   with the second
            0       0 1 2 3                8
            1       4                      9 10 11 12
            2       5 6 7                  13 14 15
        """
        if models == 1:
            return [self._shuffled(range(self.chats), "order")]
        busy, idle = self.chats // 2, self.chats // 8
        cuts = [(0, busy), (busy, busy + idle), (busy + idle, self.chats)]
        theirs = [(0, idle), (idle, idle + busy), (idle + busy, self.chats)]
        phases = [
            [*range(*first), *range(self.chats + second[0], self.chats + second[1])]
            for first, second in zip(cuts, theirs, strict=True)
        ]
        return [self._shuffled(chats, f"phase {number}") for number, chats in enumerate(phases) if chats]

    def _shuffled(self, chats: range | list[int], what: str) -> list[int]:
        order = [chat for chat in chats for _ in range(self.turns)]
        random.Random(f"jenga {self.seed} {what}").shuffle(order)
        return order


def picture(number: int) -> bytes:
    """A PNG of 4 x 4 colours; each number has others."""
    from PIL import Image

    colours = np.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(colours).resize((128, 128), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()
