from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from prefixd_swap.errors import MemoryMisuseError, TransferError
from prefixd_swap.vmem import Export, VirtualMemory, attach_memory, recv_export, send_export
from tests.swap.conftest import used_bytes

CHILD = Path(__file__).with_name("attach_child.py")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        yield ours, theirs


@contextlib.contextmanager
def child_attached(
    ours: socket.socket, theirs: socket.socket, memory: VirtualMemory, *further: str
) -> Iterator[subprocess.Popen[bytes]]:
    export = memory.export()
    arguments = [sys.executable, str(CHILD), str(theirs.fileno()), export.meta.decode(), str(export.count), *further]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(arguments, pass_fds=[theirs.fileno()], env=environment) as child:
        theirs.close()
        ours.settimeout(60)
        try:
            send_export(ours, export)
            yield child
        finally:
            ours.close()
            child.wait(60)


def test_another_process_reads_and_writes_the_same_chunks(
    memory: VirtualMemory, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    memory.create(2)
    memory.destroy(range(0, 2))  # ids do not start at 0, and the child must use the same ones
    chunks = memory.create(4)
    mapped = memory.reserve(4 * memory.chunk_bytes)
    mapped.map(0, chunks)
    view = mapped.tensor((4, memory.chunk_bytes), torch.uint8)
    for row in range(4):
        view[row].fill_(row + 10)
    if memory.device != "cpu":
        torch.cuda.synchronize()
    with child_attached(ours, theirs, memory) as child:
        ours.sendall(bytes([chunks[3], chunks[1]]))
        answer = json.loads(ours.recv(4096))
        assert answer["seen"] == [[13, 13], [11, 11]]
        assert len(answer["refused"]) == 3 and "attached" in answer["refused"][0]
        assert view[3].eq(200).all(), "what the child wrote is here without a copy"
        assert view[1].eq(11).all()
        ours.sendall(b"x")
    assert child.returncode == 0


@pytest.mark.slow
def test_memory_outlives_a_process_that_dies_with_it_mapped(
    memory: VirtualMemory, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    chunks = memory.create(1)
    mapped = memory.reserve(memory.chunk_bytes)
    mapped.map(0, chunks)
    view = mapped.tensor((memory.chunk_bytes,), torch.uint8)
    view.fill_(1)
    with child_attached(ours, theirs, memory) as child:
        ours.sendall(bytes([chunks[0]]))
        ours.recv(4096)
        child.kill()
        child.wait(60)
        assert view.eq(200).all()


@pytest.mark.slow
def test_a_memory_shrinks_and_grows_in_every_process_that_has_it(
    memory: VirtualMemory, pair: tuple[socket.socket, socket.socket]
) -> None:
    """What both give up goes back to the system, what comes new is the same memory in both."""
    ours, theirs = pair
    size = memory.chunk_bytes
    kept = 8 * size if memory.device != "cpu" else 0  # a driver may keep some for its own tables
    first = memory.create(26)
    window = memory.reserve(len(first) * size)

    def fill(chunks: range, value: int) -> None:
        window.map(0, chunks)
        window.tensor((len(chunks) * size,), torch.uint8).fill_(value)
        if memory.device != "cpu":
            torch.cuda.synchronize()
        window.unmap(0, len(chunks) * size)

    def order(*words: object) -> Any:
        ours.sendall(json.dumps(words).encode())
        return json.loads(ours.recv(4096))

    def adopt(export: Export) -> Any:
        ours.sendall(json.dumps(["adopt", export.meta.decode(), export.count]).encode())
        assert ours.recv(4) == b"send"
        send_export(ours, export)
        return json.loads(ours.recv(4096))

    fill(first, 1)
    with child_attached(ours, theirs, memory, "resize"):
        assert order("map", 2, 5) == [[[1, 1]] * 3, 26]
        full = used_bytes(memory)
        gone = range(2, 26)
        memory.destroy(gone)
        text, count = order("drop", *_ends(gone))
        assert "chunk 2 is mapped 1 times" in text and count == 26, "refused, and nothing dropped"
        assert order("unmap", 2, 5) == [None, 26]
        if memory.on_device:
            assert full - used_bytes(memory) <= kept, "the other process still holds it"
        assert order("drop", *_ends(gone)) == [None, 2]
        assert full - used_bytes(memory) >= len(gone) * size - kept
        text, count = order("drop", 4, 5)
        assert "chunk 4 does not exist" in text and count == 2
        further = memory.create(3)
        fill(further, 9)
        assert "chunk 26 does not exist" in order("map", *_ends(further))[0]
        assert adopt(memory.export_run(further)) == [[26, 29], 5]
        assert order("map", *_ends(further)) == [[[9, 9]] * 3, 5]
        assert order("unmap", *_ends(further)) == [None, 5]
        assert order("drop", *_ends(further)) == [None, 2]
    memory.destroy(further)
    assert full - used_bytes(memory) >= len(gone) * size - kept


def _ends(run: range) -> tuple[int, int]:
    return run.start, run.stop


def test_only_who_attached_a_memory_drops_and_adopts(memory: VirtualMemory) -> None:
    chunks = memory.create(2)
    export = memory.export_run(chunks)
    for use in (lambda: memory.drop(chunks), lambda: memory.adopt(export.meta, [])):
        with pytest.raises(MemoryMisuseError, match="own"):
            use()
    with pytest.raises(MemoryMisuseError, match="chunk 2 does not exist"):
        memory.export_run(range(1, 3))


def test_a_run_of_another_memory_is_not_adopted(memory: VirtualMemory) -> None:
    memory.create(1)
    export = memory.export()
    with attach_memory(export.meta, [export.open(index) for index in range(export.count)]) as attached:
        told = json.loads(export.meta)
        for wrong, words in (
            (b"[]", "one version"),
            (json.dumps(told | {"chunks": [[1, 1], [3, 1]]}).encode(), "one version"),
            (json.dumps(told | {"chunks": [[1, 1]], "chunk_bytes": 1}).encode(), "export_run gave"),
            (json.dumps(told | {"chunks": [[-1, 1]]}).encode(), "export_run gave"),
        ):
            with pytest.raises(TransferError, match=words):
                attached.adopt(wrong, [])
        with pytest.raises(MemoryMisuseError, match="chunk 0 is here already"):
            attached.adopt(memory.export_run(range(1)).meta, [])
        assert attached.chunk_count == 1


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_a_run_that_comes_with_too_few_descriptors_is_not_adopted(memory: VirtualMemory) -> None:
    memory.create(1)
    whole = memory.export()
    with attach_memory(whole.meta, [whole.open(0)]) as attached:
        export = memory.export_run(memory.create(20))
        with pytest.raises(TransferError, match="no descriptor came for chunk 3"):
            attached.adopt(export.meta, [export.open(0), export.open(1)])
        assert attached.chunk_count == 1
        attached.check_integrity()
        assert attached.adopt(export.meta, [export.open(index) for index in range(20)]) == range(1, 21)
    before = used_bytes(memory)
    memory.destroy(range(1, 21))
    assert before - used_bytes(memory) > 12 * memory.chunk_bytes, "what was imported and not adopted is not kept"


def _numbered_file(number: int) -> int:
    fd = os.memfd_create(f"number-{number}")
    os.write(fd, str(number).encode())
    return fd


def _open_descriptors() -> set[int]:
    return set(map(int, os.listdir("/proc/self/fd")))


def test_many_descriptors_come_in_order_and_a_batch_at_a_time(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """More chunks than the process may hold files: 700 through a limit that leaves room for two batches a
    side."""
    ours, theirs = pair
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = _open_descriptors()
    errors: list[BaseException] = []

    def send() -> None:
        try:
            send_export(ours, Export(b"", 700, _numbered_file), timeout_s=60)
        except BaseException as error:
            errors.append(error)

    resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) + 560, hard))
    try:
        sender = threading.Thread(target=send)
        sender.start()
        numbers = []
        for fd in recv_export(theirs, 700, timeout_s=60):
            numbers.append(int(os.pread(fd, 16, 0)))
            os.close(fd)
        sender.join()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not errors
    assert numbers == list(range(700))
    assert not _open_descriptors() - before


