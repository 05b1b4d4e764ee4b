"""Client processes that report every call with its times: these decide whether a fault may make the call fail.

`python -m benchmarks.checks.fault_injection.fault_load OPTIONS` is one client: it stores, loads and matches prompts
until its stdin ends, and writes one line of JSON for each call. A harness uses `FaultLoad`, which starts several and
collects what they say. What one client has stored the others load and verify too.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Literal, Self, TextIO

import numpy as np

from benchmarks.common.block_bytes import wrong_bytes
from benchmarks.load.world import NAMESPACES, Prompt, content, right_bytes
from prefixd.client import Cache, Client, ClientError

Kind = Literal["store", "durable", "load", "match"]
MIX: dict[Kind, int] = {"store": 4, "durable": 3, "load": 6, "match": 1}
"""How often each kind of call is made, of their sum."""

_RECENT = 32
_FIRST_OWNER = 1
_ENDING_S = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One call of one client. Times are of `time.monotonic`, which is one clock for a machine's processes."""

    kind: Kind
    prompt: Prompt
    begin_s: float
    end_s: float
    blocks: int = 0
    """Blocks stored or already there, loaded, or matched."""
    wrong_bytes: int = 0
    """Of the blocks loaded."""
    error: str = ""
    """Class of the error that the call ended with; empty when it succeeded."""
    message: str = ""


def load(cache: Cache, prompt: Prompt) -> tuple[int, int]:
    """Loads a prompt and compares: blocks that came, and bytes of them that are wrong. Raises `ClientError`."""
    got = np.zeros_like(content(prompt))
    blocks = cache.load(prompt.tokens, got)
    read = got[: blocks * prompt.spec.block_bytes]
    return blocks, wrong_bytes(read, right_bytes(prompt, read))


class FaultLoad:
    """`clients` processes that call the daemon at `address` until the context is left.

    The next prompt to store is always a new one; prompts to load are chosen from those of all clients so far. A call
    that fails is an outcome like any other, and the client goes on.
    """

    def __init__(
        self,
        address: str,
        *,
        clients: int = 2,
        pause_s: float = 0.0,
        timeout_s: float = 30.0,
        seed: int = 0,
    ) -> None:
        """`pause_s` between two calls of a client; `timeout_s` of one call."""
        self._options = {
            "address": address,
            "clients": clients,
            "pause_s": pause_s,
            "timeout_s": timeout_s,
            "seed": seed,
        }
        self._clients = clients
        self._processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        self._news = threading.Condition()
        self._outcomes: list[Outcome] = []
        self._running = 0

    def __enter__(self) -> Self:
        for client in range(self._clients):
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.checks.fault_injection.fault_load",
                    json.dumps({**self._options, "client": client}),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._processes.append(process)
            reader = threading.Thread(target=self._read, args=(process.stdout,), name=f"client-{client}", daemon=True)
            self._running += 1
            reader.start()
            self._readers.append(reader)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def outcomes(self) -> list[Outcome]:
        """Every call so far, in the order in which they ended."""
        with self._news:
            return list(self._outcomes)

    def all_served(self, outcomes: Sequence[Outcome]) -> bool:
        """Whether each client has stored something: from then on it has its connection, and the daemon's memory."""
        stored = {one.prompt.owner for one in outcomes if one.kind in ("store", "durable") and not one.error}
        return len(stored) == self._clients

    def wait(self, enough: Callable[[Sequence[Outcome]], bool], timeout_s: float) -> bool:
        """Waits until `enough` says so of the outcomes so far; False when it does not in time, or the clients end."""
        deadline = time.monotonic() + timeout_s
        with self._news:
            while not (done := enough(self._outcomes)) and self._running and (left := deadline - time.monotonic()) > 0:
                self._news.wait(left)
            return done

    def stop(self) -> None:
        """Has the clients finish their calls and ends them.

        Raises RuntimeError: a client ended otherwise than by being told to; its traceback is on stderr.
        """
        processes, self._processes = self._processes, []
        for process in processes:
            if process.stdin is not None:
                process.stdin.close()
        codes = []
        for process in processes:
            try:
                codes.append(process.wait(_ENDING_S))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(process.wait())
        for reader in self._readers:
            reader.join()
        for process in processes:
            if process.stdout is not None:
                process.stdout.close()
        if any(codes):
            raise RuntimeError(f"clients of the load ended with status {codes}")

    def _read(self, lines: TextIO) -> None:
        for line in lines:
            with self._news:
                said = json.loads(line)
                self._outcomes.append(Outcome(**{**said, "prompt": Prompt(**said["prompt"])}))
                self._news.notify_all()
        with self._news:
            self._running -= 1
            self._news.notify_all()


class _Told(threading.Event):
    """Set when the harness closes our stdin, or has died."""

    def __init__(self) -> None:
        super().__init__()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        sys.stdin.read()
        self.set()


def _run(options: dict[str, Any]) -> None:
    me, clients = options["client"], options["clients"]
    choices = random.Random(f"{options['seed']} {me}")
    kinds = [kind for kind, weight in MIX.items() for _ in range(weight)]
    ended = _Told()
    stored = 0
    with Client(options["address"], name=f"load {me}", timeout_s=options["timeout_s"]) as client:
        caches: dict[int, Cache] = {}
        while not ended.is_set():
            kind: Kind = choices.choice(kinds) if stored else "store"
            if kind in ("store", "durable"):
                owner, number, stored = me, stored, stored + 1
            else:
                # The others are about as far as we are; half of the time something recent, that is still in memory.
                depth = min(stored, _RECENT) if choices.random() < 0.5 else stored
                owner, number = choices.randrange(clients), stored - 1 - choices.randrange(depth)
            prompt = Prompt(number % len(NAMESPACES), _FIRST_OWNER + owner, number)
            begin = time.monotonic()
            blocks = wrong = 0
            error = message = ""
            try:
                cache = caches.get(prompt.namespace)
                if cache is None:
                    cache = caches[prompt.namespace] = client.register(prompt.spec)
                if kind == "load":
                    blocks, wrong = load(cache, prompt)
                elif kind == "match":
                    blocks = cache.match(prompt.tokens).blocks
                else:
                    result = cache.store(prompt.whole, content(prompt), durable=kind == "durable")
                    blocks = result.committed + result.duplicates
            except ClientError as failure:
                error, message = type(failure).__name__, str(failure)
            outcome = Outcome(kind, prompt, begin, time.monotonic(), blocks, wrong, error, message)
            print(json.dumps(asdict(outcome)), flush=True)
            ended.wait(options["pause_s"])


if __name__ == "__main__":
    _run(json.loads(sys.argv[1]))
