"""Texts are tokenized in two threads, a bounded number of them at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from prefixd.errors import ExhaustedError, UnavailableError
from prefixd.server.tokenization import Stopped, TextCodec, TokenIds
from prefixd_swap import started_threads

T = TypeVar("T")

_SHORT_CHARACTERS = 16 << 10  # tokenized in some milliseconds
_WAITING = 256
_WAITING_CHARACTERS = 64 << 20


class TokenizerThreads:
    """A thread for short texts and one for long texts: a question does not wait behind a book.

    Args:
        most_texts: texts that may wait or be tokenized at a time.
        most_characters: characters that they may have together; a single text may have more.

    Raises:
        OutOfMemoryError: the system gives no threads.
    """

    def __init__(self, most_texts: int = _WAITING, most_characters: int = _WAITING_CHARACTERS) -> None:
        self._most_texts = most_texts
        self._most_characters = most_characters
        self._short = started_threads(1, "prefixd-text-short")
        self._long = started_threads(1, "prefixd-text-long")
        self._stops: set[threading.Event] = set()  # one a text
        self._characters = 0
        self._closed = False

    async def load(self, work: Callable[..., T], *args: object) -> T:
        """Runs what prepares the tokenizer, in the thread for long texts."""
        return await asyncio.get_running_loop().run_in_executor(self._long, work, *args)

    async def encode(self, codec: TextCodec, text: str, most: int) -> TokenIds:
        """Token ids of a prompt, see `TextCodec.encode`. When the caller is cancelled, tokenizing stops soon.

        Raises:
            ExhaustedError: too many texts wait.
            TooManyTokensError: the text has far more than `most` tokens.
            UnavailableError: the daemon ends.
        """
        self._refuse_closed()
        characters = self._characters + len(text)
        if self._stops and (len(self._stops) >= self._most_texts or characters > self._most_characters):
            raise ExhaustedError(
                f"{len(self._stops)} prompts with {self._characters} characters wait to be tokenized, and "
                f"{self._most_texts} with {self._most_characters} are the limit; send the prompt again later, or send "
                "token_ids"
            )
        stop = threading.Event()
        self._stops.add(stop)
        self._characters += len(text)
        threads = self._short if len(text) <= _SHORT_CHARACTERS else self._long
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, codec.encode, text, most, stop)
        except Stopped:
            self._refuse_closed()
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # it was not the caller: the text still waited when we closed
                self._refuse_closed()
            raise
        finally:
            stop.set()
            self._stops.discard(stop)
            self._characters -= len(text)

    def close(self) -> None:
        """Refuses and stops what waits or runs; a text that is being tokenized is not waited for."""
        self._closed = True
        for stop in self._stops:
            stop.set()
        for threads in (self._short, self._long):
            threads.shutdown(wait=False, cancel_futures=True)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UnavailableError("the daemon is ending; send the request again when it is back")
