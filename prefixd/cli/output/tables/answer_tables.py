"""Prints a table for each answer: settings, figures, accounts, tenants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from prefixd.base.sizes import as_size
from prefixd.cli.output.tables.figures import figure_table
from prefixd.cli.output.tables.grid import console, duration, table, tier_name
from prefixd.cli.output.tables.period_tables import fill_table, outcome_line, wear_line
from prefixd.cli.output.tables.stored_text import stored_line
from prefixd.cli.output.terminal import cleaned, shown
from prefixd.v1 import admin_pb2

if TYPE_CHECKING:
    from prefixd.cli.machine_checks import Check

_MOST_HOLDERS = 5  # printed; --json has up to 100


def print_settings(values: Mapping[str, Any], sources: Mapping[str, str], descriptions: Mapping[str, str]) -> None:
    """Prints the configuration: name, value and source of each setting, and its description if there are any."""
    columns = ("setting", "value", "from", *(["description"] if descriptions else []))
    made = table(*columns, fold=columns[1:])
    described = {name: None for name in descriptions if name not in values}  # tenants.NAME.*: settings of any tenant
    for name, value in {**values, **described}.items():
        source = sources.get(name, "default")
        made.add_row(
            name,
            _setting_value(name, value),
            Text(source, style="dim" if source == "default" else "green"),
            *([Text(" ".join(descriptions.get(name, "see tenants.NAME").split()))] if descriptions else []),
        )
    console().print(made)


def _setting_value(name: str, value: Any) -> Text:
    if value is None:
        return Text("-", style="dim")
    if isinstance(value, bool):
        return Text(str(value).lower())
    if name.endswith("bytes") and isinstance(value, int):  # not "auto"
        return Text(f"{value} ({as_size(value)})" if value else "0")
    return Text(str(value))


def _model_table(models: Iterable[admin_pb2.ModelStats]) -> Table:
    columns = (
        "model",
        "worker",
        "running",
        "waiting",
        "finished",
        "restarts",
        "held in the gpu tier",
        "given up because",
    )
    made = table(*columns, fold=columns[-1:])
    for model in models:
        worker, queue = model.worker, model.scheduler
        made.add_row(
            Text(model.name),
            _worker_state(worker),
            f"{worker.running_requests:,}",
            f"{queue.waiting_requests:,}",
            f"{queue.finished_requests:,}",
            f"{worker.restarts:,}",
            as_size(model.held_bytes),
            Text(worker.error),
        )
    return made


def _worker_state(worker: admin_pb2.WorkerStats) -> str:
    return admin_pb2.WorkerStats.State.Name(worker.state).removeprefix("STATE_").lower()


def _print_models(out: Console, models: Sequence[admin_pb2.ModelStats], queue: admin_pb2.SchedulerStats) -> None:
    """Prints the totals of several models, then each model."""
    ready = sum(model.worker.state == admin_pb2.WorkerStats.STATE_READY for model in models)
    running = sum(model.worker.running_requests for model in models)
    out.print(
        f"workers: {ready} of {len(models)} ready, {running} running, {queue.waiting_requests} waiting "
        f"({queue.policy}), {queue.finished_requests} finished",
        markup=False,
    )
    out.print(_model_table(models))
    for model in models:
        _print_worker(out, model.worker, f"{model.name}: ")


def _print_worker(out: Console, worker: admin_pb2.WorkerStats, prefix: str = "") -> None:
    """Prints a worker's design; each line begins with `prefix`."""

    def print_line(text: str, style: str = "") -> None:
        out.print(Text(f"{prefix}{text}", style=style))

    if worker.kv:
        graphs = f"CUDA graphs {'in use' if worker.cuda_graphs else 'not in use'}"
        print_line(f"worker's design: kv {worker.kv}, layout {worker.layout}, {graphs}")
    if worker.cuda_graphs_reason:
        print_line(f"without CUDA graphs: {worker.cuda_graphs_reason}", "yellow")
    if worker.prompt_graphs_reason:
        print_line(f"without CUDA graphs of prompts: {worker.prompt_graphs_reason}", "yellow")
    if worker.operators_reason:
        print_line(f"operators {worker.operators}: {worker.operators_reason}", "yellow")
    if worker.block_tokens_reason:
        print_line(f"block size: {worker.block_tokens_reason}", "yellow")
    if worker.HasField("draft"):
        print_line(f"draft: {worker.draft.model} proposes {worker.draft.draft_tokens} tokens at a time")


