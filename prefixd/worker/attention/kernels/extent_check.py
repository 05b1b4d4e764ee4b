"""Finds the kernel over blocks and extents, and checks it once on its device, before a model relies on it."""

from __future__ import annotations

import functools

import torch

from prefixd.worker.attention.kernels.extent_call import Blocks, ExtentCall, ExtentKernel, Scores, Tiles

_TOLERANCE = 0.03
_BLOCK_TOKENS, _PAGES = 16, (2, 0, 3)


@functools.cache
def find_extent_kernel(
    query_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[ExtentKernel | None, str]:
    """The kernel in Triton for these heads, or why there is none.

    A decode and a prompt over a block table of three blocks show whether it compiles and computes what it should.
    """
    try:
        from prefixd.worker.attention.kernels.extent_triton import extent_attention
    except ImportError as missing:
        return None, f"Triton is not installed ({missing})"
    for queries in (1, 20):
        try:
            error = error_of(extent_attention, queries, query_heads, kv_heads, head_dim, dtype, device)
        except Exception as failure:  # whatever a compiler and a driver may raise
            why = (str(failure).strip() or type(failure).__name__).splitlines()[0]
            return None, f"the Triton kernel cannot run: {why}"
        if not error <= _TOLERANCE:
            return None, f"the Triton kernel is wrong: the relative error of {queries} queries is {error:.2g}"
    return extent_attention, ""


def error_of(
    kernel: ExtentKernel,
    queries: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """The relative error of a kernel's attention of the last `queries` of 40 tokens."""
    tokens, group = 40, query_heads // kv_heads
    generator = torch.Generator().manual_seed(5)
    query = torch.randn((queries, query_heads, head_dim), generator=generator).to(dtype)
    pool = torch.randn((4, _BLOCK_TOKENS, 2, kv_heads, head_dim), generator=generator).to(dtype)
    block = 1 << (max(16, queries * group) - 1).bit_length()
    tile_queries = min(queries, max(1, 64 // group))
    block = min(block, max(64, 1 << (group - 1).bit_length()))
    firsts = list(range(0, queries, tile_queries))
    positions = torch.arange(tokens - queries, tokens, dtype=torch.int32, device=device)

    def on_device(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    call = ExtentCall(
        Blocks(on_device(list(_PAGES))[None]),
        Tiles(
            on_device([0] * len(firsts)),
            on_device(firsts),
            on_device([min(tile_queries, queries - first) for first in firsts]),
            block,
        ),
        positions,
        positions,
        _BLOCK_TOKENS,
        tokens,
    )
    output = torch.zeros_like(query, device=device)
    there = pool.to(device)
    kernel(query.to(device), there[:, :, 0], there[:, :, 1], call, Scores(head_dim**-0.5), output)
    keys, values = pool[list(_PAGES)].flatten(0, 1)[:tokens].float().repeat_interleave(group, dim=2).unbind(1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * head_dim**-0.5
    hidden = torch.arange(tokens) > positions.cpu()[:, None]
    expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)
    return float((output.float().cpu() - expected).norm() / expected.norm())
