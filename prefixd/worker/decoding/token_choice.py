"""Chooses the next tokens of a step's rows from their logits.

All rows are computed together, and the results are copied to the host once, without waiting: on a GPU, only in
`QueuedChoices.read` does the host wait for the device in a step. Each row's result is the same in every batch: no
operation here sums over rows, and none has an order of summation that depends on their number.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from prefixd.base.sampling import MOST_LOGPROBS, Sampling
from prefixd.worker.to_device import HostCopy, array_to_device, to_device
from prefixd.worker_protocol.protocol import TokenLogprobs


class TokenCounts:
    """Counts of a request's tokens on the device, updated with each token, so that a step's work does not grow with the
    output.

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
        prompt, self.output = array_to_device(np.stack(counts), device)
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

    def add_queued(self, token: torch.Tensor) -> None:
        """`add` of a token, [1], that the host does not know yet."""
        self.output.index_add_(0, token, torch.ones_like(token, dtype=torch.int32))


_MASK_64 = (1 << 64) - 1
_GREEDY_BELOW = 1e-5  # vLLM's bound too: a smaller temperature would only overflow
_HOTTEST = 1e30  # uniform over any logits, and well inside a float32
_NO_TOKEN = -1


class Choice(NamedTuple):
    """The inputs of one row's choice, besides its logits.

    k: tokens generated before this one.  counts: needed if the sampling has a penalty.
    forced: the token, whatever the logits are; None: one is chosen.
    """

    sampling: Sampling
    k: int
    counts: TokenCounts | None = None
    forced: int | None = None


class Chosen(NamedTuple):
    """A row's token, and logprobs if its sampling asks for them."""

    token: int
    logprobs: TokenLogprobs | None = None


