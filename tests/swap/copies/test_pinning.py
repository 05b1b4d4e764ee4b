"""Host memory that is registered with CUDA in the background, and the copies of it meanwhile."""

from __future__ import annotations

import asyncio
import mmap
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixd_swap.copies import pinning
from prefixd_swap.copies.copy_engine import CudaCopyEngine
from prefixd_swap.copies.pinning import HostPin, pieces
from prefixd_swap.errors import DeviceError, OutOfMemoryError
from prefixd_swap.spans import Span
from prefixd_swap.vmem import VirtualMemory
from prefixd_swap.vmem.backends import linux
from prefixd_swap.vmem.backends.cuda_driver import open_device, register_host, unregister_host

SLICE = 1 << 20
BYTES = 5 * SLICE // 2  # two slices and a half


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pinning, "_SLICE_BYTES", SLICE)
    yield
    assert not pinning._borders, "nothing is cut any more once no memory is registered"


@pytest.fixture
def shared() -> np.ndarray[Any, Any]:
    return np.frombuffer(mmap.mmap(-1, BYTES), np.uint8)


def test_a_copy_is_cut_at_the_borders_of_slices() -> None:
    pinning._add_borders([1000, 2000, 2500])
    pinning._add_borders([2500, 3000])
    assert pieces(0, 900) == [(0, 900)] and pieces(1000, 1000) == [(0, 1000)]
    assert pieces(900, 2200) == [(0, 100), (100, 1000), (1100, 500), (1600, 500), (2100, 100)]
    pinning._remove_borders([1000, 2000, 2500])
    assert pieces(900, 2200) == [(0, 1600), (1600, 500), (2100, 100)]
    pinning._remove_borders([2500, 3000])
    assert pieces(900, 2200) == [(0, 2200)]


def test_without_a_thread_nothing_is_pinned_and_said_once(shared: np.ndarray[Any, Any], no_more_threads: Any) -> None:
    said: list[str] = []
    limit: AbstractContextManager[Any] = no_more_threads()
    with limit:
        pin = HostPin(shared.ctypes.data, BYTES, 0, said.append)
    assert len(said) == 1 and said[0].startswith(f"0 of {BYTES} bytes are pinned")
    pin.close()


@pytest.mark.parametrize(("system", "asked"), [("always within_size [advise] never", True), ("[never] advise", False)])
def test_huge_pages_are_asked_for_where_the_system_gives_them_to_who_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, asked: bool
) -> None:
    setting = tmp_path / "shmem_enabled"
    setting.write_text(system)
    monkeypatch.setattr(linux, "_SHMEM_ENABLED", setting)
    mapped = mmap.mmap(-1, 4 << 20, mmap.MAP_SHARED)
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    linux.advise_huge_pages(address, 4 << 20)
    assert ("hg" in _flags(address)) == asked
    monkeypatch.setattr(linux, "_SHMEM_ENABLED", tmp_path / "no such file")
    linux.advise_huge_pages(address, 4 << 20)


def _flags(address: int) -> list[str]:
    """What the kernel knows of the mapping that begins at `address`."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            start, _, end = line.split()[0].partition("-")
            here = int(start, 16) <= address < int(end, 16)
        elif here and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("not mapped")


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
class TestOnCuda:
    @pytest.fixture
    def gate(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
        """Registering the second slice sets the first event and waits for the other."""
        reached, go_on = threading.Event(), threading.Event()
        count = 0

        def register(*arguments: int) -> None:
            nonlocal count
            count += 1
            if count == 2:
                reached.set()
                assert go_on.wait(60)
            register_host(*arguments)

        monkeypatch.setattr(pinning, "register_host", register)
        yield reached, go_on
        go_on.set()

    @pytest.fixture
    def engine(self, memory: VirtualMemory) -> Iterator[CudaCopyEngine]:
        made = CudaCopyEngine(0, threads=1)
        yield made
        made.close()

    def test_copies_go_on_while_it_is_registered(
        self,
        memory: VirtualMemory,
        engine: CudaCopyEngine,
        shared: np.ndarray[Any, Any],
        gate: tuple[threading.Event, threading.Event],
    ) -> None:
        """One copy of all of it, which the driver refuses in one piece while a part of it is registered."""
        reached, go_on = gate
        said: list[str] = []
        chunks = -(-BYTES // memory.chunk_bytes)
        mapped = memory.reserve(chunks * memory.chunk_bytes)
        mapped.map(0, memory.create(chunks))
        pin = HostPin(shared.ctypes.data, BYTES, 0, said.append)
        assert reached.wait(60) and pin.pinned_bytes == SLICE
        host, device = Span(shared.ctypes.data, BYTES), mapped.span(0, BYTES)
        for turn, wait in enumerate([lambda: None, lambda: (go_on.set(), _until_pinned(pin)), pin.close]):
            wait()
            shared[:] = np.random.default_rng(turn).integers(0, 256, BYTES, np.uint8)
            wanted = shared.copy()
            asyncio.run(engine.copy([(device, host)]))
            shared[:] = 0
            asyncio.run(engine.copy([(host, device)]))
            assert np.array_equal(shared, wanted)
        assert not said

    def test_closing_waits_for_the_slice_under_way_and_undoes_all(
        self, shared: np.ndarray[Any, Any], gate: tuple[threading.Event, threading.Event], memory: VirtualMemory
    ) -> None:
        reached, go_on = gate
        pin = HostPin(shared.ctypes.data, BYTES, 0, pytest.fail)
        assert reached.wait(60)
        closing = threading.Thread(target=pin.close)
        closing.start()
        pin._stopping.wait(60)
        go_on.set()
        closing.join(60)
        assert not closing.is_alive() and pin.pinned_bytes == 0
        register_host(shared.ctypes.data, BYTES)  # refused if a slice still was
        unregister_host(shared.ctypes.data)
        pin.close()

    def test_what_cannot_be_locked_is_said_once_and_copied_all_the_same(
        self,
        memory: VirtualMemory,
        engine: CudaCopyEngine,
        shared: np.ndarray[Any, Any],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        said: list[str] = []
        told = threading.Event()

        def refuse(address: int, nbytes: int, ordinal: int) -> None:
            if address != shared.ctypes.data:
                raise OutOfMemoryError("RLIMIT_MEMLOCK is reached")
            register_host(address, nbytes, ordinal)

        monkeypatch.setattr(pinning, "register_host", refuse)
        pin = HostPin(shared.ctypes.data, BYTES, 0, lambda line: (said.append(line), told.set())[0])
        assert told.wait(60)
        assert len(said) == 1 and said[0].startswith(f"{SLICE} of {BYTES} bytes are pinned") and "MEMLOCK" in said[0]
        mapped = memory.reserve(2 * memory.chunk_bytes)
        mapped.map(0, memory.create(2))
        shared[:] = 7
        asyncio.run(engine.copy([(mapped.span(0, BYTES), Span(shared.ctypes.data, BYTES))]))
        view = np.zeros(BYTES, np.uint8)
        asyncio.run(engine.copy([(Span(view.ctypes.data, BYTES), mapped.span(0, BYTES))]))
        assert (view == 7).all()
        pin.close()
        with pytest.raises(DeviceError, match="NOT_REGISTERED"):
            unregister_host(shared.ctypes.data)
        open_device(0).call("cuMemGetInfo")


def _until_pinned(pin: HostPin) -> None:
    assert pin._thread is not None
    pin._thread.submit(lambda: None).result(60)  # behind the registration
    assert pin.pinned_bytes == pin.nbytes
