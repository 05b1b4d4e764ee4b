"""A step is queued before the tokens of the last one are read: the same tokens and blocks as one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixd.base.sampling import BeamSearch
from prefixd.worker import pass_queue
from prefixd.worker.decoding.token_choice import Choice, Chosen, QueuedChoices, queue_choices
from prefixd.worker.memory.kv_memory import KvSequence, StepKv
from prefixd.worker.model import CausalModel, load_model
from prefixd.worker.pass_queue import PassQueue, QueuedPass
from prefixd.worker.spec.model_spec import read_model_spec
from prefixd.worker.to_device import UnreadTokens
from prefixd.worker_protocol.protocol import Cancel, Done, Extend, StateFrames, Step, blocks_needed
from prefixd.worker_protocol.worker_settings import WorkerSettings
from prefixd_swap.errors import OutOfMemoryError
from tests.worker.conftest import VOCAB, Rig
from tests.worker.tiny_models import build_recurrent

GARBAGE = 1 << 40


class LazyStream:
    """A device that computes nothing before the host waits for it; what it has not computed yet is garbage.

    So the host cannot have used the results of a pass before it has waited for them.
    """

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []
        self.read_behind: list[int] = []
        """For each wait, the passes that were queued behind what it waited for."""
        self._passes = 0

    def until(self, place: int) -> None:
        """Compute the first `place` pieces of work."""
        for index in range(place):
            work, self.work[index] = self.work[index], lambda: None
            work()

    def attach(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        """Has a rig's engine compute on this device."""
        model, kv = rig.model, rig.kv
        forward, close, poll, copy, search = model.forward, kv.close, kv.poll, kv.copy, PassQueue._search

        def queue_forward(
            tokens: Sequence[int],
            step: StepKv,
            wanted: Sequence[int],
            unread: UnreadTokens | None = None,
            before_layer: None = None,
        ) -> torch.Tensor:
            logits = torch.full((len(wanted), VOCAB), torch.nan)
            self.work.append(lambda: logits.copy_(forward(tokens, step, wanted, unread)))
            self._passes += 1
            return logits

        def queue(logits: torch.Tensor, rows: Sequence[int], choices: Sequence[Choice], *, count: bool) -> Any:
            ids = torch.full((len(choices),), GARBAGE)
            made: list[QueuedChoices] = []

            def choose() -> None:
                made.append(queue_choices(logits, rows, choices, count=count))
                ids.copy_(made[0].ids)

            self.work.append(choose)
            return Late(self, len(self.work), ids, made, self._passes)

        def retire(memory: KvSequence, on_closed: Callable[[], None]) -> None:
            self.work.append(lambda: close(memory, on_closed))

        def poll_stream(wait: bool = False) -> int:
            if wait:
                self.until(len(self.work))
            return poll(wait)

        def search_now(passes: PassQueue, queued: QueuedPass) -> list[Done]:
            self.until(len(self.work))
            return search(passes, queued)

        def copy_behind(*arguments: Any) -> None:
            self.work.append(lambda: copy(*arguments))

        monkeypatch.setattr(model, "forward", queue_forward)
        monkeypatch.setattr(model, "synchronize", lambda: self.until(len(self.work)))
        monkeypatch.setattr(type(model), "asynchronous", True)
        monkeypatch.setattr(pass_queue, "queue_choices", queue)
        monkeypatch.setattr(PassQueue, "_search", search_now)
        monkeypatch.setattr(kv, "close", retire)
        monkeypatch.setattr(kv, "poll", poll_stream)
        monkeypatch.setattr(kv, "copy", copy_behind)

    @property
    def passes(self) -> int:
        """Passes that were queued."""
        return self._passes


@dataclass
class Late:
    """`QueuedChoices` of a lazy stream."""

    stream: LazyStream
    place: int
    ids: torch.Tensor
    made: list[QueuedChoices]
    number: int

    def read(self) -> list[Chosen | None]:
        self.stream.until(self.place)
        self.stream.read_behind.append(self.stream.passes - self.number)
        return self.made[0].read()


@dataclass(frozen=True)
class Plan:
    """A request, and what becomes of it.

    starts: before this step.  cancelled: before this step, and then run anew from where it was, as after a preemption.
    ahead: memory for the whole output from the start on, else block by block.
    """

    length: int
    sampling: dict[str, Any]
    starts: int = 0
    cancelled: int | None = None
    ahead: bool = True

    def prompt(self) -> list[int]:
        return [(7 * self.length + 11 * place) % (VOCAB - 1) for place in range(self.length)]


@dataclass
class Running:
    """A plan's request. blocks: how many it has memory for."""

    plan: Plan
    request: int
    frames: list[int]
    blocks: int
    before: list[int] = field(default_factory=list)

    def tokens(self, rig: Rig) -> list[int]:
        return [*self.before, *rig.tokens[self.request]]


def start(rig: Rig, plan: Plan, before: Sequence[int] = ()) -> Running:
    tokens = [*plan.prompt(), *before]
    most = rig.blocks(plan.length + plan.sampling["max_tokens"])
    beams: BeamSearch | None = plan.sampling["beam_search"]
    if beams is not None:
        most = blocks_needed(plan.length, plan.sampling["max_tokens"], beams.width, rig.block_tokens)
    frames = rig.frames(most)
    blocks = most if plan.ahead or beams is not None else rig.blocks(len(tokens))
    request = rig.start(tokens, frames[:blocks], generated=len(before), **plan.sampling)
    return Running(plan, request, frames, blocks, list(before))


def run(rig: Rig, plans: Sequence[Plan]) -> list[Running]:
    """All requests to their ends."""
    running: dict[int, Running] = {}
    step = 0
    while len(running) < len(plans) or not all(each.request in rig.done for each in running.values()):
        for number, plan in enumerate(plans):
            if plan.starts == step:
                running[number] = start(rig, plan)
            elif plan.cancelled == step and number in running:
                rig.take(rig.engine.cancel(Cancel(running[number].request)))
        rig.take(rig.engine.step() if rig.engine.runnable else rig.engine.flush())
        for number, each in running.items():
            if each.request not in rig.done:
                known = each.plan.length + len(each.tokens(rig))
                if known > each.blocks * rig.block_tokens:
                    more = each.frames[each.blocks : each.blocks + 1]
                    rig.take(rig.engine.extend(Extend(each.request, more)))
                    each.blocks += 1
            elif rig.done[each.request].reason == "cancelled" and not each.plan.sampling["beam_search"]:
                running[number] = start(rig, each.plan, each.tokens(rig))
        step += 1
    return [running[number] for number in range(len(plans))]


SAMPLINGS = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 14),
        "temperature": st.sampled_from([0.0, 3.0]),
        "seed": st.integers(0, 3),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([(), tuple(range(0, VOCAB, 7))]),
        "repetition_penalty": st.sampled_from([1.0, 1.4]),
        "logprobs": st.sampled_from([None, 2]),
        "beam_search": st.sampled_from([None, None, None, BeamSearch(width=2)]),
    }
)
PLANS = st.builds(
    Plan,
    length=st.integers(1, 50),
    sampling=SAMPLINGS,
    starts=st.integers(0, 5),
    cancelled=st.one_of(st.none(), st.integers(0, 12)),
    ahead=st.booleans(),
)