class QueuedChoices:
    """The next token of each row, which the device may still compute.

    ids: [rows] int64 on the device, token ids that a further pass may take as its input: valid ids in any case.
    found: ids, or _NO_TOKEN.  table: of `_logprobs` for the rows in `told`, which want `most` logprobs each.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        found: torch.Tensor,
        table: torch.Tensor | None,
        told: Sequence[int],
        most: Sequence[int],
    ) -> None:
        self.ids = ids
        self._rows = len(found)
        self._told, self._most = told, most
        self._width = 0 if table is None else table.shape[1]
        # One copy to the host; of doubles where there are logprobs: they hold any token id exactly.
        self._copy = HostCopy(found if table is None else torch.cat((found.double(), table.flatten())))

    def read(self) -> list[Chosen | None]:
        """Waits for the device; None for a row whose logits hold NaN or no finite value at all."""
        flat = self._copy.read()
        logprobs: list[TokenLogprobs | None] = [None] * self._rows
        for index, (row, most) in enumerate(zip(self._told, self._most, strict=True)):
            first = self._rows + index * self._width
            logprobs[row] = _token_logprobs(flat[first : first + self._width], most)
        numbers = map(int, flat[: self._rows])
        return [
            None if token == _NO_TOKEN else Chosen(token, told) for token, told in zip(numbers, logprobs, strict=True)
        ]


def choose_tokens(logits: torch.Tensor, choices: Sequence[Choice]) -> list[Chosen | None]:
    """The next token of each row, or None where the logits hold NaN or no finite value at all; waits for the device.

    logits: [rows, vocab], of any floating type; choices[i] is row i's.

    Logprobs are the model's own: of the logits as they come, before penalties, temperature and filters.
    """
    return queue_choices(logits, range(len(choices)), choices).read()


def queue_choices(
    logits: torch.Tensor, rows: Sequence[int], choices: Sequence[Choice], *, count: bool = False
) -> QueuedChoices:
    """`choose_tokens` of some rows of the logits, without waiting; with `count` tokens are added to their counts."""
    if len(rows) != len(logits):
        logits = logits[to_device(rows, torch.int64, logits.device)]
    scores = penalised(logits, choices)
    best, tokens = scores.max(dim=-1)  # NaN if any is NaN
    drawn = [row for row, choice in enumerate(choices) if choice.sampling.temperature >= _GREEDY_BELOW]
    if drawn:
        places = to_device(drawn, torch.int64, logits.device)
        at = [uniform(choices[row].sampling.seed or 0, choices[row].k) for row in drawn]
        kept = weights(scores[places].float(), [choices[row].sampling for row in drawn])
        tokens = tokens.index_copy(0, places, _invert(kept, to_device(at, torch.float64, logits.device)))
    forced = [(row, choice.forced) for row, choice in enumerate(choices) if choice.forced is not None]
    if forced:
        places, ids = to_device(list(zip(*forced, strict=True)), torch.int64, logits.device)
        tokens = tokens.index_copy(0, places, ids)
    if count and scores is not logits:  # some have penalties
        for row, choice in enumerate(choices):
            if choice.counts is not None:
                choice.counts.add_queued(tokens[row : row + 1])
    found = torch.where(torch.isfinite(best), tokens, _NO_TOKEN)
    told = [row for row, choice in enumerate(choices) if choice.sampling.logprobs is not None]
    table = None
    if told:
        places = to_device(told, torch.int64, logits.device)
        most = MOST_LOGPROBS if any(choices[row].sampling.logprobs for row in told) else 0
        table = _logprobs(logits[places], tokens[places], min(most, logits.shape[-1]))
    return QueuedChoices(tokens, found, table, told, [choices[row].sampling.logprobs or 0 for row in told])


def uniform(seed: int, k: int) -> float:
    """A number in [0, 1) for the k-th token of a seed (Philox, a counter-based generator keyed by both)."""
    # Setting a generator's state gives the numbers of a new one with this key, in a quarter of the time.
    _philox.state = {
        "bit_generator": "Philox",
        "state": {"counter": _ZEROS, "key": np.array([seed & _MASK_64, k], np.uint64)},
        "buffer": _ZEROS,
        "buffer_pos": 4,  # empty
        "has_uint32": 0,
        "uinteger": 0,
    }
    return int(_philox.random_raw() >> 11) * 2.0**-53


_ZEROS = np.zeros(4, np.uint64)
_philox = np.random.Philox(key=0)


def weights(scores: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """[rows, vocab]: probabilities at each row's temperature, 0 for what its filters take out; not summing to 1.

    scores: [rows, vocab] float32.  samplings: of temperatures above 0.

    Filters as in transformers, in the order of its `generate`: top_k keeps all tokens that are as likely as the k-th;
    top_p counts the probability of what top_k left; min_p goes by the most likely token.
    """
    device, vocab = scores.device, scores.shape[-1]
    heat = [min(sampling.temperature, _HOTTEST) for sampling in samplings]
    best = scores.max(dim=-1, keepdim=True).values
    few = [row for row, sampling in enumerate(samplings) if 0 < sampling.top_k < vocab]
    if few:
        counts = [samplings[row].top_k for row in few]
        rows, last = to_device([few, [count - 1 for count in counts]], torch.int64, device)
        some = scores[rows]
        least = some.topk(max(counts), dim=-1).values.gather(1, last[:, None])
        scores = scores.index_copy(0, rows, some.masked_fill(some < least, -torch.inf))
    kept = torch.softmax((scores - best) / to_device(heat, torch.float32, device)[:, None], dim=-1)
    nuclei = [row for row, sampling in enumerate(samplings) if 0.0 < sampling.top_p < 1.0]
    if nuclei:
        rows = to_device(nuclei, torch.int64, device)
        top_p = to_device([samplings[row].top_p for row in nuclei], torch.float64, device)
        kept = kept.index_copy(0, rows, _nucleus(kept[rows], top_p))
    if any(sampling.min_p for sampling in samplings):
        min_p = to_device([sampling.min_p for sampling in samplings], torch.float32, device)
        kept = kept.masked_fill(kept < min_p[:, None] * kept.max(dim=-1, keepdim=True).values, 0.0)
    return kept


def penalised(logits: torch.Tensor, choices: Sequence[Choice]) -> torch.Tensor:
    """[rows, vocab]: the logits with each row's penalties taken off; the tensor itself where there are none.

    As vLLM has them: repetition first, of prompt and output; then presence and frequency, of the output alone.
    """
    some = [(row, choice.sampling, choice.counts) for row, choice in enumerate(choices) if choice.counts is not None]
    if not some:
        return logits
    rows = to_device([row for row, _, _ in some], torch.int64, logits.device)
    factors = [
        [sampling.repetition_penalty or 1.0 for _, sampling, _ in some],
        [sampling.presence_penalty for _, sampling, _ in some],
        [sampling.frequency_penalty for _, sampling, _ in some],
    ]
    repetition, presence, frequency = to_device(factors, torch.float32, logits.device)[:, :, None]
    output = torch.stack([counts.output for _, _, counts in some])
    present = output > 0
    seen = torch.stack([counts.prompt for _, _, counts in some]) | present
    whole = logits.float()
    scores = whole[rows]
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where(seen, repeated, scores) - presence * present - frequency * output
    return whole.index_copy(0, rows, scores)


def _nucleus(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep of each row the most likely tokens, up to the one with which they reach `top_p`."""
    ranked, order = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    before = ranked.double().cumsum(dim=-1)
    before -= ranked
    ranked = ranked.masked_fill(before >= top_p[:, None], 0.0)
    return torch.zeros_like(probabilities).scatter(1, order, ranked)


def _invert(kept: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """[rows]: the tokens at which the rows' cumulative sums pass the fraction `at` of their totals."""
    cumulative = kept.double().cumsum(dim=-1)
    # `at` is at most 1 - 2^-53: even rounded, the product is below the total, so no token without weight is chosen.
    target = at[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return tokens.clamp(max=kept.shape[-1] - 1)  # a row of NaN; its token is not used


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, most: int) -> torch.Tensor:
    """[rows, 1 + 2 * most] doubles: the tokens' logprobs, the most likely tokens, and theirs.

    The number is the same for all rows: the order of equal logprobs may depend on it.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, tokens.clamp(min=0)[:, None])
    best, ids = logprobs.topk(most, dim=-1)
    return torch.cat((chosen.double(), ids.double(), best.double()), dim=1)


def _token_logprobs(numbers: list[float], wanted: int) -> TokenLogprobs:
    """A row of `_logprobs` as the caller gets it."""
    most = len(numbers) // 2
    pairs = [
        (int(token), logprob)
        for token, logprob in zip(numbers[1 : 1 + wanted], numbers[1 + most : 1 + most + wanted], strict=True)
        if logprob > -torch.inf
    ]
    return TokenLogprobs(numbers[0], [token for token, _ in pairs], [logprob for _, logprob in pairs])
