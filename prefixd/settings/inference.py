"""The queue and the worker of a daemon that serves models itself: `scheduler` and `worker`."""

from __future__ import annotations

import os
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field
from pydantic import model_validator as check_together

from prefixd.settings.field_types import AbsolutePath, Bytes, Count, Seconds, Section, listed_texts
from prefixd.settings.model_folder import ModelFolder
from prefixd_scheduler import POLICIES

_MOST_REQUESTS = 1_000_000


def _parse_count_or_auto(value: object) -> int | str:
    if value == "auto":
        return "auto"
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST_REQUESTS:
        raise ValueError(f"give a whole number from 0 to {_MOST_REQUESTS:,}, or auto")
    return value


CountOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_parse_count_or_auto)]


class SchedulerSettings(Section):
    """The order of the queue."""

    policy: Literal["fcfs", "fpf", "relaxed-fpf", "lpm", "shortest-ready", "deadline"] = "relaxed-fpf"
    """The request that runs next, of those with the lowest priority number. fcfs: the one that arrived first. fpf:
    the one whose cached prefix is in the nearest tier. relaxed-fpf: as fpf, but a request's age counts too, so that no
    wait is without bound. lpm: the one with most cached tokens. shortest-ready: the one with the least time left to
    load and compute its prompt. deadline: the one whose deadline comes first. All but fcfs and relaxed-fpf may starve a
    request."""
    starvation_bound_s: Seconds | None = None
    """For the policies that may starve a request: a request that has waited this long runs before all that have not.
    If at most L requests wait at a time and one starts at least every s seconds, no request waits longer than
    starvation_bound_s + L * s."""
    look_ahead: CountOrAuto = "auto"
    """How many waiting requests get their prefixes loaded before their turn. auto: as many as start while one prefix is
    loaded, by recent measurements. 0: none. A number is for comparison."""
    queue_limit: Count = 4096
    """The most requests that wait; one more is refused."""
    load: Literal["auto", "always", "never"] = "auto"
    """How the daemon gets a cached prefix that is not in GPU memory. auto: the way that brings the first token soonest,
    by measured times: load it, compute it again, or load its end while its beginning is computed; a load that is slower
    than expected is abandoned. always: load it, even if that takes longer. never: compute it again. The last two are
    for comparison."""
    preemption: Literal["auto", "swap", "recompute"] = "auto"
    """How the daemon frees the KV of a running request that is preempted because GPU memory is short. swap: it moves
    the KV down a tier and loads it again later. recompute: it drops the KV and computes it again. auto: the faster of
    both, for each request. Without a tier below the GPU tier, and with cache.enabled = false, the KV is always computed
    again."""

    @check_together(mode="after")
    def _check_starvation_bound(self) -> Self:
        if self.starvation_bound_s is not None and not POLICIES[self.policy].may_starve:
            raise ValueError(
                f"scheduler.starvation_bound_s = {self.starvation_bound_s:g}, but scheduler.policy = {self.policy} "
                "starves no request; leave the bound out"
            )
        return self


