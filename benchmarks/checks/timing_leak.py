"""Checks that a tenant cannot find out another tenant's prompts from answers and their times.

A daemon with the embedded model and two tenants. In rounds of 50 the victim asks half of some random prompts; the
attacker then asks each of them once, one after the other on an idle daemon, and guesses which the victim has asked:
from the answer (hit_tokens), and from the time to its first token, by its own clock and by the answer's. It knows that
half of a round has been asked, and takes the faster half for these: more than it could know, so that a difference of
any size tells. Cached prompts are always loaded, so that a hit is as much faster as it can be.

Once with cache.share_after = 3, where the number of right guesses has to be within 3 standard deviations of chance by
each way to tell; and once with 1, where nearly all have to be right by each: that the attacker looks at what tells.
right is that of the way furthest from this. Exit status 2 when one of them misses. About 5 minutes.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from benchmarks.common import harness
from benchmarks.common.options import option, seed
from benchmarks.ways_of_serving.ttft import first_token
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client
from prefixd.serving.models.embedded_model import VOCAB_SIZE

SHARE_AFTER = 3
LEAST_RIGHT = 0.95
_AT_ONCE = 50
"""Prompts of a round, for which the tiers have room."""
_VICTIM, _ATTACKER = "victim-" + "v" * 32, "attacker-" + "a" * 32

Prompt = list[int]


@dataclass(frozen=True, slots=True)
class Seen:
    """Observations of an answer.

    Attributes:
        hit: it says that tokens of the prompt were found.
        clocks: seconds until the first token, by the caller's clock and by the daemon's.
    """

    hit: bool
    clocks: tuple[float, float]


def ask(client: Client, prompt: Prompt) -> Seen:
    """Sends a prompt; returns all that a client can observe of the answer."""
    first_s, ended = first_token(client, prompt, timeout_s=60)
    return Seen(any(ended.hit_tokens.values()), (first_s, ended.ttft_s))


def guess(seen: Sequence[Seen], cached: int) -> dict[str, list[bool]]:
    """Returns a guess for each prompt of a round whether it was cached, by way of guessing; `cached` prompts were."""

    def fastest(clock: int) -> list[bool]:
        order = sorted(range(len(seen)), key=lambda number: seen[number].clocks[clock])
        taken = set(order[:cached])
        return [number in taken for number in range(len(seen))]

    return {"answer": [each.hit for each in seen], "clock": fastest(0), "daemon_clock": fastest(1)}


def probe(share_after: int, prompts: int, prompt_tokens: int, seed: int, step: Callable[[], None]) -> dict[str, int]:
    """Returns the number of right guesses of the attacker, by way of guessing."""
    chance = random.Random(seed)

    def made(count: int) -> list[Prompt]:
        return [[chance.randrange(256) for _ in range(prompt_tokens)] for _ in range(count)]

    right = {"answer": 0, "clock": 0, "daemon_clock": 0}
    with (
        tempfile.TemporaryDirectory(prefix="prefixd-") as folder,
        DaemonProcess(_settings(Path(folder), share_after)) as daemon,
        Client(str(daemon.tcp), token=_VICTIM) as victim,
        Client(str(daemon.tcp), token=_ATTACKER) as attacker,
    ):
        for prompt in made(_AT_ONCE):  # the first requests of a daemon take longer
            ask(attacker, prompt)
        for start in range(0, prompts, _AT_ONCE):
            asked = made(min(_AT_ONCE, prompts - start))
            cached = len(asked) // 2
            for prompt in asked[:cached]:
                ask(victim, prompt)
            seen: dict[int, Seen] = {}
            for number in chance.sample(range(len(asked)), len(asked)):
                seen[number] = ask(attacker, asked[number])
                step()
            for way, guessed in guess([seen[number] for number in range(len(asked))], cached).items():
                right[way] += sum(each == (number < cached) for number, each in enumerate(guessed))
    return right


def verdict(protected: dict[str, int], bare: dict[str, int], probes: int) -> tuple[dict[str, Any], list[str]]:
    """Returns the result, and the bounds that it misses.

    Args:
        protected: right guesses with blocks that become common after `SHARE_AFTER` tenants, by each way to tell.
        bare: those with blocks that are common at once.
        probes: guesses of each.
    """
    most_off = 3 * sqrt(probes / 4)
    off = {way: abs(right - probes / 2) for way, right in protected.items()}
    missed = [
        f"with cache.share_after = {SHARE_AFTER} {protected[way]} of {probes} guesses by {way} are right, more than "
        f"{most_off:.1f} from chance"
        for way, distance in off.items()
        if distance > most_off
    ]
    within = not missed
    missed += [
        f"with cache.share_after = 1 only {right} of {probes} guesses by {way} are right: the probe is blunt"
        for way, right in bare.items()
        if right < LEAST_RIGHT * probes
    ]
    furthest = max(off, key=lambda way: off[way])
    result = {
        "with": {"right": protected[furthest], "probes": probes, "within": within, "by": protected},
        "without": {"right": min(bare.values()), "probes": probes, "by": bare},
    }
    return result, missed


def _settings(folder: Path, share_after: int) -> dict[str, Any]:
    tokens = folder / "tokens"
    tokens.write_text(f"v client {_VICTIM} victim\na client {_ATTACKER} attacker\n")
    tokens.chmod(0o600)
    return {
        "worker.embedded": True,
        "cache.share_after": share_after,
        "scheduler.load": "always",
        "gpu.bytes": "256MiB",
        "cpu.bytes": "512MiB",
        "disk.bytes": 0,
        "server.tcp": "127.0.0.1:0",
        "server.insecure_tcp": True,
        "server.tokens": str(tokens),
    }


@harness.benchmark(
    "checks.timing_leak",
    __doc__,
    option("--prompts", 1000, "prompts to guess"),
    option("--prompt-tokens", 96, "tokens of a prompt"),
    seed("of the prompts", 1),
)
def main(options: harness.Options) -> harness.Outcome:
    """Guesses with and without protection. Raises BenchmarkError for too few prompts."""
    if options.prompts < _AT_ONCE:
        raise harness.BenchmarkError(
            f"--prompts {options.prompts}: so few are always right by chance; {_AT_ONCE} at least"
        )
    assert VOCAB_SIZE > 256, "every byte is a token"
    with harness.progress("timing leak", 2 * options.prompts) as step:
        protected, bare = (
            probe(share_after, options.prompts, options.prompt_tokens, options.seed, step)
            for share_after in (SHARE_AFTER, 1)
        )
    return harness.Outcome(*verdict(protected, bare, options.prompts))


if __name__ == "__main__":
    harness.run(main)
