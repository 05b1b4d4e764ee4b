"""``python -m prefixd.worker --fd N --config JSON``: started by the daemon; N is a socket to it."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import sys
import time
import traceback

from prefixd.base import heap
from prefixd.base.errors import PrefixdError
from prefixd.process.start import prepare_process
from prefixd.worker_protocol.errors import ConnectionClosedError
from prefixd.worker_protocol.framing import Connection, to_worker
from prefixd.worker_protocol.protocol import Failed, ToWorker
from prefixd.worker_protocol.worker_settings import decode_settings

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str] | None = None) -> int:
    """Run a worker; returns the exit status: 0 after Shutdown or when the daemon is gone, 1 after Failed."""
    prepare_process()
    parser = argparse.ArgumentParser(prog="python -m prefixd.worker", description="prefixd's inference worker")
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the socket to the daemon")
    parser.add_argument("--config", required=True, help="settings as JSON (worker_protocol/worker_settings.py)")
    options = parser.parse_args(arguments)
    _die_with_daemon()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The daemon decides when a worker ends, not the terminal, nor a signal to a whole group of processes.
        signal.signal(number, signal.SIG_IGN)
    end = socket.socket(fileno=options.fd)
    if _is_closed(end):
        return 0
    connection = Connection(end, to_worker())
    try:
        settings = decode_settings(options.config)
        # transformers and torch are loaded here, so that a broken installation is reported to the
        # daemon as well.
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        with heap.imports():
            from transformers.utils import logging

            from prefixd.worker.conversation import serve

        logging.disable_progress_bar()
        logging.set_verbosity_error()
        serve(connection, settings, time.monotonic)
    except ConnectionClosedError:
        return 0
    except Exception as error:  # the daemon is told of any error
        if not _expected(error):
            traceback.print_exc()
        _report(connection, error)
        return 1
    finally:
        connection.close()
    return 0


def _expected(error: Exception) -> bool:
    from prefixd_swap.errors import SwapError

    return isinstance(error, PrefixdError | SwapError)


def _report(connection: Connection[ToWorker], error: Exception) -> None:
    text = " ".join(str(error).split())
    detail = text if _expected(error) else f"{type(error).__name__}: {text}"
    try:
        connection.send(Failed(detail))
    except ConnectionClosedError:
        print(detail, file=sys.stderr)


def _is_closed(end: socket.socket) -> bool:
    """Whether the daemon has ended already, before `_die_with_daemon` took effect."""
    try:
        return not end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def _die_with_daemon() -> None:
    """Have this process killed when the thread that started it, the daemon's main thread, ends (prctl(2)).

    Otherwise a worker would notice only after a long forward pass that its socket is closed.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
