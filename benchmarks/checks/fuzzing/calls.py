"""Calls of raw bytes to any method, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

LOST = "(lost by the client)"
_PAUSES_S = (0.0, 0.002, 0.01, 0.05, 0.2)
FORGOTTEN = ("Internal error from Core", "Locally cancelled by application!")
"""What gRPC's asyncio client says in place of a status that comes while it sends."""


@dataclass(slots=True)
class Answer:
    """How a call ended, and the messages that came before."""

    status: str
    details: str
    messages: list[bytes]


async def send(
    channel: Any,
    path: str,
    raws: Sequence[bytes],
    stop_after: int | None = None,
    patience_s: float | None = None,
    **options: Any,
) -> tuple[Any, Answer]:
    """The call, and what came of it: at the end, or after `stop_after` messages, or after `patience_s`.

    gRPC's asyncio client forgets a status that comes while it sends, and puts words of its own in its place, which no
    server says. Such a stream is sent again, and slower; when that does not help, the status is LOST. An
    INTERNAL that the server did say would be in its log, which is looked through.
    """
    stream: Any
    if len(raws) == 1:  # what gRPC sends is the same for all kinds of methods
        stream = channel.unary_stream(path)(raws[0], **options)
        return stream, await _answer(stream, stop_after, patience_s)
    for pause_s in _PAUSES_S if patience_s is None else (0.005,):
        stream = channel.stream_stream(path)(_each(raws, pause_s), **options)
        answer = await _answer(stream, stop_after, patience_s)
        given_up = patience_s is not None and answer.status == "CANCELLED"
        if given_up or answer.details not in FORGOTTEN:
            return stream, answer
    return stream, Answer(LOST, "", answer.messages)


async def _each(raws: Sequence[bytes], pause_s: float = 0.0) -> AsyncIterator[bytes]:
    for raw in raws:
        yield raw
        if pause_s:
            await asyncio.sleep(pause_s)


async def _answer(stream: Any, stop_after: int | None, patience_s: float | None) -> Answer:
    """Reads to the end, or `stop_after` messages; gives up after `patience_s`."""
    messages: list[bytes] = []

    async def read() -> None:
        async for message in stream:
            messages.append(message)
            if stop_after is not None and len(messages) >= stop_after:
                return

    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError, TimeoutError):
        async with asyncio.timeout(patience_s):
            await read()
    if stop_after is not None and len(messages) >= stop_after and not stream.done():
        return Answer("OK", "", messages)
    if patience_s is not None and not stream.done():
        stream.cancel()
    code = await stream.code()
    return Answer(code.name, (await stream.details()) or "", messages)
