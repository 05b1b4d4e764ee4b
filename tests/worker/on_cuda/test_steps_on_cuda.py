"""Steps beside other work on CUDA memory: mapping and loads beside steps, drafts, recurrent layers.

With a GPU the model runs there, and each step is queued before the tokens of the one before it are read. Against the
stand-in driver it runs on the CPU, as in `test_engine_on_cuda`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prefixd.worker.model import load_model
from prefixd.worker.spec.kv_groups import CUDA_CHUNK_BYTES
from prefixd.worker.spec.model_spec import read_model_spec
from prefixd.worker_protocol.protocol import Arrived, Cancel, Expect, Extend, Layers, StateFrames
from prefixd.worker_protocol.worker_settings import WorkerSettings
from prefixd_swap.vmem.backends.cuda_driver import open_device
from tests.worker.conftest import Rig
from tests.worker.tiny_models import build_recurrent

STAND_IN = "PREFIXD_TEST_STAND_IN" in os.environ
DEVICE = "cpu" if STAND_IN else "cuda"
VOCAB = 96

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not STAND_IN and not torch.cuda.is_available(), reason="no CUDA GPU on this machine"),
]

Make = Callable[..., Rig]


@pytest.fixture
def make(wide_llama_directory: Path) -> Iterator[Make]:
    rigs: list[Rig] = []
    thread = ThreadPoolExecutor(1)

    def make(directory: Path = wide_llama_directory, frames: int = 60, **settings: Any) -> Rig:
        asked = WorkerSettings(
            model=str(directory), device=DEVICE, dtype="float32", chunk_bytes=CUDA_CHUNK_BYTES, **settings
        )
        model = load_model(read_model_spec(asked))
        rigs.append(Rig(model, frames, 64, device="cuda", requests=10, ahead=True, background=thread))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
    thread.shutdown()


def random_tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB - 1, count).tolist()


def finish(rig: Rig) -> None:
    while rig.engine.runnable:
        rig.step()
    rig.take(rig.engine.flush())


def alone(rig: Rig, prompt: list[int], **arguments: Any) -> list[int]:
    request = rig.start(prompt, temperature=1.0, **arguments)
    finish(rig)
    return rig.tokens[request]


def test_steps_beside_mapping(make: Make) -> None:
    """Requests decode while prefixes are mapped and idle rows unmapped; some are expected, one is cancelled."""
    rig = make()
    prefixes = [rig.frames(2), rig.frames(2)]
    prompts = [random_tokens(seed, 33) for seed in range(2)]
    turns = [[*prompts[number % 2][:32], *random_tokens(20 + number, 5)] for number in range(4)]
    for prompt, frames in zip(prompts, prefixes, strict=True):
        alone(rig, prompt, frames=[*frames, *rig.frames(1)], max_tokens=1)
    expected = [alone(rig, turn, max_tokens=6, seed=number) for number, turn in enumerate(turns)]
    requests: list[int] = []
    for number, turn in enumerate(turns):
        if number % 2:
            rig.engine.expect(Expect(prefixes[number % 2]))
        rig.step()
        own = [*prefixes[number % 2], *rig.frames(1)]
        requests.append(rig.start(turn, own, cached_blocks=2, max_tokens=6, seed=number, temperature=1.0))
        if number == 2:
            rig.step()
            rig.take(rig.engine.cancel(Cancel(requests[-1])))
    finish(rig)
    for number, request in enumerate(requests):
        tokens = rig.tokens[request]
        assert tokens == expected[number][: len(tokens)] and (number == 2 or len(tokens) == 6)


def test_the_drivers_calls_of_an_attach_and_of_a_step(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call a chunk and one for access where a prefix is mapped afresh, none where it is still mapped, none a step."""
    rig = make()
    cuda, calls = open_device(0), Counter[str]()
    call = cuda.call

    def counted(name: str, *arguments: Any) -> Any:
        if name in ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap"):
            calls[name] += 1
        return call(name, *arguments)

    monkeypatch.setattr(cuda, "call", counted)

    def attach(frames: list[int]) -> tuple[int, Counter[str]]:
        calls.clear()
        request = rig.start(prompt, frames, cached_blocks=2, max_tokens=8, temperature=1.0)
        rig.manager.check_integrity()  # waits for the mapping in the background
        return request, Counter(calls)

    prompt, prefix, own = random_tokens(3, 40), rig.frames(2), rig.frames(1)
    alone(rig, prompt, frames=[*prefix, *own], max_tokens=1)
    mapped, no_calls = attach([*prefix, *own])
    fresh, some_calls = attach([*prefix, *rig.frames(1)])
    assert (no_calls, some_calls) == ({}, {"cuMemMap": 3, "cuMemSetAccess": 1})
    calls.clear()
    finish(rig)
    rig.manager.check_integrity()
    assert not calls and rig.tokens[mapped] == rig.tokens[fresh] and len(rig.tokens[fresh]) == 8


