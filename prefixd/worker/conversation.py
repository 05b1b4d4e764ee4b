"""The worker's conversation with its daemon."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from prefixd.worker.attention.choice.backend_choice import choose_attention
from prefixd.worker.decoding.draft import Draft
from prefixd.worker.engine import Engine
from prefixd.worker.layer_gate import Mailbox
from prefixd.worker.load_graphs import load_graphs
from prefixd.worker.memory.grouped_kv import GroupedKv
from prefixd.worker.memory.kv_memory import KvMemory
from prefixd.worker.memory.make_kv import make_embeddings, make_kv
from prefixd.worker.memory.shared_frames import SharedFrames
from prefixd.worker.model import CausalModel, load_model
from prefixd.worker.operators import Operators
from prefixd.worker.readiness import Readiness
from prefixd.worker.spec.model_spec import read_model_spec
from prefixd.worker_protocol.errors import ProtocolError
from prefixd.worker_protocol.framing import Connection
from prefixd.worker_protocol.protocol import (
    Arrived,
    Cancel,
    Done,
    Expect,
    Extend,
    Grow,
    Layers,
    Memory,
    Ping,
    Pong,
    Shrink,
    Shutdown,
    Start,
    Step,
    ToWorker,
)
from prefixd.worker_protocol.worker_settings import WorkerSettings
from prefixd_swap.group_shape import chunks_per_frame
from prefixd_swap.threads import started_threads
from prefixd_swap.vmem import attach_memory, recv_export


def serve(connection: Connection[ToWorker], settings: WorkerSettings, clock: Callable[[], float]) -> None:
    """Say Hello, attach the daemon's memory, load, and run requests until Shutdown.

    The memory is attached before loading: that may take minutes, and the daemon does not wait so long for the worker to
    receive its descriptors.

    Raises ModelError, SwapError, ProtocolError, and ConnectionClosedError when the daemon is gone.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    spec = read_model_spec(settings)
    choose_attention(spec, paged=settings.kv == "paged")  # refuses a model that no backend can compute
    if spec.draft is not None:
        choose_attention(spec.draft)
    connection.send(spec.hello())
    message = connection.receive()
    if isinstance(message, Shutdown):
        return
    if not isinstance(message, Memory):
        raise ProtocolError(f"{type(message).__name__} before Memory: the daemon must send its memory first")
    with attach_memory(message.meta, recv_export(connection.socket, message.fds)) as memory:
        spec = replace(spec, groups=spec.groups.in_frames(message.frame_bytes, memory.chunk_bytes))
        wanted = settings.operators
        operators: Operators = ("fused" if spec.device.type == "cuda" else "model") if wanted == "auto" else wanted
        notes: list[str] = []
        model = load_model(spec, paged=settings.kv == "paged", operators=operators, note=notes.append)
        draft_model = None if spec.draft is None else load_model(spec.draft, operators=operators)
        frames = SharedFrames(memory, chunks_per_frame(spec.groups.frame_bytes, memory.chunk_bytes), message)
        with _mapping_thread(model) as background:
            kv = make_kv(
                spec,
                frames.memory,
                frames.table,
                requests=settings.max_sequences,
                frames=message.most_frames,
                background=background,
            )
            embeddings = make_embeddings(
                spec,
                frames.memory,
                frames.table,
                kv,
                requests=settings.max_sequences,
                background=background,
            )
            readiness = Readiness(connection.send)
            for line in notes:
                readiness.note(line)
            readiness.change(operators=model.operators.operators, operators_reason=model.operators.reason)
            graphs = load_graphs(settings, spec, model, kv, readiness, clock)
            draft: Draft | None = None
            if draft_model is not None and isinstance(kv, GroupedKv):  # two models have two groups
                draft = Draft(draft_model, kv, spec.draft_tokens)
            ahead = settings.async_scheduling and model.asynchronous
            engine = Engine(
                model, kv, settings.max_step_tokens, clock, graphs, draft, ahead=ahead, embeddings=embeddings
            )
            readiness.send()
            try:
                _run(connection, engine, frames, [kv] if embeddings is None else [kv, embeddings.memory])
            finally:
                engine.close()
                kv.end()
                if embeddings is not None:
                    embeddings.memory.end()


def _mapping_thread(model: CausalModel) -> AbstractContextManager[Executor | None]:
    """The thread that maps memory beside a GPU's passes; None on a CPU, where memory is mapped at once.

    On a CPU a request whose memory is still being mapped would miss a pass that it could share with others. Mapping
    takes a fraction of a pass: 0.17 s for 8,192 tokens of an 8B in float32, whose weights take seconds to read.
    """
    return started_threads(1, "mapping") if model.asynchronous else nullcontext()


def _run(connection: Connection[ToWorker], engine: Engine, frames: SharedFrames, memories: list[KvMemory]) -> None:
    """Handle all messages that have come, compute a step, and wait only when there is nothing to compute.

    Messages are also handled while the device computes, so that their frames are mapped meanwhile.
    """
    ended = False
    mailbox = Mailbox(connection, lambda message: frames.grow(message, connection.socket))
    engine.listen = mailbox.listen

    def take(timeout_s: float | None = 0.0) -> None:
        nonlocal ended
        while not ended and mailbox.poll(timeout_s):
            message = mailbox.receive()
            timeout_s = 0.0
            if isinstance(message, Shutdown):
                ended = True
            elif isinstance(message, Memory):
                raise ProtocolError("a second Memory message: the daemon sends its memory once")
            elif isinstance(message, Ping):
                connection.send(Pong())
            elif isinstance(message, Grow):
                frames.grow(message, connection.socket)
            elif isinstance(message, Expect):
                engine.expect(message)
            elif isinstance(message, Shrink):
                connection.send(frames.shrink(message, *memories))
            else:
                for done in _take(engine, message):
                    connection.send(done)

    while not ended:  # after Shutdown no step: it could wait for layers that do not come any more
        for answer in engine.step(take if engine.asynchronous else None):
            connection.send(answer)
        if engine.runnable:
            take()
        else:
            for answer in engine.flush():
                connection.send(answer)
            take(None)


def _take(engine: Engine, message: Start | Extend | Arrived | Layers | Cancel) -> list[Step | Done]:
    if isinstance(message, Start):
        return engine.start(message)
    if isinstance(message, Extend):
        return engine.extend(message)
    if isinstance(message, Arrived):
        return engine.arrived(message)
    if isinstance(message, Layers):
        return engine.layers(message)
    return engine.cancel(message)
