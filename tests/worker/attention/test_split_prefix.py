"""Attention in several calls, with prefixes split and merged, is the attention of one call."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.engines.varlen_reference import alone_reference, varlen_reference
from prefixd.worker.attention import flash_attention, split_prefix
from prefixd.worker.attention.attention import FULL_ATTENTION, AttentionKind
from prefixd.worker.attention.choice.pass_plan import PassPlan, split_long
from prefixd.worker.attention.flash_attention import FlashAttention
from prefixd.worker.attention.kernels import flash_kernels, merge_kernel
from prefixd.worker.attention.kernels.flash_kernels import flash_alone, why_no_lse, why_not_alone
from prefixd.worker.attention.kernels.merge_kernel import OwnPart, Parts
from prefixd.worker.attention.split_prefix import piece_size
from prefixd.worker.graphs.captured import PassInputs
from prefixd.worker.graphs.decode_graphs import DecodeStep
from prefixd.worker.memory.kv_memory import Segment
from prefixd.worker.memory.virtual_kv import VirtualStep

TOKENS, DIM = 700, 16
WAYS = ["together", "alone", "split"]

segments_and_ways = st.lists(
    st.tuples(st.just(1) | st.integers(2, 40), st.integers(1, TOKENS - 40), st.sampled_from(WAYS)),
    min_size=1,
    max_size=5,
)


def step_of(segments: list[Segment], kv_heads: int, dtype: torch.dtype) -> VirtualStep:
    generator = torch.Generator().manual_seed(len(segments))
    kv = torch.randn((len(segments) + 1, TOKENS, 1, 2, kv_heads, DIM), generator=generator, dtype=torch.float64)
    kv = kv.to(dtype)
    for number, segment in enumerate(segments):
        kv[number + 1, segment.stop :] = torch.nan
    kv[0] = torch.nan
    return VirtualStep(kv, segments, range(1, len(segments) + 1))


def plan_of(parts: list[tuple[int, int, str]], pieces: int) -> PassPlan:
    ways = [way for *_, way in parts]
    single = [queries == 1 for queries, *_ in parts]
    together = [number for number, way in enumerate(ways) if way == "together"]
    return PassPlan(
        together=tuple(number for number in together if not single[number]),
        decodes=tuple(number for number in together if single[number]),
        alone=tuple(number for number, way in enumerate(ways) if way == "alone"),
        split=tuple(number for number, way in enumerate(ways) if way == "split"),
        pieces=pieces,
    )


@settings(deadline=None, max_examples=30)
@given(
    segments_and_ways,
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([(1, 1), (2, 3), (2, 4)]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_every_plan_comes_to_the_same(
    parts: list[tuple[int, int, str]], pieces: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    segments = [Segment(None, start, start + queries) for queries, start, _ in parts]
    kv_heads, group = heads
    step = step_of(segments, kv_heads, dtype)
    rows = sum(map(len, segments)) + 3
    query = torch.randn((1, kv_heads * group, rows, DIM), dtype=torch.float64).to(dtype)
    one = FlashAttention(varlen_reference)
    expected = one.begin(step).attend(query, 0, 0.25)
    backend = FlashAttention(
        varlen_reference, lambda queries, keys, captured=False: plan_of(parts, pieces), alone_reference
    )
    found = backend.begin(step).attend(query, 0, 0.25)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert not found[0, sum(map(len, segments)) :].any(), "padding comes out as zeros"


def test_a_window_that_hides_keys_has_one_call() -> None:
    segments = [Segment(None, 600, 620)]
    step = step_of(segments, 2, torch.float64)
    query = torch.randn((1, 4, 20, DIM), dtype=torch.float64)
    backend = FlashAttention(varlen_reference, lambda queries, keys, captured=False: PassPlan(split=(0,), pieces=2))
    begun = backend.begin(step)
    for kind, calls in ((AttentionKind(window=619), 1), (AttentionKind(window=620), 2), (FULL_ATTENTION, 2)):
        backend.calls = 0
        found = begun.attend(query, 0, 0.25, kind)
        assert backend.calls == calls
        torch.testing.assert_close(found, FlashAttention(varlen_reference).begin(step).attend(query, 0, 0.25, kind))


def test_a_pass_is_prepared_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to the device takes the host longer than a kernel."""
    copies = []
    for module in (split_prefix, flash_attention):
        make = module.to_device
        monkeypatch.setattr(module, "to_device", lambda *values, make=make: copies.append(values) or make(*values))
    make_all = split_prefix.uploaded
    monkeypatch.setattr(split_prefix, "uploaded", lambda *values: copies.append(values) or make_all(*values))
    segments = [Segment(None, 599, 600), Segment(None, 600, 620), Segment(None, 0, 30)]
    step = step_of(segments, 2, torch.float64)
    backend = FlashAttention(
        varlen_reference,
        lambda queries, keys, captured=False: PassPlan(together=(2,), decodes=(0,), split=(1,), pieces=2),
    )
    begun = backend.begin(step)
    query = torch.randn((1, 4, 51, DIM), dtype=torch.float64)
    begun.attend(query, 0, 0.25)
    prepared = len(copies)
    assert prepared <= 5
    begun.attend(query, 0, 0.25)
    assert len(copies) == prepared and backend.calls == 2 * 3


def test_pieces_begin_at_whole_blocks_of_keys() -> None:
    assert [piece_size(*sizes) for sizes in ((300, 2), (128, 8), (32768, 8), (1025, 4))] == [256, 128, 4096, 384]


