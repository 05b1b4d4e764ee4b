"""Records decisions about loading cached prefixes and their outcomes, and meters the loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prefixd.cache import Trie
from prefixd.cache.index.trie import Rows
from prefixd_scheduler import CostModel, Distance, Regret, Stretch, plan_load


@dataclass(slots=True)
class LoadChoice:
    """A decision whose outcome is not known yet.

    Attributes:
        stretches: where the cached prefix lay at the decision.
        chosen_s: when it was decided.
        turn_s: when the request's turn came; None before.
        backlog_s: at that moment, estimated seconds until the worker had computed the prompts that it had.
    """

    stretches: tuple[Stretch, ...]
    chosen_s: float
    turn_s: float | None = None
    backlog_s: float = 0.0

    @property
    def needs_load(self) -> bool:
        """Whether there was anything to load."""
        return any(stretch.distance is not Distance.GPU for stretch in self.stretches)

    def note_turn(self, now_s: float, backlog_s: float) -> None:
        """The request's turn has come; the first call counts."""
        if self.turn_s is None:
            self.turn_s, self.backlog_s = now_s, backlog_s


@dataclass(slots=True)
class LoadCounters:
    """Decisions of requests that have had their first token, and loads that were given up.

    Attributes:
        decided: requests with a cached prefix that was not wholly in GPU memory.
        cut: of these, requests that computed a part of it again.
        beside: of these, requests that loaded one part while they computed another.
        abandoned: loads that were given up because they had fallen behind.
        regret: compares the seconds from a request's turn to its first token with the other choices.
    """

    decided: int = 0
    cut: int = 0
    beside: int = 0
    abandoned: int = 0
    regret: Regret = field(default_factory=Regret)

    def judge(
        self,
        choice: LoadChoice,
        cost: CostModel,
        now_s: float,
        tokens: int,
        block_tokens: int,
        *,
        cut: bool,
        beside: bool,
    ) -> None:
        """Judges the choice for a prompt of `tokens` tokens, which has its first token now.

        Loading ahead of the turn costs nothing, so a load that was not made counts as begun at the decision.
        """
        self.decided += 1
        self.cut += cut
        self.beside += beside
        turn_s = now_s if choice.turn_s is None else choice.turn_s
        ahead_s = turn_s - choice.chosen_s
        plan = plan_load(
            cost,
            choice.stretches,
            tokens,
            block_tokens,
            both_at_once=False,
            wait_s=ahead_s + choice.backlog_s,
            to_carry_out=False,
        )
        others = [plan.load_s if cut or beside else None, plan.compute_s]
        self.regret.judge(now_s - turn_s, *(None if other is None else other - ahead_s for other in others))


class LoadClaims:
    """Blocks on their way to one tier, each claimed by the first load that began to move it.

    Loads that join a movement cause no further bytes. If eight requests waited for one prefix and each counted its
    bytes, the cost model would learn an eighth of the time that a load takes.
    """

    def __init__(self) -> None:
        self._claimed: dict[int, npt.NDArray[np.bool_]] = {}  # by trie, of each row; only while there are some
        self._counts: dict[int, int] = {}

    def claim(self, trie: Trie, rows: Rows) -> npt.NDArray[np.bool_]:
        """Claims the rows that no load has claimed; returns which of `rows` these are, [len(rows)], for `release`."""
        claimed = self._claimed.get(trie.ordinal, np.empty(0, np.bool_))
        if (most := int(rows.max(initial=-1)) + 1) > len(claimed):
            grown = np.zeros(max(most, 2 * len(claimed)), np.bool_)
            grown[: len(claimed)] = claimed
            claimed = grown
        fresh = ~claimed[rows]
        if fresh.any():
            claimed[rows] = True
            self._claimed[trie.ordinal] = claimed
            self._counts[trie.ordinal] = self._counts.get(trie.ordinal, 0) + int(np.count_nonzero(fresh))
        return fresh

    def claimed(self, trie: Trie, rows: Rows) -> npt.NDArray[np.bool_]:
        """[len(rows)]: which of them a load has claimed."""
        known = self._claimed.get(trie.ordinal, np.empty(0, np.bool_))
        found = np.zeros(len(rows), np.bool_)
        inside = rows < len(known)
        found[inside] = known[rows[inside]]
        return found

    def release(self, trie: Trie, rows: Rows) -> None:
        """Releases claimed rows, which have come or were given up."""
        if not len(rows):
            return
        self._claimed[trie.ordinal][rows] = False
        self._counts[trie.ordinal] -= len(rows)
        if not self._counts[trie.ordinal]:
            del self._claimed[trie.ordinal], self._counts[trie.ordinal]


class LoadMeter:
    """Splits time evenly among the loads under way (processor sharing).

    Loads overlap. Eight loads that each take 80 ms because of the seven others cost 10 ms each: this figure is compared
    with the time of computing.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._active = 0
        self._share_s = 0.0  # the seconds charged so far to a load that has always been under way
        self._since_s = 0.0

    def begin(self) -> float:
        """A load begins; returns a mark for `end`."""
        self._advance()
        self._active += 1
        return self._share_s

    def so_far(self, mark: float) -> float:
        """The seconds that a load under way has been charged."""
        self._advance()
        return self._share_s - mark

    def end(self, mark: float) -> float:
        """A load ended; returns the seconds it is charged."""
        self._advance()
        self._active -= 1
        return self._share_s - mark

    def _advance(self) -> None:
        now = self._clock()
        if self._active:
            self._share_s += (now - self._since_s) / self._active
        self._since_s = now
