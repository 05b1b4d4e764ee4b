"""What `prefixd top` shows of a daemon's answers, as rich's texts and tables. 80 columns are enough for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rich.table import Table
from rich.text import Text

from prefixd.base.sizes import as_size
from prefixd.base.tiers import Tier
from prefixd.cli.output.tables.grid import duration, tier_name
from prefixd.cli.output.tables.stored_text import stored_words
from prefixd.cli.top.daemon_watch import Snapshot
from prefixd.v1 import admin_pb2 as pb

_MOST_TROUBLES = 3
_COLORS = {"gpu": "blue", "cpu": "green", "disk": "yellow", "remote": "magenta"}
_LEAST_BAR = 10
_BESIDE_BAR = 66  # columns of the table of tiers, without the bars
_MOST_ROWS = 100


@dataclass(slots=True)
class Rates:
    """What happened between two answers: differences of counters, and the seconds between them."""

    now: Snapshot | None = None
    before: Snapshot | None = None
    _tiers: dict[int, pb.TierStats] = field(default_factory=dict)

    def take(self, snapshot: Snapshot) -> None:
        """Takes the next answer. One of another daemon, whose counters begin anew, has no rates yet."""
        self.before, self.now = self.now, snapshot
        if self.before is not None and snapshot.stats.uptime_s < self.before.stats.uptime_s:
            self.before = None
        self._tiers = {} if self.before is None else {tier.tier: tier for tier in self.before.stats.tiers}

    def per_s(self, tier: pb.TierStats, counter: str) -> str:
        """Returns how fast a tier's counter grows, such as `12/s`; empty without an earlier answer."""
        earlier = self._tiers.get(tier.tier)
        if earlier is None or self.now is None or self.before is None:
            return ""
        seconds = max(self.now.at_s - self.before.at_s, 1e-3)
        return f"{short((getattr(tier, counter) - getattr(earlier, counter)) / seconds)}/s"


def short(number: float) -> str:
    """Formats a number in at most five characters: 0, 0.4, 12, 9999, 12.3k, 4.5M."""
    if number < 10 and number % 1:
        return f"{number:.1f}"
    if number < 10_000:
        return f"{number:.0f}"
    for unit in "kMGT":
        number /= 1000
        if number < 1000 or unit == "T":
            break
    return f"{number:.1f}{unit}" if number < 100 else f"{number:.0f}{unit}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def found_tokens(stats: pb.StatsResponse) -> tuple[list[int], int, str]:
    """Returns the prompt tokens found by tier, those asked for, and when: in the last hour, or since the start if
    nothing was asked for then, or the daemon does not tell."""
    total = stats.period.total
    if total.asked_tokens:
        return list(total.hit_tokens), total.asked_tokens, f"(last {round(stats.period.seconds / 60)} min)"
    hits = [0] * len(Tier)
    for tier in stats.tiers:
        hits[tier.tier - 1] = tier.hit_tokens
    return hits, stats.asked_tokens, "since the start"


def head(stats: pb.StatsResponse) -> Text:
    """Returns the first line: version, state, hit rate."""
    state = ("draining, up", "yellow") if stats.draining else ("up", "green")
    hits, asked, when = found_tokens(stats)
    found = f"  {_share(sum(hits), asked)} of {short(asked)} prompt tokens found {when}"
    return Text.assemble((f"prefixd {stats.version} ", "bold"), state, f" for {duration(stats.uptime_s)}", found)


def troubles(stats: pb.StatsResponse) -> Text:
    """Returns a line for each degraded part; empty if there is none."""
    lines = [f"{each.part}, for {duration(each.since_s)}: {each.what}; {each.remedy}" for each in stats.troubles]
    left_out = len(lines) - _MOST_TROUBLES
    if left_out > 0:
        lines[_MOST_TROUBLES:] = [f"and {left_out} more: prefixd stats"]
    lines += [f"worker was given up: {model.worker.error}" for model in stats.models if model.worker.error]
    return Text("\n".join(lines), style="bold red")


def tiers(stats: pb.StatsResponse, rates: Rates, width: int) -> Table:
    """Returns the tiers: how full, what was found there, and what comes and goes."""
    numbers = ("full", "used", "blocks", "found", "up", "evicted")
    made = _table("tier", "", *numbers, right=numbers)
    hits, asked, _ = found_tokens(stats)
    bar_width = max(_LEAST_BAR, width - _BESIDE_BAR)
    for tier in stats.tiers:
        name, of = tier_name(tier.tier), tier.capacity_bytes
        made.add_row(
            Text(name, style="bold red" if tier.trouble else "bold"),
            _bar(tier.used_bytes / of if of else 0.0, bar_width, _COLORS.get(name, "white")),
            _share(tier.used_bytes, of),
            f"{as_size(tier.used_bytes)} of {as_size(of)}" if of else as_size(tier.used_bytes),
            short(tier.blocks),
            _share(hits[tier.tier - 1], asked),
            rates.per_s(tier, "promoted_blocks") or short(tier.promoted_blocks),
            rates.per_s(tier, "evicted_blocks") or short(tier.evicted_blocks),
        )
    return made


