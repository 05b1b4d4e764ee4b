"""Eight engines need one prefix at the same time: with claims it is computed once, without them up to eight times.

Starts --engines processes, each with a session of its own, and asks all of them for the same new prompt at once,
--prompts times. Each loads what is cached, and computes and stores the rest. In one round of --kill-every another
process has claimed the prompt before, and is killed while all others wait for it.

It fails when a block is computed more than once with claims, when a loaded byte is wrong, when a claim is left over, or
when the daemon's accounting contradicts itself. What is computed without claims depends on the machine; it is printed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.common import harness
from benchmarks.common.daemons import violations_of
from benchmarks.common.options import option
from benchmarks.load.claiming_engine import BLOCKS, ClaimingEngine
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client

_WAIT_S = 60.0  # far longer than any engine computes: whoever waits in vain computes, which is counted
_COMPUTE_S = 0.02
_PATIENCE_S = 60.0


def ask_all(engines: Sequence[ClaimingEngine], prompt: int, *, claims: bool) -> list[dict[str, Any]]:
    """Asks all engines for one prompt at once."""
    for engine in engines:
        engine.order(prompt, claims=claims, wait_s=_WAIT_S, compute_s=_COMPUTE_S)
    return [engine.answer() for engine in engines]


def ask_all_after_a_death(address: str, admin: Client, engines: Sequence[ClaimingEngine], prompt: int) -> Any:
    """As `ask_all`; the process that has claimed the prompt is killed while all of them wait."""
    with ClaimingEngine(address) as dying:
        dying.order(prompt, only_claims=True)
        if not dying.answer()["claimed"]:
            raise harness.BenchmarkError(f"prompt {prompt} was claimed already")
        before = admin.stats().claims.waits
        for engine in engines:
            engine.order(prompt, claims=True, wait_s=_WAIT_S, compute_s=_COMPUTE_S)
        harness.wait_until(lambda: admin.stats().claims.waits >= before + len(engines), _PATIENCE_S, 0.01)
    return [engine.answer() for engine in engines]


def run(engines: int, prompts: int, kill_every: int) -> dict[str, Any]:
    """All rounds; the figures."""
    computed = {True: 0, False: 0}
    wrong = kills = 0
    with (
        DaemonProcess({"cpu.bytes": "256MiB", "disk.bytes": 0}) as daemon,
        Client(daemon.address, name="compute_once") as admin,
        ExitStack() as stack,
        harness.progress("prompts", 2 * prompts) as step,
    ):
        started = [stack.enter_context(ClaimingEngine(daemon.address)) for _ in range(engines)]
        for number in range(2 * prompts):
            claims = number < prompts
            if claims and number % kill_every == kill_every - 1:
                answers = ask_all_after_a_death(daemon.address, admin, started, number)
                kills += 1
            else:
                answers = ask_all(started, number, claims=claims)
            computed[claims] += sum(answer["computed"] for answer in answers)
            wrong += sum(answer["wrong"] for answer in answers)
            step()
        claims_left = admin.stats().claims.open
        violations = violations_of(admin)
    return {
        "engines": engines,
        "prompts": prompts,
        "kills": kills,
        "blocks": prompts * BLOCKS,
        "computed_blocks": computed[True],
        "computed_blocks_without_claims": computed[False],
        "wrong_loads": wrong,
        "claims_left": claims_left,
        "integrity_violations": len(violations),
        "found": violations,
    }


def failures(result: dict[str, Any]) -> list[str]:
    """Returns the promises that a result breaks, in words."""
    return harness.missed(
        result,
        zero=("wrong_loads", "claims_left", "integrity_violations"),
        most={"computed_blocks": result["blocks"]},
        least={"computed_blocks": result["blocks"]},
    )


@harness.benchmark(
    "checks.compute_once",
    __doc__,
    option("--engines", 8, "processes that need the same prompts"),
    option("--prompts", 50, "rounds with claims, and as many without"),
    option("--kill-every", 5, "in one round of so many the engine that computes is killed"),
)
def main(options: harness.Options) -> harness.Outcome:
    """Rounds with claims, then without."""
    began_s = time.perf_counter()
    result = run(options.engines, options.prompts, options.kill_every)
    return harness.Outcome({"seconds": round(time.perf_counter() - began_s, 1), **result}, failures(result))


if __name__ == "__main__":
    harness.run(main)
