"""Plans how much of a cached prefix to load, and how much to compute.

A token's keys and values can be computed only when those of all tokens before it are there. So there are two ways to
mix loading and computing: load a part from the front and compute the rest after it; or compute from the front while the
back is loaded, towards the front, until both meet ("Compute Or Load KV Cache? Why Not Both?", Cake, section 4). In the
second way, a near part may be loaded first, as the front.

```
tokens of the prompt   |-- ready --|-- front --|--- computed ---|---- loaded ----|-- rest --|
                        on the GPU   loaded       computed   ->  <-   loaded        computed
                                     before       at the same time                  at last
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prefixd_scheduler.costs.cost import CostModel
from prefixd_scheduler.distance import Distance

_WORTH = 0.88
"""Both at once is chosen if its estimate is below this share of the best other estimate. It takes a sixth longer than
estimated, more than loading alone does (`benchmarks.load_or_recompute`): the two share the machine, and a pass that
began before the last block came has to end."""
_PROBED = 16
"""A probe loads one part in this many."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring blocks of a cached prefix whose nearest copy is in one tier, in the order of the prompt.

    Attributes:
        distance: of that tier.
        tokens: of the blocks.
        nbytes: that are loaded, as the tier keeps them: of a coded block its stored bytes.
        decoded_bytes: the bytes that are made of the coded ones among these blocks.
    """

    distance: Distance
    tokens: int
    nbytes: int
    decoded_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How a cached prefix is used; drawn at the top of this file. All lengths are in tokens.

    Attributes:
        ready_tokens: on the GPU already, from the first token on.
        front_tokens: behind them, loaded before anything is computed.
        computed_tokens: behind these, computed although they are cached, while the back is loaded.
        loaded_tokens: the back. It is 0 without `computed_tokens`: then all loaded tokens are the front.
        first_token_s: estimated seconds until the prompt is computed; None where something was never observed.
        load_s: the same if everything cached is loaded.
        compute_s: the same if nothing is loaded.
    """

    ready_tokens: int
    front_tokens: int = 0
    computed_tokens: int = 0
    loaded_tokens: int = 0
    first_token_s: float | None = None
    load_s: float | None = None
    compute_s: float | None = None

    @property
    def used_tokens(self) -> int:
        """Tokens of the prefix that are used from the cache or computed beside a load; the others are computed last."""
        return self.ready_tokens + self.front_tokens + self.computed_tokens + self.loaded_tokens


def plan_load(
    cost: CostModel,
    stretches: Sequence[Stretch],
    prompt_tokens: int,
    block_tokens: int,
    *,
    both_at_once: bool,
    queued_bytes: Mapping[Distance, int] | None = None,
    usable: Callable[[int], int] | None = None,
    wait_s: float = 0.0,
    to_carry_out: bool = True,
) -> LoadPlan:
    """The fastest way to the first token of a prompt, part of which is cached.

    Within a stretch the time is a concave function of how much is loaded from the front (each further token saves more
    than the one before it), so only whole stretches need to be looked at; a meeting point is found by bisection, as
    computing takes longer and loading less the further it is behind. Time O(s log n) for s stretches and n blocks.

    Args:
        cost: estimates times.
        stretches: the cached prefix, whole blocks.
        prompt_tokens: of the whole prompt; the cached prefix is shorter.
        block_tokens: length of a block.
        both_at_once: whether computing and loading may go on at the same time.
        queued_bytes: bytes that already wait or move on the way from each tier.
        usable: (tokens of the prefix) -> the longest usable length up to that, if not every length is possible
            (windows, states). Then nothing is done at once.
        wait_s: seconds before computing this prompt can begin, because others are computed. Loading within this time
            costs nothing.
        to_carry_out: whether the plan is carried out: it then may load from a tier that is too slow, as a probe
            (`CostModel.probes`). False: it only estimates times.
    """
    plan = _Planner(cost, stretches, prompt_tokens, block_tokens, queued_bytes or {}, usable, wait_s)
    return plan.plan(both_at_once, probing=to_carry_out)


