"""The daemon under attack and its clients, and checks that a judge can make with them."""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from benchmarks.checks.attacks import people
from benchmarks.checks.attacks.people import ALICE, BOB, Person
from benchmarks.checks.attacks.tenant_client import Bystander, Sample
from benchmarks.checks.tenancy.house import House
from benchmarks.common.harness import free_port, wait_until
from benchmarks.common.process_footprint import status_bytes
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client, ClientError, Finished, NamespaceSpec, PartSpec, Sampling, Tokens
from prefixd.v1 import admin_pb2

PLAIN: Mapping[str, object] = {
    "worker.embedded": True,
    "worker.threads": 1,
    "gpu.device": "cpu",
    "gpu.bytes": "64MiB",
    "cpu.bytes": "64MiB",
    "disk.bytes": "256MiB",
    "scheduler.queue_limit": 256,
}
"""Settings of the daemon, unless a scenario has others."""
TOKENS_OF_EACH = 4
"""Tokens of each person for TCP, all of the same tenant."""

_PROGRAM = ("-m", "benchmarks.common.limited", "descriptors", "-m", "prefixd.cli.tethered")
_CALL_S = 30.0
_RESTARTED_S = 120.0
_DRAINED_S = 90.0
_POLL_S = 0.05
_MEMORY_LOOK_S = 0.05
_NEWCOMER_BLOCKS = 4
_TOKENS = 16


class Scene:
    """A running daemon with two bystanders. A context manager.

    Args:
        settings: returns the settings of the daemon that differ from `PLAIN`; may make files in the folder.
    """

    def __init__(self, settings: Callable[[Path], Mapping[str, object]]) -> None:
        self._stack = ExitStack()
        self._numbers = itertools.count(1)
        self._settings = settings
        self.metrics_port = free_port()
        self.daemon: DaemonProcess
        self.bystanders: list[Bystander] = []

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _start(self) -> None:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="prefixd-hostile-")))
        folder.chmod(0o711)  # users need it to reach the socket, where the daemon checks them
        self._house = House(folder, people.QUOTAS, free_port(), tokens=TOKENS_OF_EACH)
        metrics = {"server.metrics": f"127.0.0.1:{self.metrics_port}"}
        settings = {**PLAIN, **self._house.settings, **people.users(), **metrics, **self._settings(folder)}
        self.daemon = DaemonProcess(settings, directory=folder / "d", program=_PROGRAM)
        self._stack.callback(self.daemon.kill)  # a stop would write blocks back first
        self.daemon.start()
        for person, address, memory in ((ALICE, self.tcp, "streamed"), (BOB, self.daemon.address, "shared")):
            self.bystanders.append(self._stack.enter_context(Bystander(person, address, self.token(person), memory)))
        for bystander in self.bystanders:
            bystander.look()

    @property
    def tcp(self) -> str:
        """host:port of the daemon."""
        assert self.daemon.tcp is not None
        return self.daemon.tcp

    def next(self) -> int:
        """Returns a number that no name or prompt has used."""
        return next(self._numbers)

    def client(self, person: Person = ALICE, timeout_s: float = _CALL_S) -> Client:
        return Client(self.tcp, name=person.name, token=self.token(person), memory="streamed", timeout_s=timeout_s)

    def token(self, person: Person, number: int = 0) -> str:
        """Returns one of a person's `TOKENS_OF_EACH` tokens for TCP."""
        return self._house.token(person.name, number=number)

    def evict(self, person: Person) -> int:
        """Evicts all blocks of a tenant, as an operator; returns the number of blocks that are still there."""
        with self.operator() as operator:
            for namespace in operator.stats().namespaces:
                if namespace.tenant == person.name and namespace.blocks:
                    operator.evict(namespace_id=namespace.namespace_id)
            return sum(each.blocks for each in operator.stats().namespaces if each.tenant == person.name)

    def operator(self) -> Client:
        """Returns a client of the operator: the daemon's user, at the unix socket."""
        return Client(self.daemon.address, name="operator", memory="streamed", timeout_s=60.0)

    def stats(self) -> admin_pb2.StatsResponse:
        with self.operator() as operator:
            return operator.stats()

    def served(self) -> admin_pb2.NamespaceStats:
        """Returns the namespace of the daemon's model with Alice's prompts, as an operator sees it."""
        stats = self.stats()
        name = stats.models[0].namespace
        return next(
            each for each in stats.namespaces if each.namespace.name == name and each.tenant in (ALICE.name, "")
        )

    def newcomer(self) -> list[str]:
        """Does all that clients do, as a new honest client; returns the faults, one line each."""
        number = self.next()
        tokens, content = fresh_prompt(number), fresh_bytes(number)
        try:
            with self.client() as client:
                cache = client.register(NamespaceSpec(f"new-model-{number}", _TOKENS, (PartSpec("full", 0, 8192),)))
                stored = cache.store(tokens, content)
                got = np.zeros_like(content)
                if stored.dropped or cache.load(tokens, got) < _NEWCOMER_BLOCKS:
                    return ["a new client of another tenant cannot store 32 KiB"]
                if not np.array_equal(got, content):
                    return ["a new client of another tenant reads wrong bytes"]
                ask(client, tokens % 256, salt=b"%d" % number)
        except ClientError as error:
            return [f"a new client of another tenant is shut out: {type(error).__name__}: {error}"[:300]]
        return []

    def pause(self) -> None:
        """Makes the bystanders begin no more calls, and waits until their calls have ended."""
        self._order_all("pause")
        self.wait_until_drained()

    def restart(self) -> None:
        """Restarts the daemon, whose bystanders must be paused; returns when its model answers."""
        self.daemon.restart()
        with self.client(timeout_s=_RESTARTED_S) as client:
            ask(client, [1], timeout_s=_RESTARTED_S)

    def resume(self) -> None:
        self._order_all("go")

    def wait_until_drained(self, before_s: float = float("inf")) -> bool:
        """Waits until the bystanders' calls that began before `before_s` have ended; returns False if some have not."""

        def drained() -> bool:
            return min(bystander.look() for bystander in self.bystanders) >= before_s

        return wait_until(drained, _DRAINED_S, _POLL_S)

    def take_samples(self) -> tuple[list[Sample], list[str]]:
        """Returns the bystanders' calls that ended since the last time, and their failures."""
        samples: list[Sample] = []
        failures: list[str] = []
        for bystander in self.bystanders:
            bystander.look()
            samples += bystander.samples
            failures += [failure.what for failure in bystander.failures]
            bystander.samples, bystander.failures = [], []
        return samples, failures

    def _order_all(self, order: str) -> None:
        for bystander in self.bystanders:
            bystander.look(order)


