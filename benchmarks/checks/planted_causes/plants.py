"""Plants: requests that are late for a known reason, and what `why` says of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from prefixd.client import Client, Sampling, Tokens
from prefixd.v1 import admin_pb2

PROMPT_TOKENS = 72
"""Four whole blocks of 16 tokens, and some behind them."""
BLOCKS = 4
_VOCABULARY = 256

Check = Callable[[admin_pb2.RequestInfo], bool]


@dataclass(frozen=True, slots=True)
class Plant:
    """One plant, after its request has ended.

    Attributes:
        kind: the cause that was planted.
        cause, sentence: what `why` says.
        named: whether that is right, with its details.
    """

    kind: str
    cause: str
    sentence: str
    named: bool


class Plants:
    """Makes prompts, sends plants and keeps what `why` said of each.

    Args:
        seed: of the prompts.
    """

    def __init__(self, seed: int) -> None:
        self.done: list[Plant] = []
        self.rng = np.random.default_rng(seed)
        self._numbers = 0

    def prompt(self, tokens: int = PROMPT_TOKENS) -> list[int]:
        """Returns a new prompt."""
        ids: list[int] = self.rng.integers(0, _VOCABULARY, tokens).tolist()
        return ids

    def changed(self, prompt: list[int]) -> tuple[list[int], int]:
        """Returns a prompt with one other token, and its place in one of the whole blocks."""
        place = int(self.rng.integers(0, 16 * BLOCKS))
        other = (prompt[place] + 1 + int(self.rng.integers(0, _VOCABULARY - 1))) % _VOCABULARY
        return [*prompt[:place], other, *prompt[place + 1 :]], place

    def next_id(self) -> str:
        """Returns an id for a request."""
        self._numbers += 1
        return f"plant-{self._numbers}"

    def plant(
        self,
        client: Client,
        operator: Client,
        kind: str,
        prompt: list[int],
        check: Check = lambda info: True,
        *,
        salt: bytes = b"",
    ) -> None:
        """Sends a prompt, and asks why it took its time.

        Args:
            client: sends it.
            operator: asks.
            kind: the cause that was planted.
            prompt: the prompt.
            check: whether the answer has the details that were planted.
            salt: the prompt's.
        """
        identity = self.next_id()
        ask(client, prompt, identity, salt=salt)
        self.judge(operator, kind, identity, check)

    def judge(self, operator: Client, kind: str, identity: str, check: Check = lambda info: True) -> None:
        """Asks why a request that has ended took its time."""
        (info,) = operator.why(identity)
        self.done.append(Plant(kind, info.cause, info.sentence, info.cause == kind and check(info)))


def ask(client: Client, prompt: list[int], identity: str = "", *, salt: bytes = b"") -> None:
    """Sends a prompt and waits for its one token."""
    for _ in client.generate(prompt, sampling=Sampling(max_tokens=1), request_id=identity, salt=salt):
        pass


@contextmanager
def running(client: Client, prompt: list[int], tokens: int) -> Iterator[None]:
    """A context that begins when a request has its first token, and waits at its end for the request's last one."""
    began, sampling = threading.Event(), Sampling(max_tokens=tokens, ignore_eos=True)

    def run() -> None:
        try:
            for event in client.generate(prompt, sampling=sampling):
                if isinstance(event, Tokens):
                    began.set()
        finally:
            began.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        began.wait()
        yield
    finally:
        thread.join()
