"""A client that matches one short prompt at fixed times, in a process of its own: `... bystander ADDRESS`.

Each line on its standard input is answered with one line of JSON: the matches that ended since the last line (when each
began, by `time.monotonic`, how long it took, and whether it failed), and how many have not ended. After the line `rest`
it begins no match until another line comes. It ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass

import numpy as np

from benchmarks.load.companion import Companion, order_lines
from prefixd.client import AsyncClient, ClientError, NamespaceSpec, PartSpec

_BLOCKS, _BLOCK_TOKENS, _PART_BYTES = 16, 16, 4096
_EVERY_S = 0.005
_TIMEOUT_S = 600.0
_SPEC = NamespaceSpec("bystander", _BLOCK_TOKENS, (PartSpec("full", 0, _PART_BYTES),))


@dataclass(frozen=True, slots=True)
class Sample:
    """One match."""

    begin_s: float
    """By `time.monotonic`, which all processes of a machine share."""
    seconds: float
    failed: bool
    """It ended with an error: gRPC ends calls that wait for half a minute for an event loop."""


class Bystander(Companion):
    """The side that starts it."""

    def __init__(self, address: str) -> None:
        super().__init__("benchmarks.load.matching_client", address)
        self.samples: list[Sample] = []
        """All matches that had ended at the last `look`."""

    def look(self) -> int:
        """Fetches the matches that have ended; returns how many have not. Waits for the process to be ready.

        Raises BenchmarkError: the process has ended.
        """
        return self._ask("")

    def rest(self) -> int:
        """As `look`; no match begins from now on, until the next `look`.

        On a machine with more to do than it has cores, a daemon may answer fewer matches than begin: without a rest,
        more and more would wait.
        """
        return self._ask("rest")

    def _ask(self, order: str) -> int:
        self.tell(order)
        answer = self.answer()
        self.samples += [Sample(*sample) for sample in answer["ended"]]
        return int(answer["waiting"])


async def _serve(address: str) -> None:
    orders = await order_lines()
    ended: list[tuple[float, float, bool]] = []
    waiting, resting = 0, False
    async with AsyncClient(address, name="bystander", timeout_s=_TIMEOUT_S) as client, asyncio.TaskGroup() as group:
        tokens = np.arange(_BLOCKS * _BLOCK_TOKENS, dtype=np.uint32)
        cache = await client.register(_SPEC)
        await cache.store(tokens, np.zeros(_BLOCKS * _PART_BYTES, np.uint8))

        async def match() -> None:
            nonlocal waiting
            waiting += 1
            begin_s = time.monotonic()
            failed = False
            try:
                await cache.match(tokens)
            except ClientError:
                failed = True
            waiting -= 1
            ended.append((begin_s, time.monotonic() - begin_s, failed))

        async def match_at_fixed_times() -> None:
            due_s = time.monotonic()
            while True:
                if not resting:
                    group.create_task(match())  # also while an earlier one waits
                due_s += _EVERY_S
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))

        matching = group.create_task(match_at_fixed_times())
        while order := await orders.readline():
            resting = order == b"rest\n"
            print(json.dumps({"ended": ended, "waiting": waiting}), flush=True)
            ended.clear()
        matching.cancel()


def main() -> None:
    """The process's side."""
    asyncio.run(_serve(sys.argv[1]))


if __name__ == "__main__":
    main()