def print_stats(stats: admin_pb2.StatsResponse) -> None:
    """Prints the daemon's degraded parts, workers, hit rate, tiers, namespaces, sessions and figures."""
    stats = cleaned(stats)
    out = console()
    draining = ", [yellow]draining[/]" if stats.draining else ""
    out.print(f"prefixd {stats.version}: [green]up[/] for {duration(stats.uptime_s)}{draining}")
    _print_degraded(out, stats)
    worker, queue = stats.worker, stats.scheduler
    if worker.state in (admin_pb2.WorkerStats.STATE_UNSPECIFIED, admin_pb2.WorkerStats.STATE_NONE):
        out.print("worker: none (cache only)")
    elif len(stats.models) > 1:
        _print_models(out, stats.models, queue)
    else:
        out.print(
            f"worker: {_worker_state(worker)}, {worker.model} on {worker.device}, {worker.running_requests} running, "
            f"{queue.waiting_requests} waiting ({queue.policy}), {queue.finished_requests} finished"
            + (f", {worker.restarts} restarts" if worker.restarts else "")
            + (f", blocks of {worker.block_tokens:,} tokens" if worker.block_tokens else ""),
            markup=False,
        )
        _print_worker(out, worker)
    rate = f" ({stats.hit_tokens / stats.asked_tokens:.0%})" if stats.asked_tokens else ""
    out.print(f"prompt tokens: {stats.asked_tokens:,} asked for, {stats.hit_tokens:,} found in the cache{rate}")
    out.print(_tier_table(stats.tiers))
    for tier in stats.tiers:
        if tier.most_bytes:
            out.print(_size_line(tier), markup=False)
    if (who := fill_table(stats)) is not None:
        out.print(who)
    if stats.traffic.requests:
        out.print(outcome_line(stats.traffic.requests), markup=False)
    if stats.namespaces:
        out.print(_namespace_table(stats.namespaces, stats.models))
        if stats.other_namespaces:
            out.print(f"and {stats.other_namespaces:,} more namespaces, with fewer blocks")
    if stats.sessions:
        out.print(_session_table(stats.sessions))
    out.print(figure_table(stats))
    if (line := stored_line(stats.stored)) is not None:
        out.print(line, markup=False)
    if stats.HasField("disk_wear"):
        out.print(wear_line(stats.disk_wear), markup=False)
    if stats.HasField("remote"):
        out.print(f"shared store: {stats.remote.store}", markup=False)
    for tier in stats.tiers:
        if tier.quarantined_bytes:
            out.print(
                f"[yellow]quarantine:[/] {as_size(tier.quarantined_bytes)} of the {tier_name(tier.tier)} tier: clients "
                "may still write there, although their reservations have expired; free when they release it or end"
            )


def _print_degraded(out: Console, stats: admin_pb2.StatsResponse) -> None:
    """Prints what an operator has to do something about, first of all."""
    for trouble in stats.troubles:
        line = f"degraded for {duration(trouble.since_s)}: {trouble.part}: {trouble.what}"
        out.print(Text(line, style="red"))
        out.print(Text(f"  {trouble.remedy}"))
    for model in stats.models:
        if model.worker.error:
            out.print(Text(f"worker of {model.name} was given up: {model.worker.error}", style="red"))
    if not stats.models and stats.worker.error:
        out.print(Text(f"worker was given up: {stats.worker.error}", style="red"))
    if stats.draining:
        out.print(Text("the daemon takes no new work", style="yellow"))
        out.print("  `prefixd undrain` makes it take new work again, unless it is ending")


