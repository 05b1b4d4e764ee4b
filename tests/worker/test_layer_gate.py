"""A pass computes the first layers while the last layers of its cached blocks are on their way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import pytest
import torch

from prefixd.base.sampling import BeamSearch, Sampling
from prefixd.serving.kv_shape import KvShape
from prefixd.worker import conversation
from prefixd.worker.layer_gate import Mailbox
from prefixd.worker.memory.shared_frames import SharedFrames
from prefixd.worker.model import CausalModel
from prefixd.worker_protocol.errors import ConnectionClosedError
from prefixd.worker_protocol.framing import Connection
from prefixd.worker_protocol.protocol import (
    Cancel,
    Done,
    Extend,
    Grow,
    Layers,
    Ping,
    Pong,
    Shutdown,
    Start,
    Step,
    ToWorker,
)
from tests.worker.conftest import VOCAB, Rig

TOKENS = np.random.default_rng(12).integers(0, VOCAB - 1, 100).tolist()  # 6 blocks of 16, and 4
LAYERS = 3
MakeRig = Callable[..., Any]


class Arrivals:
    """Blocks that come layer by layer: what has not come is NaN. Each time the engine listens, another layer comes.

    `events`: "layer n" when it comes, and the number of each layer of which attention is computed.
    """

    def __init__(self, rig: Rig, home: Sequence[int], fresh: Sequence[int], layers_at_once: int = 1) -> None:
        self.rig, self.come, self.step = rig, 0, layers_at_once
        self.events: list[object] = []
        self._pairs = [(self._layers(source), self._layers(target)) for source, target in zip(home, fresh, strict=True)]
        for _, target in self._pairs:
            target.fill_(torch.nan)
        self._backend = rig.model.attention
        rig.model.attention = cast(Any, self)
        rig.engine.listen = self.listen

    def _layers(self, frame: int) -> torch.Tensor:
        """[layers, ...]: a block's numbers."""
        geometry = self.rig.model.spec.geometry
        numbers, heads = self.rig.window(frame), 2 * geometry.kv_heads * geometry.head_dim
        if geometry.layout == "layer":
            return numbers.view(LAYERS, -1)
        return numbers.view(geometry.block_tokens, LAYERS, heads).transpose(0, 1)

    def listen(self, request: int) -> Layers | None:
        self.come = min(self.come + self.step, LAYERS)
        self.events.append(f"layer {self.come - 1}")
        for source, target in self._pairs:
            target[: self.come].copy_(source[: self.come])
        return Layers(request, self.come)

    def begin(self, step: Any) -> Any:
        attention = self._backend.begin(step)
        attend = attention.attend

        def recorded(query: Any, layer: int, *arguments: Any) -> Any:
            self.events.append(layer)
            return attend(query, layer, *arguments)

        attention.attend = recorded
        return attention


@contextmanager
def loading(rig: Rig, blocks: int = 6, **sampling: Any) -> Iterator[tuple[list[int], list[int], int, Arrivals]]:
    """The right tokens, and a request whose `blocks` cached blocks come; none of their layers is there yet."""
    home = rig.frames(8)
    expected = rig.generate(TOKENS, frames=home, **sampling)
    rig.steps.clear()
    fresh = rig.frames(8)
    request = rig.start(TOKENS, fresh, blocks, loading=True, **sampling)
    yield expected, fresh, request, Arrivals(rig, home[:blocks], fresh[:blocks])


