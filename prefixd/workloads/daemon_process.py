"""A daemon in its own process, for the demo and the benchmarks: started, waited for, ended by its pid."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from prefixd.errors import PrefixdError
from prefixd.settings_sources import ENV_PREFIX

_LOG_LINES = 20


class DaemonFailed(PrefixdError):
    """The daemon did not start, or did not end, as it should; the message has the last lines of its log."""


class DaemonProcess:
    """`prefixd serve` with its data and socket in `directory`. Started again, it finds there what it kept.

    `overrides` are settings by dotted name. Use it as an asynchronous context manager: on leaving, the
    process gets SIGTERM (it writes its cache back and ends), and is killed when that takes longer than
    `stop_timeout_s`.
    """

    def __init__(
        self,
        directory: Path,
        overrides: Mapping[str, Any],
        *,
        start_timeout_s: float = 120.0,
        stop_timeout_s: float = 60.0,
    ) -> None:
        self.directory = directory
        self.address = f"unix:{directory / 'prefixd.sock'}"
        self._overrides = dict(overrides)
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._log: deque[str] = deque(maxlen=_LOG_LINES)
        self._readers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Returns when the daemon answers; raises DaemonFailed."""
        self._log.clear()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            # Its own group: Ctrl-C reaches us alone, and we end it in order.
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)},
        )
        self._readers = [asyncio.create_task(self._keep_log(process.stderr))]
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self._wait_until_ready(process.stdout)
        except TimeoutError as error:
            await self.stop()
            raise DaemonFailed(
                f"the daemon was not ready within {self._start_timeout_s:g} s{self.last_words()}"
            ) from error
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """SIGTERM, then the wait for its end; SIGKILL and DaemonFailed when it takes too long."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(self._stop_timeout_s):
                await process.wait()
        except TimeoutError as error:
            process.kill()
            await process.wait()
            raise DaemonFailed(
                f"the daemon did not end within {self._stop_timeout_s:g} s of SIGTERM{self.last_words()}"
            ) from error
        finally:
            for reader in self._readers:
                reader.cancel()
            await asyncio.gather(*self._readers, return_exceptions=True)

    def last_words(self) -> str:
        """The end of its log, to be put behind an error's message."""
        return "; it said: " + " | ".join(self._log) if self._log else ""

    def _command(self) -> list[str]:
        overrides = {
            "data_dir": self.directory / "data",
            "server.socket": self.directory / "prefixd.sock",
            **self._overrides,
        }
        settings = [f"--set={name}={_text(value)}" for name, value in overrides.items()]
        # No configuration but this one: the figures must not depend on the user's.
        serve = ["serve", "--json", "--log-level=warning", f"--config={os.devnull}"]
        return [sys.executable, "-m", "prefixd", *serve, *settings]

    async def _wait_until_ready(self, stdout: asyncio.StreamReader | None) -> None:
        while stdout is not None:
            line = await stdout.readline()
            if not line:
                break
            with suppress(ValueError):
                if "socket" in json.loads(line):
                    self._readers.append(asyncio.create_task(self._keep_log(stdout)))
                    return
        await asyncio.gather(*self._readers)
        raise DaemonFailed(f"the daemon ended before it was ready{self.last_words()}")

    async def _keep_log(self, stream: asyncio.StreamReader | None) -> None:
        while stream is not None and (line := await stream.readline()):
            self._log.append(line.decode(errors="replace").rstrip())


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
