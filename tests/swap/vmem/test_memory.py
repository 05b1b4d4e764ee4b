from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prefixd_swap.errors import CreationStoppedError, DeviceError, IntegrityError, MemoryMisuseError, OutOfMemoryError
from prefixd_swap.vmem import VirtualMemory, VirtualRange, create_memory
from prefixd_swap.vmem.backends import host
from prefixd_swap.vmem.backends.cuda_driver import ck, open_device
from tests.swap.conftest import used_bytes

Settle = Callable[[], None]


def bytes_at(mapped: VirtualRange, chunk: int, count: int = 1) -> torch.Tensor:
    """`count` chunks of a range from its chunk number `chunk`, as bytes."""
    size = mapped.memory.chunk_bytes
    return mapped.tensor((count * size,), torch.uint8, offset=chunk * size)


def test_one_chunk_at_two_addresses_is_the_same_memory(memory: VirtualMemory, settle: Settle) -> None:
    size = memory.chunk_bytes
    chunks = memory.create(3)
    one, two = memory.reserve(4 * size), memory.reserve(8 * size)
    one.map(0, chunks)
    two.map(5 * size, [chunks[1]])
    assert one.base != two.base
    bytes_at(one, 1).fill_(42)
    assert bytes_at(two, 5).eq(42).all()
    settle()
    one.unmap(0, 3 * size)
    assert bytes_at(two, 5).eq(42).all(), "bytes live as long as the chunk, whoever unmaps it"


def test_a_chunk_can_be_mapped_twice_on_one_range(memory: VirtualMemory) -> None:
    (chunk,) = memory.create(1)
    mapped = memory.reserve(3 * memory.chunk_bytes)
    mapped.map(0, [chunk, chunk, chunk])
    bytes_at(mapped, 2).fill_(9)
    assert bytes_at(mapped, 0, 3).eq(9).all()


def test_remapping_shows_another_chunk_at_the_same_address(memory: VirtualMemory, settle: Settle) -> None:
    size = memory.chunk_bytes
    first, second = memory.create(2)
    mapped = memory.reserve(size)
    for chunk, value in ((first, 1), (second, 2)):
        mapped.map(0, [chunk])
        bytes_at(mapped, 0).fill_(value)
        settle()
        mapped.unmap(0, size)
    mapped.map(0, [first])
    assert bytes_at(mapped, 0).eq(1).all()


def test_a_view_may_be_made_before_anything_is_mapped(memory: VirtualMemory) -> None:
    size = memory.chunk_bytes
    mapped = memory.reserve(1024 * size)
    view = mapped.tensor((1024, size // 2), torch.bfloat16)
    assert view.data_ptr() == mapped.base and str(view.device) == memory.device
    mapped.map(1000 * size, memory.create(1))
    view[1000] = 1.5
    assert view[1000].float().sum().item() == 1.5 * size // 2


def test_strides_and_offset_of_a_view(memory: VirtualMemory) -> None:
    mapped = memory.reserve(memory.chunk_bytes)
    mapped.map(0, memory.create(1))
    bytes_at(mapped, 0).zero_()
    plain = mapped.tensor((4, 6), torch.int32)
    plain.copy_(torch.arange(24, dtype=torch.int32).view(4, 6))
    column_major = mapped.tensor((5, 4), torch.int32, strides=(1, 6), offset=4)
    assert torch.equal(column_major, plain[:, 1:].T)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda r, n: r.tensor((n + 1,), torch.int32), id="longer"),
        pytest.param(lambda r, n: r.tensor((n,), torch.int32, offset=4), id="shifted"),
        pytest.param(lambda r, n: r.tensor((2, 2), torch.int32, (n - 1, 1)), id="strided"),
        pytest.param(lambda r, n: r.tensor((4,), torch.int32, offset=2), id="unaligned"),
        pytest.param(lambda r, n: r.tensor((2,), torch.int32, (-1,), 8), id="backwards"),
        pytest.param(lambda r, n: r.tensor((4,), torch.int32, (1, 1)), id="two strides for one axis"),
    ],
)
def test_a_view_cannot_leave_its_range(
    memory: VirtualMemory, view: Callable[[VirtualRange, int], torch.Tensor]
) -> None:
    mapped = memory.reserve(memory.chunk_bytes)
    numbers = memory.chunk_bytes // 4
    assert mapped.tensor((2, 2), torch.int32, (numbers - 2, 1)).shape == (2, 2)
    with pytest.raises(MemoryMisuseError):
        view(mapped, numbers)


