"""The answer of `prefixd what-if` as tables, sentences and a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prefixd.base.sizes import as_size
from prefixd.cli.output.tables import grid
from prefixd.v1 import admin_pb2 as pb

_LITTLE = 0.005  # of the prompt tokens: less than this is no gain to report
_NAMES = {"cpu": "CPU memory", "disk": "disk"}
_GIB = 1 << 30


def print_what_if(answer: pb.WhatIfResponse) -> None:
    """Prints how long the daemon has watched, and for each tier a table of sizes, its gain in words, and policies."""
    out, ghosts = grid.console(), answer.ghosts
    out.print(
        f"Watched for {grid.duration(ghosts.watched_s)}: prompts of {ghosts.asked_tokens:,.0f} tokens."
        + (f" {ghosts.skipped_prompts:,} prompts were left out for lack of time." if ghosts.skipped_prompts else "")
    )
    for tier in ghosts.tiers:
        name = grid.tier_name(tier.tier)
        out.print()
        if not tier.sure:
            out.print(
                f"{name}: not enough data yet. {tier.references:,} sampled blocks were asked for, at least 1,000 are "
                "needed; ask again later."
            )
            continue
        out.print(_table(answer, tier))
        for line in _sentences(answer, tier):
            out.print(line, markup=False)


def _table(answer: pb.WhatIfResponse, tier: pb.GhostTier) -> object:
    columns = ("size", "found", "+/-", "tokens\nmore", "prefill\nsaved", "seconds")
    made = grid.table(grid.tier_name(tier.tier), *columns, right=columns)
    now = _size_now(tier)
    if tier.HasField("measured_hit_rate"):
        measured = ("now, measured", as_size(tier.nbytes), f"{tier.measured_hit_rate:.1%}")
        made.add_row(*measured, *("",) * (len(columns) - 2))
    for size in tier.sizes:
        more, saved = size.hit_rate - now.hit_rate, _saved(answer, tier, size)
        tokens, seconds = saved * answer.ghosts.asked_tokens, ""
        if answer.HasField("token_s"):
            seconds = f"{tokens * answer.token_s:z,.0f}"  # z: no "-0"
        saved_share = saved / max(1e-9, 1 - _found_now(answer))
        made.add_row(
            "now, estimated" if size.factor == 1 else f"{size.factor:g}x",
            as_size(size.nbytes),
            f"{size.hit_rate:.1%}",
            f"{100 * size.margin:.1f}",
            "" if size.factor == 1 else f"{more * answer.ghosts.asked_tokens:+z,.0f}",
            "" if size.factor == 1 else f"{saved_share:z.1%}",
            "" if size.factor == 1 else seconds,
        )
    return made


def _sentences(answer: pb.WhatIfResponse, tier: pb.GhostTier) -> Iterator[str]:
    now, name = _size_now(tier), grid.tier_name(tier.tier)
    what = _NAMES.get(name, name)
    if not now.filled:
        yield (
            f"Prompts had too few different blocks to fill the {name} tier since then: more {what} would have found "
            "nothing more."
        )
    else:
        double = next(size for size in tier.sizes if size.factor == 2)
        more, saved = as_size(double.nbytes - now.nbytes), _saved(answer, tier, double)
        gain = double.hit_rate - now.hit_rate
        if saved >= _LITTLE:
            tokens = saved * answer.ghosts.asked_tokens
            seconds = f", {tokens * answer.token_s:,.0f} s" if answer.HasField("token_s") else ""
            yield (
                f"{more} more {what} would have saved {saved / (1 - _found_now(answer)):.0%} of prefill "
                f"({tokens:,.0f} tokens{seconds})."
            )
        elif gain >= _LITTLE and tier.tier != answer.ghosts.tiers[-1].tier:
            yield f"{more} more {what} would have had {gain:.1%} of the prompt tokens that came from farther away."
        else:
            yield f"{more} more {what} would have found hardly more."
    if tier.policy_hit_rates:
        others = ", ".join(
            f"{policy} {rate:.1%}" for policy, rate in sorted(tier.policy_hit_rates.items(), key=lambda each: -each[1])
        )
        yield f"With other policies and this size: {others} ({tier.policy}: {now.hit_rate:.1%})."
    yield f"Estimated from {tier.references:,} sampled blocks, {tier.sampled_share:.2%} of all."


def _size_now(tier: pb.GhostTier) -> pb.GhostSize:
    return next(size for size in tier.sizes if size.factor == 1)


def _found_now(answer: pb.WhatIfResponse) -> float:
    """The share of the prompt tokens that is found in any tier, which nobody computes."""
    return max(_size_now(tier).hit_rate for tier in answer.ghosts.tiers)


def _saved(answer: pb.WhatIfResponse, tier: pb.GhostTier, size: pb.GhostSize) -> float:
    """The share of the prompt tokens that would not have been computed; below 0 for a smaller last tier."""
    if tier.tier == answer.ghosts.tiers[-1].tier:
        return size.hit_rate - _found_now(answer)
    return max(0.0, size.hit_rate - _found_now(answer))


def draw_what_if(answer: pb.WhatIfResponse, file: Path) -> None:
    """Draws what each tier finds by its size. `check_drawable` has checked matplotlib and the file's kind."""
    from matplotlib.figure import Figure

    tiers = [tier for tier in answer.ghosts.tiers if tier.sure]
    figure = Figure(figsize=(5 * max(1, len(tiers)), 4), layout="constrained")
    axes = figure.subplots(1, max(1, len(tiers)), squeeze=False)[0]
    for plot, tier in zip(axes, tiers, strict=False):
        sizes = [size.nbytes / _GIB for size in tier.sizes]
        rates = [100 * size.hit_rate for size in tier.sizes]
        plot.plot(sizes, rates, marker="o", label=tier.policy)
        plot.fill_between(
            sizes,
            [rate - 100 * size.margin for rate, size in zip(rates, tier.sizes, strict=True)],
            [rate + 100 * size.margin for rate, size in zip(rates, tier.sizes, strict=True)],
            alpha=0.2,
        )
        for policy, rate in tier.policy_hit_rates.items():
            plot.plot([tier.nbytes / _GIB], [100 * rate], "x", label=policy)
        if tier.HasField("measured_hit_rate"):
            plot.plot([tier.nbytes / _GIB], [100 * tier.measured_hit_rate], "k*", label="measured")
        plot.set(xlabel=f"{grid.tier_name(tier.tier)} tier, GiB", ylabel="prompt tokens found, %", ylim=(0, 100))
        plot.set_title(f"What a {grid.tier_name(tier.tier)} tier of another size would find", fontsize=10)
        plot.legend(fontsize="small")
    if not tiers:
        axes[0].set_title("not enough data yet")
    figure.savefig(file, dpi=150)
