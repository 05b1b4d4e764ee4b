"""One request while the worker runs it: its tokens, how far its KV reaches, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal, Protocol

import numpy as np
import torch

from prefixd.base.errors import InvalidArgumentError
from prefixd.base.sampling import Sampling
from prefixd.worker.decoding.token_choice import Choice, TokenCounts
from prefixd.worker.images import PromptImages, check_images
from prefixd.worker.memory.grouped_kv import GroupedSequence
from prefixd.worker.memory.kv_memory import KvSequence, Segment
from prefixd.worker.memory.state_memory import SequenceState
from prefixd.worker_protocol.errors import RequestError
from prefixd.worker_protocol.protocol import Arrived, ImageShape, Start, blocks_needed


class Limits(Protocol):
    """The properties of the model that a run depends on (`ModelSpec`)."""

    @property
    def device(self) -> torch.device: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_tokens(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def block_slots(self) -> int: ...
    @property
    def state_slots(self) -> int: ...
    @property
    def image_slots(self) -> int: ...
    @property
    def layers_apart(self) -> int: ...
    def embedding_frames(self, rows: int) -> int: ...
    @property
    def images(self) -> ImageShape | None: ...
    @property
    def images_apart(self) -> bool: ...


class Run:
    """A request's state.

    tokens: prompt and generated tokens, as far as the host has read them.
    unread: how many tokens follow them that the device has sampled, or will, and the host has not read.
    computed: how many tokens, from the first, have their KV in memory, or will have it: that is queued on the device.
    The last token sampled is computed only when the next one is wanted, so always `computed < len(tokens) + unread`.
    failed: its logits were not finite, so no token follows.
    images: None for a prompt without images.
    draft_behind: number of the last computed tokens that have no KV of the draft yet; 0 without a draft.
    loading: layers of its cached blocks are on their way; the first `layers` have come.
    """

    def __init__(
        self,
        start: Start,
        memory: KvSequence,
        block_tokens: int,
        limits: Limits,
        images: PromptImages | None = None,
    ) -> None:
        self.id = start.id
        self.sampling = start.sampling
        self._guessing = replace(start.sampling, logprobs=None)
        self.tokens: list[int] = np.frombuffer(start.tokens, dtype="<u4").tolist()
        self.generated = start.generated
        self.unread = 0
        self.failed = False
        self._forced: list[int] = start.sampling.forced_ids.tolist()
        self._counts: TokenCounts | None = None
        if start.sampling.penalised:
            known = [token for token in self.tokens if token < limits.vocab_size]  # some placeholders are not
            self._counts = TokenCounts(known, start.generated, limits.vocab_size, limits.device)
        self.computed = start.cached_blocks * block_tokens
        self.draft_behind = 0
        self.loading = start.loading
        self.layers = 0
        self._all_layers = limits.layers_apart
        self.memory = memory
        self.images = images
        self.reported_blocks = start.cached_blocks
        self._arrived: tuple[int, int] | None = None  # the first and the end of tokens that need not be computed
        self._block_tokens = block_tokens
        most = len(self.tokens) + start.sampling.max_tokens - start.generated
        self._last = min(most, limits.max_model_tokens)  # number of tokens with which it ends
        stop = set(start.sampling.stop_token_ids)
        self.stop = frozenset(stop if start.sampling.ignore_eos else stop | set(limits.eos_token_ids))
        self.ended = self._why_ended()

    @property
    def members(self) -> Sequence[Run]:
        """The sequences to compute: this one."""
        return (self,)

    @property
    def memories(self) -> list[KvSequence]:
        """Its memory."""
        return [self.memory]

    @property
    def pending(self) -> int:
        """Number of tokens that can be computed now, as far as its frames reach; none if an unread token is known to
        be the last one, or no layer of its cached blocks has come."""
        unread = self.unread
        if (unread and self.room <= unread) or (self.loading and not self.layers):
            return 0
        reach = len(self.tokens) + unread
        held = self.memory_tokens if self._arrived is None else self._arrived[0]
        if held < reach:
            reach = held
        return (reach if self.images is None else self.images.last_cut(reach)) - self.computed

    @property
    def memory_tokens(self) -> int:
        """Tokens that its frames hold."""
        return self.memory.blocks * self._block_tokens

    @property
    def block_start(self) -> int:
        """Tokens before the block of the last known token."""
        return (len(self.tokens) - 1) // self._block_tokens * self._block_tokens

    @property
    def block_end(self) -> int:
        """Tokens up to the end of that block."""
        return self.block_start + self._block_tokens

    @property
    def room(self) -> int:
        """Tokens that may follow the known ones, unread ones included, if none of them ends the request."""
        return self._last - len(self.tokens)

    @property
    def kept_tokens(self) -> int:
        """Tokens whose KV is in memory, including the draft's KV."""
        return self.computed - self.draft_behind

    @property
    def decoding(self) -> bool:
        """One token is left, and the next one follows from it."""
        return len(self.tokens) + self.unread - self.computed == 1

    @property
    def filled_blocks(self) -> int:
        """Full blocks in memory."""
        return self.kept_tokens // self._block_tokens

    def _why_ended(self) -> Literal["stop", "length"] | None:
        if self.generated and self.tokens[-1] in self.stop:
            return "stop"
        if self.room <= 0:
            return "length"
        return None

    def choice(self, assumed: Sequence[int] = ()) -> Choice:
        """How the next token is chosen, or the one behind `assumed` tokens that may come."""
        counts, k = self._counts, self.generated + self.unread
        if assumed:
            k += len(assumed)
            counts = counts and counts.after(assumed)
        return Choice(self.sampling, k, counts, self._forced[k] if k < len(self._forced) else None)

    def guess(self, assumed: Sequence[int]) -> Choice:
        """As `choice`, for the draft: without logprobs and forced tokens, so that its proposals are accepted as often
        as if the model had chosen the forced tokens."""
        return self.choice(assumed)._replace(sampling=self._guessing, forced=None)

    def segment(self, count: int) -> Segment:
        """The next `count` tokens to compute."""
        stop = self.computed + count
        images = None if self.images is None else self.images.of_pass(self.computed, stop)
        return Segment(self.memory, self.computed, stop, images=images)

    def arrive(self, first: int, end: int) -> None:
        """Skip tokens [first, end), behind those computed so far or now: their KV is in memory."""
        self._arrived = first, end
        self.advance(0)

    def advance(self, count: int) -> None:
        """Count `count` more computed tokens, and skip arrived ones behind them."""
        self.computed += count
        if self._arrived is not None and self.computed >= self._arrived[0]:
            self.computed, self._arrived = self._arrived[1], None

    @property
    def arriving(self) -> bool:
        """Whether arrived tokens have not been skipped yet."""
        return self._arrived is not None

    def note_layers(self, layers: int) -> None:
        """The first `layers` layers of its cached blocks have come."""
        self.layers = layers
        self.loading = layers < self._all_layers

    @property
    def state(self) -> SequenceState | None:
        """The state of its recurrent layers; None for a model without."""
        return self.memory.state if isinstance(self.memory, GroupedSequence) else None

    def append(self, token: int) -> None:
        """Add a generated token; its penalties count it by `count`, or when it is sampled (`queue_choices`)."""
        self.tokens.append(token)
        self.generated += 1
        self.ended = self._why_ended()

    def count(self, token: int) -> None:
        """Have a generated token count for the penalties of those that follow."""
        if self._counts is not None:
            self._counts.add(token)

    @property
    def over(self) -> bool:
        """Whether no token follows the known ones: passes that compute further ones are in vain."""
        return self.failed or self.ended is not None

    @property
    def must_be_read(self) -> bool:
        """Whether its unread token must be known before it is computed: the state behind a full block would be kept,
        though the request may have ended before."""
        if not self.unread or self.state is None:
            return False
        return self.state.keeps_tail and (self.computed + 1) % self._block_tokens == 0