def _tier_table(tiers: Iterable[admin_pb2.TierStats]) -> Table:
    numbers = ("used", "of", "full", "blocks", "held", "hit\ntokens", "promoted", "demoted", "evicted")
    made = table("tier", *numbers, right=numbers)
    for tier in tiers:
        counts = (tier.blocks, tier.held_blocks, tier.hit_tokens)
        moves = (tier.promoted_blocks, tier.demoted_blocks, tier.evicted_blocks)
        made.add_row(
            tier_name(tier.tier),
            as_size(tier.used_bytes),
            as_size(tier.capacity_bytes) if tier.capacity_bytes else "-",
            f"{tier.used_bytes / tier.capacity_bytes:.0%}" if tier.capacity_bytes else "-",
            *(f"{count:,}" for count in counts + moves),
        )
    return made


def _size_line(tier: admin_pb2.TierStats) -> str:
    """Returns the bounds of a tier that grows and shrinks by itself, and why it has its size."""
    bounds = f"{tier_name(tier.tier)} tier: from {as_size(tier.least_bytes)} to {as_size(tier.most_bytes)}"
    target = f", on its way to {as_size(tier.target_bytes)}" if tier.target_bytes != tier.capacity_bytes else ""
    return f"{bounds}, now {as_size(tier.capacity_bytes)}{target}; last change: {tier.resized_because}"


def _namespace_table(namespaces: Iterable[admin_pb2.NamespaceStats], models: Sequence[admin_pb2.ModelStats]) -> Table:
    """A table of namespaces, with the model of the daemon's own, and the tenant if there are several."""
    namespaces, numbers = list(namespaces), ("block tokens", "blocks")
    tenants = ("tenant",) if len({entry.tenant for entry in namespaces}) > 1 else ()
    made = table("namespace", *tenants, "id", *numbers, right=numbers, fold=("namespace",))
    for entry in namespaces:
        name = entry.namespace.name
        of_model = name.removesuffix("-images") if entry.worker else ""  # as `NamespaceSpec.for_images` names them
        owners = [model.name for model in models if of_model == model.namespace]
        made.add_row(
            Text(f"{name} ({', '.join(owners)})" if owners else name),
            *([Text(entry.tenant)] if tenants else []),
            entry.namespace_id.hex(),
            str(entry.namespace.block_tokens),
            f"{entry.blocks:,}",
        )
    return made


def _session_table(sessions: Iterable[admin_pb2.SessionStats]) -> Table:
    numbers = ("pid", "leases", "reservations", "stored", "open for")
    made = table("session", *numbers, right=numbers, fold=("session",))
    for session in sessions:
        made.add_row(
            Text(session.client_name or session.session_id),
            str(session.pid or "-"),
            str(session.leases),
            str(session.reservations),
            as_size(session.stored_bytes),
            duration(session.age_s),
        )
    return made


def print_verification(
    progress: admin_pb2.VerifyProgress, damaged: Sequence[admin_pb2.DamagedBlock], elapsed_s: float
) -> None:
    """Prints how much a verification has read, and the damaged blocks."""
    out = console()
    rate = as_size(int(progress.checked_bytes / max(elapsed_s, 1e-3)))
    read = f"{progress.checked_blocks:,} blocks, {as_size(progress.checked_bytes)} in {duration(elapsed_s)} ({rate}/s)"
    if progress.altered_blocks:
        read += f", of which a lossy codec has altered {progress.altered_blocks:,}"
    if not damaged:
        out.print(f"{read}: [green]all in order[/]")
        return
    made = table("block", "namespace", "fault", fold=("fault",))
    for block in damaged:
        made.add_row(shown(block.key), block.namespace_id.hex(), Text(shown(block.reason)))
    out.print(made)
    more = progress.dropped_blocks - progress.damaged_blocks
    out.print(
        f"{read}: [red]{progress.damaged_blocks:,} damaged[/] and dropped"
        + (f", with {more:,} that continued them" if more > 0 else "")
        + "; blocks that are also in memory are written again, the others are computed at their next use"
    )


