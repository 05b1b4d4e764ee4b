"""Connects a command to a daemon: its address, credentials, and errors that name the next step."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from prefixd.base.setting_sources import find_socket
from prefixd.cli.failures import CommandFailed, NoDaemon, WrongUsage
from prefixd.process import signals

if TYPE_CHECKING:
    from prefixd.client import AsyncClient

T = TypeVar("T")

Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="ADDRESS",
        show_default=False,
        envvar="PREFIXD_ADDRESS",
        help="The daemon: unix:/path or host:port. By default server.socket of `prefixd config show`.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text; errors too.")]

TOKEN_VARIABLE = "PREFIXD_TOKEN"
_PANEL = "A daemon on another host"


def _file(flag: str, help: str, variable: str | None) -> Any:
    option = typer.Option(flag, metavar="FILE", show_default=False, envvar=variable, rich_help_panel=_PANEL, help=help)
    return Annotated[Path | None, option]


_CREDENTIALS = {
    "tls_ca": _file(
        "--tls-ca", "Authorities (PEM) that signed its certificate; without this option: no TLS.", "PREFIXD_TLS_CA"
    ),
    "tls_cert": _file("--tls-cert", "Certificate (PEM) to send.", "PREFIXD_TLS_CERT"),
    "tls_key": _file("--tls-key", "The certificate's key (PEM).", "PREFIXD_TLS_KEY"),
    # A file, since every user of a machine can read its command lines.
    "token_file": _file(
        "--token-file", f"File with the token to send; or set {TOKEN_VARIABLE}, which unix sockets ignore.", None
    ),
}
_given: ContextVar[dict[str, Path | None]] = ContextVar("credentials given on the command line", default={})  # noqa: B039


def asks_daemon(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options for a daemon on another host to a command that has `--address` and calls `connected`."""

    @functools.wraps(command)
    def with_credentials(**options: Any) -> None:
        _given.set({name: options.pop(name) for name in _CREDENTIALS})
        command(**options)

    signature = inspect.signature(command, eval_str=True)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
        for name, option in _CREDENTIALS.items()
    ]
    with_credentials.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), *added]
    )
    return with_credentials


@asynccontextmanager
async def connected(address: str | None) -> AsyncIterator[AsyncClient]:
    """Yields a client of the daemon at `address`; raises its errors as CommandFailed with the next step, as WrongUsage
    where an argument is invalid."""
    from prefixd.client import AsyncClient, ClientError, InvalidArgumentError, ServerUnavailable, UnsupportedError
    from prefixd.client.errors import status_name

    target = address or f"unix:{find_socket(os.environ)}"
    here = target.startswith(("unix:", "/"))
    if here and _given.get().get("token_file") is not None:
        raise WrongUsage(
            f"--token-file {_given.get()['token_file']}: {target} accepts no tokens, it identifies callers by user; "
            "give --address HOST:PORT, or leave --token-file out"
        )
    try:
        async with AsyncClient(target, name="prefixd cli", memory="streamed", **_credentials()) as client:
            yield client
    except ServerUnavailable as error:
        if error.answered:
            raise CommandFailed(str(error), status="UNAVAILABLE") from error
        hint = "Start it with `prefixd serve`, or name it with --address" if here else "Does it need TLS (--tls-ca)?"
        if "http1.x server" in str(error):
            raise NoDaemon(str(error), "An HTTP port is there; give the socket, or the port of server.tcp") from error
        raise NoDaemon(str(error), f"Is it running? {hint}") from error
    except UnsupportedError as error:
        remedy = "Start a daemon with a model: `prefixd serve --model DIR` or --embedded"
        raise CommandFailed(str(error), remedy, "UNIMPLEMENTED") from error
    except InvalidArgumentError as error:
        raise WrongUsage(str(error)) from error
    except ClientError as error:
        raise CommandFailed(str(error), status=status_name(error)) from error


def _credentials() -> dict[str, Any]:
    given = dict(_given.get())
    token_file = given.pop("token_file", None)
    token = os.environ.get(TOKEN_VARIABLE, "")
    if token_file is not None:
        try:
            token = token_file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise WrongUsage(f"--token-file {token_file} cannot be read ({why}); give a file with the token") from error
    return {**given, "token": token.strip()}


def run(command: Coroutine[object, object, T]) -> T:
    """Runs a command's coroutine; Ctrl-C cancels it and ends cleanly."""
    import prefixd.client  # noqa: F401  before the coroutine: until `interruptible`, Ctrl-C ends the process at once

    with signals.interruptible():
        return asyncio.run(command)
