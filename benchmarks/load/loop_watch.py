"""A daemon that records how long each callback holds its event loop.

`python -m benchmarks.load.loop_watch --holds FILE PARENT serve ...` is `prefixd serve ...` that ends with process
PARENT and appends to FILE one line of JSON for each callback that held the event loop, and for each garbage collection,
that took half a millisecond or more. A harness uses `WatchedDaemon`, which starts it and reads the file.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.common.harness import BenchmarkError
from prefixd.cli.demo.daemon_process import DaemonProcess

_ROOT = Path(__file__).resolve().parents[2]
_RECORDED_S = 0.0005
_BLOCKED_S = 0.02  # a callback that waited as long is recorded too, however little it computed
_LOOK_S = 0.003  # how often the thread looks where a callback is
_WRITE_EVERY_S = 0.05
_FRAMES = 4
_ANSWER_S = 60.0
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class LoopHold:
    """One callback that held the event loop, or one garbage collection in any thread."""

    begin_s: float
    """By `time.monotonic`, which all processes of a machine share."""
    cpu_ms: float
    """CPU time of the loop's thread; of a garbage collection, the time that it took."""
    wall_ms: float
    """Time from the callback's begin to its end: longer where the thread waited for the GIL, a core or a file."""
    gc_ms: float
    """CPU time of garbage collections inside it."""
    name: str
    """The callback, or the coroutines of the task that it ran, outermost first."""
    where: str
    """Where the thread was seen most often meanwhile, innermost first: `file:line function < ...`. Empty if never."""


class LoopWatch:
    """Measures every callback of the event loop in the thread that called `install`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._thread = threading.get_ident()
        self._holds: deque[LoopHold] = deque()
        self._running: tuple[int, float] | None = None  # number and begin of the callback that runs now
        self._number = 0
        self._seen: tuple[int, Counter[str]] = (0, Counter())
        self._gc_s = 0.0  # of the callback that runs now
        self._gc_began = (0.0, 0.0)
        self._run = asyncio.Handle._run
        self._ended = threading.Event()

    def install(self) -> None:
        """From now on all callbacks are measured, and a thread writes what was found."""
        watch = self

        def run(handle: asyncio.Handle) -> None:
            watch.measure(handle)

        setattr(asyncio.Handle, "_run", run)  # noqa: B010 - a method of a class that is not ours
        gc.callbacks.append(self._collecting)
        threading.Thread(target=self._look_and_write, name="loop-watch", daemon=True).start()

    def remove(self) -> None:
        """Ends what `install` began; the thread ends a moment later."""
        setattr(asyncio.Handle, "_run", self._run)  # noqa: B010
        gc.callbacks.remove(self._collecting)
        self._ended.set()

    def measure(self, handle: asyncio.Handle) -> None:
        """Runs a callback and records it if it took long."""
        if threading.get_ident() != self._thread:
            self._run(handle)
            return
        self._number += 1
        self._gc_s = 0.0
        callback = handle._callback  # type: ignore[attr-defined]
        begin = time.monotonic()
        self._running = (self._number, begin)
        begin_cpu = time.thread_time()
        self._run(handle)
        cpu = time.thread_time() - begin_cpu
        wall = time.monotonic() - begin
        self._running = None
        if cpu >= _RECORDED_S or wall >= _BLOCKED_S:
            number, places = self._seen
            where = places.most_common(1)[0][0] if number == self._number and places else ""
            self._holds.append(LoopHold(begin, cpu * 1e3, wall * 1e3, self._gc_s * 1e3, name_of(callback), where))

    def _collecting(self, phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            self._gc_began = time.monotonic(), time.thread_time()
            return
        begin, begin_cpu = self._gc_began
        took = time.thread_time() - begin_cpu
        on_loop = threading.get_ident() == self._thread
        if on_loop:
            self._gc_s += took
        if took >= _RECORDED_S:
            where = "on the event loop" if on_loop else f"in thread {threading.current_thread().name}"
            wall = time.monotonic() - begin
            name = f"garbage collection of generation {info['generation']}"
            self._holds.append(LoopHold(begin, took * 1e3, wall * 1e3, took * 1e3, name, where))

    def _look_and_write(self) -> None:
        """Looks every few milliseconds where the loop's thread is, if its callback runs for as long already."""
        written_s = 0.0
        with self._file.open("a") as file:
            while not self._ended.wait(_LOOK_S):
                running, now = self._running, time.monotonic()
                if running is not None and now - running[1] >= _LOOK_S:
                    frame = sys._current_frames().get(self._thread)
                    if self._running == running and frame is not None:
                        if self._seen[0] != running[0]:
                            self._seen = (running[0], Counter())
                        self._seen[1][_place(frame)] += 1
                if now - written_s >= _WRITE_EVERY_S:
                    written_s = now
                    until = now if running is None else running[1]
                    while self._holds:
                        file.write(json.dumps(asdict(self._holds.popleft())) + "\n")
                    file.write(json.dumps({"until_s": until}) + "\n")
                    file.flush()


