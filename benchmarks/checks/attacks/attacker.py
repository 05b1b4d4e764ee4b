"""What an attack has at hand: its order, its clients of the daemon, and how it tells what it has found out."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Any, Literal

import grpc

from benchmarks.common.harness import BenchmarkError
from benchmarks.load.companion import Companion
from prefixd.client import AsyncClient, ClientError

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
        super().__init__("benchmarks.checks.attacks.attacker_process", json.dumps(asdict(order)))
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
        return not self._stopped.is_set()

    async def until_stopped(self) -> None:
        await self._stopped.wait()

    async def hold(self, **facts: Any) -> None:
        """The attack is in place, and stays so until it is stopped."""
        self.in_place(**facts)
        await self.until_stopped()

    async def channels(self, count: int, *, unread: bool = False) -> list[grpc.aio.Channel]:
        """Connections to the TCP door that show nothing, each its own; where answers have no window if `unread`."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        if unread:
            options += [("grpc.http2.lookahead_bytes", 5), ("grpc.http2.bdp_probe", 0)]
        opened = (grpc.aio.insecure_channel(self.tcp, options=options) for _ in range(count))
        return [await self._clients.enter_async_context(channel) for channel in opened]

    async def go_on(self, attacks: Iterable[Coroutine[Any, Any, None]], in_place_s: float = 2.0, **facts: Any) -> None:
        """Does all of these at once; the attack is in place after so long. Raises what one of them fails with: an
        attack that did not take place holds nothing off."""
        tasks = [asyncio.create_task(attack) for attack in attacks]
        await asyncio.sleep(in_place_s)
        await self.hold(**facts)
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