def test_loads_beside_steps(make: Make) -> None:
    """Blocks come by another stream while their request computes those before them, and another decodes."""
    rig = make()
    prompt, home, fresh = random_tokens(5, 100), rig.frames(7), rig.frames(7)
    expected = alone(rig, prompt, frames=home, max_tokens=3)
    other = alone(rig, random_tokens(6, 20), max_tokens=6)
    going = rig.start(random_tokens(6, 20), max_tokens=6, temperature=1.0)
    request = rig.start(prompt, fresh[:2], max_tokens=3, temperature=1.0)
    side = torch.cuda.Stream() if not STAND_IN else None
    with torch.cuda.stream(side):
        for source, target in zip(home[2:6], fresh[2:6], strict=True):
            rig.window(target).copy_(rig.window(source), non_blocking=True)
    rig.step()
    if side is not None:
        side.synchronize()
    rig.take(rig.engine.arrived(Arrived(request, 2, fresh[2:6])))
    rig.take(rig.engine.extend(Extend(request, fresh[6:])))
    finish(rig)
    assert (rig.tokens[request], rig.tokens[going]) == (expected, other)


@pytest.mark.parametrize("layout", ["token", "layer"])
def test_layers_come_while_those_before_are_computed(make: Make, layout: str) -> None:
    """The daemon's stream brings them; the pass waits on the host alone. Then one is cancelled in the middle."""
    rig = make(layout=layout, frames=60 if layout == "token" else 4)
    blocks = 3 if layout == "token" else 1
    length = blocks * rig.block_tokens + 5
    prompt, home, fresh = random_tokens(7, length), rig.frames(blocks + 1), rig.frames(blocks + 1)
    expected = alone(rig, prompt, frames=home, max_tokens=4)
    spec, side = rig.model.spec.geometry, torch.cuda.Stream() if not STAND_IN else None
    come, heard = 0, list[int]()

    def layers_of(frame: int) -> torch.Tensor:
        numbers = rig.window(frame)
        if layout == "layer":
            return numbers.view(spec.layers, -1)
        return numbers.view(spec.block_tokens, spec.layers, -1).transpose(0, 1)

    def listen(request: int) -> Layers | None:
        nonlocal come
        if come == stop:
            return None
        heard.append(come)
        with torch.cuda.stream(side):
            for source, target in zip(home[:blocks], fresh[:blocks], strict=True):
                layers_of(target)[come : come + 4].copy_(layers_of(source)[come : come + 4], non_blocking=True)
        if side is not None:
            side.synchronize()
        come += 4
        return Layers(request, come)

    rig.engine.listen = listen
    for stop in (8, 16):
        come = 0
        for frame in fresh[:blocks]:
            rig.window(frame).fill_(torch.nan)
        request = rig.start(prompt, fresh, cached_blocks=blocks, loading=True, max_tokens=4, temperature=1.0)
        rig.take(rig.engine.layers(listen(request) or Layers(request, 0)))
        finish(rig)
        assert rig.done[request].reason == ("cancelled" if stop < 16 else "length")
        assert rig.tokens[request] == (expected if stop == 16 else [])
    assert heard == [0, 4, 0, 4, 8, 12]


def test_a_draft_beside_the_model(make: Make, wide_llama_directory: Path) -> None:
    prompts = [random_tokens(seed, 20 + seed) for seed in range(2)]
    plain = make()
    expected = [alone(plain, prompt, max_tokens=8) for prompt in prompts]
    rig = make(draft_model=str(wide_llama_directory), frames=120)
    requests = [rig.start(prompt, max_tokens=8, temperature=1.0) for prompt in prompts]
    finish(rig)
    assert [rig.tokens[request] for request in requests] == expected
    accepted = sum(step.accepted_tokens for step in rig.steps)
    assert accepted > len(prompts), "the draft is the model itself"


def test_recurrent_layers(make: Make, tmp_path: Path) -> None:
    """Side by side as alone."""
    build_recurrent("jamba").save_pretrained(tmp_path)
    rig = make(tmp_path, frames=200)
    prompts = [random_tokens(seed, 40 + 7 * seed) for seed in range(2)]

    def begin(prompt: list[int]) -> int:
        own = StateFrames(own=rig.state_frames(), tail=rig.state_frames())
        return rig.start(prompt, state=own, max_tokens=5, temperature=1.0)

    expected = []
    for prompt in prompts:
        request = begin(prompt)
        finish(rig)
        expected.append(rig.tokens[request])
    requests = [begin(prompt) for prompt in prompts]
    finish(rig)
    assert [rig.tokens[request] for request in requests] == expected