class WatchedDaemon(DaemonProcess):
    """A daemon whose event loop is watched; `holds` is what was found."""

    def __init__(self, settings: Mapping[str, object] | None = None, **how: Any) -> None:
        super().__init__(settings, **how)
        self.holds_file = self.directory / "holds.jsonl"
        self._program = ("-m", "benchmarks.load.loop_watch", "--holds", str(self.holds_file))
        self._holds: list[LoopHold] = []
        self._read_bytes = 0
        self._until_s = 0.0

    def holds(self, begin_s: float, end_s: float) -> list[LoopHold]:
        """What began in this time, by `time.monotonic`. Returns when all of it is known.

        Raises BenchmarkError: one callback has not ended for a minute.
        """
        deadline = time.monotonic() + _ANSWER_S
        while self._until_s < end_s:
            self._read()
            if time.monotonic() > deadline:
                raise BenchmarkError(f"the daemon's event loop was held for {_ANSWER_S:g} s{self.last_words()}")
            time.sleep(_POLL_S)
        return [hold for hold in self._holds if begin_s <= hold.begin_s < end_s]

    def _read(self) -> None:
        with self.holds_file.open("rb") as file:
            file.seek(self._read_bytes)
            lines = file.read().splitlines(keepends=True)
        for line in lines:
            if not line.endswith(b"\n"):  # the rest of it is written just now
                break
            self._read_bytes += len(line)
            record = json.loads(line)
            if "until_s" in record:
                self._until_s = record["until_s"]
            else:
                self._holds.append(LoopHold(**record))


def name_of(callback: Any) -> str:
    """The callback's name; where it runs a task, the names of the coroutines that wait for each other in it."""
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        names: list[str] = []
        waited: Any = task.get_coro()
        while waited is not None and len(names) < 2 * _FRAMES:
            if name := getattr(waited, "__qualname__", None):
                names.append(name)
            waited = getattr(waited, "cr_await", None) or getattr(waited, "ag_await", None)
        return " > ".join(names)
    while hasattr(callback, "func"):  # functools.partial
        callback = callback.func
    return str(getattr(callback, "__qualname__", None) or type(callback).__qualname__)


def _place(frame: FrameType | None) -> str:
    """The innermost frames, those of asyncio's loop left out."""
    places: list[str] = []
    while frame is not None and len(places) < _FRAMES:
        code = frame.f_code
        path = Path(code.co_filename)
        if path == Path(__file__) or (path.name == "events.py" and path.parent.name == "asyncio"):
            break
        shown = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else Path(*path.parts[-2:])
        places.append(f"{shown}:{frame.f_lineno} {code.co_qualname}")
        frame = frame.f_back
    return " < ".join(places)


def main() -> None:
    """The daemon."""
    from prefixd.cli import tethered

    if len(sys.argv) < 3 or sys.argv[1] != "--holds":
        sys.exit("usage: python -m benchmarks.load.loop_watch --holds FILE PARENT serve ...")
    file = Path(sys.argv[2])
    del sys.argv[1:3]
    LoopWatch(file).install()
    tethered.main()


if __name__ == "__main__":
    main()
