"""Plants causes of late first tokens, and asks `prefixd why` for each.

A daemon with the embedded model and two tenants, in memory only, gets plants of six kinds; a second one with a
disk, which is started again and again, the others. Each plant is one request with an id of its own, after what
makes it late:

  never_seen           a new prompt
  differs              a cached prompt with one other token, at a random place
  other_namespace      a cached prompt with another salt
  evicted_by_operator  a cached prompt, after `prefixd evict`
  evicted              a cached prompt of tenant a, after tenant b has filled the tiers
  no_place             a new prompt while as many requests run as may
  model_loading        a new prompt just after the daemon's start
  computing_faster     a prompt on disk only, with scheduler.load = never
  slow_load            a prompt on disk only, and a disk that answers each read after --latency
  damaged              a prompt on disk only, of which each block has a wrong byte

A plant is named if `why` gives its kind as the main cause and, where there is one, the detail that was planted:
token, both ids, tenant, salt, bytes. To pass, all of them have to be named.

  python -m benchmarks.checks.why --json benchmarks/results/why.json
  python -m benchmarks.checks.why --each 1 --only memory
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from benchmarks.checks.planted_causes.in_memory import plant_in_memory
from benchmarks.checks.planted_causes.on_disk import plant_on_disk
from benchmarks.checks.planted_causes.plants import Plants
from benchmarks.common import harness
from benchmarks.common.options import Option, number, only, option, seed

_DAEMONS = ("memory", "disk")


def result_of(plants: Plants) -> dict[str, Any]:
    """Returns how many were planted and named, of each kind, and what `why` said of those that it did not name."""
    planted, named = (
        Counter(plant.kind for plant in plants.done),
        Counter(each.kind for each in plants.done if each.named),
    )
    return {
        "planted": len(plants.done),
        "named": sum(named.values()),
        "kinds": {kind: {"planted": planted[kind], "named": named[kind]} for kind in planted},
        "found": [
            f"{plant.kind} was named {plant.cause}: {plant.sentence}" for plant in plants.done if not plant.named
        ],
    }


def failures(result: dict[str, Any]) -> list[str]:
    """Returns in words what a result misses."""
    if not result["planted"]:
        return ["nothing was planted"]
    return harness.missed(result, least={"named": result["planted"]})


@harness.benchmark(
    "checks.why",
    __doc__,
    option("--each", 10, "plants of each kind"),
    only(_DAEMONS, "only the plants of this daemon"),
    Option("--latency", {"type": number(0.01, 10.0), "default": 0.5, "metavar": "S", "help": "of a read from disk"}),
    seed("of the prompts"),
)
def main(options: harness.Options) -> harness.Outcome:
    """Plants on both daemons."""
    plants = Plants(options.seed)
    chosen = options.only or _DAEMONS
    if "memory" in chosen:
        plant_in_memory(plants, options.each)
    if "disk" in chosen:
        plant_on_disk(plants, options.each, options.latency)
    result = result_of(plants)
    return harness.Outcome(result, failures(result))


if __name__ == "__main__":
    harness.run(main)
