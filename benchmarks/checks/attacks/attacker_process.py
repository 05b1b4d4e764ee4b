"""The attacker, in a process of its own: `... attacker_process ORDER`, where ORDER is JSON of an `Order`.

It waits for a line on its standard input, attacks, says in one line of JSON what it has found out once the attack is in
place, goes on until the next line, and then tells the rest. It steps back behind the others: it is on another host, in
truth, and the cores here are the daemon's.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import traceback

import grpc

from benchmarks.checks.attacks.attacker import Given, Mallory, Order, refusal
from benchmarks.checks.attacks.people import become
from benchmarks.checks.attacks.scenarios import SCENARIOS
from benchmarks.common.background import step_back
from benchmarks.load.companion import order_lines
from prefixd.client import ClientError

_IN_PLACE_S = 45.0
_STOP_S = 15.0


async def _serve(order: Order) -> None:
    lines = await order_lines()
    stopped = asyncio.Event()
    become(order.uid)
    print(json.dumps({"ready": True}), flush=True)
    if not await lines.readline():
        return
    async with Mallory(order, stopped) as mallory:
        attack = asyncio.create_task(SCENARIOS[order.scenario].attack(mallory))
        told = asyncio.create_task(_tell_in_time(mallory, attack))
        if not await lines.readline():  # whoever started us has gone
            os._exit(1)
        await told
        stopped.set()
        begin_s = time.monotonic()
        done, _ = await asyncio.wait({attack}, timeout=_STOP_S)
        found: Given = {}
        if not done:
            attack.cancel()
            found["stopped_late_s"] = round(time.monotonic() - begin_s, 1)
        elif (error := attack.exception()) is None:
            found = attack.result() or {}
        else:
            found["ended_by"] = refusal(error)
        print(json.dumps(found), flush=True)


async def _tell_in_time(mallory: Mallory, attack: asyncio.Task[Given | None]) -> None:
    """Says that the attack is in place when it does not say so itself: it was refused, or hangs, or is wrong."""
    in_place = asyncio.create_task(mallory.told.wait())
    await asyncio.wait({in_place, attack}, timeout=_IN_PLACE_S, return_when=asyncio.FIRST_COMPLETED)
    if in_place.done():
        return
    if not attack.done():
        mallory.in_place(hangs=True)
    elif (error := attack.exception()) is None:
        mallory.in_place()
    elif isinstance(error, ClientError | grpc.aio.AioRpcError | OSError):
        mallory.in_place(ended_by=refusal(error))
    else:
        mallory.in_place(error="".join(traceback.format_exception(error)))


def main() -> None:
    """The process."""
    step_back()
    asyncio.run(_serve(Order(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
