"""The attacker, in a process of its own: `... attacker ORDER`, where ORDER is JSON of an `Order`.

It waits for a line on its standard input, attacks, says in one line of JSON what it has found out once the attack is in
place, goes on until the next line, and then tells the rest. It steps back behind the others: it is on another host, in
truth, and the cores here are the daemon's.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Any, Literal

import grpc

from benchmarks.attacks.people import become
from benchmarks.common.background import step_back
from benchmarks.common.harness import BenchmarkError
from benchmarks.load.companion import Companion
from prefixd.client import AsyncClient, ClientError

_IN_PLACE_S = 45.0
_STOP_S = 15.0
_ANSWER_S = 120.0  # it keeps to the times above, unless it is stuck

Door = Literal["tcp", "unix"]
Given = dict[str, Any]
"""What an attacker knows of its victims, as a real one can; and what it has found out. Plain JSON."""


@dataclass(frozen=True, slots=True)
class Order:
    """What to do, where and as whom, and what is known."""

    scenario: str
    tcp: str
    unix: str
    metrics_port: int
    token: str
    uid: int
    given: Given


def varint(value: int) -> bytes:
    """A number as protobuf writes it."""
    written = bytearray()
    while value > 127:
        written.append(value & 127 | 128)
        value >>= 7
    return bytes([*written, value])


class Attacker(Companion):
    """The side that starts it."""

    def __init__(self, order: Order) -> None:
        super().__init__("benchmarks.attacks.attacker", json.dumps(asdict(order)))
        if not self.answer()["ready"]:
            raise BenchmarkError(f"the attacker of {order.scenario} is not ready")

    def attack(self) -> Given:
        """Returns when the attack is in place, with what it has found out. Raises BenchmarkError."""
        return self._ask()

    def stop(self) -> Given:
        """Has it tell the rest. Raises BenchmarkError."""
        return self._ask()

    def _ask(self) -> Given:
        watchdog = threading.Timer(_ANSWER_S, self._process.kill)
        watchdog.start()
        try:
            self.tell()
            return self.answer()
        finally:
            watchdog.cancel()


class Mallory:
    """What an attack has at hand, in the attacker's process."""

    def __init__(self, order: Order, stopped: asyncio.Event) -> None:
        self.given = order.given
        self.tcp = order.tcp
        self.unix = order.unix
        self.metrics_port = order.metrics_port
        self.token = order.token
        self._stopped = stopped
        self.told = asyncio.Event()
        """Whether the attack is in place."""
        self._clients: AsyncExitStack

    async def __aenter__(self) -> Mallory:
        self._clients = AsyncExitStack()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._clients.aclose()

    @property
    def going(self) -> bool:
        """Whether the attack is to go on."""
        return not self._stopped.is_set()

    async def until_stopped(self) -> None:
        """Waits for the end."""
        await self._stopped.wait()

    async def channels(self, count: int, *, unread: bool = False) -> list[grpc.aio.Channel]:
        """Connections to the TCP door that show nothing, each its own; where answers have no window if `unread`."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        if unread:
            options += [("grpc.http2.lookahead_bytes", 5), ("grpc.http2.bdp_probe", 0)]
        opened = (grpc.aio.insecure_channel(self.tcp, options=options) for _ in range(count))
        return [await self._clients.enter_async_context(channel) for channel in opened]

    async def go_on(self, attacks: Iterable[Coroutine[Any, Any, None]], in_place_s: float = 2.0) -> None:
        """Does all of these at once; the attack is in place after so long. Raises what one of them fails with: an
        attack that did not take place holds nothing off."""
        tasks = [asyncio.create_task(attack) for attack in attacks]
        await asyncio.sleep(in_place_s)
        self.in_place()
        await self.until_stopped()
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended

    def in_place(self, **facts: Any) -> None:
        """The attack is in place; the judge looks now. The second time it says nothing."""
        if not self.told.is_set():
            self.told.set()
            print(json.dumps(facts), flush=True)

    async def client(self, door: Door = "tcp", memory: str = "streamed", name: str = "mallory") -> AsyncClient:
        """One more client, which is closed at the end."""
        address = self.tcp if door == "tcp" else self.unix
        client = AsyncClient(address, name=name, memory=memory, token=self.token, timeout_s=20.0)  # type: ignore[arg-type]
        return await self._clients.enter_async_context(client)


async def until_refused(count: int, attempt: Callable[[int], Awaitable[object]]) -> tuple[int, str]:
    """Tries so often, with numbers from 0 on; how many attempts succeeded, and what the daemon said to the next one."""
    for number in range(count):
        try:
            await attempt(number)
        except ClientError as error:
            return number, refusal(error)
    return count, ""


def refusal(error: BaseException) -> str:
    """In a line: what the daemon said when it refused."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"[:300]
    return f"{type(error).__name__}: {error}"[:300]


async def _serve(order: Order) -> None:
    from benchmarks.attacks.scenarios import SCENARIOS

    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
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
