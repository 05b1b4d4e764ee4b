"""Prints what happened in a stretch of time, who fills the cache, and the wear of the disk."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from prefixd.base.sizes import as_size
from prefixd.base.tiers import Tier
from prefixd.cli.output.tables.figures import quantiles_text
from prefixd.cli.output.tables.grid import console, duration, table
from prefixd.cli.output.terminal import cleaned
from prefixd.v1 import admin_pb2

_DAY_S = 86_400
_YEAR_S = 365.25 * _DAY_S
_MOST_SHOWN = 20  # tenants and models; --json has all
_BARS = " ▁▂▃▄▅▆▇█"


def print_period(stats: admin_pb2.StatsResponse) -> None:
    """Prints which tier served the prompts of a stretch of time, and what else happened in it."""
    stats = cleaned(stats)
    out, period, total = console(), stats.period, stats.period.total
    out.print(f"prefixd {stats.version}: the last {duration(period.seconds)}")
    found = sum(total.hit_tokens)
    rate = f" ({found / total.asked_tokens:.0%})" if total.asked_tokens else ""
    out.print(f"prompt tokens: {total.asked_tokens:,} asked for, {found:,} found in the cache{rate}")
    out.print(_tier_table(total, {tier.tier for tier in stats.tiers}))
    if len(period.points) > 1:
        rates = [sum(each.hit_tokens) / each.asked_tokens if each.asked_tokens else 0.0 for each in period.points]
        out.print(f"hit rate, {duration(period.step_s)} a bar: {bars(rates)}", markup=False)
    out.print(f"{total.lookups:,} lookups by engines; {as_size(total.written_bytes)} written to disk")
    if total.requests:
        out.print(f"{total.requests:,} requests ended, {total.generated_tokens:,} tokens generated")
    first = total.first_token_s
    if (text := quantiles_text([first.p50, first.p95, first.p99], first.count)) is not None:
        out.print(f"first token: {text} requests")


def bars(shares: Sequence[float]) -> str:
    """Returns a bar of text for each share from 0 to 1."""
    return "".join(_BARS[min(round(share * (len(_BARS) - 1)), len(_BARS) - 1)] for share in shares)


def fill_table(stats: admin_pb2.StatsResponse) -> Table | None:
    """A table of who fills the cache and who uses it, by tenant and model, the most bytes first; None without any."""
    cached = _by_who(stats.cached.bytes)
    asked, hits = _by_who(stats.traffic.asked_tokens), _by_who(stats.traffic.hit_tokens)
    stored, generated = _by_who(stats.traffic.stored_bytes), _by_who(stats.traffic.generated_tokens)
    everyone = sorted({*cached, *asked, *stored}, key=lambda who: (-cached[who], -asked[who], who))
    if not everyone:
        return None
    numbers = ("cached", "share", "stored", "asked\ntokens", "found", "generated")
    made = table("tenant", "model", *numbers, right=numbers, fold=("model",))
    whole = sum(cached.values())
    for who in everyone[:_MOST_SHOWN]:
        made.add_row(
            *(Text(each) for each in who),
            as_size(cached[who]),
            f"{cached[who] / whole:.0%}" if whole else "-",
            as_size(stored[who]) if stored[who] else "-",
            f"{asked[who]:,}",
            f"{hits[who] / asked[who]:.0%}" if asked[who] else "-",
            f"{generated[who]:,}" if generated[who] else "-",
        )
    return made


def outcome_line(requests: Sequence[admin_pb2.LabelledCount]) -> str:
    """Returns how requests to the daemon's own workers have ended: `requests ended: 1,200 stop, 3 failed`."""
    counts = Counter[str]()
    for each in requests:
        counts[each.labels.get("outcome", "")] += each.count
    return "requests ended: " + ", ".join(f"{count:,} {outcome}" for outcome, count in counts.most_common())


def wear_line(wear: admin_pb2.DiskWear) -> str:
    """Returns how much is written to disk, and how long the drive lasts if the settings say what it stands."""
    line = (
        f"disk: {as_size(round(wear.recent_bytes_per_s * _DAY_S))} a day written at the rate of the last hour, "
        f"{as_size(round(wear.mean_bytes_per_s * _DAY_S))} a day since the start"
    )
    if wear.HasField("used_ratio"):
        line += f"; {wear.used_ratio:.1%} of its endurance of {wear.endurance_bytes / 1e12:,.4g} TB used"
    if wear.HasField("left_s"):
        line += f", {wear.left_s / _YEAR_S:,.1f} years left"
    return line


def _tier_table(total: admin_pb2.PeriodFigures, existing: set[int]) -> Table:
    numbers = ("found\ntokens", "of all\nasked", "brought\nup", "evicted\nblocks")
    made = table("tier", *numbers, right=numbers)
    known = min(map(len, (total.hit_tokens, total.loaded_bytes, total.evicted_blocks)))
    for tier in [tier for tier in Tier if tier < known and tier.wire in existing]:
        found, loaded, evicted = total.hit_tokens[tier], total.loaded_bytes[tier], total.evicted_blocks[tier]
        share = f"{found / total.asked_tokens:.1%}" if total.asked_tokens else "-"
        made.add_row(tier.label, f"{found:,}", share, as_size(loaded), f"{evicted:,}")
    return made


def _by_who(counts: Sequence[admin_pb2.LabelledCount]) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = defaultdict(int)
    for each in counts:
        found[each.labels.get("tenant", ""), each.labels.get("model", "")] += each.count
    return found