@pytest.fixture
def lazy(model: CausalModel) -> Iterator[Callable[..., tuple[Rig, LazyStream]]]:
    """Engines that queue ahead, on lazy devices."""
    rigs: list[tuple[Rig, pytest.MonkeyPatch]] = []

    def make(kv: str = "virtual") -> tuple[Rig, LazyStream]:
        rig, stream, patch = Rig(model, frames=120, kv=kv, ahead=True), LazyStream(), pytest.MonkeyPatch()
        rigs.append((rig, patch))
        stream.attach(rig, patch)
        return rig, stream

    yield make
    for rig, patch in reversed(rigs):
        rig.close()
        patch.undo()


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plans=st.lists(PLANS, min_size=1, max_size=4))
def test_tokens_and_blocks_are_those_of_steps_one_after_the_other(model: CausalModel, plans: list[Plan]) -> None:
    plain = Rig(model, frames=120)
    expected = [start(plain, replace(plan, ahead=True)) for plan in plans]
    plain.run()
    with pytest.MonkeyPatch.context() as patch:
        rig = Rig(model, frames=240, ahead=True)
        LazyStream().attach(rig, patch)
        found = run(rig, plans)
        for plan, one, other in zip(plans, expected, found, strict=True):
            wanted, done = plain.done[one.request], rig.done[other.request]
            if plan.sampling["beam_search"]:
                assert done.reason == "cancelled" or done.beams == wanted.beams
                continue
            assert (other.tokens(rig), done.reason) == (one.tokens(plain), wanted.reason)
            tokens = len(other.before)
            for update in (each for step in rig.steps for each in step.updates if each.id == other.request):
                tokens += len(update.tokens)
                assert len(update.logprobs) == (len(update.tokens) if plan.sampling["logprobs"] else 0)
                # The KV of all known tokens but the last, whatever was computed in vain.
                known = plan.length + tokens - 1 if update.tokens else plan.length
                assert update.filled_blocks == known // rig.block_tokens or not update.tokens
                assert update.filled_blocks <= known // rig.block_tokens
        if not any(plan.cancelled is not None or plan.sampling["beam_search"] for plan in plans):
            assert sum(step.computed_tokens for step in rig.steps) == sum(s.computed_tokens for s in plain.steps)
        rig.close()
    plain.close()


@pytest.mark.parametrize("kv", ["virtual", "paged"])
def test_tokens_are_read_when_the_next_pass_is_queued(
    lazy: Callable[..., tuple[Rig, LazyStream]], prompt: list[int], kv: str
) -> None:
    """The last pass is known to be the last, so nothing is queued behind it."""
    rig, stream = lazy(kv)
    rig.generate(prompt, max_tokens=8)
    assert stream.read_behind == [1] * 7 + [0] and stream.passes == 8
    assert [step.read_at_once for step in rig.steps] == [0] * 7 + [1]


def test_passes_of_a_beam_search_count_as_read_at_once(
    lazy: Callable[..., tuple[Rig, LazyStream]], prompt: list[int]
) -> None:
    """Those of the requests beside it, too."""
    rig, _ = lazy()
    frames = rig.frames(blocks_needed(len(prompt), 4, 2, rig.block_tokens) * rig.block_frames)
    search = rig.start(prompt, frames=frames, max_tokens=4, beam_search=BeamSearch(width=2))
    rig.generate(prompt[:9], max_tokens=12)
    assert rig.done[search].beams
    at_once = [step.read_at_once for step in rig.steps]
    assert at_once == [*[1] * 4, *[0] * (len(at_once) - 5), 1]


def test_a_stop_token_that_would_fill_a_block_fills_none(
    lazy: Callable[..., tuple[Rig, LazyStream]], rig: Rig, prompt: list[int]
) -> None:
    """Its KV is computed in vain, by the pass that was queued before it was known."""
    generated = rig.generate(prompt, max_tokens=14)
    assert generated.index(generated[13]) == 13 and (len(prompt) + 14) % rig.block_tokens == 0
    ahead, stream = lazy()
    request = ahead.start(prompt, max_tokens=20, stop_token_ids=(generated[13],))
    ahead.run()
    ahead.take(ahead.engine.flush())
    assert ahead.tokens[request] == generated and ahead.done[request].reason == "stop"
    assert stream.passes == 15 and ahead.filled[request] == 3
    assert sum(step.computed_tokens for step in ahead.steps) == len(prompt) + 13


