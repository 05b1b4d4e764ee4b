"""The command line, `prefixd`. Only what a command needs is imported, so that `--help` answers at once."""

from __future__ import annotations

TYPE_CHECKING = False  # typing's takes as long as all that is imported before a signal has a handler
if TYPE_CHECKING:
    from prefixd_swap import FileOps


def main(ops: FileOps | None = None) -> None:
    """Entry point of the `prefixd` command; ends the process with its exit code.

    Args:
        ops: file calls of the disk tier of a daemon that is served, to have them fail in a test.
    """
    from prefixd.process import signals

    signals.end_at_once()
    signals.hold_hangups()
    from prefixd.process.start import prepare_process

    prepare_process()
    from prefixd.cli.app import app

    app(prog_name="prefixd", obj=ops)


__all__ = ["main"]
