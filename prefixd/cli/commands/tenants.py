"""`prefixd tenants`: shows each tenant's use and quotas, and changes quotas while the daemon runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefixd.base.tiers import QUOTA_TIERS
from prefixd.cli.completions import complete_tenants
from prefixd.cli.connect import Address, Json, asks_daemon, connected, run
from prefixd.cli.failures import CleanGroup, CommandFailed, WrongUsage, examples, paragraphs

if TYPE_CHECKING:
    from prefixd.v1 import admin_pb2


app = typer.Typer(
    cls=CleanGroup,
    no_args_is_help=True,
    help="Show each tenant's use and limits, and change the limits.",
    epilog=examples("prefixd tenants list", "prefixd tenants set acme --cpu 1GiB:4GiB --sessions 32"),
)


def list_command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", show_default=False, autocompletion=complete_tenants, help="One tenant; all by default."
        ),
    ] = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Show each tenant's use and limits, and how often the daemon refused it more."""
    from prefixd.cli.output import json_values as plain
    from prefixd.cli.output.tables import answer_tables as render

    async def ask() -> list[admin_pb2.TenantStats]:
        async with connected(address) as client:
            return await client.tenants()

    tenants = [tenant for tenant in run(ask()) if name in (None, tenant.name)]
    if not tenants:
        raise CommandFailed(f"there is no tenant {name!r}; `prefixd tenants list` shows them all")
    if as_json:
        plain.print_json([plain.to_plain(tenant) for tenant in tenants])
    else:
        render.print_tenants(tenants)


@dataclass(frozen=True, slots=True)
class TierChange:
    """A change of a tier's quota: None leaves a value unchanged, -1 removes the limit."""

    guaranteed: int | None
    most: int | None


def _parse_tier_change(text: str) -> TierChange:
    """Parses `1GiB:4GiB`: either size may be missing, and `none` as the second removes the limit."""
    from prefixd.base.sizes import parse_room

    guaranteed, colon, most = text.partition(":")
    try:
        if not colon or text == ":":
            raise ValueError("write GUARANTEED:MOST, such as 1GiB:4GiB, 1GiB:, :4GiB or :none")
        return TierChange(
            parse_room(guaranteed) if guaranteed else None,
            -1 if most == "none" else parse_room(most) if most else None,
        )
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}") from error


def _parse_count(text: str) -> float:
    if text == "none":
        return -1.0
    if not text.isdecimal() or not int(text):
        raise typer.BadParameter(f"{text!r}: give a whole number above 0, or none for no limit")
    return float(text)


def _parse_rate(text: str) -> float:
    if text == "none":
        return -1.0
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise typer.BadParameter(f"{text!r}: give a number above 0, or none for no limit")
    return value


def _parse_size(text: str) -> float:
    from prefixd.base.sizes import parse_room

    try:
        return -1.0 if text == "none" else float(parse_room(text))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}") from error


def _tier_option(tier: str) -> Any:
    help_text = f"Guaranteed and most bytes of the {tier} tier: 1GiB:4GiB, 1GiB:, :4GiB, :none (no limit)."
    return typer.Option(f"--{tier}", metavar="SIZE:SIZE", parser=_parse_tier_change, show_default=False, help=help_text)


def _limit(help_text: str, metavar: str = "COUNT", parser: Any = _parse_count) -> Any:
    return typer.Option(metavar=metavar, parser=parser, show_default=False, help=f"{help_text}; none: no limit.")


def set_command(
    name: Annotated[
        str, typer.Argument(metavar="NAME", show_default=False, autocompletion=complete_tenants, help="The tenant.")
    ],
    gpu: Annotated[TierChange | None, _tier_option("gpu")] = None,
    cpu: Annotated[TierChange | None, _tier_option("cpu")] = None,
    disk: Annotated[TierChange | None, _tier_option("disk")] = None,
    sessions: Annotated[float | None, _limit("Most sessions open at once")] = None,
    grants: Annotated[float | None, _limit("Most leases, reservations and claims at once")] = None,
    namespaces: Annotated[float | None, _limit("Most namespaces that are open or have blocks")] = None,
    waiting_requests: Annotated[float | None, _limit("Most requests that wait")] = None,
    requests_per_s: Annotated[float | None, _limit("Most calls of Generate a second", "RATE", _parse_rate)] = None,
    calls: Annotated[float | None, _limit("Most calls under way at once, not counting Generate")] = None,
    retained_bytes: Annotated[
        float | None,
        _limit(
            "Most bytes of blocks with a priority; without a limit all tenants together may have half of the tiers",
            "SIZE",
            _parse_size,
        ),
    ] = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Change a tenant's limits until the daemon reads its settings again (SIGHUP, restart): change the settings too.

    The daemon takes nothing away at once. If a tenant has more bytes of a tier than the new limit, it loses its own
    blocks there as it stores more; above any other limit it gets no more until it has less.
    """
    from prefixd.cli.output import json_values as plain
    from prefixd.cli.output.tables import answer_tables as render

    limits = {
        "sessions": sessions,
        "grants": grants,
        "namespaces": namespaces,
        "waiting_requests": waiting_requests,
        "requests_per_s": requests_per_s,
        "calls": calls,
        "retained_bytes": retained_bytes,
    }
    tiers = {tier: given for tier, given in zip(QUOTA_TIERS, (gpu, cpu, disk), strict=True) if given is not None}
    given = {limit: value for limit, value in limits.items() if value is not None}
    if not tiers and not given:
        raise WrongUsage("no limit is given; `prefixd tenants set --help` lists them")

    async def ask() -> admin_pb2.TenantStats:
        async with connected(address) as client:
            return await client.set_tenant(
                name,
                tiers={tier: (change.guaranteed, change.most) for tier, change in tiers.items()},
                limits={limit: None if value < 0 else value for limit, value in given.items()},
            )

    stats = run(ask())
    if as_json:
        plain.print_json(plain.to_plain(stats))
    else:
        render.print_tenants([stats])


app.command(
    "list", help=list_command.__doc__, epilog=examples("prefixd tenants list", "prefixd tenants list acme --json")
)(asks_daemon(list_command))
app.command(
    "set",
    help=paragraphs(set_command.__doc__ or ""),
    epilog=examples(
        "prefixd tenants set acme --cpu 1GiB:4GiB", "prefixd tenants set acme --requests-per-s 20 --sessions none"
    ),
)(asks_daemon(set_command))