def check_start(start: Start, block_tokens: int, limits: Limits) -> None:
    """Refuse a request that cannot run. Raises RequestError."""
    if not start.tokens or len(start.tokens) % 4:
        raise RequestError(f"{len(start.tokens)} bytes of tokens; send at least one token as 4-byte little-endian ids")
    tokens = np.frombuffer(start.tokens, dtype="<u4")
    if len(tokens) > limits.max_model_tokens:
        raise RequestError(f"{len(tokens)} tokens are over the model's {limits.max_model_tokens}; shorten the prompt")
    if not 0 <= start.generated < len(tokens):
        raise RequestError(f"generated={start.generated} of {len(tokens)} tokens; at least one must be the prompt's")
    cached, prompt = start.cached_blocks * block_tokens, len(tokens) - start.generated
    check_images(start.images, tokens.tolist(), prompt, cached, limits.images, limits.images_apart)
    of_images = np.zeros(len(tokens), bool)
    for image in start.images:
        of_images[image.first : image.first + image.tokens] = True
    largest = int(tokens[~of_images].max(initial=0))
    if largest >= limits.vocab_size:
        raise RequestError(f"token id {largest} is outside the model's vocabulary of {limits.vocab_size}")
    blocks = len(start.frames) // limits.block_slots if limits.block_slots else limits.max_model_tokens
    if len(start.frames) != blocks * limits.block_slots and limits.block_slots:
        raise RequestError(f"{len(start.frames)} frames; a block takes {limits.block_slots}: give whole blocks")
    if not 0 <= start.cached_blocks <= blocks:
        raise RequestError(f"cached_blocks={start.cached_blocks} with {len(start.frames)} frames")
    if start.cached_blocks * block_tokens >= len(tokens):
        raise RequestError(
            f"{start.cached_blocks} cached blocks of {block_tokens} cover all {len(tokens)} tokens; "
            "leave at least one token to compute"
        )
    if start.loading and not (
        limits.layers_apart and start.cached_blocks and not start.sampling.beams and not start.images
    ):
        raise RequestError(
            "cached blocks come layer by layer; that is for models with one group of full attention, and not for beam "
            "searches, images and drafts"
        )
    _check_state(start, limits)
    _check_image_frames(start, cached, limits)
    _check_sampling(start.sampling)
    if start.sampling.forced_tokens is not None:
        _check_forced(start, limits)
    if start.sampling.beams:
        _check_beams(start, len(tokens), block_tokens, limits)


