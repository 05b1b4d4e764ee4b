"""Captured passes with prompts give the tokens of passes without graphs, whatever is in the batch."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.engines.varlen_reference import varlen_reference
from prefixd.worker.attention.flash_attention import FlashAttention
from prefixd.worker.graphs.captured import CapturedStep, Span
from prefixd.worker.graphs.decode_graphs import DecodeGraphs
from prefixd.worker.graphs.pass_graphs import PassGraphs
from prefixd.worker.graphs.prompt_graphs import PromptGraphs
from prefixd.worker.load_graphs import capture
from prefixd.worker.readiness import Readiness


@pytest.mark.parametrize("ahead", [False, True])
def test_prompts_are_replayed_with_the_same_tokens(rig_with, prompt, ahead):
    """Prompts in pieces, behind a prefix, beside requests that decode, and more at once than a graph takes."""
    plain = rig_with(None)
    prompts = [prompt[:length] for length in (1, 2, 17, 33, 50, 16, 40, 9, 30, 5)]
    options = [{"max_tokens": 12 + index, "temperature": 0.8, "seed": index} for index in range(10)]
    expected = [plain.generate(each, **chosen) for each, chosen in zip(prompts, options, strict=True)]
    rig = rig_with(FlashAttention(varlen_reference))
    kv, compute = rig.manager.kv, rig.model.captured
    prompt_graphs = PromptGraphs(kv, compute, pytest.fail, lambda compute: compute)
    decode_graphs = DecodeGraphs(kv, compute, 16, pytest.fail, lambda compute: compute)
    capture([prompt_graphs, decode_graphs], rig.model, rig.kv, 99.0, Readiness(print), itertools.count().__next__)
    assert prompt_graphs.captured_sizes == [16, 32, 48, 64, 96, 128, 192, 256]
    rig.engine._graphs, rig.engine._ahead = PassGraphs(decode_graphs, prompt_graphs), ahead
    requests = []
    for each, chosen in zip(prompts, options, strict=True):
        requests.append(rig.start(each, **chosen))
        rig.step()
    rig.run()
    assert [rig.tokens[request] for request in requests] == expected
    assert prompt_graphs.replays >= 6 and decode_graphs.replays >= 6
    assert prompt_graphs.replays + decode_graphs.replays < len(rig.steps), "nine at once are too many for a graph"
    rig.manager.check_integrity()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_pass_is_filled_up_with_rows_that_change_nothing(data: st.DataObject) -> None:
    """What a graph writes and asks for: each token at its place, and padding what the last token writes."""
    kv = torch.zeros((6, 512, 1, 2, 1, 4))
    stride = kv.shape[1]
    parts = data.draw(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 40)), min_size=1, max_size=6))
    spans = [Span(row, start, length) for row, (start, length) in enumerate(parts)]
    count = sum(span.length for span in spans)
    seen: list[CapturedStep] = []

    def compute(step: CapturedStep) -> torch.Tensor:
        seen.append(step)
        pairs = torch.arange(1.0, step.rows + 1)[:, None, None, None].expand(step.rows, 2, 1, 4)
        step.write(0, pairs)
        return step.wanted[:, None].float()

    graphs = PromptGraphs(kv, compute, pytest.fail, lambda compute: compute)
    ends = list(itertools.accumulate(span.length for span in spans))
    wanted = [end - 1 for end in ends if data.draw(st.booleans())]
    logits = graphs.run(list(range(count)), spans, wanted)
    assert logits[:, 0].tolist() == wanted
    written = torch.zeros(6, stride)
    number = itertools.count(1)
    for span in spans:
        for position in range(span.start, span.start + span.length):
            written[span.row, position] = next(number)
    assert torch.equal(kv[:, :, 0, 0, 0, 0], written)
    step = seen[0]
    arguments = step.varlen_arguments()[1]
    queries = step.query_starts.tolist()
    assert queries[: len(spans) + 1] == [0, *ends] and set(queries[len(spans) + 1 :]) == {step.rows}
    assert arguments["cu_seq_k"].tolist()[: len(spans)] == [span.row * stride for span in spans]
    lengths = arguments["seqused_k"].tolist()
    assert lengths[: len(spans)] == [span.start + span.length for span in spans]
    assert all(1 <= length <= lengths[len(spans) - 1] for length in lengths[len(spans) :])
    assert step.positions[0, :count].tolist() == [
        position for span in spans for position in range(span.start, span.start + span.length)
    ]


def test_passes_that_no_graph_takes(rig_with):
    rig = rig_with(FlashAttention(varlen_reference))
    graphs = PromptGraphs(rig.manager.kv, rig.model.captured, pytest.fail, lambda compute: compute)
    assert graphs.fits([Span(0, 0, 256)]) and not graphs.fits([Span(0, 0, 257)])
    assert graphs.fits([Span(row, 0, 2) for row in range(8)]) and not graphs.fits([Span(row, 0, 2) for row in range(9)])
    assert graphs.fits([Span(0, (16 << 10) - 2, 2)]) and not graphs.fits([Span(0, (16 << 10) - 1, 2)])


def test_prompt_graphs_that_come_to_other_logits_are_given_up_alone(rig_with, prompt):
    expected = rig_with(None).generate(prompt, temperature=0.8)
    rig = rig_with(FlashAttention(varlen_reference))
    said: list[str] = []
    prompts = PromptGraphs(rig.manager.kv, rig.model.captured, said.append, lambda compute: lambda: -compute())
    decode = DecodeGraphs(rig.manager.kv, rig.model.captured, 2, pytest.fail, lambda compute: compute)
    rig.engine._graphs = PassGraphs(decode, prompts)
    assert rig.generate(prompt, temperature=0.8) == expected
    assert len(said) == 1 and said[0].startswith("the graph of a pass with prompts of 64 comes to other logits")
    assert decode.replays > 3 and not prompts.replays
