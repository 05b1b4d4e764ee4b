"""`prefixd doctor`: checks the daemon's accounts and its machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prefixd.cli.connect import Address, Json, connected, run
from prefixd.cli.failures import EXIT_FAILED, examples

if TYPE_CHECKING:
    from prefixd.v1 import admin_pb2

SET_ASIDE = "disk index"
"""The `part` of the daemon's trouble after it set an index aside: `prefixd.server.startup.set_aside_index.PART`."""
EXAMPLES = examples(
    "prefixd doctor", "prefixd doctor --json | jq '.violations'", "prefixd doctor --calibrate machine.json"
)


def doctor_command(
    address: Address = None,
    as_json: Json = False,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Measure this machine's disk and copies, and the passes of the model if a daemon serves one; write "
            "them to FILE for `prefixd plan --calibration`.",
        ),
    ] = None,
) -> None:
    """Account for every block, slot and lease of the running daemon; list its troubles with their remedies.

    Violations are defects of prefixd: please report them. Troubles (a full disk, a limit that is too low) do not change
    the exit status. It is 0 if all counts are right, and 1 if one is wrong, if the daemon has given a worker up (then
    start the daemon again), or if an index of the disk tier is set aside (then run `prefixd recover`).

    The command reports limits and disk space of the machine on which it runs.

    With --calibrate the command checks nothing: it measures this machine, in about a minute.
    """
    if calibrate is not None:
        _calibrate(calibrate, address)
        return
    from prefixd.cli.machine_checks import check_environment
    from prefixd.cli.output import json_values as plain
    from prefixd.cli.output import tables as render

    async def ask() -> tuple[str, admin_pb2.CheckIntegrityResponse, admin_pb2.StatsResponse]:
        async with connected(address) as client:
            return client.address, await client.check_integrity(), await client.stats()

    reached, integrity, stats = run(ask())
    checks = check_environment(reached, stats)
    if as_json:
        plain.print_json(plain.to_plain(integrity) | {"environment": [asdict(check) for check in checks]})
    else:
        render.print_diagnosis(integrity, checks)
    set_aside = any(trouble.part == SET_ASIDE for trouble in integrity.troubles)
    if integrity.violations or set_aside or any(model.worker.error for model in stats.models) or stats.worker.error:
        raise typer.Exit(EXIT_FAILED)


def _calibrate(file: Path, address: str | None) -> None:
    """Writes the measurements of `prefixd.planner.calibrate`; of a model only if a daemon is named or runs here."""
    from prefixd.cli.demo.demo import check_writable
    from prefixd.planner.calibrate import measure_machine, measure_passes
    from prefixd.planner.hardware import Calibration
    from prefixd.server.startup.compute_device import resolve_device
    from prefixd.settings import Settings

    check_writable(file)
    settings = Settings.load()
    served = address is not None or settings.server.socket.exists()

    async def measure() -> Calibration:
        measured = await measure_machine(
            settings.disk.path or settings.data_dir,
            resolve_device(settings),
            lambda part: typer.echo(f"measuring {part} ...", err=True),
            io_threads=settings.disk.io_threads,
        )
        if not served:
            return measured
        typer.echo("measuring passes of the daemon's model ...", err=True)
        async with connected(address) as client:
            return await measure_passes(measured, client)

    measured = run(measure())
    file.write_text(measured.to_json(), encoding="utf-8")
    typer.echo(measured.to_json(), nl=False)
    if not served:
        typer.echo("No daemon runs here. If one serves a model, the command measures its passes too.", err=True)
