"""Messages between daemon and worker; how they lie on the socket: `framing`.

The order of a conversation (``>`` from the worker, ``<`` from the daemon)::

    > Hello     the model's needs; from its configuration alone, so the daemon can size its memory early
    < Memory    followed on the same socket by the GPU tier's descriptors (`prefixd_swap.vmem.send_export`)
    > Ready     memory attached, weights loaded
    < Start, Extend, Arrived, Layers, Cancel   at any time from here on
    < Expect    a request will probably start
    < Grow      more frames; followed on the same socket by their descriptors, and before any message that names them
    < Shrink    unmap frames that no request has
    > Shrunk    the worker has unmapped them
    > Step      after each forward pass
    > Done      once a request, after its last Step, when its frames are unmapped
    < Ping      at any time after Ready
    > Pong      the answer, between two steps
    < Shutdown  or the socket closes: the worker ends
    > Failed    in place of anything else: the worker ends
"""

from __future__ import annotations

from typing import Literal

import msgspec

from prefixd.base.rules.rules import RecurrentState, Rule, Window
from prefixd.base.sampling import Sampling
from prefixd.images.decoding import Pixels
from prefixd.worker_protocol.errors import ProtocolError


class GroupShape(msgspec.Struct, frozen=True):
    """The layers of a model that share one shape and one rule.

    name: for people, unique.
    rule: a sliding window, chunks, a state; None for full attention.
    layers: how many.
    frames: how many frames a block of the group takes; of a group that has a state, how many the state takes.
    token_bytes, token_stride: if tokens are padded in frames, bytes of a token and from one to the next; else 0.
    kv_heads, head_dim: of its keys and values; 0 where it keeps something else (states, latents).
    """

    name: str
    rule: Rule | None
    layers: int
    frames: int
    token_bytes: int = 0
    token_stride: int = 0
    kv_heads: int = 0
    head_dim: int = 0


class ImageGroup(msgspec.Struct, frozen=True):
    """The layers that attend to a prompt's images and to nothing else: every token needs all their keys and values.

    layers: how many. frames: how many frames an image takes.
    """

    layers: int
    frames: int


class ImageShape(msgspec.Struct, frozen=True):
    """How a model takes images.

    placeholder_id: the token id that stands for an image in a prompt.
    kind: "rows": each row of an image's embedding is one token, so that its placeholder is repeated; "cross": the
        placeholder stays one token, and layers of their own attend to the image.
    both_ways: the tokens of an image attend to each other in both directions, so that a pass must hold all of them.
    row_bytes: of a row of an embedding, which lies in frames until the prompt has passed it; 0 for "cross".
    """

    placeholder_id: int
    kind: Literal["rows", "cross"]
    both_ways: bool = False
    row_bytes: int = 0


class Need(msgspec.Struct, frozen=True):
    """The bytes that some layers of a group need. The frames of a group hold at least as much.

    group: its place in `Hello.groups`.
    rule: of the layers; the same as the group's, unless `worker.groups` is "one".
    nbytes: of these layers in a block, or in a state.
    """

    group: int
    rule: Rule | None
    nbytes: int


