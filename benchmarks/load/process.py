"""A client with mixed work in a process of its own, and how the process that started it tells it what to do.

Orders are lines of JSON on its standard input, answers lines on its standard output; it ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Self

from benchmarks.common.harness import BenchmarkError
from benchmarks.load.load import LoadPlan, MixedLoad, Tally
from benchmarks.load.world import Prompt


class LoadProcess:
    """The starting side. A context manager: leaving it ends the process."""

    def __init__(self, address: str, plan: LoadPlan) -> None:
        self.plan = plan
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.load.process", address, json.dumps(asdict(plan))],
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

    def order(self, do: str, **what: Any) -> None:
        """Sends an order; its answer is `answer`'s to fetch, in the order of the orders."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **what}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def answer(self) -> dict[str, Any]:
        """The next answer; BenchmarkError when the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchmarkError(f"the client process with pid {self.pid}: {answer['error']}")
        return answer

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        """`order`, then `answer`."""
        self.order(do, **what)
        return self.answer()

    def stop(self) -> Tally:
        """Ends its work in order, then the process; what it counted."""
        tally = Tally.from_plain(self.ask("stop")["tally"])
        self._close()
        return tally

    def count(self) -> Tally:
        """What it has counted so far."""
        return Tally.from_plain(self.ask("count")["tally"])

    def kill(self) -> None:
        """SIGKILL, wherever it is."""
        self._process.kill()
        self._close()

    def _close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._process.wait()

    def _ended(self) -> BenchmarkError:
        return BenchmarkError(f"a client process ended by itself, with status {self._process.wait()}")


async def _serve(address: str, plan: LoadPlan) -> None:
    orders = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    async with MixedLoad(address, plan) as load:
        while line := await orders.readline():
            order = json.loads(line)
            print(json.dumps(await _obey(load, order)), flush=True)
            if order["do"] == "stop":
                return


async def _obey(load: MixedLoad, order: dict[str, Any]) -> dict[str, Any]:
    match order["do"]:
        case "go":
            load.go()
            return {}
        case "count":
            return {"tally": load.tally.to_plain()}
        case "pause":
            await load.pause()
            return {"tally": load.tally.to_plain(), "durable": len(load.durable)}
        case "stop":
            await load.pause()
            return {"tally": load.tally.to_plain()}
        case "audit":
            shared = (Prompt(*numbers) for numbers in order["shared"])
            return asdict(await load.audit(shared))
        case other:
            return {"error": f"no such order: {other}"}


def main() -> None:
    """The process's side."""
    asyncio.run(_serve(sys.argv[1], LoadPlan(**json.loads(sys.argv[2]))))


if __name__ == "__main__":
    main()
