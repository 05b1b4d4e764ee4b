"""What the connectors' tests share: a daemon, and one rank's transfers over memory that stands for an engine's."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from prefixd.base.rules.rules import SlidingWindow
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import MatchResult, Retention
from prefixd.integrations.engine.connector_counters import ConnectorCounters
from prefixd.integrations.engine.copying.block_transfers import Transfers
from prefixd.integrations.engine.copying.cuda_device import Fence, computed_already
from prefixd.integrations.engine.copying.group_pages import GroupPages, PageRun
from prefixd.integrations.engine.daemon_link import Link
from prefixd.integrations.engine.geometry import Geometry, Group
from prefixd.integrations.engine.jobs import LoadJob, Namespaced, Outcomes, SaveJob
from prefixd_swap import CopyEngine, PageCopies
from prefixd_swap.codecs.part_shape import PartShape
from prefixd_swap.copies.address_columns import Pair
from prefixd_swap.copies.copy_engine import HostCopyEngine
from tests.waiting import wait_until

DEADLINE_S = 60.0
PATIENT_S = 60.0  # a limit that no call to a daemon that runs reaches on a busy machine
LAYERS, PAGES, PAGE_BYTES = 3, 32, 96
LOG = logging.getLogger("an engine.prefixd")

Pages = npt.NDArray[np.uint8]


class GatedEngine(HostCopyEngine):
    """Stops in every copy, before it is made or after, until the test lets it go on."""

    def __init__(self, *, after: bool = False) -> None:
        super().__init__(1)
        self.reached = threading.Event()
        self.go = threading.Event()
        self.after = after

    async def copy(self, pairs: Sequence[Pair]) -> None:
        """Copies, and waits."""
        if self.after:
            await super().copy(pairs)
        self.reached.set()
        waiting = asyncio.ensure_future(asyncio.to_thread(self.go.wait, DEADLINE_S))
        try:
            assert await asyncio.shield(waiting)
        except asyncio.CancelledError:
            await waiting  # as a copy under way would
            raise
        if not self.after:
            await super().copy(pairs)


class Rank:
    """`Transfers` of one rank with memory of its own.

    Group 0 has a block of the engine every 4 tokens, group 1 every 8; a prefixd block has 16 tokens. `window_tokens`
    is the window of the last group, `replicated` has the groups of which all ranks have the same bytes;
    `blocks_outermost`: the layers of a block lie together. With `object_copies` parts are objects:
    `coded` has the shape of their numbers and their bytes.
    """

    def __init__(
        self,
        address: str,
        *,
        groups: int = 1,
        rank: int = 0,
        ranks: int = 1,
        engine: CopyEngine | None = None,
        timeout_s: float = PATIENT_S,
        waits_until_up: bool = True,
        memory: Sequence[Any] | None = None,
        addresses: Sequence[int] | None = None,
        ordinal: int | None = None,
        page_copies: PageCopies | None = None,
        page_bytes: int = PAGE_BYTES,
        by_block: bool | None = None,
        window_tokens: int | None = None,
        replicated: Sequence[int] = (),
        blocks_outermost: bool = False,
        object_copies: Any = None,
        coded: tuple[PartShape, int] | None = None,
    ) -> None:
        tokens = [4, 8][:groups]
        self.page_bytes = page_bytes
        rules = [None] * (groups - 1) + [None if window_tokens is None else SlidingWindow(window_tokens)]
        self.geometry = Geometry(
            tuple(
                Group(
                    index,
                    each,
                    16 // each * LAYERS * page_bytes if coded is None else coded[1],
                    rule,
                    index in replicated,
                    None if coded is None else coded[0],
                )
                for index, (each, rule) in enumerate(zip(tokens, rules, strict=True))
            ),
            block_tokens=16,
            unit_tokens=max(tokens),
            ranks=ranks,
            layout="test",
            by_block=groups == 1 if by_block is None else by_block,
        )
        self.memory: Any = memory or [np.zeros((LAYERS, PAGES, page_bytes), np.uint8) for _ in tokens]
        bases = addresses or [array.ctypes.data for array in self.memory]
        apart, stride = (page_bytes, LAYERS * page_bytes) if blocks_outermost else (PAGES * page_bytes, page_bytes)
        self.pages = [
            GroupPages(
                tuple((PageRun(base + layer * apart, stride, page_bytes),) for layer in range(LAYERS)),
                on_device=ordinal is not None,
            )
            for base in bases
        ]
        self.counters = ConnectorCounters()
        self.link = Link(address, "test", timeout_s, LOG)
        if waits_until_up:
            wait_until(lambda: self.link.up)
        self.transfers = Transfers(
            self.link,
            self.geometry,
            self.pages,
            rank,
            engine or HostCopyEngine(1),
            self.counters,
            ordinal,
            page_copies,
            object_copies,
        )
        self._saves = 0

    def ids(self, *of_groups: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        return tuple(map(tuple, of_groups))

    def prefix(self, name: str, tokens: int, seed: int = 0) -> Namespaced:
        ids = np.random.default_rng(seed).integers(0, 1000, tokens)
        return Namespaced(self.geometry.spec(name, b""), ids.astype("<u4").tobytes())

    def save(
        self,
        prefix: Namespaced,
        *ids: Sequence[int],
        first: int = 0,
        groups: Sequence[int] | None = None,
        fence: Fence = computed_already,
        retention: tuple[Retention, ...] = (),
    ) -> int:
        """Queues the save of a prefix's blocks from `first` on, of all groups or of some; its id."""
        self._saves += 1
        blocks = len(prefix.tokens) // 64 - first
        chosen = tuple(range(len(self.pages))) if groups is None else tuple(groups)
        job = SaveJob(self._saves, prefix, first, blocks, chosen, self.ids(*ids), retention)
        self.transfers.save([job], fence)
        return self._saves

    def load(
        self,
        name: str,
        prefix: Namespaced,
        *ids: Sequence[int],
        first: int = 0,
        waits: bool = False,
        fence: Fence = computed_already,
        found: MatchResult | None = None,
    ) -> None:
        blocks = len(prefix.tokens) // 64 - first
        self.transfers.load(LoadJob(name, prefix, first, blocks, self.ids(*ids), waits, found), fence)

    def settle(self) -> Outcomes:
        """What has ended, once nothing is under way."""
        transfers = self.transfers
        with transfers._changed:
            assert transfers._changed.wait_for(lambda: not (transfers._loading or transfers._saving), DEADLINE_S)
        return transfers.take_outcomes()

    def saved(
        self, prefix: Namespaced, *ids: Sequence[int], first: int = 0, groups: Sequence[int] | None = None
    ) -> dict[str, float]:
        """Saves, waits, and returns what was counted."""
        job = self.save(prefix, *ids, first=first, groups=groups)
        assert self.settle().saves == {job: 1}
        return self.counted()

    def counted(self) -> dict[str, float]:
        """What was counted since the last call; the saved bytes are in `saved_bytes`."""
        counts = self.counters.take()
        self.saved_bytes = counts.pop("saved_bytes", 0)
        return counts

    def close(self) -> None:
        self.transfers.close()


MakeRank = Callable[..., Rank]


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    """A daemon without a disk; shared by a module's tests, which use namespaces of their own."""
    with DaemonProcess({"cpu.bytes": "64MiB", "disk.bytes": 0}) as running:
        yield running


@pytest.fixture
def own_daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon that the test may kill, stop and start again."""
    with DaemonProcess({"cpu.bytes": "64MiB", "disk.bytes": 0}) as running:
        yield running


@pytest.fixture
def make_rank(request: pytest.FixtureRequest) -> Iterator[MakeRank]:
    made: list[Rank] = []

    def make(address: str, **how: Any) -> Rank:
        made.append(Rank(address, **how))
        return made[-1]

    yield make
    for rank in made:
        rank.close()


@pytest.fixture
def rank(daemon: DaemonProcess, make_rank: MakeRank) -> Rank:
    """One rank of a model with one group."""
    return make_rank(daemon.address)