def test_parts_without_keys_count_for_nothing() -> None:
    """Flash attention says so by an infinite log-sum-exp, FlashAttention 2 by a positive one."""
    output = torch.full((3, 2, DIM), 7.0)
    parts = Parts(torch.randn(6, 2, 1, DIM), torch.randn(6, 2, 1))
    parts.lse[2], parts.lse[4] = torch.inf, -torch.inf
    parts.output[[2, 4]] = torch.nan
    merge_kernel.merge(output, torch.tensor([2, 0], dtype=torch.int32), parts)
    torch.testing.assert_close(output[2], parts.output[0, :, 0])
    weights = parts.lse[[1, 3, 5]].softmax(0)[..., None]
    torch.testing.assert_close(output[0], (weights * parts.output[[1, 3, 5]]).sum(0)[:, 0])
    assert (output[1] == 7).all()


def test_triton_merges_as_torch_does() -> None:
    """By Triton's interpreter, where Triton is installed and runs without a GPU (TRITON_INTERPRET=1)."""
    merge_triton = pytest.importorskip("prefixd.worker.attention.kernels.merge_triton", exc_type=ImportError)
    if not torch.cuda.is_available() and "Interpreted" not in type(merge_triton._merge).__name__:
        pytest.skip("Triton compiles for a GPU here, and there is none")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(1)
    group, kv_heads, dims = 3, 2, 24
    parts = Parts(
        torch.randn((9, group, kv_heads, dims), generator=generator).to(device).transpose(1, 2),
        torch.randn((kv_heads, 9, group), generator=generator).to(device).permute(1, 0, 2),
    )
    parts.lse[4] = torch.inf
    parts.output[4] = torch.nan
    further = Parts(
        torch.randn((5, kv_heads, group, dims), generator=generator).to(device),
        torch.randn((kv_heads, group, 5), generator=generator).to(device).permute(2, 0, 1),
    )
    target, rows = torch.tensor([[3, 0, 1], [4, 0, 2]], dtype=torch.int32, device=device)
    for own in (OwnPart(further, rows), None):
        found, expected = (torch.zeros((4, group * kv_heads, dims), device=device) for _ in range(2))
        merge_triton.merge(found, target, parts, own)
        merge_kernel.merge_in_torch(expected, target, parts, own)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_log_sum_exp_is_used_only_where_a_check_finds_it_right(monkeypatch: pytest.MonkeyPatch) -> None:
    where = (64, torch.float32, torch.device("cpu"))
    assert why_no_lse(varlen_reference, *where) is None

    def other(change, **names):
        def kernel(*arguments, **keywords):
            output, lse = varlen_reference(*arguments, **keywords)
            return change(output, lse)

        return kernel

    wrong = {
        "shape": lambda output, lse: (output, lse.T),
        "sequence without keys": lambda output, lse: (output, lse.nan_to_num(posinf=0)),
        "is wrong": lambda output, lse: (output, lse / 0.693),
        "all of 5 keys is wrong": lambda output, lse: (output.flip(0), lse),
    }
    for said, change in wrong.items():
        reason = flash_kernels.why_no_lse(other(change), *where)
        assert reason is not None and said in reason


def test_a_long_prefix_is_split_where_that_is_asked_for() -> None:
    plan = split_long([1, 1, 128, 128, 4096, 16], [5000, 10, 32768 + 128, 1000, 36000, 3000])
    assert plan == PassPlan(together=(3, 4), decodes=(0, 1), split=(2, 5), pieces=8)


@pytest.mark.parametrize("pieces", [2, 4])
def test_captured_decodes_are_split_by_the_lengths_of_each_pass(pieces: int) -> None:
    """A graph has one number of pieces; what is in them comes from its tensors."""
    generator = torch.Generator().manual_seed(4)
    kv = torch.randn((5, TOKENS, 1, 2, 2, DIM), generator=generator, dtype=torch.float64)
    inputs = PassInputs(3, 3, torch.device("cpu"))
    step = DecodeStep(kv, inputs, 3, TOKENS)
    backend = FlashAttention(
        varlen_reference,
        lambda queries, keys, captured=False: PassPlan(split=tuple(range(len(queries))), pieces=pieces),
    )
    query = torch.randn((1, 4, 3, DIM), generator=generator, dtype=torch.float64)
    for rows, lengths in (([4, 0, 2], [700, 1, 129]), ([1, 3, 0], [3, 256, 640])):
        inputs.query_starts[:4] = torch.arange(4)
        inputs.starts[:3] = torch.tensor(rows) * TOKENS
        inputs.lengths[:3] = torch.tensor(lengths)
        found = backend.begin(step).attend(query, 0, 0.25)
        segments = [Segment(None, length - 1, length) for length in lengths]
        expected = FlashAttention(varlen_reference).begin(VirtualStep(kv, segments, rows)).attend(query, 0, 0.25)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert backend.calls == 2


def test_the_kernel_for_one_sequence_is_used_only_where_a_check_finds_it_right() -> None:
    where = (64, torch.float32, torch.device("cpu"))
    assert why_not_alone(alone_reference, *where) is None
    assert "cannot run" in str(why_not_alone(flash_alone, *where)), "torch has no such operator on a CPU"

    def uncausal(query, key, value, *, scale):
        return alone_reference(query[:1].expand_as(query).contiguous(), key, value, scale=scale)

    assert "is wrong" in str(why_not_alone(uncausal, *where))
