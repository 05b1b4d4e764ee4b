"""Captured decode passes give the tokens of passes without graphs, and are given up where they do not."""

from __future__ import annotations

import gc
import itertools
import re
import weakref

import pytest
import torch

from benchmarks.engines.varlen_reference import varlen_reference
from prefixd.worker.attention.flash_attention import FlashAttention
from prefixd.worker.graphs.captured import CapturedStep, Span
from prefixd.worker.graphs.decode_graphs import DecodeGraphs
from prefixd.worker.graphs.pass_graphs import PassGraphs
from prefixd.worker.graphs.prompt_graphs import PromptGraphs
from prefixd.worker.load_graphs import capture
from prefixd.worker.readiness import Readiness


def test_decode_passes_are_replayed_with_the_same_tokens(rig_with, prompt):
    """A stand-in for CUDA graphs: what was captured is computed again, from the tensors that the capture saw."""
    plain = rig_with(None)
    prompts = [prompt[:length] for length in (1, 16, 17, 33, 50)]
    options = [{"max_tokens": 9 + 3 * index, "temperature": 0.8, "seed": index} for index in range(5)]
    expected = [plain.generate(each, **chosen) for each, chosen in zip(prompts, options, strict=True)]
    rig = rig_with(FlashAttention(varlen_reference))
    graphs = DecodeGraphs(rig.manager.kv, rig.model.captured, 4, pytest.fail, capture=lambda compute: compute)
    rig.engine._graphs = PassGraphs(graphs)
    requests = [rig.start(each, **chosen) for each, chosen in zip(prompts, options, strict=True)]
    rig.run()
    assert [rig.tokens[request] for request in requests] == expected
    assert graphs.captured_sizes == [1, 2, 4], "five at once are too many, and three are filled up to four"
    captured = len(graphs.captured_sizes)  # their first passes are computed without a graph, to compare
    assert graphs.replays == sum(step.computed_tokens <= 4 for step in rig.steps) - captured
    assert not graphs.fits([1] * 5)
    rig.manager.check_integrity()


def test_graphs_take_tokens_that_the_host_has_not_read(rig_with, prompt):
    """Also where a batch of three is filled up to four."""
    prompts = [prompt[:length] for length in (5, 16, 40)]
    expected = [rig_with(None).generate(each, temperature=0.8) for each in prompts]
    rig = rig_with(FlashAttention(varlen_reference))
    rig.engine._ahead = True
    graphs = DecodeGraphs(rig.manager.kv, rig.model.captured, 4, pytest.fail, capture=lambda compute: compute)
    rig.engine._graphs = PassGraphs(graphs)
    requests = [rig.start(each, temperature=0.8) for each in prompts]
    rig.run()
    assert [rig.tokens[request] for request in requests] == expected
    assert graphs.captured_sizes == [4] and graphs.replays


def test_graphs_captured_at_load_serve_all_later_passes(rig_with, prompt):
    """They are captured on scratch memory, which is the same in all rows, and compared there in batches of many."""
    expected = rig_with(None).generate(prompt, temperature=0.8)
    rig = rig_with(FlashAttention(varlen_reference))
    captured: list[object] = []

    def take(compute):
        captured.append(compute)
        return compute

    graphs = DecodeGraphs(rig.manager.kv, rig.model.captured, 17, pytest.fail, capture=take)
    said: list[object] = []
    readiness = Readiness(said.append)
    capture([graphs], rig.model, rig.kv, 60.0, readiness, itertools.count().__next__)
    assert graphs.captured_sizes == [1, 2, 4, 8, 16, 24] and len(graphs._passes.captured) == len(captured) == 6
    assert [note.text.partition(" in")[0] for note in said] == [
        "captured 5 of 6 CUDA graphs",
        "captured 6 of 6 CUDA graphs",
    ]
    rig.manager.check_integrity()
    rig.engine._graphs = PassGraphs(graphs)
    requests = [rig.start(prompt, temperature=0.8) for _ in range(3)]
    rig.run()
    assert [rig.tokens[request] for request in requests] == [expected] * 3
    assert len(captured) == 6 and graphs.replays == sum(step.computed_tokens <= 17 for step in rig.steps)


def test_time_to_capture_is_bounded_and_short_sequences_come_first(rig_with):
    rig = rig_with(FlashAttention(varlen_reference))
    graphs = DecodeGraphs(
        rig.manager.kv, rig.model.captured, 2, pytest.fail, capture=lambda compute: compute, fewest_keys=256
    )
    said: list[object] = []
    capture([graphs], rig.model, rig.kv, 3.0, Readiness(said.append), itertools.count().__next__)
    assert graphs._passes.captured == [(2, 256), (1, 256), (2, 512)]
    assert said[-1].text == (
        "captured 3 of 4 CUDA graphs in 4.0 s and 0 MiB; the others are captured when they are first needed"
    )


def _refuses(compute):
    raise RuntimeError("operation not permitted when stream is capturing\nCompile with ...")


def _says_nothing(compute):
    raise RuntimeError