def embedding_frames(rows: int, row_bytes: int, frame_bytes: int) -> int:
    """Number of frames of an image's embedding, whose rows lie one after the other."""
    return -(-rows * row_bytes // frame_bytes)


def frames_each(frame_bytes: int, common_bytes: int) -> int:
    """Number of frames of the common size in one of a model's own frames (Jenga, section 6.1).

    Raises ProtocolError unless the common size divides the frame.
    """
    if common_bytes < 1 or frame_bytes % common_bytes:
        raise ProtocolError(
            f"frames of {common_bytes} bytes do not fill one of {frame_bytes}: the daemon must take a size that "
            "divides those of all its models"
        )
    return frame_bytes // common_bytes


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model in numbers.

    groups: its layers, and behind them those of its draft, if it has one. Layers with a state are one group, the last.
    needs: of these groups, for the daemon's account of memory. The rest of their frames is padding.
    whole_pages: with block tables: the frames of a block in one group, and of a state, must lie side by side, and only
        the first is named. Else they lie anywhere, and each is named.
    frame_bytes: bytes of a frame: one size for all groups, so that any frame serves any of them.

    weights_bytes, working_bytes: estimated bytes of the weights on the device, and of the rest without the KV
        (`memory_estimate`).
    block_tokens: the size of a block, at least `block_tokens_asked` of the settings.
    block_tokens_reason: why the two differ, and what the padding of tokens costs, one line; empty if neither is so.
    token_bytes: keys and values of a token in all groups; token_memory: the memory that it takes, with padding.
    window_margin: blocks before the first token that the token this many before the next one sees are not read.
    images: None for a model of text alone.
    image_group: None without such layers. Their keys and values depend on the image alone, so they are in no block of a
        prompt.
    """

    groups: tuple[GroupShape, ...]
    frame_bytes: int
    dtype: str
    block_tokens: int
    layout: Literal["token", "layer"]
    chunk_bytes: int
    vocab_size: int
    max_model_tokens: int
    eos_token_ids: tuple[int, ...]
    architecture: str
    parameters: int
    device: str
    weights_bytes: int = 0
    working_bytes: int = 0
    block_tokens_asked: int = 0
    block_tokens_reason: str = ""
    token_bytes: int = 0
    token_memory: int = 0
    window_margin: int = 0
    images: ImageShape | None = None
    image_group: ImageGroup | None = None
    needs: tuple[Need, ...] = ()
    whole_pages: bool = False

    @property
    def block_frames(self) -> int:
        """Frames that a block takes in all groups that keep something of every token."""
        return sum(group.frames for group in self.groups if not isinstance(group.rule, RecurrentState))

    @property
    def state_frames(self) -> int:
        """Frames that a state takes; 0 for a model without."""
        return sum(group.frames for group in self.groups if isinstance(group.rule, RecurrentState))

    def in_frames(self, frame_bytes: int) -> Hello:
        """The same model in smaller frames, which it shares with others. Raises ProtocolError."""
        times = frames_each(self.frame_bytes, frame_bytes)
        groups = tuple(msgspec.structs.replace(group, frames=times * group.frames) for group in self.groups)
        of_images = self.image_group
        if of_images is not None:
            of_images = msgspec.structs.replace(of_images, frames=times * of_images.frames)
        return msgspec.structs.replace(self, groups=groups, image_group=of_images, frame_bytes=frame_bytes)


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Weights are loaded and the memory is attached: requests may start. Sent again when one of its fields changes.

    cuda_graphs: whether decode passes are replayed as CUDA graphs.
    cuda_graphs_reason: why not, one line, if the settings ask for graphs on a GPU; else empty.
    prompt_graphs, prompt_graphs_reason: as these, of passes with short prompts.
    operators: how far the model's layers are rewritten: "model", "merged", "fused".
    operators_reason: why not as far as the settings ask for, one line; else empty.
    """

    cuda_graphs: bool = False
    cuda_graphs_reason: str = ""
    prompt_graphs: bool = False
    prompt_graphs_reason: str = ""
    operators: str = "model"
    operators_reason: str = ""


class Note(msgspec.Struct, frozen=True, tag=True):
    """A line for the daemon's log, such as how far loading is."""

    text: str


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities: of the chosen token, and of the most likely ones, best first.

    token_ids: the most likely tokens, which may include the chosen one; fewer than requested if the others have
        probability 0. logprobs: theirs.
    """

    chosen: float
    token_ids: list[int]
    logprobs: list[float]


class Update(msgspec.Struct, frozen=True):
    """The results of one step for one request.

    tokens: generated in this step (a stop token included); several if tokens of a draft were accepted.
    filled_blocks: full blocks with KV in memory now, counted from the start of the prompt, cached ones included.
    logprobs: of each of the tokens, if the request asks for them.
    kept: for each state of `Start.keep` that was kept in this step, the number of blocks before it.
    images: places in `Start.images` of those whose frames the worker has filled since the last update.
    """

    id: int
    tokens: list[int]
    filled_blocks: int
    logprobs: list[TokenLogprobs] = []
    kept: list[int] = []
    images: list[int] = []


class KvUsage(msgspec.Struct, frozen=True):
    """The worker's use of KV memory.

    If a block takes several frames, each of them counts. shared_blocks: blocks saved at present because requests share
    frames. mapped_blocks, reused_blocks, copied_blocks count since the worker's start: blocks that were mapped, that
    were still mapped from an earlier request, and that were copied.
    """

    shared_blocks: int = 0
    mapped_blocks: int = 0
    reused_blocks: int = 0
    copied_blocks: int = 0


class Step(msgspec.Struct, frozen=True, tag=True):
    """One forward pass: its results are in memory, not merely queued on a stream.

    computed_tokens: tokens whose KV was computed, over all requests, without those computed in vain behind a request's
        end; elapsed_s: wall time since the pass began, or since the pass before it had ended, if that is later.
    context_tokens: how many tokens of its request came before one of these, on average.
    passes: number of forward passes: those without a sampled token are reported with the next that has one.
    read_at_once: of these, those that were read with none queued behind them, 0 or 1: the device waited for the host.
    proposed_tokens: computed tokens that a draft proposed; accepted_tokens: proposed tokens that the model chose, too.
    """

    updates: list[Update]
    computed_tokens: int
    elapsed_s: float
    kv: KvUsage = KvUsage()
    passes: int = 1
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    context_tokens: int = 0
    read_at_once: int = 0


class BeamResult(msgspec.Struct, frozen=True):
    """A sequence that a beam search has found. score: by `BeamSearch.length_penalty`."""

    tokens: list[int]
    score: float
    reason: Literal["stop", "length"]


class Done(msgspec.Struct, frozen=True, tag=True):
    """A request ended and nothing uses its frames any more.

    `detail` explains the reasons "error" and "no_memory": the process has no addresses or mappings left for the
    request, but may have when others have ended. `beams` are the best sequences of a beam search, the best one first.
    The frames of `StateFrames.tail` hold the state after `tail_blocks` blocks; nothing if that is 0. `encoded_images`
    of its images were embedded by the vision encoder; the embeddings of the others were kept. `not_finite`: the error
    is that the logits were not finite, so that no token could be chosen.
    """

    id: int
    reason: Literal["stop", "length", "cancelled", "error", "no_memory"]
    detail: str = ""
    beams: list[BeamResult] = []
    tail_blocks: int = 0
    encoded_images: int = 0
    not_finite: bool = False


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The worker cannot go on and ends. detail: one line for the operator."""

    detail: str


class Memory(msgspec.Struct, frozen=True, tag=True):
    """The GPU tier. `fds` descriptors follow outside the framing, as SCM_RIGHTS.

    frames: numbers of the frames that there are, little-endian int64.
    chunks: the chunks of each of them, one frame after the other, little-endian int64.
    most_frames: the numbers of all frames there will ever be are below this.
    frame_bytes: of a frame: `Hello.frame_bytes`, or less where several models share the frames (`Hello.in_frames`).
    """

    meta: bytes
    fds: int
    frames: bytes
    chunks: bytes
    most_frames: int
    frame_bytes: int


class Grow(msgspec.Struct, frozen=True, tag=True):
    """More frames, of the same memory. `fds` descriptors follow outside the framing, as SCM_RIGHTS.

    meta: of `VirtualMemory.export_run`.
    frames, chunks: as in `Memory`, of the new frames alone.
    """

    meta: bytes
    fds: int
    frames: bytes
    chunks: bytes


class Shrink(msgspec.Struct, frozen=True, tag=True):
    """Unmap frames that no request has; the worker answers with Shrunk.

    frames: little-endian int64.
    """

    frames: bytes


class Shrunk(msgspec.Struct, frozen=True, tag=True):
    """The worker has unmapped these frames and closed the handles of their chunks."""

    frames: bytes


def passed_blocks(group: GroupShape, computed_tokens: int, block_tokens: int, margin: int) -> int:
    """How many blocks, from the first on, a request with `computed_tokens` never reads again in this group.

    The daemon may reuse their frames as soon as an `Update` has reported the tokens: the worker may keep them mapped,
    but does not access them. `margin` is `Hello.window_margin`.
    """
    if not isinstance(group.rule, Window):
        return 0
    return group.rule.first_seen(max(0, computed_tokens - margin)) // block_tokens


class KeptState(msgspec.Struct, frozen=True, array_like=True):
    """Copy the state after the first `blocks` blocks into `frames`, when it has been computed."""

    blocks: int
    frames: list[int]


class StateFrames(msgspec.Struct, frozen=True, kw_only=True):
    """The frames of a request's states, for each as many as the group's shape has, named as in `Start`.

    own: of the state while the request runs.
    resume: of the state after `Start.cached_blocks`, which is copied and not changed; empty if no block is cached.
    keep: the states of the prompt to keep, ascending.
    tail: of the state after the last full block, replaced whenever the output fills a block; empty: it is not kept.
    """

    own: list[int]
    resume: list[int] = []
    keep: list[KeptState] = []
    tail: list[int] = []


class PromptImage(msgspec.Struct, frozen=True, array_like=True):
    """An image of a prompt.

    first, tokens: its placeholders are the tokens [first, first + tokens) of the prompt.
    digest: 32 bytes that name its content.
    pixels: in the memory that the daemon shares; they stay there until the daemon has the request's `Done`.
    """

    first: int
    tokens: int
    digest: bytes
    pixels: Pixels


class ImageFrames(msgspec.Struct, frozen=True, array_like=True):
    """The frames of an image: with its keys and values, for layers with cross-attention, or with its embedding.

    frames: as many as `Hello.image_group.frames`, named as in `Start`; of an embedding `embedding_frames`, one by one,
        or none for an image whose tokens are all cached.
    filled: whether the keys and values, or the embedding, are there; else the worker fills them. Images of one digest
        have the same frames. Those of an embedding may be reused when an `Update` has reported the image's tokens.
    """

    frames: list[int]
    filled: bool


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run a request.

    tokens: little-endian uint32, the prompt and then the tokens that earlier runs generated.
    generated: how many of them were generated.
    cached_blocks: how many blocks, from the first on, hold KV already; at least one token must be left to compute.
    frames: the frames of the blocks, block by block: in a block the frames of each group; with `Hello.whole_pages` only
        the first frame of each group. The run alone fills those from `cached_blocks` on. Before them, -1 stands where
        the rule of a group needs nothing. In a beam search, the blocks behind the prompt's are for beams, in any order
        (`blocks_needed`).
    loading: layers of some cached blocks are still on their way: `Layers` says how many have come. For models with one
        group of full attention, and not for beam searches, images and drafts.
    fork_of: a request that may still run and has tokens in common with this one: the KV that it has computed of them
        behind the cached blocks is copied, not computed again. -1: none.
    sampling: of the sequence, with `max_tokens`, in which the tokens of earlier runs count, and a seed; no `stop`.
    state: None for a model without a state.
    images: those of the prompt, in its order. image_frames: of each of them.
    """

    id: int
    tokens: bytes
    generated: int
    cached_blocks: int
    frames: list[int]
    sampling: Sampling
    loading: bool = False
    fork_of: int = -1
    state: StateFrames | None = None
    images: list[PromptImage] = []
    image_frames: list[ImageFrames] = []


def blocks_needed(prompt_tokens: int, most_tokens: int, beams: int, block_tokens: int) -> int:
    """Blocks with frames in a beam search: the prompt's, and for every beam those behind the prompt's full blocks."""
    full = prompt_tokens // block_tokens
    own = -(-(prompt_tokens + most_tokens) // block_tokens) - full
    return -(-prompt_tokens // block_tokens) + beams * own


class Extend(msgspec.Struct, frozen=True, tag=True):
    """More frames for a request, of whole blocks, following those it has. Ignored if the request has ended."""

    id: int
    frames: list[int]


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """Cached blocks have come behind those that a request computes. Ignored if the request has ended.

    The request computes the tokens of the `first` blocks that it has frames for, and then goes on behind the blocks
    that came. For models with one group of full attention; at least one token must be left to compute.

    ```
    block      0  1  |  2  3  4  |  5  6  7  |  8
               cached   computed    arrived     computed next
    frames     Start    Extend      Arrived     Extend
    ```

    first: how many blocks have frames already.
    frames: of the blocks that came, named as in `Start`.
    """

    id: int
    first: int
    frames: list[int]


class Layers(msgspec.Struct, frozen=True, tag=True):
    """More layers of the cached blocks of a request have come (`Start.loading`). Ignored if the request has ended.

    The worker computes a layer only when it has come. If the rest does not come, Cancel ends the request, and the pass
    that waits for it is dropped.

    layers: of all cached blocks, the first so many layers are in memory.
    """

    id: int
    layers: int


class Expect(msgspec.Struct, frozen=True, tag=True):
    """A request that waits for a place will probably start with these frames, which the worker may map beside its
    steps until then. It may not start, or start with others.

    frames: of its cached blocks, named as in `Start`.
    """

    frames: list[int]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """End a request; it answers with Done. Ignored if the request has ended."""

    id: int


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Asks for a Pong. A worker that hangs in a step does not answer."""


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The answer to Ping, between two steps."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the worker."""


FromWorker = Hello | Ready | Note | Step | Done | Shrunk | Pong | Failed
ToWorker = Memory | Grow | Shrink | Start | Extend | Arrived | Layers | Expect | Cancel | Ping | Shutdown
