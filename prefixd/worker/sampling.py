"""Choosing the next token from logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from prefixd.worker.protocol import Sampling

_MASK_64 = (1 << 64) - 1


def choose_tokens(logits: torch.Tensor, choices: Sequence[tuple[Sampling, int]]) -> list[int | None]:
    """The next token of each row, or None where the logits hold NaN or no finite value at all.

    logits: [rows, vocab]; choices[i] is row i's sampling and k, the number of tokens generated before this
        one. Depends for each row on its logits and (seed, k) alone, not on the other rows nor on what was
        sampled before.
    """
    logits = logits.float()
    best, greedy = logits.max(dim=-1)  # NaN if any is NaN
    usable = torch.isfinite(best).tolist()
    tokens: list[int | None] = []
    for row, (most_likely, (sampling, k)) in enumerate(zip(greedy.tolist(), choices, strict=True)):
        if not usable[row]:
            tokens.append(None)
        elif sampling.temperature == 0.0:
            tokens.append(most_likely)
        else:
            tokens.append(_sample(logits[row], sampling, uniform(sampling.seed, k)))
    return tokens


def uniform(seed: int, k: int) -> float:
    """A number in [0, 1) for the k-th token of a seed (Philox, a counter-based generator keyed by both)."""
    key = np.array([seed & _MASK_64, k], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key)).random())


def _sample(row: torch.Tensor, sampling: Sampling, at: float) -> int:
    """Invert the distribution's cumulative sum, most likely tokens first, at the fraction `at`."""
    scaled = (row - row.max()) / sampling.temperature
    probabilities, order = torch.sort(torch.softmax(scaled, dim=-1), descending=True, stable=True)
    cumulative = probabilities.double().cumsum(dim=-1)
    nucleus = torch.searchsorted(cumulative, torch.tensor(sampling.top_p, dtype=cumulative.dtype, device=row.device))
    last = min(int(nucleus), row.numel() - 1)
    target = at * cumulative[last]
    chosen = torch.searchsorted(cumulative, target, right=True)
    return int(order[min(int(chosen), last)])