def fresh_prompt(number: int, blocks: int = _NEWCOMER_BLOCKS) -> Any:
    """Returns token ids that no other prompt has, by number."""
    return np.random.default_rng([77, number]).integers(0, 1 << 32, blocks * _TOKENS, dtype=np.uint32)


def fresh_bytes(number: int, blocks: int = _NEWCOMER_BLOCKS, block_bytes: int = 8192) -> Any:
    """Returns the bytes to store for the prompt of this number."""
    return np.random.default_rng([78, number]).integers(0, 256, blocks * block_bytes, dtype=np.uint8)


def ask(client: Client, prompt: Any, max_tokens: int = 4, **how: Any) -> tuple[list[int], Finished]:
    """Sends a greedy request; returns the tokens of its answer, and its last event."""
    got: list[int] = []
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    for event in client.generate(prompt, sampling=sampling, **{"timeout_s": _CALL_S, **how}):
        if isinstance(event, Tokens):
            got += event.token_ids
        elif isinstance(event, Finished):
            return got, event
    raise ClientError("the answer ended without its last event")


class Memory:
    """Measures by how much the private memory of a daemon and its worker grows inside the context, at most."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ended = threading.Event()
        self._begin = self._read_bytes()
        self._most = self._begin
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def grown_bytes(self) -> int:
        return self._most - self._begin

    def _watch(self) -> None:
        while not self._ended.wait(_MEMORY_LOOK_S):
            self._most = max(self._most, self._read_bytes())

    def _read_bytes(self) -> int:
        total = 0
        for pid in (self._pid, *_children(self._pid)):
            with suppress(OSError, KeyError):
                total += status_bytes(pid)["RssAnon"]
        return total


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []
