"""The worker's supervisor: starts it, gives it the GPU tier's memory, and starts it again when it dies."""

from __future__ import annotations

import asyncio
import enum
import errno
import logging
import os
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any

import numpy as np

from prefixd.base.errors import PrefixdError
from prefixd.cache.troubles import Troubles
from prefixd.serving.models.step_watchdog import StepWatchdog
from prefixd.worker_protocol.protocol import (
    Done,
    Failed,
    FromWorker,
    Grow,
    Hello,
    Memory,
    Ping,
    Ready,
    Shrink,
    Shrunk,
    Shutdown,
    Step,
    ToWorker,
    encode,
    from_worker,
)
from prefixd.worker_protocol.settings import WorkerSettings, encode_settings
from prefixd_swap import (
    Export,
    FrameId,
    FramePool,
    NewFrames,
    OutOfMemoryError,
    SwapError,
    send_export,
    started_threads,
)

log = logging.getLogger(__name__)

_STOP_S = 5.0
_RESTART_PAUSE_S = 0.2
_READ_BYTES = 1 << 18
_SCARCE_PAUSE_S = 1.0
_REMEDIES = {
    errno.EMFILE: "raise the limit of open files (ulimit -n, LimitNOFILE=)",
    errno.ENFILE: "raise the system's limit of open files (fs.file-max)",
    errno.ENOMEM: "free memory, or raise its limits (ulimit -v, the cgroup's)",
    errno.EAGAIN: "raise the limit of processes (ulimit -u, TasksMax=)",
}
PART = "worker"
ENVIRONMENT = {
    # OpenMP threads that spin at barriers stand in the daemon's way on a small machine: with one busy core of two, a
    # step takes 188 ms spinning and 26 ms sleeping.
    "OMP_WAIT_POLICY": "PASSIVE",
    # With several threads, MKL splits the sum of a matrix product by how many rows there are, so a row's last bits
    # would depend on the batch (seen: 1,408 to 512 with two threads, 64 rows or more). Its strict mode does not.
    "MKL_CBWR": "AUTO,STRICT",
}


class _NotStartedError(Exception):
    """This machine has not what it takes to start a process; what that is and what to do."""


