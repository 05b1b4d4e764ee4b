"""Ends a command after an error with one line on stderr that names the remedy, and with an exit code.

1: the command failed. 2: it was called wrongly, or the configuration is wrong. 130: Ctrl-C. 143: SIGTERM.
"""

from __future__ import annotations

import inspect
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


class CommandFailed(PrefixdError):
    """An error that the command itself found; the message is the line that the user reads."""


class WrongUsage(CommandFailed):
    """The command was called wrongly; the line names the option, its value and the possible values."""


class CleanGroup(TyperGroup):
    """A group of commands that shows expected errors, a missing package too, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command; turns its errors into a line on stderr and an exit code."""
        try:
            return super().invoke(ctx)
        except (ConfigError, WrongUsage) as error:
            raise _end(str(error), EXIT_USAGE) from error
        except PrefixdError as error:
            raise _end(str(error), EXIT_FAILED) from error
        except ModuleNotFoundError as error:
            if (extra := extra_of(error.name or "")) is None:
                raise
            line = MissingExtraError(f"{ctx.command_path} {ctx.invoked_subcommand}", str(error.name), extra)
            raise _end(str(line), EXIT_USAGE) from error
        except BrokenPipeError as error:
            # The reader (`head`, a pager) has ended. Python would report an error when it flushes stdout at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from error
        except OSError as error:
            where = f": {error.filename}" if error.filename else ""
            raise _end(f"{error.strerror or error}{where}", EXIT_FAILED) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(EXIT_INTERRUPTED) from error


def _end(line: str, code: int) -> typer.Exit:
    typer.echo(f"prefixd: {shown(' '.join(line.split()))}", err=True)
    return typer.Exit(code)


def paragraphs(docstring: str) -> str:
    """Returns a docstring as a command's help: the lines of each paragraph joined, since the terminal breaks them."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in inspect.cleandoc(docstring).split("\n\n"))


def examples(*commands: str) -> str:
    """Returns the examples below a command's help, one a line."""
    # Blank lines separate them, since the help joins the lines of a paragraph.
    heading = "Example:" if len(commands) == 1 else "Examples:"
    return "\n\n".join([heading, *(f"  {command}" for command in commands)])
