"""A client in a process of its own that answers each line on its standard input with one line of JSON."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import suppress
from typing import Any, Self

from benchmarks.common.harness import BenchmarkError


class Companion:
    """Starts and controls `python -m MODULE ARGUMENTS...`, which ends with its input; used in the harness.

    A context manager: leaving it ends the process.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is ours alone
        )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def tell(self, line: str = "") -> None:
        """Sends a line. `answer` fetches the answers in the order of the lines.

        Raises BenchmarkError: the process has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def answer(self) -> dict[str, Any]:
        """Returns the next answer. Waits until the process is ready.

        Raises BenchmarkError: the process has ended, or answers with an error.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchmarkError(f"{self._module} with pid {self.pid}: {answer['error']}")
        return answer

    def kill(self) -> None:
        """Sends SIGKILL, at any point of its work, and waits until it has ended."""
        self._process.kill()
        self.close()

    def close(self) -> None:
        """Ends its input and waits until it has ended."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()

    def _ended(self) -> BenchmarkError:
        return BenchmarkError(f"{self._module} ended by itself, with status {self._process.wait()}")


async def order_lines() -> asyncio.StreamReader:
    """Returns the lines of this process's standard input; used in the process itself."""
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    return lines
