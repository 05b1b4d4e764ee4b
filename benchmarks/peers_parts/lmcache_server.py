"""LMCache's multiprocess cache server in a process of its own, started, waited for and ended.

`python -m benchmarks.peers_parts.lmcache_server PARENT ARGUMENT...` is `lmcache ARGUMENT...`, which gets SIGTERM when
process PARENT ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self

from benchmarks.common.harness import free_port
from prefixd.base.errors import PrefixdError
from prefixd.cli.demo.daemon_process import last_lines
from prefixd.cli.tethered import PR_SET_PDEATHSIG

_START_S = 120.0
_STOP_S = 60.0
_POLL_S = 0.2
_LAST_LINES = 20
_QUIET = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_LOG_LEVEL": "WARNING"}


class LMCacheFailed(PrefixdError):
    """The server did not start, or did not end, as it should; the message has the last lines of its log."""


class LMCacheServer:
    """A context manager: the server runs inside it, with files in a folder of its own.

    Args:
        memory_bytes: of its first tier, which engines map as shared memory.
        chunk_tokens: tokens that it stores and finds together.
    """

    def __init__(self, memory_bytes: int, chunk_tokens: int) -> None:
        self._memory_bytes = memory_bytes
        self._chunk_tokens = chunk_tokens
        self._directory = Path(tempfile.mkdtemp(prefix="lmcache-"))
        self._port = free_port()
        self._http_port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def kv_transfer(self) -> dict[str, Any]:
        """vLLM's `kv_transfer_config` for it."""
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": self._port},
        }

    @property
    def pid(self) -> int:
        """The server's process; raises LMCacheFailed when none runs."""
        if self._process is None:
            raise LMCacheFailed("LMCache's server is not running; start it first")
        return self._process.pid

    def __enter__(self) -> Self:
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._command(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C reaches this process alone, which ends the server in order.
                    env=os.environ | _QUIET,
                )
            self._wait_until_healthy(self._process)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        process, self._process = self._process, None
        try:
            if process is not None:
                self._end(process)
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired as error:
            said = self._last_words()
            process.kill()
            process.wait()
            raise LMCacheFailed(f"LMCache's server did not end within {_STOP_S:g} s of SIGTERM{said}") from error

    @property
    def _log(self) -> Path:
        return self._directory / "server.log"

    def _command(self) -> list[str]:
        files = {"type": "fs_native", "base_path": str(self._directory / "files")}
        (self._directory / "files").mkdir()
        return [
            *(sys.executable, "-m", __spec__.name, str(os.getpid()), "server"),
            *("--port", str(self._port), "--http-port", str(self._http_port)),
            *("--l1-size-gb", str(self._memory_bytes / (1 << 30)), "--no-l1-use-lazy", "--eviction-policy", "LRU"),
            *("--chunk-size", str(self._chunk_tokens), "--l2-adapter", json.dumps(files)),
            # Engines without a GPU copy by themselves, into the server's memory; without a name the bytes are pickled.
            *("--supported-transfer-mode", "auto", "--shm-name", self._directory.name),
            "--disable-observability",
        ]

    def _wait_until_healthy(self, process: subprocess.Popen[bytes]) -> None:
        deadline_s = time.monotonic() + _START_S
        while not self._healthy():
            if process.poll() is not None:
                raise LMCacheFailed(f"LMCache's server ended before it was ready{self._last_words()}")
            if time.monotonic() > deadline_s:
                raise LMCacheFailed(f"LMCache's server was not ready within {_START_S:g} s{self._last_words()}")
            time.sleep(_POLL_S)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._http_port}/healthcheck", timeout=5) as answer:
                return bool(answer.status == HTTPStatus.OK)
        except OSError:
            return False

    def _last_words(self) -> str:
        said = last_lines(self._log, _LAST_LINES)
        return "; it said:\n  " + "\n  ".join(said) if said else ""


def main() -> None:
    """Ties this process to its parent and goes on as `lmcache`."""
    parent = int(sys.argv.pop(1))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(f"process {parent}, for which this server was started, has ended")
    from lmcache.cli.main import main as lmcache

    lmcache()


if __name__ == "__main__":
    main()
