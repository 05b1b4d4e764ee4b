"""Attention over blocks or extents by its definition, for machines without Triton.

It takes what the kernel takes, and reads the keys that the kernel reads, block by block: none behind the last key that
a tile sees, none before the first, each from the page or run that has it. It refuses what the kernel cannot compute.
"""

from __future__ import annotations

import torch

from prefixd.worker.attention.kernels.extent_call import Blocks, ExtentCall, Runs, Scores


def extent_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    call: ExtentCall,
    scores: Scores,
    output: torch.Tensor,
) -> None:
    """As `ExtentKernel`. Raises ValueError for arguments that the kernel does not take."""
    group = query.shape[1] // keys.shape[-2]
    tiles = [call.tiles.sequence, call.tiles.row, call.tiles.count]
    if any(tensor.dtype != torch.int32 for tensor in (*tiles, call.positions, call.lasts)):
        raise ValueError("places and tiles must be int32")
    if query.stride(-1) != 1 or keys.stride(-1) != 1 or keys.stride() != values.stride():
        raise ValueError("heads must be contiguous, and keys and values lie alike")
    if call.tiles.block & (call.tiles.block - 1) or call.tiles.block < 16:
        raise ValueError(f"tiles of {call.tiles.block} rows, which is no power of two from 16 on")
    for sequence, row, count in zip(*(tensor.tolist() for tensor in tiles), strict=True):
        if not 0 < count * group <= call.tiles.block:
            raise ValueError(f"{count} queries with {group} heads each do not fit into a tile of {call.tiles.block}")
        rows = slice(row, row + count)
        positions, lasts = call.positions[rows], call.lasts[rows]
        stop = int(lasts.max()) + 1
        first = 0 if scores.window is None else max(0, int(positions.min()) - scores.window + 1)
        if stop > call.span:
            raise ValueError(f"a tile reads {stop} keys, more than the span of {call.span}")
        seen, weighed = (_read(states, call, sequence, first, stop) for states in (keys, values))
        output[rows] = _attend(query[rows], seen, weighed, torch.arange(first, stop), positions, lasts, scores)


def _read(states: torch.Tensor, call: ExtentCall, sequence: int, first: int, stop: int) -> torch.Tensor:
    """[kv_heads, stop - first, dim]; each block, or what of it is wanted, from where it lies."""
    parts = []
    for token in range(first // call.block_tokens * call.block_tokens, stop, call.block_tokens):
        wanted = range(max(token, first), min(token + call.block_tokens, stop))
        parts.append(_in_block(states, call.places, sequence, token, wanted))
    return torch.cat(parts).transpose(0, 1)


def _in_block(states: torch.Tensor, places: Blocks | Runs, sequence: int, token: int, wanted: range) -> torch.Tensor:
    if isinstance(places, Blocks):
        page = int(places.table[sequence, token // states.shape[1]])
        return states[page, wanted.start - token : wanted.stop - token]
    for run in range(int(places.first[sequence]), int(places.first[sequence + 1])):
        if int(places.token[run]) <= wanted.start and wanted.stop <= int(places.stop[run]):
            place = int(places.page[run]) * states.stride(0) + (wanted.start - int(places.token[run])) * states.stride(
                -3
            )
            shape = (len(wanted), *states.shape[-2:])
            return states.as_strided(shape, states.stride()[-3:], states.storage_offset() + place)
    raise ValueError(f"no run of sequence {sequence} has the tokens {wanted.start} to {wanted.stop - 1}")


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    numbers: torch.Tensor,
    positions: torch.Tensor,
    lasts: torch.Tensor,
    scores: Scores,
) -> torch.Tensor:
    group = query.shape[1] // keys.shape[0]
    keys, values = (states.repeat_interleave(group, dim=0) for states in (keys, values))
    found = query.transpose(0, 1) @ keys.transpose(1, 2) * scores.scale
    if scores.softcap is not None:
        found = scores.softcap * torch.tanh(found / scores.softcap)
    hidden = numbers > lasts[:, None]
    if scores.window is not None:
        hidden |= numbers <= positions[:, None] - scores.window
    found = found.masked_fill(hidden, -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.to(found.dtype)[:, None, None].expand(-1, len(query), 1)
        return (torch.cat((found, sinks), -1).softmax(-1)[..., :-1] @ values).transpose(0, 1)
    return (found.softmax(-1) @ values).transpose(0, 1)
