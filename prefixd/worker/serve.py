"""The worker's conversation with its daemon."""

from __future__ import annotations

from collections.abc import Callable

import torch

from prefixd.worker.engine import Engine
from prefixd.worker.errors import ProtocolError
from prefixd.worker.model import load_model
from prefixd.worker.model_spec import read_model_spec
from prefixd.worker.protocol import (
    Cancel,
    Connection,
    Done,
    Extend,
    Memory,
    Ready,
    Shutdown,
    Start,
    ToWorker,
)
from prefixd.worker.settings import WorkerSettings
from prefixd_swap.vmem import VirtualTensorPool, attach_memory, recv_export


def serve(connection: Connection[ToWorker], settings: WorkerSettings, clock: Callable[[], float]) -> None:
    """Say Hello, attach the daemon's memory, load, and run requests until Shutdown.

    Loading may take minutes, and the daemon does not wait that long for its descriptors to be taken.

    Raises ModelError, SwapError, ProtocolError, and ConnectionClosedError when the daemon is gone.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    spec = read_model_spec(settings)
    connection.send(spec.hello())
    message = connection.receive()
    if isinstance(message, Shutdown):
        return
    if not isinstance(message, Memory):
        raise ProtocolError(f"{type(message).__name__} before Memory: the daemon must send its memory first")
    with attach_memory(message.meta, recv_export(connection.socket, message.fds)) as memory:
        model = load_model(spec)
        tensors = VirtualTensorPool(memory, spec.geometry, spec.sequence_capacity, message.first_chunk)
        engine = Engine(model, tensors, settings.max_step_tokens, clock)
        connection.send(Ready())
        try:
            _run(connection, engine)
        finally:
            engine.close()
            tensors.close()


def _run(connection: Connection[ToWorker], engine: Engine) -> None:
    """Take every message that has come, compute a step, and sleep only when there is nothing to compute."""
    while True:
        while connection.poll(0.0 if engine.runnable else None):
            message = connection.receive()
            if isinstance(message, Shutdown):
                return
            if isinstance(message, Memory):
                raise ProtocolError("a second Memory message: the daemon sends its memory once")
            for done in _take(engine, message):
                connection.send(done)
        for answer in engine.step():
            connection.send(answer)


def _take(engine: Engine, message: Start | Extend | Cancel) -> list[Done]:
    if isinstance(message, Start):
        return engine.start(message)
    if isinstance(message, Extend):
        return engine.extend(message)
    return engine.cancel(message)
