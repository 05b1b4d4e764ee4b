"""The attacker, in a process of its own: `... attacker_process ORDER`, where ORDER is JSON of an `Order`.

It waits for a line on its standard input and attacks. Once the attack is in place, it writes one line of JSON with its
facts. At the next line it stops and writes its other facts. It has a low priority: a real attacker is on another host
and takes no CPU time from the daemon.
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
        reported = asyncio.create_task(_report_in_time(mallory, attack))
        if not await lines.readline():  # the harness has ended
            os._exit(1)
        await reported
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


async def _report_in_time(mallory: Mallory, attack: asyncio.Task[Given | None]) -> None:
    """Reports for an attack that does not report itself: it was refused, hangs, or has a bug."""
    in_place = asyncio.create_task(mallory.reported.wait())
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
    """Runs the attacker."""
    step_back()
    asyncio.run(_serve(Order(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
