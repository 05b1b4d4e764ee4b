"""`prefixd why`: where a request's time went, what was missing in the cache, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from prefixd.cli.connect import Address, Json, connected, run
from prefixd.cli.failures import WrongUsage, examples

EXAMPLES = examples("prefixd why r17-4be2a0", "prefixd why --last 20", "prefixd why --last 5 --calls --json")
_MOST = 64


def why_command(
    request: Annotated[
        str | None,
        typer.Argument(
            metavar="[REQUEST]",
            show_default=False,
            help="A request's id, or the id that its caller sent in the header prefixd-request-id.",
        ),
    ] = None,
    last: Annotated[
        int | None, typer.Option(min=1, max=_MOST, show_default=False, help="List the last ones instead.")
    ] = None,
    calls: Annotated[bool, typer.Option("--calls", help="With --last: engines' calls, too.")] = False,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Explain why a request's first token came when it came.

    Shows where its time went, how much of its prompt was cached in which tier, the first token that differs from the
    nearest cached prefix, who evicted what it lacked, which load was given up, and what it waited for. The first line
    names the main cause.
    """
    from prefixd.cli.output import json_values as plain
    from prefixd.cli.output.tables import waterfall

    if (request is None) == (last is None):
        raise WrongUsage("name one request, or say --last N for the last ones")
    if calls and last is None:
        raise WrongUsage("--calls goes with --last")

    async def ask() -> None:
        async with connected(address) as client:
            found = await client.why(request or "", last=last or 0, calls=calls)
        if as_json:
            plain.print_json([plain.to_plain(each) for each in found])
        elif last is not None:
            waterfall.print_request_list(found)
        else:
            waterfall.print_requests(found)

    run(ask())
