"""What was decided about loading a request's cached prefix, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field

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