class _Planner:
    def __init__(
        self,
        cost: CostModel,
        stretches: Sequence[Stretch],
        prompt_tokens: int,
        block_tokens: int,
        queued_bytes: Mapping[Distance, int],
        usable: Callable[[int], int] | None,
        wait_s: float,
    ) -> None:
        self._cost = cost
        self._stretches = stretches
        self._prompt_tokens = prompt_tokens
        self._block_tokens = block_tokens
        self._queued_bytes = queued_bytes
        self._usable = usable
        self._wait_s = wait_s
        self._cached = sum(stretch.tokens for stretch in stretches)
        ready = 0
        for stretch in stretches:
            if stretch.distance is not Distance.GPU:
                break
            ready += stretch.tokens
        self._ready = ready if usable is None else usable(ready)

    def plan(self, both_at_once: bool, *, probing: bool) -> LoadPlan:
        ready, cached = self._ready, self._cached
        load_s, compute_s = self._front_s(cached), self._front_s(ready)
        if load_s is None or compute_s is None:
            return LoadPlan(ready, cached - ready, first_token_s=None, load_s=load_s, compute_s=compute_s)
        best_s, best = min((seconds, -end) for end, seconds in self._fronts())
        plan = LoadPlan(ready, -best - ready, first_token_s=best_s, load_s=load_s, compute_s=compute_s)
        if both_at_once and self._usable is None and cached > ready:
            for front, meet, seconds in self._meetings():
                if seconds < min(_WORTH * best_s, plan.first_token_s or best_s):
                    plan = LoadPlan(ready, front - ready, meet - front, cached - meet, seconds, load_s, compute_s)
        return self._probed(plan) if probing else plan

    def _probed(self, plan: LoadPlan) -> LoadPlan:
        """The plan, or one that loads a little of what is passed over, so that a tier can turn out fast again."""
        end = plan.ready_tokens + plan.front_tokens
        if plan.loaded_tokens or end == self._cached:
            return plan
        at = 0
        for stretch in self._stretches:
            if at == end and stretch.distance is not Distance.GPU and self._cost.probes(stretch.distance):
                blocks = max(1, stretch.tokens // self._block_tokens // _PROBED)
                tokens = end + blocks * self._block_tokens
                tokens = stretch.tokens + end if self._usable is not None and self._usable(tokens) != tokens else tokens
                seconds = self._front_s(tokens)
                return LoadPlan(
                    plan.ready_tokens, tokens - plan.ready_tokens, 0, 0, seconds, plan.load_s, plan.compute_s
                )
            at += stretch.tokens
        return plan

    def _ends(self) -> Iterator[int]:
        """Where stretches end, from what is ready on."""
        end = 0
        for stretch in self._stretches:
            end += stretch.tokens
            if end >= self._ready:
                yield end

    def _fronts(self) -> Iterator[tuple[int, float]]:
        """Each front that may be loaded, and the time until the prompt is computed behind it."""
        for end in {self._ready, *(end if self._usable is None else self._usable(end) for end in self._ends())}:
            if end >= self._ready and (seconds := self._front_s(end)) is not None:
                yield end, seconds

    def _meetings(self) -> Iterator[tuple[int, int, float]]:
        """Each front, the best point to meet behind it, and the time until the prompt is computed."""
        rest_s = self._compute_s(self._cached, self._prompt_tokens)
        for front in (self._ready, *self._ends()):
            if front >= self._cached:
                return
            before_s = max(self._wait_s, self._load_s(self._ready, front))
            low, high = 0, (self._cached - front) // self._block_tokens  # blocks to compute
            while low < high:
                middle = (low + high) // 2
                meet = front + middle * self._block_tokens
                if before_s + self._compute_s(front, meet) < self._load_s(meet, self._cached):
                    low = middle + 1
                else:
                    high = middle
            for blocks in (low - 1, low):
                meet = front + blocks * self._block_tokens
                if front < meet < self._cached:
                    computed_s = before_s + self._compute_s(front, meet)
                    yield front, meet, max(computed_s, self._load_s(meet, self._cached)) + rest_s

    def _front_s(self, end: int) -> float | None:
        """Loads what is missing up to `end`, and computes what is behind it."""
        compute_s = self._cost.compute_s(self._prompt_tokens - end, end)
        loads = [self._cost.load_s(*load) for load in self._loads(self._ready, end)]
        if compute_s is None or any(load is None for load in loads):
            return None
        return compute_s + max(self._wait_s, sum(load for load in loads if load is not None))

    def _load_s(self, begin: int, end: int) -> float:
        return sum(self._cost.load_s(*load) or 0.0 for load in self._loads(begin, end))

    def _compute_s(self, begin: int, end: int) -> float:
        return self._cost.compute_s(end - begin, begin) or 0.0

    def _loads(self, begin: int, end: int) -> Iterator[tuple[int, Distance, int, int]]:
        """For each tier to load from between two lengths: the bytes, the tier, the bytes queued there, and the decoded
        bytes."""
        nbytes: dict[Distance, int] = {}
        decoded: dict[Distance, int] = {}
        at = 0
        for stretch in self._stretches:
            tokens = min(end, at + stretch.tokens) - max(begin, at)
            if tokens > 0 and (distance := stretch.distance) is not Distance.GPU:
                nbytes[distance] = nbytes.get(distance, 0) + stretch.nbytes * tokens // stretch.tokens
                decoded[distance] = decoded.get(distance, 0) + stretch.decoded_bytes * tokens // stretch.tokens
            at += stretch.tokens
        for distance, count in nbytes.items():
            yield count, distance, self._queued_bytes.get(distance, 0), decoded[distance]


@dataclass(slots=True)
class Regret:
    """Seconds lost against the best choice in hindsight, over all decisions with a known outcome.

    The time of the choice that was made is measured. The times of the others are estimated afterwards, with what was
    learned since the decision. A decision that was faster than all estimates counts as no loss, not as a gain.

    Attributes:
        judged: decisions.
        spent_s: seconds that they took.
        lost_s: seconds of these that the best other choice would have saved.
    """

    judged: int = 0
    spent_s: float = 0.0
    lost_s: float = 0.0

    def judge(self, spent_s: float, *others_s: float | None) -> float:
        """Counts a decision that took `spent_s` seconds. `others_s`: the estimates of the other choices, None if
        unknown. Returns the seconds lost."""
        known = [other_s for other_s in others_s if other_s is not None]
        if not known:
            return 0.0
        lost_s = max(0.0, spent_s - min(known))
        self.judged += 1
        self.spent_s += spent_s
        self.lost_s += lost_s
        return lost_s
