"""`prefixd doctor`: is the daemon sound, and what stands in its way?"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from prefixd.cli.connect import Address, Json, connected, run
from prefixd.cli.failures import EXIT_FAILED, examples

if TYPE_CHECKING:
    from prefixd.v1 import admin_pb2

EXAMPLES = examples("prefixd doctor", "prefixd doctor --json | jq '.violations'")


def doctor_command(address: Address = None, as_json: Json = False) -> None:
    """Account for every block, slot and lease of the running daemon; say what is in trouble and what to do about it.

    Violations are defects of prefixd: please report them. Troubles (a full disk, a limit that is too low) come with
    their remedy, and do not change the exit status: it is 0 when everything adds up, and 1 when something does not, or
    when a worker was given up, which ends only with a new start of the daemon.

    The limits and the disk space are those of the machine that this command runs on.
    """
    from prefixd.cli import plain, render
    from prefixd.cli.environment import check_environment

    async def ask() -> tuple[str, admin_pb2.CheckIntegrityResponse, admin_pb2.StatsResponse]:
        async with connected(address) as client:
            return client.address, await client.check_integrity(), await client.stats()

    reached, integrity, stats = run(ask())
    checks = check_environment(reached, stats)
    if as_json:
        plain.print_json(plain.to_plain(integrity) | {"environment": [asdict(check) for check in checks]})
    else:
        render.print_diagnosis(integrity, checks)
    if integrity.violations or any(model.worker.error for model in stats.models) or stats.worker.error:
        raise typer.Exit(EXIT_FAILED)
