"""What every command that talks to a daemon shares: its address, and the client's errors with a next step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from prefixd.cli.failures import CommandFailed

if TYPE_CHECKING:
    from prefixd.client import AsyncClient

T = TypeVar("T")

Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="ADDRESS",
        show_default=False,
        help="The daemon: unix:/path or host:port. By default server.socket of `prefixd config show`.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@asynccontextmanager
async def connected(address: str | None) -> AsyncIterator[AsyncClient]:
    """A client of the daemon at `address`; its errors leave as CommandFailed with what to do next."""
    from prefixd.client import AsyncClient, ClientError, ServerUnavailable, UnsupportedError
    from prefixd.settings import Settings

    target = address or f"unix:{Settings.load().server.socket}"
    try:
        async with AsyncClient(target, name="prefixd cli", memory="streamed") as client:
            yield client
    except ServerUnavailable as error:
        raise CommandFailed(
            f"{error}. Is it running? Start it with `prefixd serve`, or name it with --address"
        ) from error
    except UnsupportedError as error:
        raise CommandFailed(
            f"{error}. Start a daemon with a model: `prefixd serve --model DIR` or --embedded"
        ) from error
    except ClientError as error:
        raise CommandFailed(str(error)) from error


def run(command: Coroutine[object, object, T]) -> T:
    """Runs a command's coroutine; Ctrl-C cancels it and ends cleanly."""
    return asyncio.run(command)
