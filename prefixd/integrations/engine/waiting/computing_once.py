"""Lets one engine of several compute a prefix that they all need: the others wait for it and load it.

```
request's turn, blocks are missing, computing them takes at least `least_s`
  Claim, without waiting ------> granted: this engine computes; the claim ends when its blocks are cached
     |
     +--> another engine has claimed them
            waiting does not pay ---------> compute
            else Claim, waiting ----------> cached: look them up again and load them
                                            the other has given up: granted, compute
                                            still claimed when the time is over: compute
```
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixd.client import ClaimedByOther, ClaimResult, ClientError, NamespaceSpec, UnsupportedError
from prefixd.integrations.engine.connector_counters import ConnectorCounters
from prefixd.integrations.engine.daemon_link import Link, LinkDown
from prefixd.integrations.engine.geometry import Geometry
from prefixd_scheduler import CostModel, Distance, PrefillCost

_ASSUMED = PrefillCost(pass_s=0.0, token_s=1e-4)
"""Until steps of the engine were observed."""
_SAVED = 0.5
"""Loading what another engine computes must save half of the time of computing it here."""
_PATIENCE = 2.0
"""The other engine may be so many times as slow as this one, since it computes other requests beside."""
_SLACK_S = 0.1  # to save the blocks
_CLAIM = 4.0
"""A claim lasts so many times as long as computing should take, so that it survives a preemption."""
_LEAST_CLAIM_S = 30.0


@dataclass(slots=True)
class Claiming:
    """What became of one request's claim."""

    spec: NamespaceSpec
    tokens: npt.NDArray[np.uint32] = field(repr=False)
    known_tokens: int
    """The tokens that need no computing: in the engine, or cached."""
    call: Future[ClaimResult] | None = None
    began_s: float | None = None
    """When the wait for another engine began."""
    claim: ClaimResult | None = None
    """The claim that was granted."""
    cached_tokens: int = 0
    """Cached tokens of the prompt, by the last answer."""


class ComputingOnce:
    """Claims what requests are about to compute, and waits for other engines' claims.

    Args:
        link: the connection to the daemon.
        geometry: how prefixd blocks are made of the engine's.
        cost: observed times of loading and computing; None: waiting always pays, as long as the claim lasts.
        clock: seconds, monotonic.
        counters: of the connector.
        least_s: what takes less time to compute is not claimed: it is not worth a call.
    """

    def __init__(
        self,
        link: Link,
        geometry: Geometry,
        cost: CostModel | None,
        clock: Callable[[], float],
        counters: ConnectorCounters,
        least_s: float,
    ) -> None:
        self._link = link
        self._geometry = geometry
        self._each = geometry.block_tokens
        self._cost = cost or CostModel()
        self._always = cost is None
        self._clock = clock
        self._counters = counters
        self._least_s = least_s
        self._supported = True

    def begin(self, spec: NamespaceSpec, tokens: npt.NDArray[np.uint32], known_tokens: int) -> Claiming:
        """Begins to claim what is missing of a request's prompt, if that takes long enough to compute."""
        claiming = Claiming(spec, tokens, known_tokens)
        whole = len(tokens) // self._each * self._each
        if self._supported and whole > known_tokens:
            compute_s = self._compute_s(known_tokens, whole)
            if compute_s >= self._least_s:
                claiming.call = self._ask(claiming, max(_LEAST_CLAIM_S, _CLAIM * compute_s), 0.0)
        return claiming

    def read(self, claiming: Claiming) -> bool:
        """Whether the request may go on: nothing is under way any more."""
        while claiming.call is not None and claiming.call.done():
            answer = self._answer(claiming.call)
            claiming.call = None
            if answer is None:
                break
            claiming.cached_tokens = answer.cached_blocks * self._each
            if answer.claim_id:
                claiming.claim = answer
            elif answer.other is not None and claiming.began_s is None:
                wait_s = self._worth_waiting_s(answer.other, claiming)
                if wait_s > 0:
                    claiming.began_s = self._clock()
                    compute_s = self._compute_s(claiming.known_tokens, len(claiming.tokens))
                    claiming.call = self._ask(claiming, max(_LEAST_CLAIM_S, _CLAIM * compute_s), wait_s)
        if claiming.call is None and claiming.began_s is not None:
            spared = max(claiming.cached_tokens - claiming.known_tokens, 0)
            self._counters.waited_for_others(self._clock() - claiming.began_s, spared)
            claiming.began_s = None
        return claiming.call is None

    def end(self, claiming: Claiming, computed_tokens: int) -> None:
        """Ends the claim of a request that has ended; if it has computed the claimed tokens, once they had time to be
        saved."""
        if claiming.call is not None:
            claiming.call.cancel()  # the SDK gives back what comes to a caller that has gone
            claiming.call = None
        claim, claiming.claim = claiming.claim, None
        if claim is None or not self._link.up:
            return
        blocks = len(claiming.tokens) // self._each
        saving_s = self._link.limit_s(self._geometry.nbytes(blocks - claim.cached_blocks))
        in_s = saving_s if computed_tokens >= blocks * self._each else 0.0

        async def end() -> bool:
            return await (await self._link.cache(claiming.spec)).end_claim(claim, in_s=in_s)

        self._link.start(end).add_done_callback(self._answer)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _ask(self, claiming: Claiming, ttl_s: float, wait_s: float) -> Future[ClaimResult]:
        async def claim() -> ClaimResult:
            cache = await self._link.cache(claiming.spec)
            return await cache.claim(claiming.tokens, wait_s=wait_s, ttl_s=ttl_s)

        return self._link.start(claim, self._link.timeout_s + wait_s)

    def _worth_waiting_s(self, other: ClaimedByOther, claiming: Claiming) -> float:
        """How long to wait for another engine at most; 0 where computing is better.

        The first token comes later than by computing at once, by the time of the load, if both engines are as fast and
        begin together. In return this engine computes other requests meanwhile.
        """
        end = other.end_block * self._each
        if self._geometry.needs_end and (
            other.end_block != other.prompt_blocks or end != len(claiming.tokens) // self._each * self._each
        ):
            return 0.0  # its windows or states are not saved where this prompt could go on
        begin = max(other.first_block * self._each, claiming.known_tokens)
        if end <= begin:
            return 0.0
        if self._always:
            return other.left_s
        compute_s = self._compute_s(begin, end)
        load_s = self._cost.load_s(self._geometry.nbytes((end - begin) // self._each), Distance.CPU) or 0.0
        if compute_s < self._least_s or load_s > (1 - _SAVED) * compute_s:
            return 0.0
        return min(other.left_s, max(0.0, _PATIENCE * compute_s + _SLACK_S - other.age_s))

    def _compute_s(self, begin: int, end: int) -> float:
        known = self._cost.compute_s(end - begin, begin)
        return self._cost.computing_as(_ASSUMED).compute_s(end - begin, begin) or 0.0 if known is None else known

    def _answer(self, call: Future[Any]) -> Any:
        """The result of a call; None if it failed: then the request is computed as without claims."""
        if call.cancelled():
            return None
        error = call.exception()
        if error is None:
            return call.result()
        if isinstance(error, UnsupportedError):
            self._supported = False
            self._link.log.warning("prefixd: the daemon is too old for compute_once_s; each engine computes for itself")
        elif not isinstance(error, LinkDown | ClientError):
            self._link.log.error("prefixd: a claim failed", exc_info=error)
        return None
