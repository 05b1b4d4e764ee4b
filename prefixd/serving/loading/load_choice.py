"""What was decided about loading a request's cached prefix, and what became of it."""

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
        stretches: the cached prefix as it lay when it was decided.
        chosen_s: when that was.
        wanted_s: when the request could have run; None while its turn has not come.
        backlog_s: so long, from then on, the worker was to compute what it had got before.
    """

    stretches: tuple[Stretch, ...]
    chosen_s: float
    wanted_s: float | None = None
    backlog_s: float = 0.0

    @property
    def is_one(self) -> bool:
        """Whether there was anything to load."""
        return any(stretch.distance is not Distance.GPU for stretch in self.stretches)

    def want(self, now_s: float, backlog_s: float) -> None:
        """The request could run now; the first call counts."""
        if self.wanted_s is None:
            self.wanted_s, self.backlog_s = now_s, backlog_s


@dataclass(slots=True)
class LoadCounters:
    """Decisions of requests that have had their first token, and loads that were given up.

    Attributes:
        decided: requests of whose cached prefix a part was not in GPU memory.
        cut: of these, those that computed a part of it again.
        beside: those that loaded a part while they computed another.
        abandoned: loads that were given up because they had fallen behind.
        regret: seconds from a request's turn to its first token, against what else could have been chosen.
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
        """A request whose prompt has `tokens` tokens has its first token now.

        Loading ahead of its turn costs nothing, so a load that was not made is taken to have begun when it was decided.
        """
        self.decided += 1
        self.cut += cut
        self.beside += beside
        wanted_s = now_s if choice.wanted_s is None else choice.wanted_s
        ahead_s = wanted_s - choice.chosen_s
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
        self.regret.judge(now_s - wanted_s, *(None if other is None else other - ahead_s for other in others))


class LoadClaims:
    """Blocks on their way to one tier, each the load's that began with it first.

    A movement that others join moves its bytes once: if each of eight who wait for one prefix counted its bytes, each
    would learn that loading takes an eighth of what it does.
    """

    def __init__(self) -> None:
        self._claimed: dict[int, npt.NDArray[np.bool_]] = {}  # by trie, of each row; only while there are some
        self._counts: dict[int, int] = {}

    def claim(self, trie: Trie, rows: Rows) -> npt.NDArray[np.bool_]:
        """[len(rows)]: which of them no other load has claimed. They are to be released."""
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
        """[len(rows)]: which of them somebody has claimed."""
        known = self._claimed.get(trie.ordinal, np.empty(0, np.bool_))
        found = np.zeros(len(rows), np.bool_)
        inside = rows < len(known)
        found[inside] = known[rows[inside]]
        return found

    def release(self, trie: Trie, rows: Rows) -> None:
        """What was claimed has come, or was given up."""
        if not len(rows):
            return
        self._claimed[trie.ordinal][rows] = False
        self._counts[trie.ordinal] -= len(rows)
        if not self._counts[trie.ordinal]:
            del self._claimed[trie.ordinal], self._counts[trie.ordinal]


class LoadMeter:
    """Splits time evenly among the loads under way (processor sharing).

    Loads overlap: eight of them, each taking 80 ms because of the seven others, cost 10 ms each, and that is what has
    to be compared with computing.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._active = 0
        self._share_s = 0.0  # what a load that was always under way would have been charged so far
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
