"""Loads and saves of an engine whose KV cache is in GPU memory: streams, fences, and the arena registered with CUDA.

Runs on a GPU, on torch's tensors, and against the stand-in driver (`tests/swap/test_cuda_stand_in.py`) where there is
none, whose copies run late on purpose.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.integrations.engine.copying.cuda_device import fence_of, page_copies_of
from prefixd.integrations.engine.geometry import Geometry, Group
from prefixd_swap import PageCopies, create_copy_engine, create_memory, register_host, unregister_host
from prefixd_swap.copies import pinning
from prefixd_swap.errors import DeviceError
from prefixd_swap.vmem.backends.cuda_driver import open_device
from tests.integrations.engine.conftest import LAYERS, LOG, PAGES, MakeRank, Rank
from tests.waiting import wait_until

STAND_IN = "PREFIXD_TEST_STAND_IN" in os.environ
PAGE_BYTES = 32 << 10
NBYTES = LAYERS * PAGES * PAGE_BYTES
SHAPE = (LAYERS, PAGES, PAGE_BYTES)
FIRST = 200  # what the stream is busy with before it comes to what a test waits for

Bytes = npt.NDArray[np.uint8]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not STAND_IN and not torch.cuda.is_available(), reason="no CUDA GPU on this machine"),
]


def noise(seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, SHAPE, np.uint8)


class TorchPages:
    """vLLM's KV cache as torch allocates it, and the stream that the model computes in."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(SHAPE, dtype=torch.uint8, device="cuda")
        self.address = self.tensor.data_ptr()
        self._stream = torch.cuda.Stream()
        self.stream = self._stream.cuda_stream
        torch.cuda.synchronize()

    def compute(self, values: Bytes) -> None:
        """Submits a long kernel and then one that fills the pages; returns before they have run."""
        ready = torch.from_numpy(values).cuda()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(200_000_000)
            self.tensor.copy_(ready)
            ready.record_stream(self._stream)

    def keep(self) -> Callable[[], Bytes]:
        """Submits a kernel that reads the pages; what it read can be seen once the stream has been waited for."""
        with torch.cuda.stream(self._stream):
            copy = self.tensor.clone()
        return lambda: copy.cpu().numpy()

    def read(self) -> Bytes:
        torch.cuda.synchronize()
        return self.tensor.cpu().numpy()

    def close(self) -> None:
        torch.cuda.synchronize()


