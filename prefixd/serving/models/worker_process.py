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
from prefixd.worker_protocol.framing import from_worker
from prefixd.worker_protocol.protocol import (
    Done,
    Failed,
    FromWorker,
    Hello,
    Note,
    Ping,
    Ready,
    Shrunk,
    Shutdown,
    Step,
    ToWorker,
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
    """The state of a model's worker."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"


class WorkerProcess:
    """Keeps a worker process running.

    The GPU tier's memory is the daemon's, so a worker that dies takes no cached block with it; its successor is given
    the same memory.

    Args:
        settings: the worker's.
        restart_limit: number of deaths in a row, without a finished request between them, before it is given up.
        on_hello: called with each worker's Hello; returns the GPU tier's frames. It is cancelled when the worker ends
            first.
        on_ready: called when the worker takes requests.
        on_step: called with the results of a step.
        on_done: called when a request has ended and its frames are unmapped.
        on_death: called when the worker is gone, with the reason and whether it is given up.
        part: its name in `troubles`.
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
        self.hello: Hello | None = None  # of the present worker, or of the last one
        self.ready = Ready()  # its last Ready
        self.state = WorkerState.STARTING
        self.restarts = 0
        self.pid = 0
        self.failure = ""  # why it was given up; kept until the daemon is started again
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
        self._was_ready = False  # a worker that fails before one was ever ready would fail again
        self._described = False  # whether the present worker has sent Hello
        self._failed = False  # whether it has sent Failed
        self._killed = False  # whether the last worker was killed by a signal after its Hello, without Failed
        self._last_words = ""
        self._late: list[tuple[FramePool, NewFrames]] = []  # frames that came while it loads its model
        self._settled = asyncio.Event()  # set while a worker is ready, and once there will be none any more
        self._frames = asyncio.Lock()  # held while frames are handed over, added or removed
        self._process: asyncio.subprocess.Process | None = None

    def start(self) -> asyncio.Task[None]:
        """Starts the first worker and keeps one running; the task ends with `stop`, or when the worker is given up."""
        self._task = asyncio.create_task(self._run(), name="worker")
        return self._task

    async def settled(self) -> bool:
        """Waits until a worker is ready, given up or stopped; returns whether it is ready."""
        await self._settled.wait()
        return self.state is WorkerState.READY

    @property
    def loads(self) -> bool:
        """Whether it is being started, or loads its model."""
        return self.state is WorkerState.STARTING

    @property
    def may_shrink(self) -> bool:
        """Whether it can be told to unmap frames: not while it loads its model with the tier's frames at hand. It reads
        no message then."""
        return self.state is WorkerState.READY or not self._channel.has_frames

    @property
    def coming_bytes(self) -> int:
        """An estimate of the device's memory that it takes soon: for the weights that it loads, and to work with."""
        return self.hello.weights_bytes + self.hello.working_bytes if self.loads and self.hello is not None else 0

    @property
    def part(self) -> str:
        """Its name in troubles."""
        return self._part

    def send(self, message: ToWorker) -> None:
        """Sends a message. If a dying worker misses it, `on_death` puts the requests back."""
        self._channel.send(message)

    @asynccontextmanager
    async def changing_frames(self) -> AsyncGenerator[None]:
        """Held during a change of the GPU tier's frames: no worker is handed the frames meanwhile, and no other task
        changes them. If the worker dies, its successor gets the frames only at the end."""
        async with self._frames:
            yield

    async def grow(self, pool: FramePool, new: NewFrames) -> None:
        """Gives the worker frames that `pool` is about to admit, before any message names them.

        Within `changing_frames`. Without a worker nothing happens: the next one is handed all frames. One that loads
        its model reads no message, so it is given them before its first request.
        """
        if self.state is not WorkerState.READY and self._channel.has_frames:
            self._late.append((pool, new))
        elif not await self._channel.grow(pool, new):
            self._kill()  # it waits for descriptors that will not come; its successor is handed all frames

    async def shrink(self, frames: Sequence[FrameId]) -> None:
        """Has the worker unmap withdrawn frames; returns when it has, or is gone. Within `changing_frames`, and only
        while `may_shrink`."""
        await self._channel.shrink([*frames])

    def proven(self) -> None:
        """A request has ended on the worker: earlier deaths do not count any more."""
        self._deaths = 0
        self._troubles.end(f"{self._part}'s step")

    async def stop(self) -> None:
        """Ends the worker and waits for it.

        A worker that still loads is killed: it would read its socket only after loading, which may take minutes. A
        worker that does not end within 5 s is killed, too.
        """
        self._stopping.set()
        if self.state is WorkerState.READY:
            self.send(Shutdown())
        else:
            self._kill()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=_STOP_S)  # the task's owner reports its error
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
                why = await self._run_one()
            except NotStartedError as error:
                await self._wait_for_resources(error)
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
        self._troubles.end(self._part)  # the trouble of lacking resources: this one is another
        self._troubles.begin(self._part, f"it was given up: {why}; start the daemon again when that is mended")
        self._on_death(why, True)
        self._settled.set()

    async def _wait_for_resources(self, error: NotStartedError) -> None:
        """Waits after a start failed for lack of resources. They may come back, so the worker is not given up."""
        self._troubles.begin(self._part, str(error))
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), _SCARCE_PAUSE_S)

    async def _run_one(self) -> str:
        """Runs one worker; returns how it ended."""
        self._last_words = ""
        self._described = self._failed = self._killed = False
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            ours, process = await start_worker(self.settings, self._channel, stack)
            self._troubles.end(self._part)
            self._process = process
            self.pid = process.pid
            if self._stopping.is_set():  # stopped while it was being started
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
                    ours.shutdown(socket.SHUT_RDWR)  # a refused worker notices it at once
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
                    self._late.clear()
                    await self._channel.hand_over(pool)
        elif isinstance(message, Ready):
            self._log_changes(message)
            self.ready = message
            if self.state is WorkerState.READY:  # a second Ready: it has given up its graphs
                return
            async with self._frames:
                for pool, new in self._late:
                    if not await self._channel.grow(pool, new):
                        self._kill()
                        return
                self._late.clear()
                self.state = WorkerState.READY
            self._was_ready = True
            log.info("the %s is ready", self._part)
            self._settled.set()
            self._on_ready()
        elif isinstance(message, Note):
            log.info("the %s: %s", self._part, message.text)
        elif isinstance(message, Failed):
            self._last_words = message.detail
            self._failed = True

    def _log_changes(self, ready: Ready) -> None:
        """Says in the log why the worker goes without something, once."""
        before = self.ready
        if ready.cuda_graphs_reason not in ("", before.cuda_graphs_reason):
            log.warning("decode steps are computed without CUDA graphs: %s", ready.cuda_graphs_reason)
        if ready.prompt_graphs_reason not in ("", before.prompt_graphs_reason):
            log.warning("steps with prompts are computed without CUDA graphs: %s", ready.prompt_graphs_reason)
        if ready.operators_reason not in ("", before.operators_reason):
            log.warning("the model's operators are %s: %s", ready.operators, ready.operators_reason)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kills a worker that hangs in a step. It is watched only when it is ready: loading may take any time."""
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
        """Waits for the frames, without reading the worker's socket; None if the worker ends first."""
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