@pytest.mark.parametrize(
    ("capture", "reason"),
    [
        (_refuses, "a decode pass of 1 cannot be captured: operation not permitted when stream is capturing"),
        (_says_nothing, "a decode pass of 1 cannot be captured: RuntimeError"),
        (
            lambda compute: lambda: 1.1 * compute(),
            "the graph of a decode pass of 1 comes to other logits: they differ by",
        ),
        (
            lambda compute: lambda: torch.nan * compute(),
            "the graph of a decode pass of 1 comes to other logits: they differ by nan",
        ),
    ],
    ids=["not captured", "no words", "other logits", "nan"],
)
def test_a_model_that_graphs_do_not_fit_is_computed_without_them(rig_with, prompt, capture, reason):
    expected = rig_with(None).generate(prompt, temperature=0.8)
    rig = rig_with(FlashAttention(varlen_reference))
    said: list[str] = []
    graphs = DecodeGraphs(rig.manager.kv, rig.model.captured, 4, said.append, capture=capture)
    rig.engine._graphs = PassGraphs(graphs)
    assert rig.generate(prompt, temperature=0.8) == expected
    assert len(said) == 1 and re.search(reason, said[0])
    assert (graphs.replays, graphs.captured_sizes, graphs.fits([1])) == (0, [], False)


def test_what_a_graph_reads_lives_as_long_as_the_graph():
    """A replay holds no tensor: the allocator would give its memory to others."""
    steps: list[weakref.ref[CapturedStep]] = []

    def compute(step: CapturedStep) -> torch.Tensor:
        steps.append(weakref.ref(step))
        return torch.ones(len(step.wanted), 4)

    def capture_nothing(compute):
        result = compute()
        return lambda: result

    kv = torch.zeros((4, 48, 1, 2, 2, 16))
    graphs = DecodeGraphs(kv, compute, 4, pytest.fail, capture=capture_nothing)
    prompts = PromptGraphs(kv, compute, pytest.fail, capture_nothing)
    graphs.run([1, 2], [0, 1], [3, 4])
    prompts.run([1, 2, 3], [Span(0, 0, 3)], [])
    gc.collect()
    assert len({id(step()) for step in steps}) == 2 and all(step() is not None for step in steps)


def test_without_memory_for_a_graph_those_that_there_are_stay(rig_with, prompt):
    expected = [rig_with(None).generate(prompt[:length], temperature=0.8) for length in (9, 20, 50)]
    rig = rig_with(FlashAttention(varlen_reference))
    notes: list[str] = []

    def capture_one(compute):
        if len(graphs._passes.captured):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16 MiB.\nMore")
        return compute

    graphs = DecodeGraphs(rig.manager.kv, rig.model.captured, 4, pytest.fail, capture=capture_one, note=notes.append)
    rig.engine._graphs = PassGraphs(graphs)
    requests = [rig.start(prompt[:9], temperature=0.8, max_tokens=20)]
    for _ in range(4):
        rig.step()
    requests += [rig.start(prompt[:length], temperature=0.8) for length in (20, 50)]
    rig.run()
    assert [rig.tokens[request][:8] for request in requests] == expected
    assert graphs.captured_sizes == [1] and graphs.replays > 5
    assert graphs.fits([50]) and not graphs.fits([50, 50]), "what has no graph is computed as without graphs"
    assert notes == [
        "no memory for the CUDA graph of a decode pass of 4, nor for others: "
        "CUDA out of memory. Tried to allocate 16 MiB."
    ]


def test_logits_that_are_no_numbers_say_nothing_of_a_graph():
    """KV of one request may be damaged; the others' graph is right."""
    logits = torch.ones(2, 4)
    logits[1] = torch.nan
    kv = torch.zeros((2, 48, 1, 2, 2, 16))
    graphs = DecodeGraphs(kv, lambda step: logits, 2, pytest.fail, capture=lambda compute: compute)
    graphs.run([1, 1], [0, 1], [3, 4])
    assert graphs.captured_sizes == [2]


def test_a_graph_looks_for_keys_up_to_a_power_of_two():
    """Flash attention divides so many keys among the multiprocessors, whether there are as many or not."""
    asked: list[tuple[int, int]] = []

    def compute(step: CapturedStep) -> torch.Tensor:
        asked.append((step.rows, step.varlen_arguments()[1]["max_k"]))
        return torch.ones(step.rows, 4)

    kv = torch.zeros((4, 48, 1, 2, 2, 16))
    graphs = DecodeGraphs(kv, compute, 4, pytest.fail, capture=lambda compute: compute, fewest_keys=8)
    for positions in ([0], [7], [8, 3], [15], [16], [31, 2], [32], [47]):
        graphs.run([1] * len(positions), range(len(positions)), positions)
    assert sorted(set(asked)) == [(1, 8), (1, 16), (1, 32), (1, 48), (2, 16), (2, 32)]


def test_a_pass_at_load_for_which_there_is_no_memory_leaves_the_rest_for_later(rig_with):
    rig = rig_with(FlashAttention(varlen_reference))
    notes: list[str] = []

    def compute(step: CapturedStep) -> torch.Tensor:
        if step.rows > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return rig.model.captured(step)

    graphs = DecodeGraphs(rig.manager.kv, compute, 17, pytest.fail, capture=lambda compute: compute)
    readiness = Readiness(lambda message: notes.append(message.text))
    capture([graphs], rig.model, rig.kv, 60.0, readiness, itertools.count().__next__)
    assert len(notes) == 1 and "captured when they are first needed" in notes[0]
    assert graphs.captured_sizes == [] and graphs.fits([1])
    rig.manager.check_integrity()