@pytest.mark.parametrize("kv", ["virtual", "paged"])
@pytest.mark.parametrize("layout", ["token", "layer"])
@pytest.mark.parametrize(("blocks", "max_step_tokens"), [(6, 64), (2, 16)], ids=["one pass", "five passes"])
def test_the_first_layers_are_computed_before_the_last_have_come_with_the_same_tokens(
    make_rig: MakeRig, kv: str, layout: str, blocks: int, max_step_tokens: int
) -> None:
    rig = make_rig(kv=kv, layout=layout, max_step_tokens=max_step_tokens)
    with loading(rig, blocks, max_tokens=12, temperature=1.0, seed=3) as (expected, _, request, arrivals):
        assert not rig.engine.runnable, "no layer has come"
        rig.take(rig.engine.layers(arrivals.listen(request) or Layers(request, 0)))
        rig.run()
        assert rig.tokens[request] == expected
        assert arrivals.events[:6] == ["layer 0", 0, "layer 1", 1, "layer 2", 2]
        assert sum(step.computed_tokens for step in rig.steps) == 100 - 16 * blocks + 11


def test_daemon_and_worker_agree_where_a_models_layers_lie(model: CausalModel) -> None:
    layers, geometry = KvShape.of(model.spec.hello(), 64).layers, model.spec.geometry
    assert layers is not None and layers.layers == model.spec.layers_apart == LAYERS
    assert (layers.nbytes, layers.stride, layers.layout) == (geometry.kv_bytes, geometry.stride, geometry.layout)


def test_layers_that_have_all_come_hold_no_pass(rig: Rig) -> None:
    with loading(rig) as (expected, _, request, arrivals):
        while arrivals.come < LAYERS:
            rig.take(rig.engine.layers(arrivals.listen(request) or Layers(request, 0)))
        rig.engine.listen = None
        rig.run()
        assert rig.tokens[request] == expected
    assert rig.engine.layers(Layers(request, 1)) == [], "it has ended"


def test_it_waits_while_others_are_computed(rig: Rig) -> None:
    """Only its own pass waits for layers, and it runs only if there is no other."""
    with loading(rig) as (expected, _, request, arrivals):
        alone = rig.generate(TOKENS[:20], max_tokens=5)
        other = rig.start(TOKENS[:20], max_tokens=5)
        rig.take(rig.engine.layers(arrivals.listen(request) or Layers(request, 0)))
        arrivals.events.clear()
        while other not in rig.done:
            rig.step()
        assert rig.tokens[other] == alone and not any(isinstance(event, str) for event in arrivals.events)
        assert rig.tokens[request] == []
        rig.run()
        assert rig.tokens[request] == expected


@pytest.mark.parametrize("passed", [0, 1])
def test_a_pass_is_dropped_when_its_request_is_cancelled(rig: Rig, passed: int) -> None:
    """Its layers came no further. Nothing of it is reported, and others run on."""
    with loading(rig) as (expected, fresh, request, arrivals):

        def listen(number: int) -> Layers | None:
            return arrivals.listen(number) if arrivals.come <= passed else None

        rig.take(rig.engine.layers(arrivals.listen(request) or Layers(request, 0)))
        rig.engine.listen = listen
        rig.run()
        assert rig.done == {**rig.done, request: Done(request, "cancelled")} and not rig.steps
        rig.engine.listen = arrivals.listen
        while arrivals.come < LAYERS:
            arrivals.listen(request)
        assert rig.generate(TOKENS, frames=fresh, cached_blocks=6) == expected


def test_nothing_is_copied_of_what_has_not_come(rig: Rig) -> None:
    """A request with the same prompt and fewer cached blocks computes them, and so gets no garbage."""
    with loading(rig) as (expected, _, request, _):
        child = rig.start(TOKENS, rig.frames(8), fork_of=request)
        while child not in rig.done:
            rig.step()
        assert rig.tokens[child] == expected
        rig.take(rig.engine.cancel(Cancel(request)))


@pytest.mark.parametrize(
    "how", [{"cached_blocks": 0}, {"cached_blocks": 1, "beam_search": BeamSearch(width=2), "max_tokens": 2}]
)
def test_what_cannot_come_layer_by_layer_is_refused(rig: Rig, how: dict[str, Any]) -> None:
    request = rig.start(TOKENS, rig.frames(16), loading=True, **how)
    assert rig.done[request].reason == "error" and "layer by layer" in rig.done[request].detail


# -- the socket ------------------------------------------------------------------------------------------------------