class WorkerSettings(Section):
    """The inference worker beside the daemon; there is one when `model` or `embedded` is set."""

    model: ModelFolder | None = None
    """Directory of a Hugging Face model, or the name of one that was downloaded (`hf download NAME`), such as
    meta-llama/Llama-3.1-8B: it is looked up in $HF_HUB_CACHE, by default ~/.cache/huggingface/hub."""
    more_models: Annotated[tuple[ModelFolder, ...], BeforeValidator(listed_texts)] = ()
    """Directories or names of further models, each with a worker of its own; all settings of this section apply to
    each. They share the GPU tier, frame by frame: busy models get the memory. A request names a model by the name of
    its directory, or by the name of the download; a request without a name goes to `model`."""
    embedded: bool = False
    """Run the small random model that comes with prefixd: for trying out and for tests."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and KV; auto: the type in which the model was saved, float32 on a CPU."""
    block_tokens: Count = 16
    """Tokens of one cached block; more where a block must fill whole chunks of memory, see `prefixd stats`."""
    block_padding: Literal["auto", "none", "any"] = "auto"
    """How much padding the KV of a token may have so that short blocks fill whole chunks of memory. auto: up
    to 15%, and what blocks of 64 tokens need if that is not enough, up to 200% or 32 KiB a token in each KV group.
    none: blocks take the least memory, and only prompts longer than a block are found again. any: blocks have
    block_tokens, whatever it costs. Other tiers hold no padding, except with kv = "paged"."""
    layout: Literal["token", "layer"] = "token"
    """How KV lies in memory: all layers of a token together, or each layer apart."""
    kv: Literal["virtual", "paged"] = "virtual"
    """How the worker addresses a request's KV: in contiguous addresses to which its blocks are mapped (virtual;
    vTensor, vAttention), or in blocks through a block table (paged; PagedAttention), a baseline to measure against."""
    attention: Literal["auto", "plain", "split", "triton", "extents", "flex"] = "auto"
    """The kernels that compute attention on CUDA. auto: torch's flash attention, in each step in the calls that were
    measured to be fastest on this kind of device; for models with soft caps, sinks or images that attend both ways, and
    for kv = "paged", a kernel in Triton. The others are for comparison. plain: flash attention in one call for the
    whole step. split: prefixes of prompts from 2,048 tokens on always in 8 pieces, which are merged. triton: the kernel
    in Triton for every model. extents: the same, reading adjacent blocks as one; with kv = "paged" and layout =
    "token". flex: FlexAttention."""
    attention_costs: AbsolutePath | None = None
    """The file by which attention = "auto" chooses, as benchmarks.gpu writes it beside its result. Without one:
    the figures of this GPU if it is an H100 or H200, else those of an H100."""
    page_order: Literal["few_free", "jenga"] = "few_free"
    """With kv = "paged", where a block's page comes from. few_free: a large page of the request's own while little is
    free inside large pages, else any free page. jenga: always its own, and a whole large page is evicted before a page
    that is free in another request's is used (Jenga, section 5.4), to measure against."""
    groups: Literal["by_rule", "one"] = "by_rule"
    """The KV that is kept for models with different kinds of layers. by_rule: for each layer the part that its rule
    needs (Jenga). one: everything for all layers, in pages of one size, as a baseline to measure against: layers with
    windows keep all tokens, blocks are as long as the largest state, and a state is kept after each block."""
    keep_embeddings: bool = True
    """For models that read images: keep images' embeddings in the tiers while there is room, so that each is computed
    once. false: embed the images of each prompt anew, as a baseline to measure against. The KV that the cross-attention
    layers of Llama 3.2 Vision compute from an image is kept in any case: 202 MiB for the 11B model."""
    draft_model: ModelFolder | None = None
    """Directory (or name, as for `model`) of a small Hugging Face model with the same tokens that proposes output,
    which the model checks several tokens at a time: the same answers in fewer passes of the model (speculative
    decoding). It runs on the same device, and its KV lies in the same blocks. For models of attention layers, with kv =
    "virtual" and layout = "token"."""
    draft_tokens: Annotated[int, Field(ge=1, le=64)] = 4
    """How many tokens the draft proposes at a time."""
    cuda_graphs: bool = True
    """Replay decode steps as CUDA graphs: on CUDA, with 16-bit KV in virtual tensors and a model that a graph can hold.
    Each is compared with the step that it replaces when it is captured; if they differ, no graph is used. If they are
    not in use, log and `prefixd stats` say why."""
    prompt_graphs: bool = True
    """With `cuda_graphs`: replay steps with prompts, too, of 2 to 256 tokens for up to 8 requests. A request has up to
    16,384 tokens with those before the step."""
    cuda_graphs_seconds: Annotated[int, Field(ge=0, le=3600)] = 20
    """The most time, in seconds, to capture CUDA graphs when a model is loaded, those of short sequences first. The
    others are captured when they are first needed, which takes some tenths of a second in a step. 0: none is captured
    at load."""
    operators: Literal["auto", "model", "merged", "fused"] = "auto"
    """How far the worker rewrites a model's layers, so that a step has fewer operators. model: not at all. merged: one
    matrix product for queries, keys and values and one for the gate and the values of an MLP, and RMSNorm in one
    operator. fused: also compiled rotary positions and activations (torch.compile, which takes up to a minute when a
    model is first loaded). auto: fused on CUDA, model on a CPU. Projections, norms and functions that
    change the logits, or cannot be compiled, are undone each by itself; log and `prefixd stats` say so."""
    async_scheduling: bool = True
    """On CUDA: plan and queue a step while the one before it is computed, and read its tokens a step late, so that the
    GPU does not wait for the host. A token that ends a request is then known a step late, which costs one row of that
    step. With beam searches and a draft model the tokens are read at once."""
    layerwise_loads: Literal["auto", "always", "never"] = "auto"
    """Whether a request computes its first layers while the last layers of its cached prefix come from CPU memory.
    auto: on CUDA, for a request that would run alone and that loads at least 64 MiB, in 2 to 4 slabs of layers, up to
    4,096 blocks. always: on a CPU, too, and however little is loaded; for comparison. never: a request waits for its
    whole load. For models of one group of full attention that read no images, without a draft; not for beam
    searches."""
    max_running: Count = 8
    """The most requests computed at once; on CUDA 64, unless it is set."""
    max_step_tokens: Count = 512
    """The most tokens computed in one step over all requests; on CUDA 4096, unless it is set. Running requests wait for
    their next token while a step of a long prompt is computed: 40 ms for 1000 tokens of an 8B model on an H100."""
    states_per_prompt: Annotated[int, Field(ge=0, le=64)] = 4
    """For models with recurrent layers: the most states kept of one prompt: at its end, where it branches from earlier
    prompts, and as state_every_tokens says. One more is kept at the end of the output. A state takes as much memory as
    the KV of hundreds of tokens and serves prefixes of one length. 0: none; no prefix of such a model is found again.
    """
    state_every_tokens: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    """Distance, in tokens, of states inside a prompt, rounded to whole blocks. They count against states_per_prompt; if
    they are too many, the last ones are kept. 0: none."""
    images_per_prompt: Count = 16
    """For models that read images: the most images of one prompt. A call of Generate has at most 16 MiB with all of
    them."""
    image_bytes: Bytes = 8 << 20
    """The largest file of an image (PNG, JPEG, WebP)."""
    image_pixels: Count = 16 << 20
    """The most pixels of an image, width times height; a decoded image takes 4 bytes for each."""
    image_seconds: Annotated[int, Field(ge=1, le=3600)] = 10
    """The most processor time, in seconds, to decode an image and to resize it for the model, in a process of its own.
    An image that takes longer is refused. A photograph of 16 million pixels takes one second."""
    images_bytes: Bytes = 1 << 30
    """The most memory for the images of all requests that wait or run: their files, and their pixels in the model's
    format. A request above it is refused."""
    threads: Count = Field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """CPU threads of the worker."""
    step_seconds: Annotated[int, Field(ge=1)] = 600
    """The longest that a step of the worker may take, in seconds. The daemon kills a worker that does not answer for
    that long, and starts another one."""
    restart_limit: Annotated[int, Field(ge=0)] = 3
    """How often the daemon restarts a worker that has died, before it gives the worker up."""

    @property
    def enabled(self) -> bool:
        """True if there is a worker."""
        return self.embedded or self.model is not None

    @check_together(mode="after")
    def _check_models(self) -> Self:
        if self.embedded and self.model is not None:
            raise ValueError(f"worker.embedded and worker.model = {self.model} are both set; keep one of them")
        if self.attention == "extents" and (self.kv, self.layout) != ("paged", "token"):
            raise ValueError(
                f'worker.attention = "extents" needs worker.kv = "paged" and worker.layout = "token", not "{self.kv}" '
                f'and "{self.layout}"; with virtual tensors it is "triton"'
            )
        if self.kv == "paged" and self.attention in ("plain", "split", "flex"):
            raise ValueError(
                f'worker.attention = "{self.attention}" reads virtual tensors alone, and worker.kv is "paged"; set one '
                "of them to its default"
            )
        if self.attention_costs is not None and self.attention != "auto":
            raise ValueError(
                f'worker.attention_costs = {self.attention_costs} is for worker.attention = "auto", not '
                f'"{self.attention}"; leave one of them out'
            )
        if self.page_order != "few_free" and self.kv != "paged":
            raise ValueError(
                f'worker.page_order = "{self.page_order}" is for block tables; leave it out, or set worker.kv = "paged"'
            )
        if self.draft_model is not None:
            if not self.enabled:
                raise ValueError(
                    f"worker.draft_model = {self.draft_model} has no model to propose tokens to; set worker.model too"
                )
            for name, needed in (("kv", "virtual"), ("layout", "token")):
                if (value := getattr(self, name)) != needed:
                    raise ValueError(
                        f'worker.draft_model = {self.draft_model} needs worker.{name} = "{needed}", not "{value}"'
                    )
        if self.more_models and not self.enabled:
            raise ValueError("worker.more_models needs worker.model too; name the first model there")
        if self.more_models and self.draft_model is not None:
            raise ValueError(
                f"worker.draft_model = {self.draft_model} is for a single model; leave it or worker.more_models out"
            )
        if self.more_models and self.layout != "token":
            raise ValueError(f"worker.layout = {self.layout} is for a single model; with worker.more_models use token")
        if self.max_step_tokens < self.block_tokens:
            raise ValueError(
                f"worker.max_step_tokens = {self.max_step_tokens} is below worker.block_tokens = "
                f"{self.block_tokens}; a step must hold at least one block"
            )
        return self
