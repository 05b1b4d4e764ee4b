"""`prefixd tier`: changes the tiers of a running daemon."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from prefixd.base.sizes import as_size
from prefixd.cli.connect import Address, Json, asks_daemon, connected, run
from prefixd.cli.failures import EXIT_FAILED, CleanGroup, CommandFailed, examples, paragraphs
from prefixd.cli.output.terminal import shown

app = typer.Typer(
    cls=CleanGroup,
    no_args_is_help=True,
    help="Change a tier while the daemon runs.",
    epilog=examples("prefixd tier resize gpu 4GiB"),
)


def _check_tier(name: str) -> str:
    if name != "gpu":
        raise typer.BadParameter(
            f"{name!r}: only the gpu tier can be resized while the daemon runs; for the others change cpu.bytes or "
            "disk.bytes and start the daemon again"
        )
    return name


def _parse_size(text: str) -> int:
    from prefixd.base.sizes import parse_room

    try:
        return parse_room(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}") from error


def resize_command(
    tier: Annotated[str, typer.Argument(metavar="TIER", callback=_check_tier, show_default=False, help="gpu")],
    nbytes: Annotated[
        int, typer.Argument(metavar="SIZE", parser=_parse_size, show_default=False, help="The new size, such as 4GiB.")
    ],
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=0.1, help="Longest wait in which no memory becomes free.")
    ] = 60.0,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Make the GPU tier larger or smaller while requests run. A smaller tier returns memory to the device.

    Cached blocks move to a tier below, or are evicted. Running requests keep their blocks: if they need more than the
    new size, the command waits for them; if they still hold more after --wait, the tier stays larger, and the command
    reports that and fails. Ctrl-C ends the command; the tier keeps the size that it has then.

    Of a tier that grows and shrinks by itself (gpu.least_bytes, gpu.most_bytes) SIZE is the most that it has from now
    on.
    """
    from prefixd.cli.output import json_values as plain
    from prefixd.cli.output import progress
    from prefixd.client import Tier
    from prefixd.v1 import admin_pb2

    del tier  # there is only one that can be resized

    async def ask() -> admin_pb2.ResizeTierResponse:
        async with connected(address) as client:
            try:
                with progress.blocks_bar("resizing, bytes") as step:
                    return await client.resize_tier(
                        Tier.GPU,
                        nbytes,
                        wait_s=wait,
                        on_progress=lambda so_far: step(
                            abs(so_far.nbytes - so_far.before_bytes), abs(so_far.target_bytes - so_far.before_bytes)
                        ),
                    )
            except asyncio.CancelledError:  # Ctrl-C
                # The last progress may be a tenth of a second old, so ask for the present size.
                for figures in (await client.stats()).tiers:
                    if figures.tier == Tier.GPU.wire:
                        typer.echo(f"prefixd: cancelled; the gpu tier has {as_size(figures.capacity_bytes)}", err=True)
                raise

    answer = run(ask())
    if as_json:
        plain.print_json(plain.to_plain(answer))
    else:
        typer.echo(
            f"the gpu tier has {as_size(answer.nbytes)}, it had {as_size(answer.before_bytes)}; "
            f"{answer.evicted_blocks:,} blocks left it, {answer.demoted_blocks:,} of them to a tier below"
        )
    if answer.unfinished:
        why = f"the gpu tier has {answer.nbytes} bytes instead of {answer.target_bytes}: {answer.unfinished}"
        if not as_json:
            raise CommandFailed(why)
        typer.echo(f"prefixd: {shown(why)}", err=True)  # stdout has the answer, in which `unfinished` says so
        raise typer.Exit(EXIT_FAILED)


app.command(
    "resize",
    help=paragraphs(resize_command.__doc__ or ""),
    epilog=examples("prefixd tier resize gpu 4GiB", "prefixd tier resize gpu 512MiB --wait 300 --json"),
)(asks_daemon(resize_command))
