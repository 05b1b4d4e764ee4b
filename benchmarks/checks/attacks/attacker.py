"""The means of an attack: its order, its clients of the daemon, and its reports to the harness."""

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

_ANSWER_S = 120.0  # the attacker has shorter limits of its own; beyond this it is stuck

Door = Literal["tcp", "unix"]
Given = dict[str, Any]
"""Facts in plain JSON: those that an attacker can know of its victims, or those that it reports."""


@dataclass(frozen=True, slots=True)
class Order:
    """The scenario, the daemon's addresses, the attacker's token and user, and the facts that it knows."""

    scenario: str
    tcp: str
    unix: str
    metrics_port: int
    token: str
    uid: int
    given: Given


def varint(value: int) -> bytes:
    """Returns a number in protobuf's encoding."""
    written = bytearray()
    while value > 127:
        written.append(value & 127 | 128)
        value >>= 7
    return bytes([*written, value])


class Attacker(Companion):
    """Starts and controls an attacker's process; used in the harness."""

    def __init__(self, order: Order) -> None:
        super().__init__("benchmarks.checks.attacks.attacker_process", json.dumps(asdict(order)))
        if not self.answer()["ready"]:
            raise BenchmarkError(f"the attacker of {order.scenario} is not ready")

    def attack(self) -> Given:
        """Returns the attacker's facts once the attack is in place. Raises BenchmarkError."""
        return self._ask()

    def stop(self) -> Given:
        """Stops the attack; returns the attacker's other facts. Raises BenchmarkError."""
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
    """The means of an attack; used in the attacker's process."""

    def __init__(self, order: Order, stopped: asyncio.Event) -> None:
        self.given = order.given
        self.tcp = order.tcp
        self.unix = order.unix
        self.metrics_port = order.metrics_port
        self.token = order.token
        self._stopped = stopped
        self.reported = asyncio.Event()
        """Set when the attack is in place."""
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
        """Reports that the attack is in place, and waits until the harness stops it."""
        self.in_place(**facts)
        await self.until_stopped()

    async def channels(self, count: int, *, unread: bool = False) -> list[grpc.aio.Channel]:
        """Opens `count` separate connections to the TCP port without a credential; if `unread`, answers get no
        window."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        if unread:
            options += [("grpc.http2.lookahead_bytes", 5), ("grpc.http2.bdp_probe", 0)]
        opened = (grpc.aio.insecure_channel(self.tcp, options=options) for _ in range(count))
        return [await self._clients.enter_async_context(channel) for channel in opened]

    async def run_all(
        self, attacks: Iterable[Coroutine[Any, Any, None]], in_place_s: float = 2.0, **facts: Any
    ) -> None:
        """Runs all of these at once; the attack is in place after `in_place_s`.

        Raises the error of one that fails: an attack that did not take place must not count as repelled.
        """
        tasks = [asyncio.create_task(attack) for attack in attacks]
        await asyncio.sleep(in_place_s)
        await self.hold(**facts)
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended

    def in_place(self, **facts: Any) -> None:
        """Reports that the attack is in place, so that the judge checks now. A second call does nothing."""
        if not self.reported.is_set():
            self.reported.set()
            print(json.dumps(facts), flush=True)

    async def client(self, door: Door = "tcp", memory: str = "streamed", name: str = "mallory") -> AsyncClient:
        """Opens one more client, which is closed at the end."""
        address = self.tcp if door == "tcp" else self.unix
        client = AsyncClient(address, name=name, memory=memory, token=self.token, timeout_s=20.0)  # type: ignore[arg-type]
        return await self._clients.enter_async_context(client)


async def until_refused(count: int, attempt: Callable[[int], Awaitable[object]]) -> tuple[int, str]:
    """Makes `count` attempts, numbered from 0. Returns how many succeeded until the first refusal, and that refusal."""
    for number in range(count):
        try:
            await attempt(number)
        except ClientError as error:
            return number, refusal(error)
    return count, ""


def refusal(error: BaseException) -> str:
    """Returns the daemon's refusal in one line."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"[:300]
    return f"{type(error).__name__}: {error}"[:300]
