"""One kernel over block tables, extents and rows: what the definition of attention gives, read from where it lies."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.engines.extent_reference import extent_reference
from prefixd.worker.attention.attention import AttentionKind
from prefixd.worker.attention.extent_attention import ExtentAttention, why_not_group
from prefixd.worker.attention.kernels.extent_call import ExtentKernel
from prefixd.worker.attention.kernels.extent_check import error_of, find_extent_kernel
from prefixd.worker.attention.tile_attention import TileAttention
from prefixd.worker.graphs.captured import PassInputs
from prefixd.worker.graphs.decode_graphs import DecodeStep
from prefixd.worker.images.prompt_images import PassImages
from prefixd.worker.memory.kv_memory import Segment, StepKv
from prefixd.worker.memory.paged_blocks import BlockTable
from prefixd.worker.memory.paged_kv import PagedStep
from prefixd.worker.memory.virtual_kv import VirtualStep

BLOCK, BLOCKS, DIM, SCALE = 16, 12, 24, 0.2
PLACES = ("virtual", "table", "extents")


def triton_kernel() -> tuple[ExtentKernel, torch.device]:
    """The kernel, on a GPU or by Triton's interpreter (TRITON_INTERPRET=1)."""
    extent_triton = pytest.importorskip("prefixd.worker.attention.kernels.extent_triton", exc_type=ImportError)
    if torch.cuda.is_available():
        return extent_triton.extent_attention, torch.device("cuda")
    if "Interpreted" not in type(extent_triton._attend).__name__:
        pytest.skip("Triton compiles for a GPU here, and there is none")
    return extent_triton.extent_attention, torch.device("cpu")


