"""The host's share of what runs on a GPU: what copies and steps cost where the driver's calls cost nothing.

    python -m benchmarks.host_share

  copies  pieces of 4, 16, 32 and 64 MiB between GPU tier and CPU tier in a running event loop: GB/s that Python allows
  pages   a batch of an engine's pages of 64 KiB, both ways: microseconds of processor a layer
  decode  a decode step of 1 to 128 requests whose pass is a graph: planning, choosing tokens, the message to the daemon

Fails when a figure misses its bound. The figures are of this machine's processor, each the best of three rounds in
which the parts take turns: whatever runs beside the benchmark makes them worse.
"""

from __future__ import annotations

from benchmarks.common import harness
from benchmarks.common.options import flag, only
from benchmarks.host_parts import decode_step, page_batches, piece_copies
from benchmarks.host_parts.free_driver import measure

PARTS = (piece_copies.PART, page_batches.PART, decode_step.PART)


@harness.benchmark(
    "host_share", __doc__, only([part.name for part in PARTS]), flag("--short", "to test the benchmark: few rounds")
)
def main(options: harness.Options) -> harness.Outcome:
    """Measures the parts and compares the figures with their bounds."""
    parts = tuple(part for part in PARTS if options.only is None or part.name in options.only)
    results = measure(parts, options.short)
    broken, rows = [], []
    for part in parts:
        figures = results[part.name]
        broken += [f"{part.name}: {line}" for line in harness.missed(figures, least=part.least, most=part.most)]
        for name, value in figures.items():
            bound = f">= {part.least[name]:g}" if name in part.least else ""
            bound = f"<= {part.most[name]:g}" if name in part.most else bound
            rows.append({"part": part.name, "figure": name, "value": value, "bound": bound})
    return harness.Outcome(dict(results), broken, [harness.Table(rows, ("part", "figure", "value", "bound"))])


if __name__ == "__main__":
    harness.run(main)