class StandInPages:
    """The same on memory of the stand-in, which a process can read; its copies stand for kernels."""

    def __init__(self) -> None:
        self._memory = create_memory("cuda")
        chunks = -(-NBYTES // self._memory.chunk_bytes)
        self._range = self._memory.reserve(chunks * self._memory.chunk_bytes)
        self._range.map(0, self._memory.create(chunks))
        self.address = self._range.span(0, NBYTES).address
        self._cuda = open_device(0)
        self.stream = int(self._cuda.call("cuStreamCreate", 1))
        self._kept: list[Bytes] = []

    def compute(self, values: Bytes) -> None:
        source = values.copy()
        self._kept.append(source)
        for _ in range(FIRST):
            self._cuda.call("cuMemcpyHtoDAsync", self.address, source.ctypes.data, 1, self.stream)
        self._cuda.call("cuMemcpyHtoDAsync", self.address, source.ctypes.data, NBYTES, self.stream)

    def keep(self) -> Callable[[], Bytes]:
        copy = np.empty(SHAPE, np.uint8)
        self._cuda.call("cuMemcpyDtoHAsync", copy.ctypes.data, self.address, NBYTES, self.stream)
        return lambda: copy

    def read(self) -> Bytes:
        self._cuda.call("cuStreamSynchronize", self.stream)
        view = (ctypes.c_uint8 * NBYTES).from_address(self.address)
        return np.frombuffer(view, np.uint8).reshape(SHAPE).copy()

    def close(self) -> None:
        self._cuda.call("cuStreamSynchronize", self.stream)
        self._range.unmap(0, self._range.nbytes)
        self._range.close()
        self._memory.close()


@pytest.fixture
def pages() -> Iterator[Any]:
    made = StandInPages() if STAND_IN else TorchPages()
    yield made
    made.close()


@pytest.fixture(params=["in batches", "page by page"])
def rank(request: pytest.FixtureRequest, own_daemon: DaemonProcess, pages: Any, make_rank: MakeRank) -> Iterator[Rank]:
    made = make_rank(
        own_daemon.address,
        engine=create_copy_engine("cuda:0", threads=1),
        memory=[None],
        addresses=[pages.address],
        ordinal=0,
        page_bytes=PAGE_BYTES,
        page_copies=PageCopies(0) if request.param == "in batches" else None,
    )
    yield made
    made.close()  # before its pages go


def registered(arena: Any) -> bool:
    """Whether CUDA knows the arena: it refuses to register it twice."""
    try:
        register_host(arena.address, arena.nbytes)
    except DeviceError:
        return True
    unregister_host(arena.address)
    return False


def pinned_bytes(rank: Rank) -> int:
    pin = rank.transfers._pin
    return 0 if pin is None or pin._pin is None else pin._pin.pinned_bytes


def save(rank: Rank, pages: Any, seed: int, first: int) -> Any:
    """Saves two blocks, eight pages from `first` on, that the model is computing at this moment."""
    prefix = rank.prefix("cuda", 32, seed)
    pages.compute(noise(seed))
    rank.save(prefix, range(first, first + 8), fence=fence_of(0, pages.stream))
    return prefix


def test_a_save_waits_for_the_step_that_computes_the_pages(rank: Rank, pages: Any) -> None:
    """Queued as vLLM's connector does, with the step submitted and not computed: what the step wrote is stored."""
    for seed in range(1, 4):
        prefix = save(rank, pages, seed, 1)
        assert rank.settle().saves and rank.counters.take()["saved_blocks"] == 2
        rank.load("r", prefix, range(20, 28))
        assert rank.settle().loads["r"][1].failed_blocks == 0
        there = pages.read()
        assert np.array_equal(there[:, 20:28], noise(seed)[:, 1:9])
        assert np.array_equal(there[:, 1:9], noise(seed)[:, 1:9])


def test_a_load_beside_a_step_disturbs_neither(rank: Rank, pages: Any) -> None:
    """The step writes all pages and then the load some of them: as in vLLM, whose steps leave a load's pages alone."""
    prefix = save(rank, pages, 1, 1)
    rank.settle()
    for seed in range(2, 5):
        pages.compute(noise(seed))
        rank.save(rank.prefix("cuda", 32, seed), range(9, 17), fence=fence_of(0, pages.stream))
        rank.load("beside", prefix, range(20, 28))
        assert rank.settle().loads["beside"][1].failed_blocks == 0
        pages.read()
        rank.load("after", prefix, range(20, 28))
        rank.load("saved", rank.prefix("cuda", 32, seed), range(1, 9))
        outcomes = rank.settle().loads
        assert [outcomes[name][1].failed_blocks for name in ("after", "saved")] == [0, 0]
        there = pages.read()
        assert np.array_equal(there[:, 20:28], noise(1)[:, 1:9])
        assert np.array_equal(there[:, 1:9], noise(seed)[:, 9:17])


def test_a_load_waits_for_a_step_that_still_reads_the_pages(rank: Rank, pages: Any) -> None:
    """Its blocks were another request's, whose last step is submitted and not computed."""
    prefix = save(rank, pages, 1, 1)
    rank.settle()
    pages.compute(noise(2))
    seen = pages.keep()
    rank.load("r", prefix, range(20, 28), fence=fence_of(0, pages.stream))
    assert rank.settle().loads["r"][1].failed_blocks == 0
    there = pages.read()
    assert np.array_equal(there[:, 20:28], noise(1)[:, 1:9])
    assert np.array_equal(seen(), noise(2)), "the step read what was there before the load"


def test_a_load_by_layers_brings_every_layer(rank: Rank, pages: Any) -> None:
    """In batches, the model's stream waits for a layer that is still on its way, and the host does not."""
    prefix = save(rank, pages, 1, 1)
    rank.settle()
    rank.load("r", prefix, range(20, 28), waits=True, fence=fence_of(0, pages.stream))
    for layer in range(LAYERS):
        rank.transfers.wait_for_layer(layer, pages.stream)
        assert np.array_equal(pages.read()[layer, 20:28], noise(1)[layer, 1:9])
    rank.transfers.wait_for_loads_of_step()
    assert rank.settle().loads["r"][1].failed_blocks == 0


def test_engines_whose_layers_and_whose_blocks_are_outermost_share_prefixes(
    own_daemon: DaemonProcess, pages: Any, make_rank: MakeRank
) -> None:
    """As vLLM with and without `cross_layer_blocks`: through the kernel, and by strided copies of single blocks."""
    ranks = [
        make_rank(
            own_daemon.address,
            engine=create_copy_engine("cuda:0", threads=1),
            memory=[None],
            addresses=[pages.address],
            ordinal=0,
            page_bytes=PAGE_BYTES,
            page_copies=PageCopies(0, row_bytes=row_bytes, call_bytes=1),
            blocks_outermost=row_bytes is not None,
        )
        for row_bytes in (None, PAGE_BYTES)
    ]
    layers_outermost, together = ranks
    prefix = save(layers_outermost, pages, 1, 1)
    layers_outermost.settle()
    together.load("r", prefix, range(20, 28))
    assert together.settle().loads["r"][1].failed_blocks == 0
    blocks = pages.read().reshape(PAGES, LAYERS, PAGE_BYTES)
    assert np.array_equal(blocks[20:28].transpose(1, 0, 2), noise(1)[:, 1:9])
    other = together.prefix("cuda", 32, 9)
    together.save(other, range(20, 28))
    together.settle()
    layers_outermost.load("r", other, range(8, 16))
    assert layers_outermost.settle().loads["r"][1].failed_blocks == 0
    assert np.array_equal(pages.read()[:, 8:16], noise(1)[:, 1:9])
    for rank in ranks:
        rank.close()  # before the pages go


def test_without_room_for_the_buffers_blocks_are_copied_page_by_page(caplog: pytest.LogCaptureFixture) -> None:
    def geometry(part_bytes: int) -> Geometry:
        return Geometry((Group(0, 4, part_bytes),), block_tokens=16, unit_tokens=4, ranks=1, layout="test")

    copies = page_copies_of(0, geometry(4 << 20), LOG)
    assert copies is not None and not caplog.records
    copies.close()
    assert page_copies_of(0, geometry(1 << 50), LOG) is None
    assert len(caplog.records) == 1 and "page by page" in caplog.text
    assert page_copies_of(None, geometry(4 << 20), LOG) is None and len(caplog.records) == 1


def test_the_arena_is_registered_and_after_a_restart_the_new_one(
    rank: Rank, pages: Any, own_daemon: DaemonProcess
) -> None:
    wait_until(lambda: pinned_bytes(rank) == 64 << 20)
    first = rank.link.arena
    assert first is not None and registered(first)
    own_daemon.restart()
    prefix = save(rank, pages, 1, 1)
    rank.settle()
    assert rank.counters.take()["saved_blocks"] == 2
    second = rank.link.arena
    assert second is not None and second is not first
    wait_until(lambda: pinned_bytes(rank) == 64 << 20)
    assert registered(second)
    rank.load("r", prefix, range(20, 28))
    assert rank.settle().loads["r"][1].failed_blocks == 0
    assert np.array_equal(pages.read()[:, 20:28], noise(1)[:, 1:9])
    with pytest.raises(DeviceError):
        unregister_host(first.address)
    address = second.address
    rank.close()
    with pytest.raises(DeviceError):
        unregister_host(address)


def test_an_arena_that_cannot_be_registered_is_copied_all_the_same(
    rank: Rank, pages: Any, own_daemon: DaemonProcess, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until(lambda: pinned_bytes(rank) == 64 << 20)

    def refuse(*args: Any) -> None:
        raise DeviceError("as much as this cannot be locked")

    monkeypatch.setattr(pinning, "register_host", refuse)
    own_daemon.restart()
    prefix = save(rank, pages, 1, 1)
    rank.load("r", prefix, range(20, 28))
    rank.settle()
    assert sum("could not be pinned" in record.getMessage() for record in caplog.records) == 1
    rank.load("r", prefix, range(20, 28))
    assert rank.settle().loads["r"][1].failed_blocks == 0
    assert np.array_equal(pages.read()[:, 20:28], noise(1)[:, 1:9])
