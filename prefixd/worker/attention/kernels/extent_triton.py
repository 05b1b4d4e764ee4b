"""Attention over pages of keys in Triton: through a block table, or over runs of adjacent pages.

A thread block has the queries of a tile, with the query heads of one KV head as further rows, and goes through the keys
that they see in blocks; the softmax is computed online (FlashAttention 2, algorithm 1). Where tiles are few, the keys
of a tile are split among thread blocks, and the parts merged by `merge_triton` (flash decoding).

Nothing behind the last key is read, and nothing before the first key of a window.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from prefixd.worker.attention.kernels.extent_call import Blocks, ExtentCall, Scores
from prefixd.worker.attention.kernels.merge_kernel import OwnPart, Parts
from prefixd.worker.attention.kernels.merge_triton import merge

_LEAST_PART = 256  # keys of a part; less does not pay for merging
_MOST_PARTS = 32
_BLOCKS_A_PROCESSOR = 2


@triton.jit
def _add_keys(
    most,
    total,
    result,
    query,
    keys,
    values,
    key,
    offsets,
    first_key,
    stop,
    position,
    last,
    dims,
    scale,
    softcap,
    window,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend to the keys with the numbers `key`, which lie `offsets` behind `keys` and `values`; both ``[BLOCK_N]``.
    most, total: of each row, base 2."""
    dim = tl.arange(0, BLOCK_D)
    there = (key >= first_key) & (key < stop)
    loaded = tl.load(keys + offsets[None, :] + dim[:, None], mask=there[None, :] & (dim < dims)[:, None], other=0.0)
    scores = tl.dot(query, loaded, input_precision=PRECISION) * scale
    if SOFTCAP:
        # softcap * tanh(scores / softcap)
        scores = softcap * (2.0 * tl.sigmoid(scores * (2.0 / softcap)) - 1.0)
    seen = (key[None, :] <= last[:, None]) & there[None, :]
    if WINDOW:
        seen = seen & (key[None, :] > position[:, None] - window)
    scores = tl.where(seen, scores * 1.4426950408889634, float("-inf"))
    larger = tl.maximum(most, tl.max(scores, 1))
    shift = tl.where(larger == float("-inf"), 0.0, larger)  # no key so far: -inf minus -inf is not a number
    weights = tl.exp2(scores - shift[:, None])
    before = tl.exp2(most - shift)
    read = tl.load(values + offsets[:, None] + dim[None, :], mask=there[:, None] & (dim < dims)[None, :], other=0.0)
    result = result * before[:, None] + tl.dot(weights.to(read.dtype), read, input_precision=PRECISION)
    return larger, total * before + tl.sum(weights, 1), result