def print_diagnosis(integrity: admin_pb2.CheckIntegrityResponse, checks: Iterable[Check]) -> None:
    """Prints violations, holders of blocks, troubles, and the checks of the machine."""
    integrity = cleaned(integrity)
    out = console()
    counted = (
        f"{integrity.blocks:,} blocks, {integrity.slots:,} slots in memory, {integrity.sessions:,} sessions, "
        f"{integrity.leases:,} leases, {integrity.reservations:,} reservations"
    )
    if integrity.violations:
        out.print(f"[red]does not add up[/] ({counted}); this is a defect, please report it:")
        for violation in integrity.violations:
            out.print(Text(f"  {violation}", style="red"))
    else:
        out.print(f"[green]ok[/] everything adds up: {counted}")
    if integrity.holders:
        most = ", ".join(f"{holder.owner} ({holder.blocks:,})" for holder in integrity.holders[:_MOST_HOLDERS])
        out.print(Text(f"   blocks held by: {most}"))
    for key in integrity.disk_keys:
        files = f" ({', '.join(key.settings)})" if key.settings else ""
        under = f"under key {key.key}{files}" if key.key else "in clear"
        now = ", which encrypts what is written now" if key.encrypts else ""
        out.print(Text(f"   blocks on disk {under}: {key.blocks:,}, {as_size(key.nbytes)}{now}"))
    for trouble in integrity.troubles:
        out.print(Text(f"trouble for {duration(trouble.since_s)}: {trouble.part}: {trouble.what}", style="red"))
        out.print(Text(f"  {trouble.remedy}"))
    if not integrity.troubles:
        out.print("[green]ok[/] no tier is in trouble")
    print_checks(checks)


def print_checks(checks: Iterable[Check]) -> None:
    """Prints findings about the machine, each with its remedy if there is one."""
    out = console()
    for check in checks:
        line = shown(f"{check.name}: {check.found}")
        if check.remedy:
            out.print(Text(line, style="yellow"))
            out.print(Text(f"  {shown(check.remedy)}"))
        else:
            out.print(Text.assemble(("ok", "green"), f" {line}"))


def _is_smaller(use: admin_pb2.TenantTierUse) -> bool:
    """Whether codecs have made a tenant's blocks on disk smaller; `in memory` they have `exact_bytes`."""
    return use.exact_bytes > use.used_bytes


def print_tenants(tenants: Sequence[admin_pb2.TenantStats]) -> None:
    """Prints each tenant's use and quotas: a table of the tiers, and one of the limits."""
    exact = ("in memory",) if any(map(_is_smaller, (use for tenant in tenants for use in tenant.tiers))) else ()
    numbers = ("used", *exact, "held", "guaranteed", "most")
    tiers = table("tenant", "tier", *numbers, right=numbers)
    limits = table("tenant", "limit", "has", "most", "refused", right=("has", "most", "refused"))
    for tenant in map(cleaned, tenants):
        uses = {each.tier: each for each in tenant.tiers}
        for quota in tenant.quota.tiers:
            use = uses.get(quota.tier, admin_pb2.TenantTierUse())
            tiers.add_row(
                tenant.name,
                tier_name(quota.tier),
                as_size(use.used_bytes),
                *([as_size(use.exact_bytes) if _is_smaller(use) else "-"] if exact else []),
                as_size(use.held_bytes),
                as_size(quota.guaranteed_bytes),
                as_size(quota.most_bytes) if quota.HasField("most_bytes") else "-",
            )
        for field in tenant.quota.DESCRIPTOR.fields:
            if field.name == "tiers":
                continue
            used = getattr(tenant, field.name, None)
            limits.add_row(
                tenant.name,
                field.name,
                "" if used is None else f"{used:,}",
                f"{getattr(tenant.quota, field.name):,}" if tenant.quota.HasField(field.name) else "-",
                str(tenant.refused.get(field.name, 0) or ""),
            )
        for limit, refused in sorted(tenant.refused.items()):
            if limit not in tenant.quota.DESCRIPTOR.fields_by_name:
                limits.add_row(tenant.name, limit, "", "", str(refused))
    console().print(tiers)
    console().print(limits)
