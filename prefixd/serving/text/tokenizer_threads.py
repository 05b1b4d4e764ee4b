"""Texts are tokenized in two threads, a bounded number of them at a time, of each tenant one in each thread."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from prefixd.base.errors import ExhaustedError, UnavailableError
from prefixd.base.tenancy.fairness import TenantTurns
from prefixd.serving.text.chat_template import Chat
from prefixd.serving.text.tokenization import Stopped, TextCodec, TokenIds
from prefixd_scheduler import SharedLimit
from prefixd_swap import started_threads

_NICENESS = 10


def step_back() -> None:
    """Lowers the priority of the calling thread, on systems where each thread has its own."""
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


T = TypeVar("T")

_SHORT_CHARACTERS = 16 << 10  # tokenized in some milliseconds
_WAITING = 256
_WAITING_CHARACTERS = 64 << 20


class TokenizerThreads:
    """A thread for short texts and one for long texts: a question does not wait behind a book.

    Args:
        most_texts: texts that may wait or be tokenized at a time.
        most_characters: characters that they may have together; a tenant's only text may have more.
        tenants: returns the number of tenants, which share both limits (`SharedLimit`).

    Raises:
        OutOfMemoryError: the system gives no threads.
    """

    def __init__(
        self,
        most_texts: int = _WAITING,
        most_characters: int = _WAITING_CHARACTERS,
        tenants: Callable[[], int] = lambda: 1,
    ) -> None:
        self._texts = SharedLimit(most_texts, tenants)
        self._characters = SharedLimit(most_characters, tenants)
        self._short_turns, self._long_turns = TenantTurns(), TenantTurns()
        self._short = started_threads(1, "prefixd-text-short")
        self._long = started_threads(1, "prefixd-text-long", step_back)
        self._stops: set[threading.Event] = set()  # one a text
        self._closed = False

    async def load(self, work: Callable[..., T], *args: object) -> T:
        """Runs `work`, which prepares the tokenizer, in the thread for long texts."""
        return await asyncio.get_running_loop().run_in_executor(self._long, work, *args)

    async def encode(self, codec: TextCodec, text: str, most: int, tenant: Hashable = None) -> TokenIds:
        """Token ids of a prompt, see `TextCodec.encode`. When the caller is cancelled, tokenizing stops soon.

        Raises:
            ExhaustedError: too many texts wait, or too many of the tenant.
            TooManyTokensError: the text has far more than `most` tokens.
            UnavailableError: the daemon ends.
        """
        return await self._run(partial(codec.encode, text, most), len(text), tenant)

    async def encode_chat(self, codec: TextCodec, chat: Chat, most: int, tenant: Hashable = None) -> TokenIds:
        """Token ids of a chat, see `TextCodec.encode_chat`; otherwise as `encode`."""
        return await self._run(partial(codec.encode_chat, chat, most), chat.characters, tenant)

    async def _run(self, work: Callable[[threading.Event], TokenIds], length: int, tenant: Hashable) -> TokenIds:
        self._refuse_closed()
        texts, characters = self._texts, self._characters
        if texts[tenant] and (not texts.left(tenant) or length > characters.left(tenant)):
            raise ExhaustedError(
                f"{texts.total} prompts with {characters.total} characters wait to be tokenized, {texts[tenant]} of "
                f"them the tenant's, and {texts.limit} with {characters.limit} are the limit; send the prompt again "
                "later, or send token_ids"
            )
        stop = threading.Event()
        self._stops.add(stop)
        texts.add(tenant, 1)
        characters.add(tenant, length)
        short = length <= _SHORT_CHARACTERS
        threads, turns = (self._short, self._short_turns) if short else (self._long, self._long_turns)
        try:
            async with turns.turn(tenant):
                self._refuse_closed()
                return await asyncio.get_running_loop().run_in_executor(threads, work, stop)
        except Stopped:
            self._refuse_closed()
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # not the caller was cancelled, but the waiting text, by `close`
                self._refuse_closed()
            raise
        finally:
            stop.set()
            self._stops.discard(stop)
            texts.add(tenant, -1)
            characters.add(tenant, -length)

    def close(self) -> None:
        """Refuses further texts and stops the present ones, without waiting for those being tokenized."""
        self._closed = True
        for stop in self._stops:
            stop.set()
        for turns in (self._short_turns, self._long_turns):
            turns.close()
        for threads in (self._short, self._long):
            threads.shutdown(wait=False, cancel_futures=True)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UnavailableError("the daemon is ending; send the request again when it is back")
