"""The requests that the worker computes: each gets memory when it comes, and gives it back when it has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from prefixd.worker.decoding.beam_run import BeamRun
from prefixd.worker.decoding.run import Run, check_start
from prefixd.worker.images import PromptImages
from prefixd.worker.memory.cross_kv import CrossKv
from prefixd.worker.memory.embedding_memory import EmbeddingMemory, PromptEmbeddings
from prefixd.worker.memory.grouped_kv import GroupedKv
from prefixd.worker.memory.kv_memory import KvMemory
from prefixd.worker.model import CausalModel
from prefixd.worker_protocol.errors import RequestError
from prefixd.worker_protocol.protocol import Done, Start
from prefixd_swap.errors import OutOfMemoryError, SwapError

_NAMED = 8


class Runs:
    """The runs by request id, and their memory.

    Args:
        model: computes them.
        kv: their memory.
        embeddings: that of their images' embeddings, for a model that keeps them.
    """

    def __init__(self, model: CausalModel, kv: KvMemory, embeddings: EmbeddingMemory | None = None) -> None:
        self._model = model
        self._kv = kv
        self._embeddings = embeddings
        self._by_id: dict[int, Run | BeamRun] = {}
        self._of_images: dict[int, CrossKv | PromptEmbeddings] = {}  # of runs with images
        self._closed: list[Done] = []  # requests that nothing on the device uses any more

    def __iter__(self) -> Iterator[Run | BeamRun]:
        return iter(self._by_id.values())

    def __contains__(self, request: int) -> bool:
        return request in self._by_id

    def __getitem__(self, request: int) -> Run | BeamRun:
        return self._by_id[request]

    def get(self, request: int) -> Run | BeamRun | None:
        """The run of a request; None if it has ended."""
        return self._by_id.get(request)

    def open(self, message: Start) -> Done | None:
        """Begins the run of a request. Returns the answer at once if it cannot run."""
        if message.id in self._by_id:
            return Done(message.id, "error", f"request {message.id} is already running; use another id")
        spec, block_tokens = self._model.spec, self._model.spec.block_tokens
        of_images: CrossKv | PromptEmbeddings | None = None
        try:
            check_start(message, block_tokens, spec)
            blocks = -(-len(message.tokens) // 4 // block_tokens)
            own = message.frames[: blocks * spec.block_slots] if message.sampling.beams else message.frames
            images = self._images(message)
            of_images = self._open_images(message)
            memory = self._kv.open(own, message.state)
        except (RequestError, SwapError) as error:
            if of_images is not None:
                self._close_images(of_images, lambda: None)
            if isinstance(error, RequestError):
                return Done(message.id, "error", str(error))
            return failure(message.id, message.frames, error)
        run: Run | BeamRun
        if (search := message.sampling.beam_search) is not None:
            run = BeamRun(message, search, self._kv, memory, block_tokens, spec, images)
        else:
            run = Run(message, memory, block_tokens, spec, images)
        self._by_id[run.id] = run
        if of_images is not None and images is not None:
            images.memory = self._of_images[run.id] = of_images
        try:
            self._fork(run, self._by_id.get(message.fork_of))
        except SwapError as error:
            self.close(run, failure(run.id, message.frames, error))
        else:
            if isinstance(run, Run) and run.ended:
                self.close(run, Done(run.id, run.ended))
        return None

    def close(self, run: Run | BeamRun, done: Done) -> None:
        """Gives back the run's memory. `take_closed` returns `done` once the device uses the memory no more."""
        del self._by_id[run.id]
        if isinstance(run, Run) and run.state is not None and done.reason != "error":  # else it may be damaged
            done = msgspec.structs.replace(done, tail_blocks=run.state.tail_blocks)
        images = run.images if isinstance(run, Run) else run.prompt.images
        if images is not None:
            done = msgspec.structs.replace(done, encoded_images=images.encoded)
        of_images = self._of_images.pop(run.id, None)
        open_memories = len(run.memories) + (of_images is not None)

        def closed() -> None:
            nonlocal open_memories
            open_memories -= 1
            if not open_memories:
                self._closed.append(done)

        for memory in run.memories:
            self._kv.close(memory, closed)
        if of_images is not None:
            self._close_images(of_images, closed)

    def poll(self, wait: bool = False) -> None:
        """As `KvMemory.poll`, for all memory."""
        self._kv.poll(wait)
        if self._embeddings is not None:
            self._embeddings.memory.poll(wait)

    def take_closed(self) -> list[Done]:
        """The ends of requests whose memory the device does not use any more, each once."""
        closed, self._closed = self._closed, []
        return closed

    def _images(self, message: Start) -> PromptImages | None:
        """The images of a request that has been checked. Raises RequestError."""
        encoder = self._model.images
        if encoder is None or not message.images:
            return None
        return PromptImages(message.images, len(message.tokens) // 4, encoder)

    def _open_images(self, message: Start) -> CrossKv | PromptEmbeddings | None:
        """The memory of a request's images; None for a prompt without. Raises as `KvMemory.open`."""
        if not message.image_frames:
            return None
        if self._embeddings is not None:
            return self._embeddings.open(message.image_frames)
        assert isinstance(self._kv, GroupedKv) and self._kv.cross is not None, "the model reads images"
        return self._kv.cross.open(message.image_frames)

    def _close_images(self, memory: CrossKv | PromptEmbeddings, on_closed: Callable[[], None]) -> None:
        if isinstance(memory, PromptEmbeddings):
            assert self._embeddings is not None, "it has opened it"
            self._embeddings.close(memory, on_closed)
            return
        assert isinstance(self._kv, GroupedKv) and self._kv.cross is not None, "it has opened it"
        self._kv.cross.close(memory, on_closed)

    def _fork(self, run: Run | BeamRun, parent: Run | BeamRun | None) -> None:
        """Copy the KV of the tokens behind the cached blocks that both have in common and `parent` has computed."""
        if parent is None or not self._model.spec.groups.plain or parent.loading:
            return  # a state cannot be cut to the common tokens, windows may have released their KV, or it has not come
        child = run if isinstance(run, Run) else run.prompt
        source = parent if isinstance(parent, Run) else parent.prompt
        first = child.computed
        known = min(source.kept_tokens, len(source.tokens))
        last = min(known, len(child.tokens) - 1, child.memory.blocks * self._model.spec.block_tokens)
        common = first
        while common < last and child.tokens[common] == source.tokens[common]:
            common += 1
        if child.images is not None:
            common = child.images.common(source.images, common)
        elif source.images is not None:
            common = source.images.common(None, common)
        if common > first and child.tokens[:first] == source.tokens[:first]:
            self._kv.copy(source.memory, child.memory, first, common)
            child.computed = common


def failure(request: int, frames: list[int], error: SwapError) -> Done:
    """The end of a request of which `frames` could not be mapped."""
    if isinstance(error, OutOfMemoryError):
        return Done(request, "no_memory", str(error))
    named = f"frames {frames[:_NAMED]}{'...' * (len(frames) > _NAMED)}" if frames else "its frames"
    return Done(request, "error", f"{named} cannot be mapped: {error}")
