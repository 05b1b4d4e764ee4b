"""`prefixd stats`, `flush`, `drain`: commands for the daemon as a whole."""

from __future__ import annotations

from typing import Annotated

import typer

from prefixd.base.sizes import as_size
from prefixd.cli.connect import Address, Json, connected, run
from prefixd.cli.failures import examples

STATS_EXAMPLES = examples("prefixd stats", "prefixd stats --json | jq '.tiers[].hit_tokens'")
FLUSH_EXAMPLES = examples("prefixd flush")
DRAIN_EXAMPLES = examples("prefixd drain", "prefixd drain --shutdown")


def stats_command(address: Address = None, as_json: Json = False) -> None:
    """Show the tiers, the hit rate, the queue, the sessions, all figures that are not 0, and the troubles."""
    from prefixd.cli.output import json_values as plain
    from prefixd.cli.output import tables as render

    async def ask() -> None:
        async with connected(address) as client:
            stats = await client.stats()
        if as_json:
            plain.print_json(plain.to_plain(stats))
        else:
            render.print_stats(stats)

    run(ask())


def flush_command(address: Address = None, as_json: Json = False) -> None:
    """Write every cached block that has no copy on disk to disk, and wait until all are durable."""
    from prefixd.cli.output import json_values as plain

    async def ask() -> None:
        async with connected(address) as client:
            answer = await client.flush()
        if as_json:
            plain.print_json(plain.to_plain(answer))
        else:
            typer.echo(f"{answer.blocks:,} blocks ({as_size(answer.nbytes)}) written to disk")

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
