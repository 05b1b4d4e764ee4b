"""Ends a command after an error with one line on stderr that names the remedy, and with an exit code.

1: the command failed. 2: it was called wrongly (INVALID_ARGUMENT), or the configuration is wrong. 130: Ctrl-C. 143:
SIGTERM. `prefixd doctor` has more.

With `--json` stdout gets the error, too, as one line: `{"error": {"message": ..., "remedy": ..., "status": "NOT_FOUND",
"exit_status": 1}}`. `status` is the name of a gRPC status; `remedy` is only there if it is no part of the message.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from prefixd.base.errors import ConfigError, PrefixdError
from prefixd.base.extras import MissingExtraError, extra_of
from prefixd.cli.output.terminal import shown

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
_UsageError: Any = typer.BadParameter.__mro__[1]  # typer does not export it
_AS_JSON = "prefixd.json"  # in a context's `meta`, which commands and their groups share


class CommandFailed(PrefixdError):
    """An error that the command itself found.

    Args:
        message: the line that the user reads, up to the remedy.
        remedy: what to do, if the message does not say it.
        status: name of the gRPC status.
    """

    def __init__(self, message: str, remedy: str = "", status: str = "") -> None:
        super().__init__(f"{message}. {remedy}" if remedy else message)
        self.message = message
        self.remedy = remedy
        self.status_name = status


class WrongUsage(CommandFailed):
    """The command was called wrongly; the line names the option, its value and the possible values."""

    status = "INVALID_ARGUMENT"


class NoDaemon(CommandFailed):
    """No daemon answers at the address."""

    status = "UNAVAILABLE"


class CleanGroup(TyperGroup):
    """A group of commands that shows expected errors, a missing package too, without a traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the options of the group; notes whether errors are to be JSON."""
        before = args[: args.index("--")] if "--" in args else args
        ctx.meta[_AS_JSON] = ctx.meta.get(_AS_JSON, False) or "--json" in before
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Runs the command; turns its errors into a line on stderr and an exit code."""
        try:
            return super().invoke(ctx)
        except (ConfigError, WrongUsage) as error:
            raise _end(ctx, error, EXIT_USAGE) from error
        except PrefixdError as error:
            raise _end(ctx, error, EXIT_FAILED) from error
        except _UsageError as error:
            error.message = error.message.removeprefix("Value error, ")  # typer's, of a word that is no choice
            if ctx.meta[_AS_JSON] and ctx.parent is None:  # a group of commands passes it on to the root
                _print_json(_plain(error.format_message(), status=WrongUsage.status), EXIT_USAGE)
            raise
        except ModuleNotFoundError as error:
            if (extra := extra_of(error.name or "")) is None:
                raise
            missing = MissingExtraError(f"{ctx.command_path} {ctx.invoked_subcommand}", str(error.name), extra)
            raise _end(ctx, missing, EXIT_USAGE) from error
        except BrokenPipeError as error:
            # The reader (`head`, a pager) has ended. Python would report an error when it flushes stdout at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from error
        except OSError as error:
            where = f": {error.filename}" if error.filename else ""
            raise _end(ctx, CommandFailed(f"{error.strerror or error}{where}"), EXIT_FAILED) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(EXIT_INTERRUPTED) from error


def _end(ctx: Any, error: PrefixdError, code: int) -> typer.Exit:
    typer.echo(f"prefixd: {shown(_one_line(str(error)))}", err=True)
    if ctx.meta[_AS_JSON]:
        _print_json(error_fields(error), code)
    return typer.Exit(code)


def error_fields(error: PrefixdError) -> dict[str, str]:
    """Returns an error as JSON has it: `message`, `status`, and `remedy` if there is one beside the message."""
    if isinstance(error, CommandFailed):
        return _plain(error.message, error.remedy, error.status_name or error.status)
    return _plain(str(error), status=error.status)


def _plain(message: str, remedy: str = "", status: str = "") -> dict[str, str]:
    return {"message": _one_line(message), **({"remedy": remedy} if remedy else {}), "status": status}


def _print_json(fields: dict[str, str], code: int) -> None:
    print(json.dumps({"error": fields | {"exit_status": code}}), flush=True)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def paragraphs(docstring: str) -> str:
    """Returns a docstring as a command's help: the lines of each paragraph joined, since the terminal breaks them."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in inspect.cleandoc(docstring).split("\n\n"))


def examples(*commands: str) -> str:
    """Returns the examples below a command's help, one a line."""
    # Blank lines separate them, since the help joins the lines of a paragraph.
    heading = "Example:" if len(commands) == 1 else "Examples:"
    return "\n\n".join([heading, *(f"  {command}" for command in commands)])
