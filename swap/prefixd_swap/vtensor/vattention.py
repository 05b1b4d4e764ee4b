"""vAttention's API on virtual tensors (paper, section 5.3, table 4): a KV cache for an engine.

It needs neither the daemon nor a GPU, and an engine can use it with its own model code:

```
kv = VAttention()
layers = kv.init_kvcache(layers=32, kv_heads=8, ...)      # [(K, V), ...], each [batch, context, kv_heads, head_dim]
reqid = kv.alloc_reqid()                                  # the request's keys are layers[i][0][reqid]
while generating:
    lengths[reqid] += 1
    if kv.step(lengths) < 0: ...                          # memory ran out: preempt a request, call again
                                                          # else the next iteration is mapped beside this one
    ...                                                   # the model writes and reads layers[i][...][reqid, :length]
kv.free_reqid(reqid)
```
"""

from __future__ import annotations

import logging
import operator
import time
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, SupportsIndex, get_args

from prefixd_swap.block_size import chunk_rule, fill_chunks
from prefixd_swap.errors import MemoryMisuseError, OutOfMemoryError
from prefixd_swap.group_shape import KvGeometry, Layout
from prefixd_swap.vmem import FrameTable, create_memory
from prefixd_swap.vtensor import AttachCosts, VirtualTensor, VirtualTensorManager
from prefixd_swap.vtensor.own_memory import grow, grow_all, prepare

if TYPE_CHECKING:
    import torch

AttachMethod = Literal["map", "copy", "auto"]
_MEASURED_BLOCKS = 16
CHUNK_BYTES = 2 << 20  # the page of the papers, and the least that CUDA allocates

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KvCacheStats:
    """Memory now, and blocks that requests got since the start.

    mapped: blocks that were mapped.  reused: blocks that were still mapped where they were needed.
    copied: blocks with copied tokens (tails of shared prefixes, copy on write).
    free_bytes: memory that no request has.  unmapped_bytes: the part of it that is mapped nowhere; the rest is still
    mapped on rows of ended requests, or mapped ahead for the next request.
    shared_bytes: memory saved by sharing.  limit_bytes: all memory.
    """

    mapped: int
    reused: int
    copied: int
    free_bytes: int
    unmapped_bytes: int
    shared_bytes: int
    limit_bytes: int


@dataclass(eq=False, slots=True)
class _Request:
    """A live reqid; the memory of `tensor` reaches at least to `tokens`."""

    tensor: VirtualTensor
    tokens: int = 0


