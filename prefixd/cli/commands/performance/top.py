"""`prefixd top`: a daemon's figures in the terminal, live."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from prefixd.base.extras import require
from prefixd.cli.connect import Address, Json, connected, run
from prefixd.cli.failures import WrongUsage, examples

EXAMPLES = examples(
    "prefixd top",
    "prefixd top --interval 5 --address gpu-7:7070 --token-file operator.token",
    "prefixd top --json",
)


def top_command(
    interval: Annotated[
        float, typer.Option("--interval", min=0.1, max=3600.0, metavar="SECONDS", help="Time between two looks.")
    ] = 2.0,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Watch the tiers, hits, loads, requests, tenants and degraded parts, live.

    80 columns and 24 lines are enough, and no mouse is needed. It survives a restart of the daemon. With --json it
    prints one look and ends.
    """
    if as_json:
        _print_once(address)
        return
    require("top", "prefixd top")
    if not sys.stdout.isatty():
        raise WrongUsage("prefixd top needs a terminal; `prefixd top --json` prints one look")
    from prefixd.cli.top.daemon_watch import watch
    from prefixd.cli.top.top_app import TopApp

    async def show() -> None:
        await TopApp(watch(address, interval)).run_async(mouse=False)

    run(show())


def _print_once(address: str | None) -> None:
    from prefixd.cli.output.json_values import print_json, to_plain
    from prefixd.cli.top.daemon_watch import ask

    async def once() -> None:
        async with connected(address) as client:
            snapshot = await ask(client)
        requests = None if snapshot.requests is None else [to_plain(each) for each in snapshot.requests]
        print_json({"stats": to_plain(snapshot.stats), "requests": requests})

    run(once())
