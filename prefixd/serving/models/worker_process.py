"""The worker's supervisor: starts it, gives it the GPU tier's memory, and starts it again when it dies."""

from __future__ import annotations

import asyncio
import enum
import logging
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any

from prefixd.base.errors import PrefixdError
from prefixd.cache.troubles import Troubles
from prefixd.serving.models.step_watchdog import StepWatchdog
from prefixd.serving.models.worker_channel import WorkerChannel
from prefixd.serving.models.worker_start import NotStartedError, start_worker
from prefixd.worker_protocol.protocol import (
    Done,
    Failed,
    FromWorker,
    Hello,
    Ping,
    Ready,
    Shrunk,
    Shutdown,
    Step,
    ToWorker,
    from_worker,
)
from prefixd.worker_protocol.worker_settings import WorkerSettings
from prefixd_swap import (
    FrameId,
    FramePool,
    NewFrames,
    SwapError,
)

log = logging.getLogger(__name__)

_STOP_S = 5.0
_RESTART_PAUSE_S = 0.2
_READ_BYTES = 1 << 18
_SCARCE_PAUSE_S = 1.0
PART = "worker"


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
        self._channel = WorkerChannel()
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._was_ready = False  # a worker that fails before it was ever ready would fail again
        self._described = False  # whether the present worker has said Hello
        self._failed = False  # whether it has said Failed
        self._killed = False  # whether the last worker was killed once it had described its model, without a complaint
        self._last_words = ""
        self._settled = asyncio.Event()  # while a worker is ready, or there will be none any more
        self._frames = asyncio.Lock()  # held while frames are handed over, come or go
        self._process: asyncio.subprocess.Process | None = None

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
        self._channel.send(message)

    @asynccontextmanager
    async def changing_frames(self) -> AsyncGenerator[None]:
        """Around a change of the GPU tier's frames: no worker is handed the frames meanwhile, and no other task changes
        them. A worker that dies within it stays dead until its end."""
        async with self._frames:
            yield

    async def grow(self, pool: FramePool, new: NewFrames) -> None:
        """Gives the worker frames that `pool` is about to admit: it has them before any message that names them.

        Within `changing_frames`. Without a worker nothing happens: the next one is handed all that there are.
        """
        if not await self._channel.grow(pool, new):
            self._kill()  # it waits for descriptors that will not come; its successor is handed all of them

    async def shrink(self, frames: Sequence[FrameId]) -> None:
        """Has the worker let go of withdrawn frames; returns when it has, or is gone.

        Within `changing_frames`.
        """
        await self._channel.shrink([*frames])

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
            except NotStartedError as error:
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

    async def _wait_for_means(self, error: NotStartedError) -> None:
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
            ours, process = await start_worker(self.settings, self._channel, stack)
            self._troubles.end(self._part)
            self._process = process
            self.pid = process.pid
            if self._stopping.is_set():  # while it was being started
                self._kill()
            decoder = from_worker()
            watching = asyncio.create_task(self._watch(process), name="worker's watchdog")
            try:
                while data := await loop.sock_recv(ours, _READ_BYTES):
                    self._watchdog.heard(loop.time())
                    for message in decoder.feed(data):
                        await self._handle(message)
            except ConnectionResetError:
                pass
            finally:
                watching.cancel()
                self._channel.close()
                with suppress(OSError):
                    ours.shutdown(socket.SHUT_RDWR)  # a worker that is refused learns of it at once
                try:
                    await asyncio.wait_for(process.wait(), _STOP_S)
                except TimeoutError:
                    process.kill()
                    await process.wait()
                self.pid = 0
                self._channel.worker_gone()
        code = process.returncode
        self._killed = code is not None and code < 0 and self._described and not self._failed
        return (
            self._last_words
            or self._channel.last_error
            or (f"signal {-code}" if code is not None and code < 0 else f"exit status {code}")
        )

    async def _handle(self, message: FromWorker) -> None:
        if isinstance(message, Step):
            self._on_step(message)
        elif isinstance(message, Done):
            self._on_done(message)
        elif isinstance(message, Shrunk):
            self._channel.shrunk()
        elif isinstance(message, Hello):
            self.hello = message
            self._described = True
            pool = await self._while_it_lives(self._on_hello(message))
            if pool is not None:
                async with self._frames:
                    await self._channel.hand_over(pool)
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
            found = watchdog.check(loop.time())
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