def work(stats: pb.StatsResponse) -> Text:
    """Returns two lines: who uses the daemon, and what its loads did."""
    worker, queue = stats.worker, stats.scheduler
    line = f"sessions {len(stats.sessions)}  leases {stats.leases}  reservations {stats.reservations}"
    if worker.state not in (pb.WorkerStats.STATE_UNSPECIFIED, pb.WorkerStats.STATE_NONE):
        line = (
            f"running {sum(model.worker.running_requests for model in stats.models)}  waiting {queue.waiting_requests}"
            f"  finished {short(queue.finished_requests)}  {line}"
        )
    loads = (
        f"loads {short(queue.load_decisions)}  split {short(queue.split_loads)}  cut {short(queue.cut_loads)}"
        f"  given up {short(queue.abandoned_loads)}  lost {duration(queue.load_regret_s)}"
    )
    written = f"to write {as_size(stats.write_back.queued_bytes)}"
    lost = sum(stats.lost_blocks.values())
    words = [loads] if queue.load_decisions else []
    saved = stored_words(stats.stored)
    return Text(f"{line}\n{'  '.join([*words, written, *saved, *([f'lost blocks {short(lost)}'] if lost else [])])}")


# -- panes --------------------------------------------------------------------------------------------------------


def requests(snapshot: Snapshot) -> Table:
    """Returns the last requests: what each found, when its first token came (of engines' calls: the end), and why."""
    if snapshot.requests is None:
        made = _table("this daemon's version does not tell its last requests")
        return made
    numbers = ("prompt", "found", "took")
    made = _table("request", "tenant", *numbers, "outcome", "why", right=numbers)
    for request in snapshot.requests:
        took_s = request.first_token_s if request.HasField("first_token_s") else request.ended_s
        known = request.HasField("first_token_s") or request.HasField("ended_s")
        used = request.used if len(request.used) else request.found
        made.add_row(
            Text(_cut(request.client_id or request.id, 18)),
            Text(_cut(request.tenant, 10)),
            short(request.prompt_tokens) if request.prompt_tokens else "-",
            _share(sum(each.tokens for each in used), request.prompt_tokens),
            milliseconds(took_s) if known else "-",
            Text(request.outcome or "runs", style="red" if request.outcome in ("failed", "refused") else ""),
            Text(request.cause.replace("_", " ")),
        )
    return made


def milliseconds(seconds: float) -> str:
    """Formats a short time: 0.2 ms, 34 ms, 1.2 s, 45 s."""
    if seconds < 1:
        return f"{seconds * 1000:.{int(seconds < 0.01)}f} ms"
    return f"{seconds:.{int(seconds < 10)}f} s"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def tenants(snapshot: Snapshot) -> Table:
    """Returns what each tenant has and does."""
    stats = snapshot.stats
    names = [tier_name(tier.tier) for tier in stats.tiers]
    numbers = (*names, "sessions", "run", "wait", "refused")
    made = _table("tenant", *numbers, right=numbers)
    for tenant in stats.tenants[:_MOST_ROWS]:
        used = {tier_name(each.tier): each.used_bytes for each in tenant.tiers}
        made.add_row(
            Text(tenant.name),
            *(as_size(used[name]) if name in used else "-" for name in names),
            str(tenant.sessions),
            str(tenant.running_requests),
            str(tenant.waiting_requests),
            short(sum(tenant.refused.values())),
        )
    return made


def models(snapshot: Snapshot) -> Table:
    """Returns the models and their workers."""
    stats = snapshot.stats
    numbers = ("run", "wait", "finished", "restarts", "held")
    made = _table("model", "worker", *numbers, right=numbers)
    styles = {pb.WorkerStats.STATE_READY: "green", pb.WorkerStats.STATE_FAILED: "red"}
    for model in stats.models:
        worker, queue = model.worker, model.scheduler
        state = pb.WorkerStats.State.Name(worker.state).removeprefix("STATE_").lower()
        made.add_row(
            Text(model.name),
            Text(state, style=styles.get(worker.state, "yellow")),
            str(worker.running_requests),
            str(queue.waiting_requests),
            short(queue.finished_requests),
            str(worker.restarts),
            as_size(model.held_bytes),
        )
    return made


def sessions(snapshot: Snapshot) -> Table:
    """Returns the sessions, those with most leases first."""
    stats = snapshot.stats
    numbers = ("pid", "leases", "reservations", "open for")
    made = _table("client", "tenant", *numbers, right=numbers)
    for each in sorted(stats.sessions, key=lambda each: -(each.leases + each.reservations))[:_MOST_ROWS]:
        name = each.client_name or each.session_id
        made.add_row(
            Text(name),
            Text(each.tenant),
            str(each.pid or "-"),
            str(each.leases),
            str(each.reservations),
            duration(each.age_s),
        )
    return made


def namespaces(snapshot: Snapshot) -> Table:
    """Returns the namespaces with most blocks."""
    stats = snapshot.stats
    names = {model.namespace: model.name for model in stats.models}
    numbers = ("block tokens", "blocks", "on gpu")
    made = _table("namespace", "tenant", *numbers, right=numbers)
    for each in stats.namespaces[:_MOST_ROWS]:
        name = each.namespace.name
        made.add_row(
            Text(names.get(name, name)),
            Text(each.tenant),
            str(each.namespace.block_tokens),
            short(each.blocks),
            short(each.gpu_blocks),
        )
    return made


PANES: dict[str, Callable[[Snapshot], Table]] = {
    "requests": requests,
    "tenants": tenants,
    "models": models,
    "sessions": sessions,
    "namespaces": namespaces,
}
"""The tables of the lower half, one of which is shown; the key of each is its first letter."""


def _table(*columns: str, right: Iterable[str] = ()) -> Table:
    made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), expand=False)
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", no_wrap=True, header_style="dim")
    return made


def _bar(share: float, width: int, color: str) -> Text:
    full = min(width, round(share * width)) if share < 1 else width
    return Text.assemble(("█" * full, color), ("░" * (width - full), "dim"))