def test_what_follows_the_descriptors_stays_in_the_socket(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    send_export(ours, Export(b"", 3, _numbered_file))
    ours.sendall(b"next message")
    for fd in recv_export(theirs, 3):
        os.close(fd)
    assert theirs.recv(64) == b"next message"


def test_descriptors_left_over_are_closed(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    before = _open_descriptors()
    send_export(ours, Export(b"", 5, _numbered_file))
    arriving = recv_export(theirs, 5)
    os.close(next(arriving))
    arriving.close()  # type: ignore[attr-defined]
    assert not _open_descriptors() - before


def test_a_peer_that_goes_away_is_an_error(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    send_export(ours, Export(b"", 2, _numbered_file))
    ours.close()
    arriving = recv_export(theirs, 3)
    with pytest.raises(TransferError, match="after 2 of 3 descriptors the peer closed"):
        for fd in arriving:
            os.close(fd)


def test_sending_to_a_peer_that_is_gone_is_an_error_and_leaks_nothing(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    theirs.close()
    before = _open_descriptors()
    with pytest.raises(TransferError):
        send_export(ours, Export(b"", 2, _numbered_file))
    assert not _open_descriptors() - before


def test_a_silent_peer_is_given_up(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(TransferError, match="in time"):
        next(recv_export(pair[1], 1, timeout_s=0.01))


def test_a_receiver_without_room_for_descriptors_says_so(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    send_export(ours, Export(b"", 5, _numbered_file))
    before = _open_descriptors()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    _, second, *_ = (number for number in range(len(before) + 2) if number not in before)
    resource.setrlimit(resource.RLIMIT_NOFILE, (second, hard))
    try:
        with pytest.raises(TransferError, match="ulimit -n"):
            next(recv_export(theirs, 5))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not _open_descriptors() - before


def test_bytes_without_descriptors_are_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    ours.sendall(b"\x01")
    with pytest.raises(TransferError, match="0 descriptors"):
        next(recv_export(theirs, 1))


@pytest.mark.parametrize(
    "meta", [b"", b"[]", b'{"kind": "host"}', b'{"kind": "tape", "chunk_bytes": 4096, "chunks": []}']
)
def test_a_description_of_something_else_is_refused(meta: bytes) -> None:
    with pytest.raises(TransferError, match="one version"):
        attach_memory(meta, [])


def test_attaching_without_the_descriptors_is_refused(memory: VirtualMemory) -> None:
    memory.create(2)
    with pytest.raises(TransferError, match="no descriptor came"):
        attach_memory(memory.export().meta, [])
