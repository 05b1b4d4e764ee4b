"""The faults: for each, how it is made on a running daemon, its allowed cost, and the reports that it must cause."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.checks.fault_injection.faulty_daemon import FaultyDaemon
from prefixd.client import Client, ClientError, NamespaceSpec, PartSpec

Settings = dict[str, object]
DISK = "disk tier"
REFUSED = ("PreconditionError", "ExhaustedError")
"""How a commit that asked for durable may end while nothing can be made durable: FAILED_PRECONDITION or
RESOURCE_EXHAUSTED, in one line with the remedy. The blocks are cached all the same."""

_REAL_DISK_BYTES = 96 << 20
_IDLE_CONNECTIONS = 60
_SPARE_DESCRIPTORS = 6


class Skip(Exception):
    """This machine cannot do it; says why."""


@dataclass(slots=True)
class Stage:
    """The daemon and the folder that a fault is made on."""

    daemon: FaultyDaemon
    folder: Path
    """For whatever the fault needs; the daemon's is below it."""

    @property
    def disk(self) -> Path:
        return self.folder / "disk"


@dataclass(frozen=True, slots=True)
class Scenario:
    """One fault."""

    name: str
    fault: Callable[[Stage], AbstractContextManager[None]]
    """Entered when the load runs; left when the fault is to go."""
    trouble: str | None = DISK
    """The part that Stats, health, metrics and log have to name; None where counters of blocks tell."""
    lost: tuple[str, ...] = ()
    """Reasons one of which has to count lost blocks."""
    durable: bool = False
    """Whether commits that ask for durable must go on succeeding."""
    drops: bool = False
    """Whether blocks on disk may be dropped, because they cannot be read."""
    settings: Settings = field(default_factory=dict)
    prepare: Callable[[Stage], AbstractContextManager[None]] | None = None
    """Entered before the daemon starts, left after it ended; may raise Skip."""
    mounts: bool = False
    """Whether `prepare` needs the right to mount, which a user namespace gives."""
    check: Callable[[Stage], Sequence[str]] | None = None
    """Returns other faults after the fault has ended, one line each."""


def ordered(orders: Mapping[str, str | int] | str) -> Callable[[Stage], AbstractContextManager[None]]:
    """A fault of the daemon's file layer."""

    @contextmanager
    def fault(stage: Stage) -> Iterator[None]:
        stage.daemon.break_disk(orders)
        try:
            yield
        finally:
            stage.daemon.heal_disk()

    return fault


# -- a file system that is really full ---------------------------------------------------------------------------


@contextmanager
def small_file_system(stage: Stage) -> Iterator[None]:
    """A file system in memory, of its own, for the disk tier."""
    stage.disk.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={_REAL_DISK_BYTES},mode=700", "prefixd-faults", str(stage.disk)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise Skip(f"mount cannot be run ({error.strerror}); run as root, or where `unshare -rm` works") from error
    if done.returncode:
        raise Skip(f"{done.stderr.strip() or 'mount failed'}; run as root, or where `unshare -rm` works")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(stage.disk)], check=True)


@contextmanager
def fill_up(stage: Stage) -> Iterator[None]:
    """Another program's file takes all free space."""
    filler = stage.disk / "index" / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 20)):
                pass
        except OSError:
            pass
    try:
        yield
    finally:
        filler.unlink()


# -- the directory and its files ---------------------------------------------------------------------------------


@contextmanager
def renamed(stage: Stage) -> Iterator[None]:
    """The directory is elsewhere for a while."""
    away = stage.folder / "away"
    stage.disk.rename(away)
    try:
        yield
    finally:
        if stage.disk.exists():  # the daemon may have made another
            raise RuntimeError(f"the daemon made a new {stage.disk} in the place of the one that was moved")
        away.rename(stage.disk)


@contextmanager
def slab_deleted(stage: Stage) -> Iterator[None]:
    """A file is deleted under the daemon, which keeps it open."""
    _oldest_slab(stage).unlink()
    yield


@contextmanager
def slab_cut_off(stage: Stage) -> Iterator[None]:
    """A file loses all but its first page."""
    os.truncate(_oldest_slab(stage), 4096)
    yield


def _oldest_slab(stage: Stage) -> Path:
    return min((stage.disk / "slabs").glob("*.slab"))


# -- limits of the process ---------------------------------------------------------------------------------------


@contextmanager
def few_descriptors(stage: Stage) -> Iterator[None]:
    """The daemon may open hardly any more files, and connections come that take what is left."""
    pid = stage.daemon.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    open_now = len(os.listdir(f"/proc/{pid}/fd"))
    with ExitStack() as stack:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (open_now + _SPARE_DESCRIPTORS, hard))
        stack.callback(lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard)))
        for name in (stage.daemon.socket, Path(f"{stage.daemon.socket}-memory")):
            for _ in range(_IDLE_CONNECTIONS):
                visitor = stack.enter_context(socket.socket(socket.AF_UNIX))
                visitor.settimeout(0.2)
                try:
                    visitor.connect(os.fspath(name))
                except (BlockingIOError, TimeoutError):  # its backlog is full: it accepts no more
                    break
        yield


