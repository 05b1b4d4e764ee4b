"""The command tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from prefixd import __version__
from prefixd.cli.commands import admin, config, generate, plan, prefixes, serve, tenants, tier
from prefixd.cli.commands.integrity import doctor, recover, verify
from prefixd.cli.commands.performance import top, what_if, why
from prefixd.cli.commands.recordings import record_trace, warm
from prefixd.cli.connect import asks_daemon
from prefixd.cli.demo import demo
from prefixd.cli.failures import CleanGroup, examples, paragraphs
from prefixd.cli.option_groups import with_option_groups
from prefixd.process import signals

app = typer.Typer(
    cls=CleanGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog=examples("prefixd demo", "prefixd serve --embedded", 'prefixd generate "Once upon a time"'),
)


def _add(name: str, panel: str, command: Callable[..., None], examples: str) -> None:
    text = paragraphs(command.__doc__ or "")
    app.command(name, help=text, epilog=examples, rich_help_panel=panel)(command)


_add("serve", "Run", serve.serve_command, serve.EXAMPLES)
_add("generate", "Run", asks_daemon(with_option_groups(generate.generate_command)), generate.EXAMPLES)
_add("demo", "Run", demo.demo_command, demo.EXAMPLES)
_add("plan", "Run", with_option_groups(plan.plan_command), plan.EXAMPLES)
_add("stats", "Look", asks_daemon(admin.stats_command), admin.STATS_EXAMPLES)
_add("top", "Look", asks_daemon(top.top_command), top.EXAMPLES)
_add("what-if", "Look", asks_daemon(what_if.what_if_command), what_if.EXAMPLES)
_add("ls", "Look", asks_daemon(prefixes.ls_command), prefixes.LS_EXAMPLES)
_add("why", "Look", asks_daemon(why.why_command), why.EXAMPLES)
_add("inspect", "Look", asks_daemon(with_option_groups(prefixes.inspect_command)), prefixes.INSPECT_EXAMPLES)
_add("pin", "Change", asks_daemon(with_option_groups(prefixes.pin_command)), prefixes.PIN_EXAMPLES)
_add("unpin", "Change", asks_daemon(with_option_groups(prefixes.unpin_command)), prefixes.UNPIN_EXAMPLES)
_add("evict", "Change", asks_daemon(with_option_groups(prefixes.evict_command)), prefixes.EVICT_EXAMPLES)
_add("flush", "Change", asks_daemon(admin.flush_command), admin.FLUSH_EXAMPLES)
_add("drain", "Change", asks_daemon(admin.drain_command), admin.DRAIN_EXAMPLES)
_add("undrain", "Change", asks_daemon(admin.undrain_command), admin.UNDRAIN_EXAMPLES)
_add("recover", "Change", recover.recover_command, recover.EXAMPLES)
_add("verify", "Look", asks_daemon(verify.verify_command), verify.EXAMPLES)
_add("doctor", "Look", asks_daemon(doctor.doctor_command), doctor.EXAMPLES)
app.add_typer(config.app, name="config", rich_help_panel="Look")
app.add_typer(record_trace.app, name="trace", rich_help_panel="Look")
app.add_typer(tenants.app, name="tenants", rich_help_panel="Change")
app.add_typer(tier.app, name="tier", rich_help_panel="Change")
app.add_typer(warm.app, name="warm", rich_help_panel="Change")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"prefixd {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Keep the KV cache of every prompt prefix in GPU memory, CPU memory and on disk."""
    if context.invoked_subcommand != "serve":
        signals.release_hangups()  # `serve` does it later, when the daemon can read its settings again