def make_steps(
    ends: Sequence[tuple[int, int]],
    kv_heads: int,
    dtype: torch.dtype,
    device: torch.device,
    order: str,
    images: Sequence[tuple[int, int]] = (),
) -> dict[str, StepKv]:
    """The same sequences in rows and in pages, whose memory behind the last token holds NaN, but in "clean" ones.

    order: of the pages: side by side, or each at another place.
    """
    generator = torch.Generator().manual_seed(len(ends))
    rows = torch.randn((len(ends) + 1, BLOCKS * BLOCK, 1, 2, kv_heads, DIM), generator=generator).to(dtype)
    clean = VirtualStep(rows.clone(), [Segment(None, *end) for end in ends], range(len(ends)))
    numbers = list(range(1, len(ends) * BLOCKS + 1))
    if order == "scattered":
        np.random.default_rng(len(ends)).shuffle(numbers)
    pool = torch.full((len(numbers) + 2, BLOCK, 1, 2, kv_heads, DIM), torch.nan, dtype=dtype)
    segments = []
    for number, (start, stop) in enumerate(ends):
        blocks = -(-stop // BLOCK)
        rows[number, stop:] = torch.nan
        pages = numbers[number * BLOCKS : number * BLOCKS + blocks]
        pool[pages] = rows[number, : blocks * BLOCK].unflatten(0, (blocks, BLOCK))
        both_ways = [(max(first, start), end) for first, end in images if start <= first and end <= stop]
        shown = PassImages(both_ways=both_ways) if both_ways else None
        segments.append(Segment(BlockTable(pages), start, stop, images=shown))
    rows, pool = rows.to(device), pool.to(device)
    clean.segments = tuple(segments)
    return {
        "clean": clean,
        "virtual": VirtualStep(rows, segments, range(len(ends))),
        "table": PagedStep(pool, segments),
        "extents": PagedStep(pool, segments, 1),
    }


def attend(step: StepKv, kernel: ExtentKernel, extents: bool, query: torch.Tensor, kind: AttentionKind) -> torch.Tensor:
    return ExtentAttention(kernel, extents=extents).begin(step).attend(query, 0, SCALE, kind)


def expected(step: StepKv, query: torch.Tensor, kind: AttentionKind) -> torch.Tensor:
    return TileAttention(BLOCK, query.dtype).begin(step).attend(query, 0, SCALE, kind)


sequences = st.lists(
    st.tuples(st.integers(0, BLOCKS * BLOCK - 40), st.just(1) | st.integers(2, 40)).map(lambda s: (s[0], s[0] + s[1])),
    min_size=1,
    max_size=4,
)
kinds = st.builds(
    AttentionKind,
    window=st.none() | st.integers(1, 60),
    softcap=st.none() | st.just(2.0),
    sinks=st.none() | st.just(torch.linspace(-1, 1, 12)),
)


@settings(deadline=None, max_examples=15)
@given(sequences, kinds, st.sampled_from([1, 3, 4, 12]), st.sampled_from(["side by side", "scattered"]))
def test_every_kind_from_every_memory(
    ends: list[tuple[int, int]], kind: AttentionKind, kv_heads: int, order: str
) -> None:
    steps = make_steps(ends, kv_heads, torch.float32, torch.device("cpu"), order)
    tokens = sum(stop - start for start, stop in ends)
    query = torch.randn((1, 12, tokens + 2, DIM), generator=torch.Generator().manual_seed(tokens))
    theirs = expected(steps["clean"], query, kind)[:, :tokens]
    for name in PLACES:
        found = attend(steps[name], extent_reference, name == "extents", query, kind)
        torch.testing.assert_close(found[:, :tokens], theirs, rtol=1e-4, atol=1e-5)
        assert not found[:, tokens:].any(), "padding comes out as zeros"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("ends", "kind"),
    [
        ([(0, 20), (100, 101), (140, 150)], AttentionKind()),
        ([(0, 20), (100, 101), (140, 150)], AttentionKind(window=40, softcap=2.0)),
        ([(150, 151), (3, 4), (100, 101)], AttentionKind(sinks=torch.linspace(-1, 1, 6))),
        ([(150, 151), (3, 4), (100, 101)], AttentionKind(window=17)),
        ([(140, 160), (3, 4)], AttentionKind(softcap=2.0, sinks=torch.linspace(-1, 1, 6))),
    ],
    ids=["full", "window and soft cap", "sinks", "window", "soft cap and sinks"],
)
@pytest.mark.parametrize("parts", [1, 3])
def test_triton_computes_what_the_reference_does(
    ends: list[tuple[int, int]], kind: AttentionKind, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with the keys split among thread blocks. On a GPU half of it in bfloat16: each kernel is compiled."""
    kernel, device = triton_kernel()
    split = "prefixd.worker.attention.kernels.extent_triton._parts"
    monkeypatch.setattr(split, lambda blocks, span, processors: (parts, -(-span // (parts * 64)) * 64))
    dtype = torch.bfloat16 if device.type == "cuda" and parts == 1 else torch.float32
    scattered, adjacent = (make_steps(ends, 2, dtype, device, order) for order in ("scattered", "side by side"))
    tokens = sum(stop - start for start, stop in ends)
    query = torch.randn((1, 6, tokens, DIM), generator=torch.Generator().manual_seed(2)).to(device, dtype)
    there = AttentionKind(kind.window, kind.softcap, None if kind.sinks is None else kind.sinks.to(device))
    theirs = expected(make_steps(ends, 2, dtype, torch.device("cpu"), "scattered")["clean"], query.cpu(), kind)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for step, extents in ((scattered["virtual"], False), (scattered["table"], False), (adjacent["extents"], True)):
        found = attend(step, kernel, extents, query, there).cpu()
        torch.testing.assert_close(found, theirs, rtol=tolerance, atol=tolerance)


def test_tokens_of_an_image_see_each_other() -> None:
    ends = [(20, 60), (0, 30)]
    steps = make_steps(ends, 2, torch.float32, torch.device("cpu"), "scattered", images=[(25, 40), (3, 12)])
    query = torch.randn((1, 4, 70, DIM), generator=torch.Generator().manual_seed(3))
    for window in (None, 9):
        kind = AttentionKind(window=window)
        theirs = expected(steps["clean"], query, kind)
        for name in PLACES:
            found = attend(steps[name], extent_reference, name == "extents", query, kind)
            torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-5)


def test_captured_decodes_read_what_their_tensors_say() -> None:
    kv = torch.randn((4, BLOCKS * BLOCK, 1, 2, 2, DIM))
    inputs = PassInputs(2, 2, torch.device("cpu"))
    step = DecodeStep(kv, inputs, 2, BLOCKS * BLOCK)
    query = torch.randn((1, 4, 2, DIM))
    for rows, lengths in (([3, 1], [190, 5]), ([0, 2], [1, 77])):
        inputs.starts[:2] = torch.tensor(rows) * BLOCKS * BLOCK
        inputs.lengths[:2] = torch.tensor(lengths)
        found = ExtentAttention(extent_reference).begin(step).attend(query, 0, SCALE)
        plain = VirtualStep(kv, [Segment(None, length - 1, length) for length in lengths], rows)
        torch.testing.assert_close(found, expected(plain, query, AttentionKind()), rtol=1e-4, atol=1e-5)


@given(st.lists(st.integers(-1, 30), max_size=12), st.integers(1, 3), st.data())
def test_extents_are_the_table_in_runs(pages: list[int], width: int, data: st.DataObject) -> None:
    table = BlockTable(pages)
    for change in (lambda: None, lambda: table.append([7, 7 + width]), lambda: table.give_up(table.blocks // 2)):
        change()
        again = {}
        for block, count, page in zip(*table.extents(width), strict=True):
            again |= {int(block) + at: int(page) + at * width for at in range(count)}
        assert again == {block: page for block, page in enumerate(table.frames) if page >= 0}
        blocks = table.extents(width).blocks
        assert (np.diff(blocks) > 0).all()
        assert table.extents(width) is table.extents(width), "found anew only when pages have changed"


def test_heads_that_the_kernel_does_not_take_have_a_reason() -> None:
    assert why_not_group(128) is None
    assert "up to 128 query heads a KV head, not 129" in str(why_not_group(129))


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (7, 1), (96, 1)])
def test_the_kernel_is_checked_before_it_is_used(heads: int, kv_heads: int) -> None:
    where = (heads, kv_heads, 16, torch.float32, torch.device("cpu"))
    for queries in (1, 20):
        assert error_of(extent_reference, queries, *where) < 1e-5

        def no_mask(query, keys, values, call, scores, output):
            everything = torch.full_like(call.lasts, 39)
            extent_reference(query, keys, values, replace(call, lasts=everything), scores, output)

        assert (error_of(no_mask, queries, *where) < 0.03) == (queries == 1)


def test_a_kernel_that_does_not_run_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    where = (8, 2, 24, torch.float32, torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "prefixd.worker.attention.kernels.extent_triton", None)
    kernel, reason = find_extent_kernel.__wrapped__(*where)
    assert kernel is None and reason.startswith("Triton is not installed")

    def fails(*arguments):
        raise RuntimeError("ptxas died\nat line 3")

    for made, said in (
        (fails, "the Triton kernel cannot run: ptxas died"),
        (lambda *arguments: None, "the Triton kernel is wrong: the relative error of 1 queries is 1"),
        (extent_reference, ""),
    ):
        module = types.SimpleNamespace(extent_attention=made)
        monkeypatch.setitem(sys.modules, "prefixd.worker.attention.kernels.extent_triton", module)
        found, reason = find_extent_kernel.__wrapped__(*where)
        assert reason == said and (found is made) == (not said)