# These differ from pass to pass; a kernel made for some of their values would be compiled while requests wait.
@triton.jit(do_not_specialize=["table_width", "part_keys", "rows", "window"])
def _attend(
    query,
    query_row,
    query_head,
    keys,
    values,
    page_stride,
    token_stride,
    head_stride,
    table,
    table_width,
    run_token,
    run_stop,
    run_page,
    tile_sequence,
    tile_row,
    tile_count,
    positions,
    lasts,
    sinks,
    output,
    output_row,
    lse,
    rows,
    part_keys,
    window,
    scale,
    softcap,
    group,
    dims,
    block_tokens,
    PAGED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile, kv, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(tile_sequence + tile)
    line, dim, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    row = tl.load(tile_row + tile) + line // group
    head = kv * group + line % group
    used = line // group < tl.load(tile_count + tile)
    position = tl.load(positions + row, mask=used, other=2147483647)
    last = tl.load(lasts + row, mask=used, other=-1)
    at = row.to(tl.int64)[:, None] * query_row + head[:, None] * query_head + dim[None, :]
    asked = tl.load(query + at, mask=used[:, None] & (dim < dims)[None, :], other=0.0)

    first_key = 0
    if WINDOW:
        first_key = tl.maximum(tl.min(position) - window + 1, 0)
    stop = tl.max(last) + 1
    low = first_key // BLOCK_N * BLOCK_N
    if PARTS:
        low += part * part_keys
        stop = tl.minimum(stop, low + part_keys)
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    result = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    own_keys, own_values = keys + kv.to(tl.int64) * head_stride, values + kv.to(tl.int64) * head_stride
    if PAGED:
        pages = table + sequence.to(tl.int64) * table_width
        for number in range(low, stop, BLOCK_N):
            key = number + column
            page = tl.load(pages + key // block_tokens, mask=key < stop, other=0).to(tl.int64)
            offsets = page * page_stride + (key % block_tokens).to(tl.int64) * token_stride
            most, total, result = _add_keys(
                most,
                total,
                result,
                asked,
                own_keys,
                own_values,
                key,
                offsets,
                first_key,
                stop,
                position,
                last,
                dims,
                scale,
                softcap,
                window,
                WINDOW,
                SOFTCAP,
                BLOCK_D,
                PRECISION,
            )
    else:
        for run in range(tl.load(table + sequence), tl.load(table + sequence + 1)):
            begin = tl.load(run_token + run)
            end = tl.minimum(tl.load(run_stop + run), stop)
            place = tl.load(run_page + run).to(tl.int64) * page_stride
            for number in range(tl.maximum(begin, low), end, BLOCK_N):
                key = number + column
                offsets = place + (key - begin).to(tl.int64) * token_stride
                most, total, result = _add_keys(
                    most,
                    total,
                    result,
                    asked,
                    own_keys,
                    own_values,
                    key,
                    offsets,
                    first_key,
                    end,
                    position,
                    last,
                    dims,
                    scale,
                    softcap,
                    window,
                    WINDOW,
                    SOFTCAP,
                    BLOCK_D,
                    PRECISION,
                )
    if SINKS:
        sink = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) * 1.4426950408889634
        larger = tl.maximum(most, sink)
        before = tl.exp2(most - larger)
        total = total * before + tl.exp2(sink - larger)
        result = result * before[:, None]
    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    into = row.to(tl.int64)
    if PARTS:
        into += part.to(tl.int64) * rows
        heads = tl.num_programs(1) * group
        sums = tl.where(total == 0.0, float("-inf"), (most + tl.log2(total)) * 0.6931471805599453)
        tl.store(lse + into * heads + head, sums, mask=used)
    at = into[:, None] * output_row + head[:, None] * dims + dim[None, :]
    tl.store(output + at, result.to(output.dtype.element_ty), mask=used[:, None] & (dim < dims)[None, :])


def extent_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    call: ExtentCall,
    scores: Scores,
    output: torch.Tensor,
) -> None:
    """As `ExtentKernel`."""
    rows, heads, dims = query.shape
    kv_heads = keys.shape[-2]
    group, paged = heads // kv_heads, isinstance(call.places, Blocks)
    block_d = max(16, triton.next_power_of_2(dims))
    block_n = 64 if block_d <= 128 else 32
    tiles = len(call.tiles.sequence)
    tile_rows = call.tiles.block // group
    span = call.span if scores.window is None else min(call.span, scores.window + tile_rows + block_n)
    parts, part_keys = _parts(tiles * kv_heads, span, _processors(query.device))
    into, lse = output, query.new_empty(0, dtype=torch.float32)
    if parts > 1:
        into = query.new_empty((parts, rows, heads, dims), dtype=torch.float32)
        lse = query.new_empty((parts, rows, heads), dtype=torch.float32)
    if isinstance(call.places, Blocks):
        table, width, runs = call.places.table, call.places.table.stride(0), [call.places.table] * 3
    else:
        table, width, runs = call.places.first, 0, [call.places.token, call.places.stop, call.places.page]
    pages, places = keys.stride(0), keys.stride(-3)
    sinks = scores.sinks
    _attend[(tiles, kv_heads, parts)](
        query,
        query.stride(0),
        query.stride(1),
        keys,
        values,
        pages,
        places,
        keys.stride(-2),
        table,
        width,
        *runs,
        call.tiles.sequence,
        call.tiles.row,
        call.tiles.count,
        call.positions,
        call.lasts,
        call.lasts if sinks is None else sinks,
        into,
        into.stride(-3),
        lse,
        rows,
        part_keys,
        scores.window or 0,
        scores.scale,
        scores.softcap or 0.0,
        group,
        dims,
        call.block_tokens,
        PAGED=paged,
        WINDOW=scores.window is not None,
        SOFTCAP=scores.softcap is not None,
        SINKS=sinks is not None and parts == 1,
        PARTS=parts > 1,
        BLOCK_M=call.tiles.block,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=4 if call.tiles.block <= 64 else 8,
        num_stages=2,
    )
    if parts > 1:
        by_kv = Parts(
            into.flatten(0, 1).unflatten(1, (kv_heads, group)), lse.flatten(0, 1).unflatten(1, (kv_heads, group))
        )
        every = torch.arange(rows, dtype=torch.int32, device=query.device)
        merge(output, every, by_kv, None if sinks is None else _sink_part(sinks, rows, kv_heads, dims))


def _sink_part(sinks: torch.Tensor, rows: int, kv_heads: int, dims: int) -> OwnPart:
    """A part that every row has: a sink has a score, and no value."""
    group = len(sinks) // kv_heads
    nothing = torch.zeros((1, kv_heads, group, dims), device=sinks.device)
    own = Parts(nothing, sinks.float().view(1, kv_heads, group))
    return OwnPart(own, torch.zeros(rows, dtype=torch.int32, device=sinks.device))


def _parts(blocks: int, span: int, processors: int) -> tuple[int, int]:
    """How many parts the keys are split into so that all multiprocessors have work, and the keys of a part."""
    wanted = min(_BLOCKS_A_PROCESSOR * processors // blocks, span // _LEAST_PART, _MOST_PARTS)
    if wanted < 2:
        return 1, span
    part_keys = -(-span // (wanted * 128)) * 128
    return -(-span // part_keys), part_keys


@functools.cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; the interpreter computes as an H100's 132 would."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