class Line:
    """A connection on which these messages come; then it is closed."""

    socket = None

    def __init__(self, *messages: object) -> None:
        self.messages = list(messages)
        self.sent: list[object] = []

    def poll(self, timeout_s: float | None) -> bool:
        return timeout_s is None

    def receive(self) -> object:
        if not self.messages:
            raise ConnectionClosedError("closed")
        return self.messages.pop(0)

    def send(self, message: object) -> None:
        self.sent.append(message)


def test_messages_keep_their_order_while_a_pass_waits() -> None:
    grow, kept = Grow(b"", 1, b"", b""), [Extend(1, [4]), Layers(2, 1), Cancel(2)]
    line = Line(kept[0], Ping(), kept[1], grow, kept[2], Layers(1, 2), Cancel(1), Extend(3, []), Shutdown())
    grown: list[Grow] = []
    mailbox = Mailbox(cast("Connection[ToWorker]", line), grown.append)
    assert not mailbox.poll()
    assert mailbox.listen(1) == Layers(1, 2)
    assert (line.sent, grown) == ([Pong()], [grow]), "descriptors follow on the socket: they are taken at once"
    assert mailbox.listen(1) is None, "cancelled"
    assert mailbox.listen(3) is None, "the worker is to end"
    read = []
    while mailbox.poll():
        read.append(mailbox.receive())
    assert read == [*kept, Extend(3, []), Shutdown()]
    with pytest.raises(ConnectionClosedError):
        mailbox.listen(1)


def test_a_worker_computes_while_layers_come(rig: Rig) -> None:
    """It answers a Ping in the middle of the pass, and starts what came meanwhile after it."""
    frames = rig.frames(8)
    expected, other = rig.generate(TOKENS, frames=frames, max_tokens=2), rig.generate(TOKENS[:20], max_tokens=2)
    line = Line(
        start(1, TOKENS, [*frames[:6], *rig.frames(2)], cached=6),
        *(Layers(1, 1), Ping(), start(2, TOKENS[:20], rig.frames(2)), Layers(1, 2), Ping(), Layers(1, LAYERS)),
        Shutdown(),
    )
    line.poll = lambda timeout_s: timeout_s is None or not any(isinstance(each, Layers) for each in line.messages)
    conversation._run(cast("Connection[ToWorker]", line), rig.engine, cast(SharedFrames, None), [rig.kv])
    assert [type(message) for message in line.sent[:3]] == [Pong, Pong, Step]
    tokens: dict[int, list[int]] = {1: [], 2: []}
    for message in line.sent:
        for update in message.updates if isinstance(message, Step) else ():
            tokens[update.id] += update.tokens
    assert tokens == {1: expected[: len(tokens[1])], 2: other[: len(tokens[2])]} and tokens[1]


@pytest.mark.parametrize("end", ["the daemon ends it", "the daemon is gone"])
def test_a_worker_ends_while_it_waits_for_layers(rig: Rig, end: str) -> None:
    frames = rig.frames(8)
    line = Line(
        start(1, TOKENS, frames, cached=6), Layers(1, 1), *([Shutdown()] if end == "the daemon ends it" else [])
    )
    polls = iter([True, True, False])
    line.poll = lambda timeout_s: next(polls)
    run = (cast("Connection[ToWorker]", line), rig.engine, cast(SharedFrames, None), [rig.kv])
    if end == "the daemon ends it":
        conversation._run(*run)
        assert line.sent == [Done(1, "cancelled")]
    else:
        with pytest.raises(ConnectionClosedError):
            conversation._run(*run)


def start(request: int, tokens: list[int], frames: list[int], cached: int = 0) -> Start:
    return Start(
        id=request,
        tokens=np.array(tokens, "<u4").tobytes(),
        generated=0,
        cached_blocks=cached,
        frames=frames,
        sampling=Sampling(max_tokens=2, ignore_eos=True),
        loading=cached > 0,
    )
