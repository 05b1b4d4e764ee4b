"""`prefixd tenants`: what each tenant may have and has, and changing it while the daemon runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefixd.base.tiers import QUOTA_TIERS
from prefixd.cli.connect import Address, Json, asks_daemon, connected, run
from prefixd.cli.failures import CleanGroup, CommandFailed, examples, paragraphs

if TYPE_CHECKING:
    from prefixd.v1 import admin_pb2


app = typer.Typer(
    cls=CleanGroup,
    no_args_is_help=True,
    help="Show and change what each tenant may have.",
    epilog=examples("prefixd tenants list", "prefixd tenants set acme --cpu 1GiB:4GiB --sessions 32"),
)


def list_command(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", show_default=False, help="One tenant; all by default.")
    ] = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Show what each tenant has and may have, and how often it was refused more."""
    from prefixd.cli.output import json_values as plain
    from prefixd.cli.output import tables as render

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
    """Of a tier's quota: None stays as it is, -1 is no limit."""

    guaranteed: int | None
    most: int | None


def _tier_quota(text: str) -> TierChange:
    """Reads `1GiB:4GiB`: either may be left out, and `none` is no limit."""
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


def _count(text: str) -> float:
    if text == "none":
        return -1.0
    if not text.isdecimal() or not int(text):
        raise typer.BadParameter(f"{text!r}: give a whole number above 0, or none for no limit")
    return float(text)


def _rate(text: str) -> float:
    if text == "none":
        return -1.0
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise typer.BadParameter(f"{text!r}: give a number above 0, or none for no limit")
    return value


def _size(text: str) -> float:
    from prefixd.base.sizes import parse_room

    try:
        return -1.0 if text == "none" else float(parse_room(text))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}") from error


def _tier_option(tier: str) -> Any:
    help_text = f"Bytes of the {tier} tier, guaranteed and most: 1GiB:4GiB, 1GiB:, :4GiB, :none."
    return typer.Option(f"--{tier}", metavar="SIZE:SIZE", parser=_tier_quota, show_default=False, help=help_text)


def _limit(help_text: str, metavar: str = "COUNT", parser: Any = _count) -> Any:
    return typer.Option(metavar=metavar, parser=parser, show_default=False, help=f"{help_text}; none: no limit.")


def set_command(
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="The tenant.")],
    gpu: Annotated[TierChange | None, _tier_option("gpu")] = None,
    cpu: Annotated[TierChange | None, _tier_option("cpu")] = None,
    disk: Annotated[TierChange | None, _tier_option("disk")] = None,
    sessions: Annotated[float | None, _limit("Sessions open at once")] = None,
    grants: Annotated[float | None, _limit("Leases and reservations at once")] = None,
    namespaces: Annotated[float | None, _limit("Namespaces that are open or have blocks")] = None,
    waiting_requests: Annotated[float | None, _limit("Requests that wait")] = None,
    requests_per_s: Annotated[float | None, _limit("Calls of Generate a second", "RATE", _rate)] = None,
    calls: Annotated[float | None, _limit("Calls under way at once, beside Generate")] = None,
    retained_bytes: Annotated[
        float | None,
        _limit(
            "Bytes of blocks with a priority; without a limit all tenants together may have half of the tiers",
            "SIZE",
            _size,
        ),
    ] = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Change what a tenant may have, until the settings are read again (SIGHUP or a restart): change it there, too.

    Nothing is taken away at once. A tenant with more bytes of a tier than it may have loses its own blocks there as it
    stores more; of everything else it gets no more until it has less.
    """
    from prefixd.cli.output import json_values as plain
    from prefixd.cli.output import tables as render

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
        raise CommandFailed("nothing to set was named; `prefixd tenants set --help` lists the limits")

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
