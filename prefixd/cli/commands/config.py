"""`prefixd config`: shows the settings with which the daemon would start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from prefixd.base.errors import ConfigError
from prefixd.cli.connect import Json
from prefixd.cli.failures import CleanGroup, examples

app = typer.Typer(
    cls=CleanGroup,
    no_args_is_help=True,
    help="Look at the configuration.",
    epilog=examples("prefixd config show"),
)

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        show_default=False,
        help="TOML file; by default ./prefixd.toml or ~/.config/prefixd/prefixd.toml, if one exists.",
    ),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        show_default=False,
        help="Any setting by its name in `prefixd config show`, such as --set cache.write_back=false.",
    ),
]


def parse_assignments(assignments: list[str] | None) -> dict[str, Any]:
    """Parses `["cpu.bytes=1GiB"]` to `{"cpu.bytes": "1GiB"}`; raises ConfigError."""
    values: dict[str, Any] = {}
    for assignment in assignments or ():
        name, equals, value = assignment.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--set {assignment}: write --set section.setting=value")
        if name.strip() in values:
            raise ConfigError(f"--set {name.strip()} is given twice; keep one")
        values[name.strip()] = value.strip()
    return values


@app.command("show", epilog=examples("prefixd config show --set cpu.bytes=8GiB", "prefixd config show --describe"))
def show_command(
    config: ConfigFile = None,
    assignments: Assignments = None,
    describe: Annotated[bool, typer.Option("--describe", help="Describe each setting.")] = False,
    as_json: Json = False,
) -> None:
    """Show every setting, its value and the source of the value."""
    from prefixd.cli.output import json_values as plain
    from prefixd.cli.output.tables import answer_tables as render
    from prefixd.settings import Settings, dotted_names, dotted_values

    settings, sources = Settings.load_with_sources(config, parse_assignments(assignments))
    values = dotted_values(settings)
    if as_json:
        plain.print_json(
            {name: {"value": value, "source": sources.get(name, "default")} for name, value in values.items()}
        )
    else:
        render.print_settings(values, sources, dotted_names() if describe else {})
