"""The tables of `prefixd plan`."""

from __future__ import annotations

from collections.abc import Sequence

from prefixd.base.sizes import as_size
from prefixd.base.tiers import QUOTA_TIERS
from prefixd.cli.output.tables import grid
from prefixd.planner.curve import OPTIMUM, Curve
from prefixd.planner.machine.planned_codecs import EXACT
from prefixd.planner.sweep import ENOUGH, MEMORY_PRICE, Point, TracePlan, enough, soonest

_FULL = 0.98
_SOONER = 0.9
"""The command names another policy if its median first token takes less than this share of the time."""
_LATE = 1.1
"""If the last answer is this many times later than the last request, the queue has grown."""


def print_points(
    points: Sequence[Point],
    assumptions: Sequence[str],
    *,
    sweep: bool,
    took_s: float,
    requests: int,
    arrival_s: float,
) -> None:
    """Prints the plans of a command, of `requests` requests each, the last of which comes after `arrival_s`."""
    out = grid.console()
    out.print("Assumed:")
    for line in assumptions:
        out.print(f"  {line}", markup=False)
    coded = any(plan.plan.codec.name != EXACT.name for plan, _ in points)
    numbers = ("hits", *QUOTA_TIERS, "first\np50", "token\np95", "requests\nper s", "to disk", "evicted")
    numbers += ("bytes\nsaved",) if coded else ()
    names = ("codec",) if coded else ()
    made = grid.table("cpu tier", "disk tier", *names, "policy", "eviction", *numbers, right=numbers)
    best = enough(points)
    for plan, figures in points:
        settings = plan.plan.settings
        made.add_row(
            as_size(plan.cpu_bytes),
            as_size(plan.disk_bytes),
            *((plan.plan.codec.name,) if coded else ()),
            settings.scheduler.policy,
            settings.cache.eviction,
            f"{figures.hit_rate:.1%}",
            *(f"{share:.1%}" if (share := figures.hits.get(tier)) else "-" for tier in QUOTA_TIERS),
            _format_wait(figures.ttft_s.p50),
            _format_wait(figures.ttft_s.p95),
            f"{figures.requests_per_s:.2f}",
            as_size(figures.disk_written_bytes),
            f"{sum(figures.evicted_blocks.values()):,}",
            *((as_size(figures.disk_saved_bytes) if figures.disk_saved_bytes else "-",) if coded else ()),
            style="bold green" if sweep and plan is best[0] else None,
        )
    out.print(made)
    out.print(
        "Hits by tier: the tier that had the tokens when the daemon loaded them for the request. The look-ahead may "
        "have read them from disk into the CPU tier before that."
    )
    first = points[0][1]
    if first.achievable_hit_rate is not None:
        out.print(f"A cache without limits would find {first.achievable_hit_rate:.1%} of the prompt tokens.")
    if first.refused:
        out.print(f"{first.refused:,} requests are too long for the GPU tier: refused, and in no figure here.")
    if first.gpu_busy > _FULL and first.elapsed_s > _LATE * arrival_s > 0:
        out.print("The GPU is always busy: requests arrive faster than it computes answers, and the queue grows.")
    if sweep:
        plan, figures = best
        out.print(
            f"[bold]Enough: {as_size(plan.cpu_bytes)} of CPU memory and {as_size(plan.disk_bytes)} of disk[/], "
            f"with {_describe(plan)}: the cheapest machine that finds {ENOUGH:.0%} as many tokens as the best one; a "
            f"byte of memory costs as much as {MEMORY_PRICE} bytes of disk."
        )
        other, faster = soonest(points, best)
        if faster.ttft_s.p50 < _SOONER * figures.ttft_s.p50:
            out.print(
                f"With these sizes the first token comes soonest with {_describe(other)}: after "
                f"{grid.duration(faster.ttft_s.p50)} (median) instead of {grid.duration(figures.ttft_s.p50)}, with "
                f"{faster.hit_rate:.1%} found instead of {figures.hit_rate:.1%}."
            )
    out.print(f"{requests * len(points):,} requests planned in {grid.duration(took_s)}.")


def _describe(plan: TracePlan) -> str:
    settings, codec = plan.plan.settings, plan.plan.codec.name
    names = f"{settings.scheduler.policy} and {settings.cache.eviction}"
    return names if codec == EXACT.name else f"{names}, and the codec {codec}"


def _format_wait(seconds: float) -> str:
    """Formats as `grid.duration`, but below a second in ms: a GPU's first token may take only a few."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else grid.duration(seconds)


def print_curve(curve: Curve, token_bytes: int) -> None:
    """Prints the miss-ratio curve of a model whose tokens have `token_bytes` bytes."""
    names = [name for name in curve.hit_rates if name != OPTIMUM] + [OPTIMUM]
    made = grid.table("one tier of", "blocks", *names, right=("one tier of", "blocks", *names))
    for at, size in enumerate(curve.capacities):
        rates = (f"{curve.hit_rates[name][at]:.1%}" for name in names)
        made.add_row(as_size(size * curve.block_tokens * token_bytes), f"{size:,}", *rates)
    out = grid.console()
    sampled = "" if curve.share == 1 else f", estimated from {curve.share:.2%} of them"
    out.print(f"\nBlocks found by one tier alone{sampled}, by its size; with unlimited size {curve.most:.1%}:")
    out.print(made)
