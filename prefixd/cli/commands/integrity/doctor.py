"""`prefixd doctor`: checks the daemon's accounts and its machine, or a host before the first start."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prefixd.cli.commands.config import Assignments, ConfigFile, parse_assignments
from prefixd.cli.connect import Address, Json, connected, run
from prefixd.cli.failures import NoDaemon, error_fields, examples
from prefixd.cli.output.terminal import shown

if TYPE_CHECKING:
    from prefixd.cli.machine_checks import Check
    from prefixd.v1 import admin_pb2

EXIT_NO_DAEMON = 3
EXIT_DEGRADED = 4
EXIT_VIOLATED = 5
EXAMPLES = examples(
    "prefixd doctor",
    "prefixd doctor --host --config /etc/prefixd/prefixd.toml",
    "prefixd doctor --json | jq '.violations'",
    "prefixd doctor --calibrate machine.json",
)


def doctor_command(
    address: Address = None,
    as_json: Json = False,
    host: Annotated[
        bool, typer.Option("--host", help="Check only this host, for the start of a daemon with these settings.")
    ] = False,
    config: ConfigFile = None,
    assignments: Assignments = None,
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
    """Account for every block, slot and lease of the running daemon; list what is degraded, with remedies.

    Without a daemon, or with --host, the command checks whether one could start here with the settings: memory, shared
    memory, limits, control group, disk, kernel, Python packages, GPU, the configuration. Give the same --config and
    --set as to `prefixd serve`.

    The exit status is 0 if all is well, 3 if no daemon answers, 4 if a part of the daemon is degraded, a worker was
    given up or an index of the disk tier is set aside (with --host: if a check has a remedy), and 5 if a count is
    wrong: that is a defect of prefixd, please report it. As with every command 1 means that it failed, 2 that it was
    called wrongly. Limits of a host on which a daemon runs change no status.

    With --calibrate the command checks nothing: it measures this machine, in about a minute.
    """
    if calibrate is not None:
        _calibrate(calibrate, address)
        return
    if host:
        checks = _check_host(config, assignments)
        _print_checks(checks, as_json)
        if any(check.remedy for check in checks):
            raise typer.Exit(EXIT_DEGRADED)
        return
    try:
        _check_daemon(address, as_json)
    except NoDaemon as error:
        here = (address or "unix:").startswith(("unix:", "/"))
        typer.echo(f"prefixd: {shown(str(error))}", err=True)
        checks = _check_host(config, assignments) if here else []
        if not as_json and checks:
            typer.echo("Could a daemon start on this host?")
        _print_checks(checks, as_json, error)
        raise typer.Exit(EXIT_NO_DAEMON) from error


def _check_daemon(address: str | None, as_json: bool) -> None:
    """Prints the diagnosis of a running daemon; raises typer.Exit unless all is well."""
    from prefixd.cli.machine_checks import check_environment
    from prefixd.cli.output import json_values as plain
    from prefixd.cli.output.tables import answer_tables as render

    async def ask() -> tuple[str, admin_pb2.CheckIntegrityResponse, admin_pb2.StatsResponse]:
        async with connected(address) as client:
            return client.address, await client.check_integrity(), await client.stats()

    reached, integrity, stats = run(ask())
    checks = check_environment(reached, stats)
    if as_json:
        plain.print_json(plain.to_plain(integrity) | {"environment": [asdict(check) for check in checks]})
    else:
        render.print_diagnosis(integrity, checks)
    if integrity.violations:
        raise typer.Exit(EXIT_VIOLATED)
    if integrity.troubles or any(model.worker.error for model in stats.models) or stats.worker.error:
        raise typer.Exit(EXIT_DEGRADED)


def _check_host(config: Path | None, assignments: list[str] | None) -> list[Check]:
    from prefixd.base.errors import ConfigError
    from prefixd.base.extras import require
    from prefixd.base.setting_sources import find_config_file
    from prefixd.cli.machine_checks import Check

    try:
        require("daemon", "prefixd serve")
    except ConfigError as error:
        return [Check("packages", "those of a client are installed, not those of a daemon", str(error))]
    from prefixd.cli.host_checks import check_host
    from prefixd.settings import Settings

    file = config or find_config_file(os.environ)
    try:
        settings = Settings.load(file, parse_assignments(assignments))
    except ConfigError as error:
        return [Check("configuration", str(error), "mend it; `prefixd config show --describe` lists all settings")]
    return check_host(settings, file)


def _print_checks(checks: Sequence[Check], as_json: bool, error: NoDaemon | None = None) -> None:
    from prefixd.cli.output import json_values as plain
    from prefixd.cli.output.tables import answer_tables as render

    if not as_json:
        render.print_checks(checks)
        return
    why = {} if error is None else {"error": error_fields(error) | {"exit_status": EXIT_NO_DAEMON}}
    plain.print_json(why | {"environment": [asdict(check) for check in checks]})


def _calibrate(file: Path, address: str | None) -> None:
    """Writes what `prefixd.planner.machine.calibrate` measures; of a model only if a daemon is named or runs here."""
    from prefixd.cli.demo.demo import check_writable
    from prefixd.planner.machine.calibrate import measure_machine, measure_passes
    from prefixd.planner.machine.calibration import Calibration
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
