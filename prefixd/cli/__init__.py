"""The command line, `prefixd`. Only what a command needs is imported, so that `--help` answers at once."""

from __future__ import annotations


def main() -> None:
    """Entry point of the `prefixd` command; ends the process with its exit code."""
    from prefixd.cli.app import app

    app(prog_name="prefixd")


__all__ = ["main"]
