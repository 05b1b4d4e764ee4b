"""`prefixd verify`: compares every block on disk with its checksum."""

from __future__ import annotations

import sys
import time
from contextlib import aclosing
from typing import TYPE_CHECKING

import typer

from prefixd.base.sizes import as_size
from prefixd.cli.connect import Address, Json, connected, run
from prefixd.cli.failures import EXIT_FAILED, examples

if TYPE_CHECKING:
    from prefixd.v1 import admin_pb2

EXAMPLES = examples("prefixd verify", "prefixd verify --json | jq '.damaged[].key'", "prefixd verify && echo clean")


def verify_command(address: Address = None, as_json: Json = False) -> None:
    """Read every block on disk and compare its checksum; drop damaged blocks.

    The daemon drops a damaged block together with the blocks that continue it, and computes it again at its next use.
    If a block is also in memory, the daemon writes it to disk again. The daemon serves meanwhile. Ctrl-C ends the
    verification.

    The exit status is 0 if no block is damaged, and 1 if damaged blocks were found (and dropped).
    """
    from prefixd.cli.output import json_values as plain
    from prefixd.cli.output.tables import answer_tables as render

    began_s = time.monotonic()
    progress, damaged = run(_verify(address))
    elapsed_s = time.monotonic() - began_s
    if as_json:
        figures = plain.to_plain(progress)
        figures["damaged"] = [plain.to_plain(block) for block in damaged]
        plain.print_json(figures | {"seconds": round(elapsed_s, 3)})
    else:
        render.print_verification(progress, damaged, elapsed_s)
    if progress.damaged_blocks:
        raise typer.Exit(EXIT_FAILED)


async def _verify(address: str | None) -> tuple[admin_pb2.VerifyProgress, list[admin_pb2.DamagedBlock]]:
    """Returns the last progress and all damaged blocks."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(file=sys.stderr)
    damaged: list[admin_pb2.DamagedBlock] = []
    began_s = time.monotonic()
    with Progress(
        TextColumn("verifying"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[found]}", style="red"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("", total=None, rate="", found="")
        async with connected(address) as client, aclosing(client.verify()) as answers:
            async for progress in answers:
                damaged += progress.damaged
                rate = progress.checked_bytes / max(time.monotonic() - began_s, 1e-3)
                bar.update(
                    task,
                    completed=progress.checked_blocks,
                    total=progress.total_blocks,
                    rate=f"{as_size(int(rate))}/s",
                    found=f"{progress.damaged_blocks:,} damaged" if progress.damaged_blocks else "",
                )
    return progress, damaged
