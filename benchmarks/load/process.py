"""A client with mixed work in a process of its own, and how the process that started it tells it what to do.

Orders are lines of JSON on its standard input, answers lines on its standard output; it ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.load.companion import Companion, order_lines
from benchmarks.load.mixed_load import LoadPlan, MixedLoad, Tally
from benchmarks.load.world import Prompt


class LoadProcess(Companion):
    """Starts and controls the process; used in the harness."""

    def __init__(self, address: str, plan: LoadPlan) -> None:
        super().__init__("benchmarks.load.process", address, json.dumps(asdict(plan)))
        self.plan = plan

    def order(self, do: str, **what: Any) -> None:
        """Sends an order. `answer` fetches the answers in the order of the orders."""
        self.tell(json.dumps({"do": do, **what}))

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        """`order`, then `answer`."""
        self.order(do, **what)
        return self.answer()

    def stop(self) -> Tally:
        """Ends its work in order, then the process; returns its counts."""
        tally = Tally.from_plain(self.ask("stop")["tally"])
        self.close()
        return tally

    def count(self) -> Tally:
        return Tally.from_plain(self.ask("count")["tally"])


def tell_all(clients: Sequence[LoadProcess], do: str) -> list[dict[str, Any]]:
    """Sends the same order to all clients at once; returns their answers."""
    for client in clients:
        client.order(do)
    return [client.answer() for client in clients]


async def _serve(address: str, plan: LoadPlan) -> None:
    orders = await order_lines()
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
    """Runs the client."""
    asyncio.run(_serve(sys.argv[1], LoadPlan(**json.loads(sys.argv[2]))))


if __name__ == "__main__":
    main()
