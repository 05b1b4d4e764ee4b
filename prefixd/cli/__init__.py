"""The command line, `prefixd`. A command imports only the modules that it needs, so that `--help` answers at once."""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing takes as long as all imports before the signal handlers are installed
if TYPE_CHECKING:
    from prefixd_swap import FileOps


def main(ops: FileOps | None = None) -> None:
    """Entry point of the `prefixd` command; ends the process with its exit code.

    Args:
        ops: file calls of a served daemon's disk tier; a test passes calls that fail.
    """
    from prefixd.process import signals

    signals.end_at_once()
    signals.hold_hangups()
    from prefixd.process.start import prepare_process

    prepare_process()
    from prefixd.cli.app import app

    app(prog_name="prefixd", obj=ops)


__all__ = ["main"]
