"""The command tree."""

from __future__ import annotations

from typing import Annotated

import typer

from prefixd import __version__
from prefixd.cli import admin, config, demo, doctor, generate, prefixes, serve, verify
from prefixd.cli.connect import asks_daemon
from prefixd.cli.failures import CleanGroup, examples

app = typer.Typer(
    cls=CleanGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog=examples("prefixd demo", "prefixd serve --embedded", 'prefixd generate "Once upon a time"'),
)

app.command("serve", epilog=serve.EXAMPLES, rich_help_panel="Run")(serve.serve_command)
app.command("generate", epilog=generate.EXAMPLES, rich_help_panel="Run")(asks_daemon(generate.generate_command))
app.command("demo", epilog=demo.EXAMPLES, rich_help_panel="Run")(demo.demo_command)
app.command("stats", epilog=admin.STATS_EXAMPLES, rich_help_panel="Look")(asks_daemon(admin.stats_command))
app.command("ls", epilog=prefixes.LS_EXAMPLES, rich_help_panel="Look")(asks_daemon(prefixes.ls_command))
app.command("inspect", epilog=prefixes.INSPECT_EXAMPLES, rich_help_panel="Look")(asks_daemon(prefixes.inspect_command))
app.command("pin", epilog=prefixes.PIN_EXAMPLES, rich_help_panel="Change")(asks_daemon(prefixes.pin_command))
app.command("unpin", epilog=prefixes.UNPIN_EXAMPLES, rich_help_panel="Change")(asks_daemon(prefixes.unpin_command))
app.command("evict", epilog=prefixes.EVICT_EXAMPLES, rich_help_panel="Change")(asks_daemon(prefixes.evict_command))
app.command("flush", epilog=admin.FLUSH_EXAMPLES, rich_help_panel="Change")(asks_daemon(admin.flush_command))
app.command("drain", epilog=admin.DRAIN_EXAMPLES, rich_help_panel="Change")(asks_daemon(admin.drain_command))
app.command("verify", epilog=verify.EXAMPLES, rich_help_panel="Look")(asks_daemon(verify.verify_command))
app.command("doctor", epilog=doctor.EXAMPLES, rich_help_panel="Look")(asks_daemon(doctor.doctor_command))
app.add_typer(config.app, name="config", rich_help_panel="Look")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"prefixd {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Keep the KV cache of every prompt prefix in GPU memory, CPU memory and on disk."""