def _misuses() -> Iterator[tuple[str, Callable[[VirtualMemory, VirtualRange, range, int], object]]]:
    # Arguments: the memory, a range of four chunks with the first two mapped, all six chunks, the chunk's
    # size.
    yield "map over a mapped chunk", lambda m, r, c, n: r.map(n, [c[2], c[3]])
    yield "map at an unaligned offset", lambda m, r, c, n: r.map(2 * n + 512, [c[2]])
    yield "map past the end", lambda m, r, c, n: r.map(3 * n, [c[2], c[3]])
    yield "map before the start", lambda m, r, c, n: r.map(-n, [c[2]])
    yield "map an unknown chunk", lambda m, r, c, n: r.map(2 * n, [c[2], 99])
    yield "map a negative chunk", lambda m, r, c, n: r.map(2 * n, [-1])
    yield "map a destroyed chunk", lambda m, r, c, n: (m.destroy(c[5:6]), r.map(2 * n, [c[5]]))
    yield "unmap what is not mapped", lambda m, r, c, n: r.unmap(n, 2 * n)
    yield "unmap a part of a chunk", lambda m, r, c, n: r.unmap(0, n // 2)
    yield "unmap past the end", lambda m, r, c, n: r.unmap(0, 5 * n)
    yield "close a range with mappings", lambda m, r, c, n: r.close()
    yield "destroy a mapped chunk", lambda m, r, c, n: m.destroy(c[1:3])
    yield "destroy an unknown chunk", lambda m, r, c, n: m.destroy(range(5, 9))
    yield "destroy a chunk twice", lambda m, r, c, n: (m.destroy(c[4:5]), m.destroy(c[4:5]))
    yield "destroy every other chunk", lambda m, r, c, n: m.destroy(range(2, 6, 2))
    yield "create nothing", lambda m, r, c, n: m.create(0)
    yield "reserve a part of a chunk", lambda m, r, c, n: m.reserve(n + 512)
    yield "reserve nothing", lambda m, r, c, n: m.reserve(0)
    yield "a span that is not mapped", lambda m, r, c, n: r.span(2 * n - 8, 16)


@pytest.mark.parametrize("misuse", [pytest.param(misuse, id=name) for name, misuse in _misuses()])
def test_misuse_is_refused_and_changes_nothing(
    memory: VirtualMemory, misuse: Callable[[VirtualMemory, VirtualRange, range, int], object]
) -> None:
    size = memory.chunk_bytes
    chunks = memory.create(6)
    mapped = memory.reserve(4 * size)
    mapped.map(0, chunks[:2])
    bytes_at(mapped, 0, 2).fill_(7)
    with pytest.raises(MemoryMisuseError):
        misuse(memory, mapped, chunks, size)
    memory.check_integrity()
    assert mapped.mapped_chunks().tolist() == [0, 1]
    assert bytes_at(mapped, 0, 2).eq(7).all()
    mapped.map(2 * size, chunks[2:4])


def test_nothing_works_after_close(device: str, chunk_bytes: int | None) -> None:
    memory = create_memory(device, chunk_bytes)
    chunks = memory.create(2)
    mapped, closed = memory.reserve(2 * memory.chunk_bytes), memory.reserve(memory.chunk_bytes)
    mapped.map(0, chunks)
    closed.close()
    closed.close()
    with pytest.raises(MemoryMisuseError, match="range is closed"):
        closed.map(0, chunks[:1])
    memory.close()
    memory.close()
    for use in (lambda: memory.create(1), lambda: memory.reserve(memory.chunk_bytes), memory.export):
        with pytest.raises(MemoryMisuseError, match="memory is closed"):
            use()
    with pytest.raises(MemoryMisuseError, match="range is closed"):
        mapped.tensor((1,), torch.uint8)


def test_ids_are_consecutive_and_never_used_twice(memory: VirtualMemory) -> None:
    assert memory.create(3) == range(0, 3)
    memory.destroy(range(0, 3))
    assert memory.create(2) == range(3, 5)
    assert memory.chunk_count == 2


def test_more_memory_than_there_is_is_refused_and_leaves_nothing(memory: VirtualMemory) -> None:
    memory.create(1)
    with pytest.raises(OutOfMemoryError, match=r"bytes.*make the (gpu )?tier .*smaller|bytes.*GPU tier smaller"):
        memory.create((1 << 40) // memory.chunk_bytes if memory.device != "cpu" else (1 << 33))
    assert memory.chunk_count == 1
    memory.reserve(memory.chunk_bytes).map(0, memory.create(1))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_a_create_that_fails_half_way_leaves_nothing(memory: VirtualMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device can fill up between asking for its free memory and the last chunk."""
    cuda = open_device(0)
    memory.destroy(memory.create(40))  # what the driver keeps for itself, it has now
    before = used_bytes(memory)
    call, made = cuda.call, 0

    def fail_the_33rd(name: str, *arguments: Any) -> Any:
        nonlocal made
        made += name == "cuMemCreate"
        if name == "cuMemCreate" and made == 33:
            return ck(name, (cuda.api.CUresult.CUDA_ERROR_OUT_OF_MEMORY,))
        return call(name, *arguments)

    monkeypatch.setattr(cuda, "call", fail_the_33rd)
    with pytest.raises(OutOfMemoryError, match="cuMemCreate failed with CUDA_ERROR_OUT_OF_MEMORY"):
        memory.create(40)
    assert memory.chunk_count == 0 and used_bytes(memory) - before < 16 * memory.chunk_bytes, "32 were made"
    assert memory.create(5) == range(40, 45)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_a_run_is_unmapped_and_given_access_in_one_call(memory: VirtualMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = open_device(0)
    call, calls = cuda.call, Counter[str]()

    def count(name: str, *arguments: Any) -> Any:
        calls[name] += 1
        return call(name, *arguments)

    mapped = memory.reserve(16 * memory.chunk_bytes)
    chunks = memory.create(16)
    monkeypatch.setattr(cuda, "call", count)
    mapped.map(0, chunks[::-1])
    mapped.unmap(4 * memory.chunk_bytes, 8 * memory.chunk_bytes)
    mapped.unmap(12 * memory.chunk_bytes, 4 * memory.chunk_bytes)
    assert (calls["cuMemMap"], calls["cuMemSetAccess"], calls["cuMemUnmap"]) == (16, 1, 2)
    bytes_at(mapped, 0, 4).fill_(3)


def test_creating_can_be_stopped_from_another_thread(memory: VirtualMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that creates is stopped at a third of the work: nothing of it stays, and nothing more is created."""
    monkeypatch.setattr(host, "_ALLOCATE_BYTES", memory.chunk_bytes)
    memory.create(2)
    before = used_bytes(memory)
    checked = memory._check_creating
    reached, go_on = threading.Event(), threading.Event()
    checks = 0

    def pause() -> None:
        nonlocal checks
        checks += 1
        if checks == 8:
            reached.set()
            go_on.wait(60)
        checked()

    monkeypatch.setattr(memory, "_check_creating", pause)
    with ThreadPoolExecutor(1) as thread:
        creating = thread.submit(memory.create, 24)
        assert reached.wait(60)
        memory.stop_creating()
        go_on.set()
        with pytest.raises(CreationStoppedError):
            creating.result(60)
    assert checks == 8 and memory.chunk_count == 2 and used_bytes(memory) == before
    with pytest.raises(CreationStoppedError):
        memory.create(1)


def test_create_takes_memory_at_once_and_destroy_gives_it_back(memory: VirtualMemory) -> None:
    memory.create(1)
    before = used_bytes(memory)
    chunks = memory.create(16)
    assert used_bytes(memory) - before >= 16 * memory.chunk_bytes
    memory.destroy(chunks)
    kept = 8 * memory.chunk_bytes if memory.on_device else 0  # a driver may keep some for its own tables
    assert used_bytes(memory) - before <= kept


def test_fresh_threads_can_use_the_memory(memory: VirtualMemory) -> None:
    """A new thread has no current CUDA context; every call sets it."""
    size = memory.chunk_bytes
    mapped, other = memory.reserve(2 * size), memory.reserve(size)
    uses: list[Callable[[], object]] = [
        lambda: memory.create(3),
        lambda: mapped.map(0, [0, 1]),
        lambda: mapped.unmap(0, size),
        lambda: memory.reserve(size),
        other.close,
        lambda: os.close(memory.export().open(0)),
        lambda: memory.destroy(range(2, 3)),
    ]
    for use in uses:
        with ThreadPoolExecutor(1) as fresh:
            fresh.submit(use).result()
    assert mapped.mapped_chunks().tolist() == [1] and memory.chunk_count == 2


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize("failing", ["cuMemMap", "cuMemSetAccess"])
def test_a_map_that_fails_half_way_leaves_nothing(
    memory: VirtualMemory, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    cuda = open_device(0)
    call, last = cuda.call, 0
    mapped = memory.reserve(3 * memory.chunk_bytes)
    chunks = memory.create(3)

    def fail(name: str, *arguments: Any) -> Any:
        nonlocal last
        last += name == "cuMemMap"
        if name == failing and last == 3:
            return ck(name, (cuda.api.CUresult.CUDA_ERROR_NOT_SUPPORTED,))
        return call(name, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(cuda, "call", fail)
        with pytest.raises(DeviceError, match=f"{failing} failed with CUDA_ERROR_NOT_SUPPORTED"):
            mapped.map(0, chunks)
    assert not len(mapped.mapped_chunks())
    memory.check_integrity()
    mapped.map(0, chunks)
    bytes_at(mapped, 0, 3).fill_(1)


def test_integrity_notices_a_wrong_count(device: str, chunk_bytes: int | None) -> None:
    with create_memory(device, chunk_bytes) as memory:
        memory.create(2)
        memory._mapped[1] = 3
        with pytest.raises(IntegrityError, match="chunk 1 is counted as mapped 3 times, but is 0"):
            memory.check_integrity()
        memory._mapped[1] = 0


@pytest.mark.parametrize("chunk", [-1, 0, 1000])
def test_an_impossible_chunk_is_refused(device: str, chunk: int) -> None:
    with pytest.raises(MemoryMisuseError, match=str(chunk)):
        create_memory(device, chunk)


@pytest.mark.parametrize("name", ["tpu", "meta", "cuda:x"])
def test_an_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(DeviceError, match=name):
        create_memory(name)


def test_a_machine_without_a_driver_says_so(tmp_path: Path) -> None:
    """In a process of its own, where the package that loads the driver cannot be found."""
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "__init__.py").write_text("")
    code = (
        "from prefixd_swap.errors import DeviceError\n"
        "from prefixd_swap.vmem import create_memory\n"
        "try: create_memory('cuda')\n"
        "except DeviceError as error: print(error)\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert "install it: pip install cuda-bindings" in done.stdout, done.stderr


def test_it_says_how_often_chunks_are_mapped(memory: VirtualMemory) -> None:
    memory.create(3)
    with_two, with_one = memory.reserve(2 * memory.chunk_bytes), memory.reserve(memory.chunk_bytes)
    with_two.map(0, [2, 0])
    with_one.map(0, [2])
    counts = memory.mapping_counts(np.array([2, 1, 0]))
    assert counts.tolist() == [2, 0, 1]
    counts[:] = 9
    assert memory.mapping_counts(np.array([2])).tolist() == [2], "a copy"
    with pytest.raises(MemoryMisuseError, match="chunk 3 does not exist"):
        memory.mapping_counts(np.array([3]))