def newcomers_served(stage: Stage) -> Sequence[str]:
    """A client that comes after the fault shares memory and is served."""
    try:
        with Client(stage.daemon.address, name="newcomer", memory="shared", timeout_s=20.0) as client:
            cache = client.register(NamespaceSpec("newcomer", 4, (PartSpec("full", 0, 64),)))
            cache.store([1, 2, 3, 4], bytearray(b"n" * 64), durable=True)
            found = bytearray(64)
            if cache.load([1, 2, 3, 4], found) != 1 or found != b"n" * 64:
                return ["a new client did not get back what it stored"]
    except ClientError as error:
        return [f"a new client is not served: {type(error).__name__}: {error}"]
    return []


# -- the index ---------------------------------------------------------------------------------------------------

_INDEX_START_BYTES = 16 << 20  # the size of the memory map that a new index begins with
_WIDE_TOKENS = 1000  # ids of so many tokens lie beside the block in the index, on pages of their own
_WIDE_BLOCKS = 100


@contextmanager
def index_grows(stage: Stage) -> Iterator[None]:
    """Blocks of many tokens and few bytes, durable, until the index's first map is too small twice over."""
    data = stage.disk / "index" / "data.mdb"
    with Client(stage.daemon.address, name="wide blocks") as client:
        cache = client.register(NamespaceSpec("wide", _WIDE_TOKENS, (PartSpec("full", 0, 64),)))
        content = bytearray(64 * _WIDE_BLOCKS)
        number = 0
        while data.stat().st_size < 2 * _INDEX_START_BYTES + (1 << 20):
            tokens = list(range(number, number + _WIDE_TOKENS * _WIDE_BLOCKS))
            cache.store(tokens, content, durable=True)
            number += 1
    yield


# -- locked memory --------------------------------------------------------------------------------


_LOCKED_BYTES = 6 << 20


@contextmanager
def little_lockable_memory(stage: Stage) -> Iterator[None]:
    """The daemon starts with a limit on locked memory that is too low, and without root's right to pass it."""
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if hard != resource.RLIM_INFINITY and hard < _LOCKED_BYTES:
        raise Skip(f"{hard} bytes may be locked here at most; raise the hard limit (ulimit -Hl) to {_LOCKED_BYTES}")
    stage.daemon.run_limited()
    yield


@contextmanager
def locked_too_little(stage: Stage) -> Iterator[None]:
    """The fault is there from the start; here its cause goes."""
    yield
    pid = stage.daemon.pid
    _, hard = resource.prlimit(pid, resource.RLIMIT_MEMLOCK)
    resource.prlimit(pid, resource.RLIMIT_MEMLOCK, (hard, hard))


SCENARIOS = (
    Scenario("no room for a slab", ordered("no room for a slab")),
    Scenario("no room for the data", ordered({"pwrite": "ENOSPC"})),
    Scenario("no room for the index", ordered("no room for the index")),
    Scenario(
        "a full file system",
        fill_up,
        prepare=small_file_system,
        mounts=True,
        settings={"disk.bytes": 2 * _REAL_DISK_BYTES},
    ),
    Scenario("read error", ordered("read error")),
    Scenario("write error", ordered("write error")),
    Scenario("sync error", ordered("sync error")),
    Scenario("index error", ordered("index error")),
    Scenario("read-only file system", ordered("read-only file system")),
    Scenario("index at its map size", index_grows, trouble=None, durable=True),
    Scenario(
        "wrong bytes read",
        ordered("wrong bytes read"),
        trouble=None,
        lost=("checksum mismatch on disk",),
        durable=True,
        drops=True,
    ),
    Scenario("out of descriptors", few_descriptors, trouble="file descriptors", check=newcomers_served),
    Scenario(
        "memory-lock limit too low",
        locked_too_little,
        trouble="memory lock",
        durable=True,
        settings={"cpu.lock": True, "cpu.bytes": _LOCKED_BYTES},
        prepare=little_lockable_memory,
    ),
    Scenario("directory renamed", renamed),
    Scenario("slab deleted", slab_deleted, trouble=None, lost=("disk read failed",), drops=True),
    Scenario("slab cut off", slab_cut_off, trouble=None, lost=("disk read failed",), drops=True),
    Scenario("slow disk", ordered({"delay_ms": 40}), trouble=None, durable=True),
)
"""The faults of the cache; that of the worker is in `_fault_worker`."""
