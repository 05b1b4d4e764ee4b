"""`prefixd stats`, `flush`, `drain`, `undrain`: commands for the daemon as a whole."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated

import typer

from prefixd.base.durations import parse_duration
from prefixd.base.sizes import as_size
from prefixd.cli.connect import Address, Json, connected, run
from prefixd.cli.failures import WrongUsage, examples

STATS_EXAMPLES = examples(
    "prefixd stats",
    "prefixd stats --watch 5",
    "prefixd stats --last 1h",
    "prefixd stats --json | jq '.tiers[].hit_tokens'",
)
FLUSH_EXAMPLES = examples("prefixd flush")
DRAIN_EXAMPLES = examples("prefixd drain", "prefixd drain --shutdown")
UNDRAIN_EXAMPLES = examples("prefixd undrain")
_WATCH_S = 2.0
_DAY_S = 24 * 3600.0


def stats_command(
    seconds: Annotated[
        float | None,
        typer.Argument(metavar="SECONDS", min=0.1, show_default=False, help="For --watch: how often; every 2 s."),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", "-w", help="Show them again every SECONDS, until Ctrl-C; with --json, one line each time."
        ),
    ] = False,
    last: Annotated[
        str | None,
        typer.Option(
            "--last",
            metavar="TIME",
            show_default=False,
            help="Show what happened in this time, such as 10m or 1h; 1d at most.",
        ),
    ] = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Show the degraded parts, the tiers, the hit rate, the queue, the sessions, and all figures that are not 0."""
    from prefixd.cli.output import json_values as plain
    from prefixd.cli.output.screen import Screen
    from prefixd.cli.output.tables import answer_tables as render
    from prefixd.cli.output.tables import period_tables

    try:
        last_s = 0.0 if last is None else parse_duration(last)
    except ValueError as error:
        raise WrongUsage(f"--last: {error}") from None
    if last_s > _DAY_S:
        raise WrongUsage(f"--last {last}: the daemon remembers a day; write 1d or less")
    show = render.print_stats if last is None else period_tables.print_period
    if seconds is not None and not watch:
        raise WrongUsage(f"{seconds:g} seconds without --watch; write `prefixd stats --watch {seconds:g}`")

    async def ask() -> None:
        async with connected(address) as client:
            if not watch:
                stats = await client.stats(last_s)
                if as_json:
                    plain.print_json(plain.to_plain(stats))
                else:
                    show(stats)
                return
            with Screen() as screen:
                while True:
                    stats = await client.stats(last_s)
                    if as_json:
                        plain.print_json_line(plain.to_plain(stats))
                    else:
                        screen.show(partial(show, stats))
                    await asyncio.sleep(_WATCH_S if seconds is None else seconds)

    run(ask())


def flush_command(address: Address = None, as_json: Json = False) -> None:
    """Write the cached blocks that have no copy on disk to disk, as many as fit, and wait until they are durable.

    Blocks that were used since the last flush may evict others from the disk; the others get only free room.
    """
    from prefixd.cli.output import json_values as plain

    async def ask() -> None:
        async with connected(address) as client:
            answer = await client.flush()
        if as_json:
            plain.print_json(plain.to_plain(answer))
        else:
            typer.echo(f"{answer.blocks:,} blocks ({as_size(answer.nbytes)}) written to disk")
            if answer.left_blocks:
                left = f"{answer.left_blocks:,} blocks ({as_size(answer.left_bytes)}) are in memory alone"
                typer.echo(f"{left}: the disk tier has no room for them (disk.bytes), or they came meanwhile")

    run(ask())


def drain_command(
    shutdown: Annotated[bool, typer.Option("--shutdown", help="End the daemon afterwards.")] = False,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Make the daemon refuse new work, finish running requests, and write the cache back to disk."""
    from prefixd.cli.output import json_values as plain

    async def ask() -> None:
        async with connected(address) as client:
            answer = await client.drain(shutdown=shutdown)
        if as_json:
            plain.print_json(plain.to_plain(answer))
        else:
            end = "the daemon ends" if shutdown else "the daemon takes no new work"
            typer.echo(
                f"{answer.finished_requests:,} requests finished, "
                f"{answer.written_blocks:,} blocks written to disk; {end}"
            )

    run(ask())


def undrain_command(address: Address = None, as_json: Json = False) -> None:
    """Make the daemon take new work again after `prefixd drain` without --shutdown."""
    from prefixd.cli.output import json_values as plain

    async def ask() -> None:
        async with connected(address) as client:
            answer = await client.undrain()
        if as_json:
            plain.print_json(plain.to_plain(answer))
        else:
            was = "the daemon takes new work again" if answer.was_draining else "the daemon was not drained"
            typer.echo(was)

    run(ask())
