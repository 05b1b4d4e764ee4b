"""A worker that computes when the test says so: it checks every frame that it reads or fills."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xxhash

from prefixd.base.rules.rules import RecurrentState, SlidingWindow
from prefixd.cache import Namespace, TieredCache
from prefixd.serving.dispatch.dispatcher import Dispatcher
from prefixd.serving.kv_shape import KvShape
from prefixd.serving.request.request import Request
from prefixd.worker_protocol.protocol import (
    Arrived,
    Cancel,
    Done,
    Extend,
    GroupShape,
    KeptState,
    Layers,
    Start,
    Step,
    ToWorker,
    Update,
)
from prefixd_swap import (
    FrameId,
    KvGeometry,
    Span,
)
from prefixd_swap.block_layers import BlockLayers

BLOCK = 4
GEOMETRY = KvGeometry(layers=1, kv_heads=1, head_dim=128, dtype="float32", block_tokens=BLOCK, layout="token")
PLACEHOLDER = 7
"""The token id that stands for an image."""
STEP = 12
"""Most tokens of a request that the worker computes at a time, if the model has windows or states."""

LAYERS = 4
BLOCK_LAYERS = BlockLayers(LAYERS, BLOCK, GEOMETRY.token_bytes // LAYERS, GEOMETRY.token_bytes)

_FULL = GroupShape("full", None, 2, 1)
_WINDOW = GroupShape("window", SlidingWindow(7), 2, 2)
_STATE = GroupShape("state", RecurrentState(), 3, 2)
MODELS = {
    "plain": KvShape((GroupShape("attention", None, 1, 1),), BLOCK),
    "layers": KvShape((GroupShape("attention", None, LAYERS, 1),), BLOCK, layers=BLOCK_LAYERS),
    "windows": KvShape((_FULL, _WINDOW), BLOCK, window_margin=2, step_tokens=STEP),
    "windows alone": KvShape((_WINDOW,), BLOCK, step_tokens=STEP),
    "states": KvShape((_FULL, _WINDOW, _STATE), BLOCK, step_tokens=STEP),
    "pages": KvShape((_FULL, _WINDOW, _STATE), BLOCK, step_tokens=STEP, whole_pages=True),
}


@dataclass
class FakeRun:
    """A request as the worker sees it."""

    start: Start
    tokens: list[int]
    frames: list[int]
    computed: int
    generated: int
    keep: list[KeptState] = field(default_factory=list)
    tail_blocks: int = 0
    arrived: range = range(0)
    loading: bool = False

    def compute(self, reach: int) -> None:
        """It has computed so many tokens, and passes over the blocks that arrived behind them."""
        self.computed = reach
        if self.arrived and reach >= self.arrived.start * BLOCK:
            self.computed = max(reach, self.arrived.stop * BLOCK)


@dataclass
class FakeWorker:
    """The worker's half of a `Bench`."""

    cache: TieredCache
    namespace: Namespace
    kv: KvShape
    dispatcher: Dispatcher = field(init=False)
    sent: list[ToWorker] = field(default_factory=list, init=False)
    runs: dict[int, FakeRun] = field(default_factory=dict, init=False)
    embedded: set[bytes] = field(default_factory=set, init=False)
    token_s: float = field(default=0.0, init=False)
    """What the worker says that computing a token took."""

    # -- the worker ---------------------------------------------------------------------------------------------------

    def _take(self, message: ToWorker) -> None:
        self.sent.append(message)
        if isinstance(message, Start):
            tokens = seen_tokens(message)
            computed = message.cached_blocks * BLOCK
            assert computed < len(tokens)
            assert not any(image.first < computed < image.first + image.tokens for image in message.images)
            run = FakeRun(message, tokens, list(message.frames), computed, message.generated)
            run.loading = message.loading
            if not run.loading:
                self._check_read(run)  # never another prompt's bytes, whatever moved meanwhile
            if message.state is not None:
                self._resume(run)
            self.runs[message.id] = run
            self._check_owned()
        elif isinstance(message, Extend) and message.id in self.runs:
            assert len(message.frames) % len(self.kv.block_widths) == 0
            self.runs[message.id].frames += message.frames
            self._check_owned()
        elif isinstance(message, Arrived) and message.id in self.runs:
            run = self.runs[message.id]
            assert message.frames and message.first == self._blocks(run) and not run.arrived
            run.frames += message.frames
            run.arrived = range(message.first, self._blocks(run))
            assert run.arrived.stop * BLOCK < len(run.tokens)
            for block in run.arrived:
                assert self._part(self._homes(run, block)[0], 0).tobytes() == self._filling(
                    run.tokens[: (block + 1) * BLOCK], 0
                )
            run.compute(run.computed)

        elif isinstance(message, Layers) and message.id in self.runs:
            run = self.runs[message.id]
            assert run.loading and 0 < message.layers <= LAYERS
            run.loading = message.layers < LAYERS
            for block in range(run.start.cached_blocks):
                filling = np.frombuffer(self._filling(run.tokens[: (block + 1) * BLOCK], 0), np.uint8)
                come, right = (
                    data.reshape(BLOCK, LAYERS, -1)[:, : message.layers]
                    for data in (self._part(self._homes(run, block)[0], 0), filling)
                )
                assert np.array_equal(come, right), "the layers that it was told of are there"

    def _homes(self, run: FakeRun, block: int) -> list[int]:
        """The frames of a block, -1 where the worker may not look any more."""
        slots = len(self.kv.block_widths)
        homes = run.frames[block * slots : (block + 1) * slots]
        for first, last, passed in self.kv.passed(run.computed):
            if block < passed:
                homes[first:last] = [-1] * (last - first)
        return homes

    def _blocks(self, run: FakeRun) -> int:
        return len(run.frames) // len(self.kv.block_widths)

    def _check_read(self, run: FakeRun) -> None:
        """What the next token needs is there: the bytes of exactly these tokens."""
        needed = self.cache.trie(self.namespace).needed(run.computed // BLOCK)
        passed = {part: blocks for first, last, blocks in self.kv.passed(run.computed) for part in range(first, last)}
        for block in range(run.computed // BLOCK):
            for part, home in enumerate(self._homes(run, block)):
                if block >= passed[part] and needed[block] & self.cache.trie(self.namespace).part_mask[part]:
                    assert self._part(home, part).tobytes() == self._filling(run.tokens[: (block + 1) * BLOCK], part)

    def _check_owned(self) -> None:
        """No frame that a run fills, or keeps a state in, is another's."""
        held = []
        for run in self.runs.values():
            for block in set(range(run.start.cached_blocks, self._blocks(run))) - set(run.arrived):
                held += [home for home in self._homes(run, block) if home >= 0]
            if (state := run.start.state) is not None:
                held += [*state.own, *state.tail, *(frame for kept in run.keep for frame in kept.frames)]
        assert len(set(held)) == len(held), "two requests fill one frame"

    def _resume(self, run: FakeRun) -> None:
        state, size = run.start.state, len(self.kv.state_widths)
        assert state is not None and len(state.own) == size and len(state.resume) == (size if run.computed else 0)
        for part, frame in enumerate(state.resume, len(self.kv.block_widths)):
            assert self._part(frame, part).tobytes() == self._filling(run.tokens[: run.computed], part)
        blocks = [kept.blocks for kept in state.keep]
        assert blocks == sorted(set(blocks)) and all(run.computed < BLOCK * n <= len(run.tokens) - 1 for n in blocks)
        run.keep = list(state.keep)

    def _keep(self, tokens: Sequence[int], frames: Sequence[int]) -> None:
        """Copies the state after these tokens."""
        for part, frame in enumerate(frames, len(self.kv.block_widths)):
            self._part(frame, part)[:] = np.frombuffer(self._filling(tokens, part), np.uint8)

    def _width(self, part: int) -> int:
        return (*self.kv.block_widths, *self.kv.state_widths)[part]

    def _filling(self, tokens: Sequence[int], part: int) -> bytes:
        return contents(tokens, part) * self._width(part)

    def _part(self, first: int, part: int) -> np.ndarray[Any, Any]:
        """The bytes of a part, in its frames side by side."""
        frames = range(first, first + self._width(part))
        span = self.cache.tiers.frames.span(FrameId(frames[0]))
        self.cache.tiers.frames.span(FrameId(frames[-1]))
        return span_bytes(replace(span, nbytes=len(frames) * span.nbytes))

    def step(self, *requests: Request) -> None:
        """A forward pass over these requests (all that run): whole prompts, then a token each, as far as frames go."""
        updates, done, computed = [], [], 0
        for run in [self.runs[r.id] for r in requests] or list(self.runs.values()):
            if run.loading:
                continue  # its pass waits
            reach = min(len(run.tokens), self._blocks(run) * BLOCK)
            if run.arrived and run.computed < run.arrived.start * BLOCK:
                reach = min(reach, run.arrived.start * BLOCK)
            if self.kv.step_tokens:
                reach = min(reach, run.computed + self.kv.step_tokens)
            self._check_read(run)
            for block in range(run.computed // BLOCK, reach // BLOCK):
                for part, home in enumerate(self._homes(run, block)):
                    filling = self._filling(run.tokens[: (block + 1) * BLOCK], part)
                    self._part(home, part)[:] = np.frombuffer(filling, np.uint8)
            computed += reach - run.computed
            news, kept = [], []
            if run.start.state is not None:
                kept = [each.blocks for each in run.keep if each.blocks * BLOCK <= reach]
                for each in run.keep[: len(kept)]:
                    self._keep(run.tokens[: each.blocks * BLOCK], each.frames)
                run.keep = run.keep[len(kept) :]
                if run.start.state.tail and reach // BLOCK > max(run.computed // BLOCK, run.start.cached_blocks):
                    run.tail_blocks = reach // BLOCK
                    self._keep(run.tokens[: run.tail_blocks * BLOCK], run.start.state.tail)
            if reach == len(run.tokens) > run.computed:
                news = [next_token(run.tokens)]
                run.generated += 1
            if run.computed != reach:
                run.compute(reach)
                updates.append(Update(run.start.id, news, run.computed // BLOCK, kept=kept))
            run.tokens += news
            if run.generated >= run.start.sampling.max_tokens:
                done.append(run.start.id)
        self.dispatcher.on_step(Step(updates, computed, max(0.001, computed * self.token_s)))
        for number in done:
            run = self.runs.pop(number)
            self.dispatcher.on_done(
                Done(number, "length", tail_blocks=run.tail_blocks, encoded_images=self._embed(run.start))
            )

    def _embed(self, start: Start) -> int:
        """How many images of a run were not known and not cached."""
        computed = start.cached_blocks * BLOCK
        new = {image.digest for image in start.images if image.first >= computed} - self.embedded
        self.embedded |= new
        return len(new)

    def answer_cancels(self) -> None:
        """The worker lets go of what it was told to cancel."""
        for message in list(self.sent):
            if isinstance(message, Cancel):
                self.sent.remove(message)
                if run := self.runs.pop(message.id, None):
                    self.dispatcher.on_done(Done(message.id, "cancelled", tail_blocks=run.tail_blocks))

    def die(self, gave_up: bool = False) -> None:
        self.runs.clear()
        self.dispatcher.on_death("signal 9", gave_up)


def seen_tokens(start: Start) -> list[int]:
    """What the model sees: tokens, and of images their content where the placeholders are."""
    tokens = np.frombuffer(start.tokens, "<u4").astype(np.int64)
    for image in start.images:
        assert (tokens[image.first : image.first + image.tokens] == PLACEHOLDER).all()
        content = xxhash.xxh3_64_intdigest(image.digest) % 1_000_000
        tokens[image.first : image.first + image.tokens] = 10_000_000 + content * 1_000 + np.arange(image.tokens)
    seen: list[int] = (tokens % (1 << 32)).tolist()
    return seen


def contents(tokens: Sequence[int], part: int = 0) -> bytes:
    """The bytes of a part of the block that ends this prefix, or of the state after it."""
    digest = xxhash.xxh3_128_digest(np.asarray(tokens, "<u4").tobytes(), seed=part)
    return digest * (GEOMETRY.block_bytes // len(digest))


def next_token(tokens: Sequence[int]) -> int:
    """What the model says after these tokens."""
    return xxhash.xxh3_64_intdigest(np.asarray(tokens, "<u4").tobytes()) % 1000


def span_bytes(span: Span) -> np.ndarray[Any, Any]:
    return np.frombuffer((ctypes.c_uint8 * span.nbytes).from_address(span.address), np.uint8)