class WorkerState(enum.Enum):
    """What the worker is doing."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"


class WorkerProcess:
    """One worker process after the other.

    The GPU tier's memory is the daemon's, so a worker that dies takes no cached block with it; its successor is given
    the same memory.

    Args:
        settings: the worker's.
        restart_limit: how many deaths in a row, without a request finished between them, are forgiven.
        on_hello: called with the model's numbers, each time a worker says them; returns the GPU tier's frames. It is
            cancelled when the worker ends first.
        on_ready: the worker takes requests.
        on_step: results.
        on_done: a request ended and its frames are unmapped.
        on_death: the worker is gone (the reason in words), and whether it is given up.
        part: what `troubles` call it.
        step_seconds: it is killed when a step takes longer.
        troubles: told while this machine has no process, memory or descriptor for a worker, and when it is given up.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        restart_limit: int,
        *,
        on_hello: Callable[[Hello], Coroutine[Any, Any, FramePool]],
        on_ready: Callable[[], None],
        on_step: Callable[[Step], None],
        on_done: Callable[[Done], None],
        on_death: Callable[[str, bool], None],
        troubles: Troubles,
        part: str = PART,
        step_seconds: float = 600.0,
    ) -> None:
        self.settings = settings
        self.hello: Hello | None = None  # what the present worker, or the last one, said of its model
        self.ready = Ready()  # what it said when it became ready
        self.state = WorkerState.STARTING
        self.restarts = 0
        self.pid = 0
        self.failure = ""  # why it was given up; it stays so until the daemon is started again
        self._restart_limit = restart_limit
        self._deaths = 0
        self._on_hello = on_hello
        self._on_ready = on_ready
        self._on_step = on_step
        self._on_done = on_done
        self._on_death = on_death
        self._troubles = troubles
        self._part = part
        self._watchdog = StepWatchdog(step_seconds)
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._was_ready = False  # a worker that fails before it was ever ready would fail again
        self._described = False  # whether the present worker has said Hello
        self._failed = False  # whether it has said Failed
        self._killed = False  # whether the last worker was killed once it had described its model, without a complaint
        self._last_words = ""
        self._settled = asyncio.Event()  # while a worker is ready, or there will be none any more
        self._frames = asyncio.Lock()  # held while frames are handed over, come or go
        self._socket: socket.socket | None = None  # of a worker that has been handed the frames
        self._threads: ThreadPoolExecutor | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._held_back: list[ToWorker] | None = None  # while descriptors are sent beside the stream
        self._shrunk: asyncio.Future[None] | None = None

    def start(self) -> asyncio.Task[None]:
        """Starts the first worker and keeps one running; the task ends with `stop`, or when the worker is given up."""
        self._task = asyncio.create_task(self._run(), name="worker")
        return self._task

    async def settled(self) -> bool:
        """Waits until a worker is ready, or given up, or all is stopped; whether one is ready."""
        await self._settled.wait()
        return self.state is WorkerState.READY

    def send(self, message: ToWorker) -> None:
        """Sends a message; one that a dying worker misses is made good by `on_death`."""
        if self._held_back is not None:
            self._held_back.append(message)
        elif self._writer is not None:
            self._writer.write(encode(message))

    @asynccontextmanager
    async def changing_frames(self) -> AsyncGenerator[None]:
        """Around a change of the GPU tier's frames: no worker is handed the frames meanwhile, and nobody else changes
        them. A worker that dies within it stays dead until its end."""
        async with self._frames:
            yield

    async def grow(self, pool: FramePool, new: NewFrames) -> None:
        """Gives the worker frames that `pool` is about to admit: it has them before any message that names them.

        Within `changing_frames`. Without a worker nothing happens: the next one is handed all that there are.
        """
        if self._socket is None:
            return
        export = pool.memory.export_run(range(int(new.chunks[0]), int(new.chunks[-1]) + 1))
        numbers = np.array(new.frames, np.int64)
        message = Grow(export.meta, export.count, numbers.tobytes(), new.chunks.tobytes())
        if not await self._send_with_descriptors(message, export):
            self._kill()  # it waits for descriptors that will not come; its successor is handed all of them

    async def shrink(self, frames: Sequence[FrameId]) -> None:
        """Has the worker let go of withdrawn frames; returns when it has, or is gone.

        Within `changing_frames`.
        """
        if self._socket is None:
            return
        self._shrunk = asyncio.get_running_loop().create_future()
        self.send(Shrink(np.array(frames, np.int64).tobytes()))
        try:
            await self._shrunk
        finally:
            self._shrunk = None

    def proven(self) -> None:
        """A request went through: earlier deaths are forgiven."""
        self._deaths = 0
        self._troubles.end(f"{self._part}'s step")

    async def stop(self) -> None:
        """Ends the worker and waits for it.

        One that still loads is killed: it reads its socket when it has loaded, which may take minutes. So is one that
        does not end within 5 s.
        """
        self._stopping.set()
        if self.state is WorkerState.READY:
            self.send(Shutdown())
        else:
            self._kill()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=_STOP_S)  # how it ended is its watcher's to report
            self._kill()
            await asyncio.wait({self._task})
        self._settled.set()

    def _kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()

    async def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                why = await self._live()
            except _NotStartedError as error:
                await self._wait_for_means(error)
                continue
            except (PrefixdError, SwapError) as error:
                why = str(error)
            except Exception as error:
                log.error("the %s could not be run", self._part, exc_info=error)
                why = f"{type(error).__name__}: {error}"
            if self._stopping.is_set():
                break
            self._deaths += 1
            gave_up = self._deaths > self._restart_limit or not (self._was_ready or self._killed)
            self.state = WorkerState.FAILED if gave_up else WorkerState.STARTING
            self._settled.clear()
            if gave_up:
                self._give_up(why)
                return
            log.error("the %s died (%s); starting another", self._part, why)
            self._on_death(why, False)
            self.restarts += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _RESTART_PAUSE_S)

    def _give_up(self, why: str) -> None:
        self.failure = why
        self._troubles.end(self._part)  # of want of means: this is another one
        self._troubles.begin(self._part, f"it was given up: {why}; start the daemon again when that is mended")
        self._on_death(why, True)
        self._settled.set()

    async def _wait_for_means(self, error: _NotStartedError) -> None:
        """There is no worker for want of means, which may come back: it is never given up for that."""
        self._troubles.begin(self._part, str(error))
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), _SCARCE_PAUSE_S)

    async def _live(self) -> str:
        """One worker's life; returns how it ended."""
        self._last_words = ""
        self._described = self._failed = self._killed = False
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            try:
                threads = stack.enter_context(started_threads(1, "prefixd-worker"))
                ours, process = await self._spawn(stack)
            except OutOfMemoryError as error:
                raise _NotStartedError(str(error)) from error
            except OSError as error:
                if error.errno not in _REMEDIES:
                    raise
                raise _NotStartedError(f"it cannot be started ({error.strerror}); {_REMEDIES[error.errno]}") from error
            self._troubles.end(self._part)
            self._threads, self._process = threads, process
            self.pid = process.pid
            if self._stopping.is_set():  # while it was being started
                self._kill()
            decoder = from_worker()
            watching = asyncio.create_task(self._watch(process), name="worker's watchdog")
            try:
                while data := await loop.sock_recv(ours, _READ_BYTES):
                    self._watchdog.heard(loop.time())
                    for message in decoder.feed(data):
                        await self._take(message, ours)
            except ConnectionResetError:
                pass
            finally:
                watching.cancel()
                self._let_go()
                with suppress(OSError):
                    ours.shutdown(socket.SHUT_RDWR)  # a worker that is refused learns of it at once
                try:
                    await asyncio.wait_for(process.wait(), _STOP_S)
                except TimeoutError:
                    process.kill()
                    await process.wait()
                self.pid = 0
                self._socket = None
                if self._shrunk is not None and not self._shrunk.done():
                    self._shrunk.set_result(None)  # with the process everything that it mapped is gone
        code = process.returncode
        self._killed = code is not None and code < 0 and self._described and not self._failed
        return self._last_words or (f"signal {-code}" if code is not None and code < 0 else f"exit status {code}")

    async def _spawn(self, stack: ExitStack) -> tuple[socket.socket, asyncio.subprocess.Process]:
        """The daemon's end of the socket, which `stack` closes, and the process that has the other."""
        ours, theirs = socket.socketpair()
        stack.enter_context(ours)
        with theirs:
            ours.setblocking(False)
            self._writer = await _writer(ours.dup())
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "prefixd.worker",
                    "--fd",
                    str(theirs.fileno()),
                    "--config",
                    encode_settings(self.settings),
                    pass_fds=[theirs.fileno(), *([self.settings.pixels_fd] if self.settings.pixels_fd >= 0 else [])],
                    env={**ENVIRONMENT, **os.environ},
                    stdin=asyncio.subprocess.DEVNULL,
                    process_group=0,  # Ctrl-C is the daemon's: before the worker can ignore it, it would end it
                )
            except RuntimeError as error:  # before Python 3.12 a thread waits for the process; it ends with its socket
                self._let_go()
                raise _NotStartedError(f"it cannot be started ({error}); {_REMEDIES[errno.EAGAIN]}") from error
            except BaseException:
                self._let_go()
                raise
        return ours, process

    def _let_go(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    async def _take(self, message: FromWorker, ours: socket.socket) -> None:
        if isinstance(message, Step):
            self._on_step(message)
        elif isinstance(message, Done):
            self._on_done(message)
        elif isinstance(message, Shrunk):
            if self._shrunk is not None and not self._shrunk.done():
                self._shrunk.set_result(None)
        elif isinstance(message, Hello):
            self.hello = message
            self._described = True
            pool = await self._while_it_lives(self._on_hello(message))
            if pool is not None:
                async with self._frames:
                    await self._hand_over(pool, ours)
        elif isinstance(message, Ready):
            if message.cuda_graphs_reason and message != self.ready:
                log.warning("decode steps are computed without CUDA graphs: %s", message.cuda_graphs_reason)
            self.ready = message
            if self.state is WorkerState.READY:  # with graphs, so far
                return
            self.state = WorkerState.READY
            self._was_ready = True
            self._settled.set()
            self._on_ready()
        elif isinstance(message, Failed):
            self._last_words = message.detail
            self._failed = True

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kills a worker that hangs. It is watched from when it is ready: loading takes as long as it takes."""
        watchdog, loop = self._watchdog, asyncio.get_running_loop()
        while True:
            await asyncio.sleep(watchdog.period_s)
            if self.state is not WorkerState.READY:
                watchdog.heard(loop.time())
                continue
            found = watchdog.look(loop.time())
            if found == "ask":
                self.send(Ping())
            elif found == "hangs":
                self._last_words = f"it answered nothing for {watchdog.limit_s:g} s: a step hangs"
                self._troubles.begin(
                    f"{self._part}'s step",
                    f"{self._last_words}, and it was killed; look at the log and the device, and raise "
                    "worker.step_seconds if steps take that long",
                )
                with suppress(ProcessLookupError):
                    process.kill()
                return

    async def _while_it_lives(self, asking: Coroutine[Any, Any, FramePool]) -> FramePool | None:
        """Waits for the frames; None when the worker ends first. Its socket is not read meanwhile."""
        assert self._process is not None
        ended = asyncio.create_task(self._process.wait())
        asked = asyncio.create_task(asking)
        try:
            await asyncio.wait({ended, asked}, return_when=asyncio.FIRST_COMPLETED)
            return asked.result() if asked.done() else None
        finally:
            for task in (ended, asked):
                task.cancel()
            await asyncio.wait({ended, asked})

    async def _hand_over(self, frames: FramePool, ours: socket.socket) -> None:
        """Gives the worker the GPU tier. One that ended meanwhile has said why, which is still to be read."""
        export = frames.memory.export()
        self._socket = ours
        await self._send_with_descriptors(describe_memory(frames, export), export)

    async def _send_with_descriptors(self, message: ToWorker, export: Export) -> bool:
        """Sends a message and the descriptors that follow it; other messages wait. Whether the worker took them."""
        self.send(message)
        self._held_back = []
        try:
            if self._writer is not None:
                await self._writer.drain()
            if export.count and self._socket is not None:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._threads, send_export, self._socket, export)
        except (OSError, SwapError) as error:
            log.debug("the worker did not take the GPU tier's memory: %s", error)
            self._last_words = self._last_words or str(error)
            return False
        finally:
            waiting, self._held_back = self._held_back, None
            for each in waiting:
                self.send(each)
        return True


def describe_memory(pool: FramePool, export: Export) -> Memory:
    """The message that announces a pool's memory to a worker."""
    frames = pool.table.frames()
    chunks = pool.table.chunks(frames)
    return Memory(export.meta, export.count, frames.tobytes(), chunks.tobytes(), pool.most, pool.frame_bytes)


async def _writer(end: socket.socket) -> asyncio.StreamWriter:
    """Writes to the worker on a descriptor of its own: when a write fails, its last words are still to be read."""
    _, writer = await asyncio.open_unix_connection(sock=end)
    if isinstance(writer.transport, asyncio.Transport):
        writer.transport.pause_reading()  # the other descriptor is for that
    # drain() then waits until everything is sent: descriptors go beside the stream and must not overtake it.
    writer.transport.set_write_buffer_limits(high=0)
    return writer
