"""`prefixd what-if`: how much more memory, or another eviction policy, would help."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prefixd.cli.connect import Address, Json, connected, run
from prefixd.cli.failures import examples

if TYPE_CHECKING:
    from prefixd.v1 import admin_pb2

EXAMPLES = examples(
    "prefixd what-if",
    "prefixd what-if --tenant team-a",
    "prefixd what-if --json | jq '.ghosts.tiers[].sizes[] | [.factor, .hit_rate]'",
    "prefixd what-if --plot what-if.png",
)


def what_if_command(
    tenant: Annotated[
        str | None,
        typer.Option("--tenant", metavar="NAME", show_default=False, help="Only the prompts of this tenant."),
    ] = None,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", show_default=False, help="Draw it, such as what-if.png (matplotlib)."),
    ] = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Show what the tiers would have found if they were larger or smaller, or if another policy evicted.

    The daemon estimates it all the time, from a sample of the blocks that prompts asked for since its start; older days
    count less. "found" is the share of the prompt tokens that the tier and nearer ones have, true to the margin beside
    it in about nine of ten cases. The present size has two figures: measured, and as the sample says; where they differ
    much, do not trust the others. One is blocks that were cached before the start: the sample sees them as new.
    """
    from prefixd.cli.output import json_values as plain

    if plot_file is not None:
        from prefixd.planner.plots import check_drawable

        check_drawable(plot_file)

    async def ask() -> admin_pb2.WhatIfResponse:
        async with connected(address) as client:
            return await client.what_if(tenant)

    answer = run(ask())
    if as_json:
        plain.print_json(plain.to_plain(answer))
    else:
        from prefixd.cli.output.tables.what_if_table import print_what_if

        print_what_if(answer)
    if plot_file is not None:
        from prefixd.cli.output.tables.what_if_table import draw_what_if

        draw_what_if(answer, plot_file)