@pytest.mark.parametrize("others", [0, 1])
def test_a_request_is_cancelled_while_its_pass_is_computed(
    lazy: Callable[..., tuple[Rig, LazyStream]], prompt: list[int], others: int
) -> None:
    """The device is done at once, so the request's end is reported before the step has reported anything."""
    rig, stream = lazy()
    cancelled = rig.start(prompt, max_tokens=8)
    kept = [rig.start(prompt[:20], max_tokens=8) for _ in range(others)]
    rig.step()
    rig.step()

    def meanwhile() -> None:
        rig.take(rig.engine.cancel(Cancel(cancelled)))
        stream.until(len(stream.work))
        rig.take(rig.engine.poll())

    rig.take(rig.engine.step(meanwhile))
    rig.run()
    assert rig.done[cancelled].reason == "cancelled"
    assert [len(rig.tokens[request]) for request in kept] == [8] * others


@pytest.mark.parametrize("at", [0, 1, 3])
def test_logits_that_are_not_finite_end_their_requests_alone(model: CausalModel, prompt: list[int], at: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        rig, passes = Rig(model, ahead=True), itertools.count()
        forward = rig.model.forward
        patch.setattr(rig.model, "forward", lambda *given: forward(*given) * (torch.nan if next(passes) == at else 1.0))
        LazyStream().attach(rig, patch)
        expected = Rig(model)
        first, frames = rig.start(prompt, max_tokens=6), rig.frames(4)
        rig.run()
        rig.take(rig.engine.flush())
        assert rig.done[first].not_finite and rig.tokens[first] == expected.generate(prompt, max_tokens=6)[:at]
        assert rig.filled.get(first, 0) == (3 if at else 0)
        assert rig.generate(prompt, frames=frames, max_tokens=4) == expected.generate(prompt, max_tokens=4)
        rig.close()
        expected.close()


def test_memory_that_cannot_be_mapped_is_no_matter_for_a_request_that_has_ended(
    lazy: Callable[..., tuple[Rig, LazyStream]], rig: Rig, prompt: list[int]
) -> None:
    """The block behind a stop token, which is not known yet when the block comes."""
    generated = rig.generate(prompt, max_tokens=14)
    ahead, _ = lazy()
    frames = ahead.frames(5)
    ending, going = (
        ahead.start(prompt, frames[:4], max_tokens=20, stop_token_ids=stop) for stop in ((generated[13],), ())
    )
    while len(ahead.tokens[ending]) < 13:
        ahead.step()
    with pytest.MonkeyPatch.context() as patch:

        def refuse(*_: object) -> None:
            raise OutOfMemoryError("no mapping left")

        patch.setattr(ahead.kv, "extend", refuse)
        for request in (ending, going):
            ahead.take(ahead.engine.extend(Extend(request, frames[4:])))
    ahead.take(ahead.engine.flush())
    assert (ahead.done[ending].reason, ahead.done[going].reason) == ("stop", "no_memory")
    assert ahead.tokens[ending] == generated
    assert ahead.tokens[going] == generated[:13], "its prompt took a pass more"


def test_tokens_come_before_the_end_that_is_told_while_the_next_pass_is_computed(tmp_path: Path) -> None:
    """One request comes to a block's end, so all tokens are read before the next pass; they end the other request."""
    build_recurrent("jamba").save_pretrained(tmp_path)
    loaded = load_model(read_model_spec(WorkerSettings(model=str(tmp_path), device="cpu", dtype="float32")))
    rig = Rig(loaded, frames=200, ahead=True)
    sent: list[Step | Done] = []

    def send(messages: list[Step | Done]) -> None:
        sent.extend(messages)
        rig.take(messages)

    def state() -> StateFrames:
        return StateFrames(own=rig.state_frames(), tail=rig.state_frames())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(loaded), "asynchronous", True)
        rig.start(list(range(1, rig.block_tokens - 3)), state=state(), max_tokens=30)
        ends = rig.start(list(range(1, 2 * rig.block_tokens - 6)), state=state(), max_tokens=4)
        for _ in range(8):
            send(rig.engine.step(lambda: send(rig.engine.poll())))
    updates = [update.id for each in sent if isinstance(each, Step) for update in each.updates]
    end = next(place for place, each in enumerate(sent) if isinstance(each, Done) and each.id == ends)
    later = [update.id for each in sent[end:] if isinstance(each, Step) for update in each.updates]
    assert ends in updates and ends not in later and len(rig.tokens[ends]) == 4
    rig.close()