def check_arrived(message: Arrived, run: Run, block_tokens: int, limits: Limits) -> int:
    """Refuse blocks that a run cannot go on behind; returns how many came. Raises RequestError."""
    blocks = len(message.frames) // limits.block_slots if limits.block_slots else 0
    if not blocks or len(message.frames) != blocks * limits.block_slots:
        raise RequestError(
            f"{len(message.frames)} frames arrived; a block takes {limits.block_slots}: give whole blocks"
        )
    if message.first != run.memory.blocks or run.arriving:
        raise RequestError(f"blocks arrived behind block {message.first}; {run.memory.blocks} have frames")
    end = (message.first + blocks) * block_tokens
    if end >= len(run.tokens):
        raise RequestError(f"{end} tokens of {len(run.tokens)} arrived; leave at least one to compute")
    return blocks


def _check_state(start: Start, limits: Limits) -> None:
    state, needed = start.state, limits.state_slots
    if (state is not None) != bool(needed):
        raise RequestError(f"state frames {'missing' if needed else 'given'}; the model's state takes {needed} frames")
    if state is None:
        return
    if start.sampling.beams:
        raise RequestError(f"beams={start.sampling.beams}; models with recurrent states are not searched with beams")
    if bool(state.resume) != (start.cached_blocks > 0):
        raise RequestError(f"cached_blocks={start.cached_blocks} with {len(state.resume)} frames of their state")
    given = [state.own, *([state.resume] if state.resume else []), *([state.tail] if state.tail else [])]
    given += [kept.frames for kept in state.keep]
    if wrong := [len(frames) for frames in given if len(frames) != needed]:
        raise RequestError(f"{wrong[0]} frames for a state; it takes {needed}")
    blocks = [start.cached_blocks, *(kept.blocks for kept in state.keep)]
    if any(before >= after for before, after in pairwise(blocks)):
        raise RequestError(f"states to keep after blocks {blocks[1:]}; name them ascending, behind the cached ones")


def _check_image_frames(start: Start, cached: int, limits: Limits) -> None:
    if len(start.image_frames) != len(start.images):
        raise RequestError(f"frames for {len(start.image_frames)} images; {len(start.images)} are needed")
    for image, given in zip(start.images, start.image_frames, strict=True):
        needed = limits.image_slots or limits.embedding_frames(image.tokens)
        passed = not limits.image_slots and image.first + image.tokens <= cached
        if len(given.frames) != needed and (given.frames or not passed):
            raise RequestError(
                f"{len(given.frames)} frames for the image at token {image.first}, with {cached} tokens cached; it "
                f"takes {needed}"
            )


def _check_sampling(sampling: Sampling) -> None:
    if sampling.max_tokens < 1:
        raise RequestError(f"max_tokens is {sampling.max_tokens}; ask for at least one token")
    try:
        sampling.check()
    except InvalidArgumentError as error:
        raise RequestError(str(error)) from error


def _check_forced(start: Start, limits: Limits) -> None:
    sampling, forced = start.sampling, start.sampling.forced_ids
    if len(forced) != sampling.max_tokens:
        raise RequestError(f"{len(forced)} forced tokens with max_tokens={sampling.max_tokens}; send as many")
    if (largest := int(forced.max())) >= limits.vocab_size:
        raise RequestError(f"forced token {largest} is outside the model's vocabulary of {limits.vocab_size}")
    if forced[: start.generated].tobytes() != start.tokens[len(start.tokens) - 4 * start.generated :]:
        raise RequestError(f"the {start.generated} generated tokens are not the first of those forced; send these")


def _check_beams(start: Start, tokens: int, block_tokens: int, limits: Limits) -> None:
    sampling = start.sampling
    if start.generated:
        raise RequestError(f"generated={start.generated}; a beam search starts from its prompt")
    needed = blocks_needed(tokens, sampling.max_tokens, sampling.beams, block_tokens)
    if len(start.frames) < needed * limits.block_slots:
        raise RequestError(
            f"{len(start.frames)} frames for {sampling.beams} beams; {needed * limits.block_slots} are needed"
        )
    stops = len(set(sampling.stop_token_ids) | set(limits.eos_token_ids))
    if sampling.beams * (1 + stops) > limits.vocab_size:
        raise RequestError(
            f"{sampling.beams} beams with {stops} stop tokens need a vocabulary of more than {limits.vocab_size}"
        )
