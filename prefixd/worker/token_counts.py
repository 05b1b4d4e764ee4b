"""How often each token is in a run: what penalties need to know of it."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch


class TokenCounts:
    """Counts on the device, kept as tokens come, so that a step does no work that grows with the output.

    prompt: [vocab_size] bool, the tokens that are in the prompt.
    output: [vocab_size] int32, how often each token was generated, in earlier runs of the request too.

    Args:
        tokens: the prompt and then what earlier runs generated.
        generated: how many of them were generated.
        vocab_size: token ids are below this.
        device: where the logits are.
    """

    def __init__(self, tokens: Sequence[int], generated: int, vocab_size: int, device: torch.device) -> None:
        ids = np.asarray(tokens, np.int64)
        split = len(ids) - generated
        counts = [np.bincount(part, minlength=vocab_size).astype(np.int32) for part in (ids[:split], ids[split:])]
        prompt, self.output = torch.from_numpy(np.stack(counts)).to(device)
        self.prompt = prompt > 0

    def after(self, tokens: Sequence[int]) -> TokenCounts:
        """The counts after further tokens, which are not added to these."""
        counts = copy.copy(self)
        counts.output = self.output.clone()
        for token in tokens:
            counts.add(token)
        return counts

    def add(self, token: int) -> None:
        """Count a token that was generated. Queued on the device; waits for nothing."""
        self.output[token] += 1