class VAttention:
    """A KV cache that is contiguous for every request, with physical memory mapped as requests grow.

    What the engine guarantees:

    - One thread makes all calls. The class's own background work ends before a call goes on.
    - Of row `reqid` the engine reads and writes only tokens [0, length) of the last successful `step` or `share`. The
      rest of the row may have no memory, and touching that kills the process (host) or its context (CUDA).
    - Memory is recycled: until the engine writes a token, it has the bytes of an earlier request, NaN included.
    - On CUDA: when `free_reqid` is called, all kernels that use the reqid have been queued on the calling thread's
      current stream or on the passed streams. The call does not synchronise: an event on each stream tells when the
      memory can be used again (`prefixd_swap.vmem.fence`).
    - Tokens in a block that is shared with another request (`share`) are not written again, except after `writable`.
    - The engine closes the cache, by `close` or a `with` block, since only the engine knows when it stops using the
      tensors.

    `make gpu-check` runs it on a GPU; elsewhere the tests run it on a stand-in driver.
    """

    def __init__(self) -> None:
        self._manager: VirtualTensorManager | None = None
        self._closed = False
        self._requests: dict[int, _Request] = {}
        self._background = ThreadPoolExecutor(1, "vattention")
        self._round: Future[None] | None = None  # the work in the background
        self._prompt_tokens = 1  # of the newest request; the same number is mapped ahead for the next one
        self._watermark = 0
        self._ahead = True
        self.costs = AttachCosts()
        """Measured by `share` with "auto"."""
        self._max_batch = 0
        self.max_context = 0
        self.block_tokens = 0
        self.rounding: tuple[str, ...] = ()
        """One line for each size that was rounded, with the reason; also logged."""

    def init_kvcache(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        max_batch: int,
        max_context: int,
        memory_limit: int,
        device: str | torch.device = "cuda",
        chunk_bytes: int = CHUNK_BYTES,
        layout: Layout = "token",
        watermark: float = 0.1,
        ahead: bool = True,
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Reserve addresses for all requests and create the physical memory, none of it mapped yet (5.3.1).

        Memory is mapped in blocks of `block_tokens` tokens, the fewest whose pieces are whole chunks:

        ```
        Qwen2.5-7B: 28 layers of 2 KiB a token, chunks of 2 MiB
        layout "token"   a block is one piece of 56 KiB a token      lcm(56 KiB, 2 MiB) = 14 MiB     256 tokens
        layout "layer"   a block is a piece of 2 KiB a token a layer lcm(2 KiB, 2 MiB) = 2 MiB     1,024 tokens
        ```

        Args:
            layers, kv_heads, head_dim, dtype: the shape of the KV of one token.
            max_batch: the most requests at a time.
            max_context: the longest request, in tokens.
            memory_limit: bytes of physical memory; rounded down to whole blocks.
            device: "cuda", "cuda:N" or "cpu".
            chunk_bytes: a multiple of the device's granularity (2 MiB on CUDA, a page on a CPU).
            layout: the layout of a request's KV in its addresses; see `KvGeometry`.
            watermark: memory of ended requests stays mapped while at least this part of all memory is mapped nowhere.
            ahead: every `step` begins to map for the next one, a token more for each of its requests, in the background
                (6.2.1). With False only `step_async` does.

        Returns a pair of keys and values for each layer, each ``[max_batch, context, kv_heads, head_dim]``: views,
        valid until `close`. `context` is `max_context` rounded up to whole blocks.

        Raises GeometryError for a shape that cannot be stored, OutOfMemoryError when the device lacks memory or
        addresses, DeviceError without the device, MemoryMisuseError for a limit below one block or a second call.
        """
        if self._closed:
            raise MemoryMisuseError("this KV cache is closed; make another VAttention")
        if self._manager is not None:
            raise MemoryMisuseError("init_kvcache was called before; make another VAttention for another KV cache")
        max_batch, max_context = _whole("max_batch", max_batch), _whole("max_context", max_context)
        memory_limit, chunk_bytes = _whole("memory_limit", memory_limit), _whole("chunk_bytes", chunk_bytes)
        if not 0 <= watermark <= 1:
            raise MemoryMisuseError(f"watermark {watermark} is no part of the memory; give it between 0 and 1")
        shape = KvGeometry(layers, kv_heads, head_dim, str(dtype).removeprefix("torch."), 1, layout)
        memory = create_memory(str(device), chunk_bytes)
        try:
            geometry = fill_chunks(shape, chunk_bytes)
            limit = memory_limit // geometry.block_bytes
            if limit < 1:
                raise MemoryMisuseError(
                    f"memory_limit {memory_limit} is less than one block of {geometry.block_tokens} tokens, "
                    f"{geometry.block_bytes} bytes; raise it, or use smaller chunks"
                )
            manager = VirtualTensorManager(
                memory,
                FrameTable(geometry.chunks_per_block(chunk_bytes)),
                geometry,
                requests=max_batch,
                max_tokens=max_context,
                limit=limit,
            )
            manager.physical.release(manager.physical.p_alloc(limit) or ())
        except BaseException:
            memory.close()
            raise
        self._manager = manager
        self._max_batch = max_batch
        self._watermark = int(limit * watermark)
        self._ahead = ahead
        self.max_context = max_context
        self.block_tokens = geometry.block_tokens
        self.rounding = tuple(_explain(manager, chunk_bytes, max_context, memory_limit))
        for line in self.rounding:
            _log.info("KV cache: %s", line)
        return [(manager.kv[:, :, layer, 0], manager.kv[:, :, layer, 1]) for layer in range(layers)]

    def alloc_reqid(self) -> int:
        """A reqid that no live request has: the row of the tensors for its KV.

        It is the row with the most free memory still mapped (6.2.2). Raises OutOfMemoryError when `max_batch` requests
        are live; if only freed ones are left, it waits for their streams.
        """
        manager = self._owned()
        manager.poll()  # finds the memory of a request that has just ended
        if manager.virtual.idle_count == 0:
            manager.poll(wait=True)
        tensor = manager.create()
        self._requests[tensor.row] = _Request(tensor)
        return tensor.row

    def free_reqid(self, reqid: int, streams: Iterable[int] | None = None) -> None:
        """End a request. Its memory stays mapped for the next one (deferred reclamation, 6.2.2).

        streams: handles of the CUDA streams that use it, the current one if not given. Raises MemoryMisuseError for a
        reqid that is not live.
        """
        manager = self._owned()
        request = self._request(reqid)
        if streams is None and manager.kv.is_cuda:
            import torch

            streams = [torch.cuda.current_stream(manager.kv.device).cuda_stream]
        manager.release(request.tensor, streams=streams or ())
        del self._requests[reqid]

    def step(self, lengths: Sequence[int]) -> int:
        """Map memory for the context lengths of an iteration, with the tokens that it adds, and begin with the next.

        lengths: `max_batch` numbers; 0 for a reqid that is not live or takes no part in the iteration.

        Returns 0; or -1 when there is not enough memory, with no request changed: free one and call again. Before it
        returns -1, it takes back the memory that `step_async` mapped ahead, and waits for the streams of freed
        requests. Raises MemoryMisuseError for a reqid that is not live, a length over `max_context`, or a length less
        than before.
        """
        manager = self._owned()
        wanted = self._check(lengths)
        if not self._grow(manager, {request.tensor: length for request, length in wanted.items()}):
            return -1
        for request, length in wanted.items():
            if request.tokens == 0:
                self._prompt_tokens = length
            request.tokens = length
        if self._ahead:
            next_lengths = {request.tensor: min(length + 1, self.max_context) for request, length in wanted.items()}
            self._round = self._background.submit(self._prepare, manager, next_lengths)
        return 0

    def step_async(self, lengths: Sequence[int]) -> None:
        """Begin to map memory for the next iteration, in the background, and return at once: for an engine that knows
        more of it than that each request gets a token, such as a part of a long prompt.

        lengths: the expected lengths of the next `step`, which waits for the end of the mapping and maps the rest. This
        is a hint: a wrong one only costs time. The background also maps ahead for the next request (eager allocation),
        and unmaps memory of ended requests when too little is unmapped (reclamation, 6.2.2).

        Raises as `step`; the next call raises an error of the device in the background.
        """
        manager = self._owned()
        wanted = {request.tensor: length for request, length in self._check(lengths).items()}
        self._round = self._background.submit(self._prepare, manager, wanted)

    def share(self, reqid: int, parent: int, tokens: int, method: AttachMethod = "map") -> int:
        """Give a new request the first `tokens` tokens of `parent`: full blocks by mapping, the rest by a copy.

        Shared memory is reference-counted, so either request can be freed first. The copy is queued on the current
        stream; the parent's tokens must be written on it or ordered before it. Returns 0; or -1 when there is not
        enough memory, with no request changed.

        method: "copy" copies all tokens into memory of the request's own; "auto" chooses the way that takes less time
            (`AttachCosts`), and copies only while more than the watermark is free. The first call with "auto" measures,
            and waits for the device.

        Raises MemoryMisuseError for a reqid that is not live or not new, or more tokens than the parent has.
        """
        manager = self._owned()
        child, source, tokens = self._request(reqid), self._request(parent), _whole("tokens", tokens)
        if method not in get_args(AttachMethod):
            raise MemoryMisuseError(f"method {method!r} is unknown; give one of {', '.join(get_args(AttachMethod))}")
        if child.tokens:
            raise MemoryMisuseError(f"reqid {reqid} has {child.tokens} tokens; share before its first step")
        if not 0 < tokens <= source.tokens:
            raise MemoryMisuseError(f"reqid {parent} has {source.tokens} tokens, not the {tokens} to be shared")
        full = tokens // self.block_tokens
        manager.truncate(child.tensor, 0)
        if method == "copy" or (method == "auto" and self._copy_pays(manager, child, source, full)):
            full = 0
        try:
            manager.match(child.tensor, source.tensor.frames[:full])
        except OutOfMemoryError:
            return -1
        if not self._grow(manager, {child.tensor: tokens}):
            manager.truncate(child.tensor, 0)
            return -1
        done = full * self.block_tokens
        manager.copy_tokens(source.tensor, child.tensor, done, tokens - done)
        child.tokens = tokens
        return 0

    def writable(self, reqid: int, token: int) -> int:
        """Copy on write: if the block of `token` is shared, give the request its own copy, which it may write.

        On CUDA a copy synchronises the device. Returns 0; or -1 when there is not enough memory, with nothing changed.
        Raises MemoryMisuseError for a reqid that is not live or a token that it does not have, OutOfMemoryError when
        the process has no mapping left: the request can then only be freed.
        """
        manager = self._owned()
        request, token = self._request(reqid), _whole("token", token)
        if not 0 <= token < request.tokens:
            raise MemoryMisuseError(f"reqid {reqid} has {request.tokens} tokens and no token {token}")
        block = token // self.block_tokens
        manager.poll(wait=True)  # until its kernels have ended, a freed request still shares its blocks
        if not manager.is_shared(request.tensor, block):
            return 0
        frames = manager.physical.p_alloc(1)
        if frames is None:
            self._trim(manager, {})
            frames = manager.physical.p_alloc(1)
        if frames is None:
            return -1
        try:
            _synchronize(manager.kv)
            first = block * self.block_tokens
            manager.writable(request.tensor, block, frames[0], min(request.tokens - first, self.block_tokens))
        finally:
            manager.physical.release(frames)
        return 0

    def stats(self) -> KvCacheStats:
        manager = self._owned()
        manager.poll()
        counts, physical, block = manager.mapping.counts, manager.physical, manager.geometry.block_bytes
        return KvCacheStats(
            mapped=counts.mapped,
            reused=counts.reused,
            copied=counts.copied,
            free_bytes=physical.free_count * block,
            unmapped_bytes=physical.unmapped_count * block,
            shared_bytes=physical.shared_count * block,
            limit_bytes=physical.limit * block,
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError unless references, memory and mappings agree."""
        self._owned().check_integrity()

    def close(self) -> None:
        """Wait for the device and give all memory and addresses back. The tensors must not be used any more.

        Can be called twice; every other call is refused from then on.
        """
        if self._closed:
            return
        self._closed = True
        self._background.shutdown()
        if self._manager is not None:
            _synchronize(self._manager.kv)
            self._manager.close()
            self._manager.memory.close()
        self._requests.clear()

    def __enter__(self) -> VAttention:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # The engine may still use the tensors, so nothing is given back here.
        if not self._closed and self._manager is not None:
            limit = self._manager.physical.limit * self._manager.geometry.block_bytes
            warnings.warn(
                f"a VAttention with {limit} bytes was not closed, and they stay until the process ends; call close()",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )

    # -- inside -------------------------------------------------------------------------------------------------

    def _owned(self) -> VirtualTensorManager:
        """The manager, once the background work has ended: from then on the caller's thread owns it."""
        if self._closed:
            raise MemoryMisuseError("this KV cache is closed; make another VAttention")
        if self._manager is None:
            raise MemoryMisuseError("there is no KV cache yet; call init_kvcache first")
        if self._round is not None:
            work, self._round = self._round, None
            work.result()
        return self._manager

    def _request(self, reqid: int) -> _Request:
        request = self._requests.get(reqid)
        if request is None:
            raise MemoryMisuseError(f"reqid {reqid} is not live; use one that alloc_reqid gave and that is not freed")
        return request

    def _check(self, lengths: Sequence[int]) -> dict[_Request, int]:
        """The requests with a length above 0, and their lengths. Raises as `step`."""
        if len(lengths) != self._max_batch:
            raise MemoryMisuseError(f"{len(lengths)} lengths for a batch of {self._max_batch}; give one a reqid")
        wanted = {}
        for reqid, number in enumerate(lengths):
            length = _whole(f"the length of reqid {reqid}", number)
            if length == 0:
                continue
            request = self._request(reqid)
            if length > self.max_context:
                raise MemoryMisuseError(
                    f"reqid {reqid} wants {length} tokens, over max_context {self.max_context}; end the request"
                )
            if length < request.tokens:
                raise MemoryMisuseError(
                    f"reqid {reqid} has {request.tokens} tokens and cannot shrink to {length}; free it, or pass 0 to "
                    "leave it out of this step"
                )
            wanted[request] = length
        return wanted

    def _grow(self, manager: VirtualTensorManager, wanted: dict[VirtualTensor, int]) -> bool:
        """Map memory for `wanted`, all or nothing; False if there is not enough."""
        manager.poll()
        with suppress(OutOfMemoryError):
            if grow_all(manager, wanted):
                return True
        self._trim(manager, wanted)
        try:
            return grow_all(manager, wanted)
        except OutOfMemoryError:  # no mapping of the kernel left; the end of a request gives some back
            return False

    def _copy_pays(self, manager: VirtualTensorManager, child: _Request, source: _Request, blocks: int) -> bool:
        """Whether copying `blocks` blocks of `source` is faster than mapping them, and enough memory is free."""
        if manager.physical.free_count - blocks < max(self._watermark, 1):
            return False
        if self.costs.copy_s is None:
            self._measure(manager)
        to_map = blocks - child.tensor.still_mapped(source.tensor.frames[:blocks])
        own = child.tensor.still_free(manager.physical.is_free)
        return self.costs.copy_pays(blocks, to_map=to_map, to_map_for_copy=max(0, blocks - own))

    def _measure(self, manager: VirtualTensorManager) -> None:
        """Map and copy some blocks on an idle row; without one, or without memory, the costs stay unknown."""
        blocks = min(_MEASURED_BLOCKS, manager.virtual.blocks, manager.physical.free_count)
        if manager.virtual.idle_count == 0 or blocks < 2:
            return
        tensor = manager.create()
        try:
            manager.unused.reclaim_behind(tensor)
            start = time.perf_counter()
            grow(manager, tensor, blocks * self.block_tokens)
            self.costs.observe_map(blocks, time.perf_counter() - start)
            half = blocks // 2 * self.block_tokens
            for _ in range(2):  # the first copy loads the kernel
                _synchronize(manager.kv)
                start = time.perf_counter()
                tensor.kv[half : 2 * half].copy_(tensor.kv[:half])
                _synchronize(manager.kv)
            self.costs.observe_copy(blocks // 2, time.perf_counter() - start)
        finally:
            manager.release(tensor)

    def _trim(self, manager: VirtualTensorManager, wanted: dict[VirtualTensor, int]) -> None:
        """Take back memory that was mapped ahead and is not `wanted`, and memory of freed requests."""
        for request in self._requests.values():
            manager.truncate(request.tensor, max(request.tokens, wanted.get(request.tensor, 0)))
        manager.poll(wait=True)

    def _prepare(self, manager: VirtualTensorManager, wanted: dict[VirtualTensor, int]) -> None:
        """In the background: the next iteration, then the next request, then reclamation."""
        manager.poll()
        with suppress(OutOfMemoryError):  # the next step reports it, unless a request ends before
            grow_all(manager, wanted)
            prepare(manager, self._prompt_tokens, manager.physical.unmapped_count - self._watermark)
        manager.unused.reclaim_until(self._watermark)


def _explain(manager: VirtualTensorManager, chunk_bytes: int, max_context: int, memory_limit: int) -> Iterable[str]:
    """One line for each size that was rounded, with the reason."""
    geometry, rows = manager.geometry, manager.virtual
    if geometry.block_tokens > 1:
        yield (
            f"memory is mapped in blocks of {geometry.block_tokens} tokens, {geometry.block_bytes} bytes: "
            f"{chunk_rule(geometry, chunk_bytes)}"
        )
    if rows.tokens != max_context:
        yield f"addresses are reserved for {rows.tokens} tokens a request, not {max_context}: whole blocks"
    used = manager.physical.limit * geometry.block_bytes
    if used != memory_limit:
        yield f"{used} of {memory_limit} bytes are used: whole blocks"


def _whole(name: str, number: SupportsIndex) -> int:
    try:
        return operator.index(number)
    except TypeError as error:
        raise MemoryMisuseError(f"{name} is {number!r}; give a whole number") from error


def _synchronize(kv: torch.Tensor) -> None:
    if kv.is_cuda:
        import torch

        torch.cuda.synchronize(kv.device)
