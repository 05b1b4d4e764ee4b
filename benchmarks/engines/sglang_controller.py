"""SGLang's real HiCacheController and host pools on a CPU, with a storage backend: what talks to prefixd in a server.

The device is left out: nothing is copied between GPU and host pool. What the controller writes to storage, and reads
from it, lies in the host pool.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.engines.sglang_without_gpu import sglang

LATENT, ROPE = 64, 16  # of an MLA pool, in elements
MODULE = {"backend_name": "prefixd", "module_path": "prefixd.integrations.sglang", "class_name": "PrefixdHiCache"}


@dataclass(frozen=True, slots=True)
class Shape:
    """A host pool."""

    kind: str = "mha"
    """"mha" or "mla"."""
    layout: str = "page_first"
    allocator: str = "default"
    page_tokens: int = 16
    layers: int = 4
    heads: int = 2
    head_dim: int = 64
    pages: int = 64

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, in bfloat16."""
        row = 2 * self.heads * self.head_dim if self.kind == "mha" else LATENT + ROPE
        return 2 * self.layers * self.page_tokens * row


def host_pool(shape: Shape) -> Any:
    """A host pool of `shape`."""
    tokens = shape.pages * shape.page_tokens
    common = dict(pin_memory=False, device="cpu", allocator_type=shape.allocator)
    sized = dict(device_capacity_tokens=tokens, start_layer=0, end_layer=shape.layers)
    info = sglang("srt.mem_cache.device_pool_info")
    if not hasattr(info, "KVBuffers"):
        return _of_device_pool(shape, common)
    if shape.kind == "mha":
        mha = sglang("srt.mem_cache.pool_host.mha")
        mha.make_kernel_ptr_table = lambda *args, **kwargs: None  # a table for the GPU's kernels
        rows = [torch.zeros(1, shape.heads, shape.head_dim, dtype=torch.bfloat16) for _ in range(2 * shape.layers)]
        keys, values = tuple(rows[: shape.layers]), tuple(rows[shape.layers :])
        buffers = info.KVBuffers(
            k=keys,
            v=values,
            k_data_ptrs=_addresses(keys),
            v_data_ptrs=_addresses(values),
            layout=info.KVBufferLayout.NHD,
        )
        buffer_info = info.MHABufferInfo(
            buffers=buffers,
            page_size=shape.page_tokens,
            head_num=shape.heads,
            head_dim=shape.head_dim,
            v_head_dim=shape.head_dim,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
        )
        return mha.MHATokenToKVPoolHost(buffer_info, 1.0, 0, shape.page_tokens, shape.layout, **common, **sized)
    return _mla_pool(shape, common, sized)


def _mla_pool(shape: Shape, common: dict[str, Any], sized: dict[str, Any]) -> Any:
    mla = sglang("srt.mem_cache.pool_host.mla")
    mla.make_kernel_ptr_table = lambda *args, **kwargs: None
    rows = tuple(torch.zeros(1, 1, LATENT + ROPE, dtype=torch.bfloat16) for _ in range(shape.layers))
    info = sglang("srt.mem_cache.device_pool_info").MLABufferInfo(
        buffers=rows,
        data_ptrs=_addresses(rows),
        layer_indices=tuple(range(shape.layers)),
        device_layer_num=shape.layers,
        page_size=shape.page_tokens,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        kv_cache_dim=LATENT + ROPE,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    return mla.MLATokenToKVPoolHost(
        info, 1.0, 0, shape.page_tokens, shape.layout, target_layer_num=shape.layers, **common, **sized
    )


def _of_device_pool(shape: Shape, common: dict[str, Any]) -> Any:
    """A host pool of SGLang 0.5.22, which takes a device's pool."""
    device = types.SimpleNamespace(
        device="cpu",
        store_dtype=torch.bfloat16,
        size=shape.pages * shape.page_tokens,
        layer_num=shape.layers,
        start_layer=0,
        end_layer=shape.layers,
        layer_shard_enabled=False,
    )
    kind = sglang(f"srt.mem_cache.pool_host.{shape.kind}")
    kind.make_kernel_ptr_table = lambda *args, **kwargs: None
    if shape.kind == "mha":
        row = (shape.heads, shape.head_dim)
        device.head_num, device.row_dim = shape.heads, shape.heads * shape.head_dim
        device.head_dim = device.v_head_dim = shape.head_dim
        device.k_buffer = [torch.zeros(1, *row, dtype=torch.bfloat16) for _ in range(shape.layers)]
        device.v_buffer = [torch.zeros(1, *row, dtype=torch.bfloat16) for _ in range(shape.layers)]
        device.k_data_ptrs, device.v_data_ptrs = _addresses(device.k_buffer), _addresses(device.v_buffer)
        return kind.MHATokenToKVPoolHost(device, 1.0, 0, shape.page_tokens, shape.layout, **common)
    device.kv_lora_rank, device.qk_rope_head_dim = LATENT, ROPE
    device.kv_buffer = [torch.zeros(1, 1, LATENT + ROPE, dtype=torch.bfloat16) for _ in range(shape.layers)]
    device.data_ptrs = _addresses(device.kv_buffer)
    return kind.MLATokenToKVPoolHost(device, 1.0, 0, shape.page_tokens, shape.layout, **common)


def mamba_pool(states: int, layout: str = "page_first") -> Any:
    """A host pool of recurrent states."""
    info = sglang("srt.mem_cache.device_pool_info").MambaStateBufferInfo(
        temporal=torch.zeros(2, states, 2, 8, 8), conv=(torch.zeros(2, states, 16, 3, dtype=torch.bfloat16),)
    )
    mamba = sglang("srt.mem_cache.pool_host.mamba")
    return mamba.MambaPoolHost(info, 1.0, 0, device_capacity=states, pin_memory=False, layout=layout)


def _addresses(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which of several ranks a controller is."""

    tp_rank: int = 0
    tp_size: int = 1


class Controller:
    """A HiCacheController, or with `sidecars` a HybridCacheController, with a storage backend attached.

    Args:
        pool: its KV host pool.
        backend: "dynamic", "file", ...
        extra: SGLang's extra configuration for the backend.
        sidecars: other host pools by their names, as {"swa": pool}.
        model: the name of the model.
        mla: whether all ranks have the same KV.
        pass_prefix_keys: as the flag of SGLang's extra configuration; its radix cache acts on it.
    """

    def __init__(
        self,
        pool: Any,
        backend: str = "dynamic",
        extra: Mapping[str, Any] | None = None,
        *,
        sidecars: Mapping[str, Any] | None = None,
        model: str = "tiny",
        mla: bool = False,
        ranks: Ranks = Ranks(),
        pass_prefix_keys: bool = True,
        metrics: bool = False,
    ) -> None:
        self.pool = pool
        self.page_tokens = int(pool.page_size)
        self.pass_prefix_keys = pass_prefix_keys
        self._requests = 0
        module = sglang("srt.managers.cache_controller")
        self._hybrid = sglang("srt.mem_cache.hybrid_cache.hybrid_cache_controller") if sidecars else None
        parallel = types.SimpleNamespace(
            attn_dcp_size=1,
            attn_dcp_rank=0,
            tp_rank=ranks.tp_rank,
            tp_size=ranks.tp_size,
            pp_rank=0,
            pp_size=1,
            attn_tp_rank=ranks.tp_rank,
            attn_tp_size=ranks.tp_size,
            attn_dp_rank=0,
        )
        for each in filter(None, (module, self._hybrid)):
            each.get_parallel = lambda: parallel
            each.is_dp_attention_enabled = lambda: False
        torch.distributed.get_world_size = lambda group=None: 1
        device = self._device(mla)
        allocator = types.SimpleNamespace(get_kvcache=lambda: device)
        common = dict(
            page_size=self.page_tokens,
            tp_group=object(),
            load_cache_event=None,
            write_policy="write_through",
            io_backend="kernel",
            storage_backend=backend,
            prefetch_threshold=1,
            model_name=model,
            storage_backend_extra_config=dict(extra or {}),
            enable_storage_metrics=metrics,
        )
        if sidecars is None:
            self.it: Any = module.HiCacheController(allocator, pool, **common)
        else:
            groups = sglang("srt.mem_cache.pool_host.group")
            names = sglang("srt.mem_cache.hicache_storage").PoolName
            entries = [
                groups.PoolEntry(names(name), each, None, lambda layer: layer, is_primary_index_anchor=name == "kv")
                for name, each in {"kv": pool, **sidecars}.items()
            ]
            self._group = groups.HostPoolGroup(entries)
            self.it = self._controller().HybridCacheController(allocator, self._group, **common)

    def _controller(self) -> Any:
        return self._hybrid

    def _device(self, mla: bool) -> Any:
        fields = dict(device="cpu", layer_num=self.pool.layer_num, register_layer_transfer_counter=lambda counter: None)
        if not mla:
            return types.SimpleNamespace(**fields)
        kind = sglang("srt.mem_cache.memory_pool").MLATokenToKVPool
        device = kind.__new__(kind)
        for name, value in fields.items():
            object.__setattr__(device, name, value)
        return device

    @property
    def backend(self) -> Any:
        """The storage backend, below SGLang's injector of failures where that is on."""
        return getattr(self.it.storage_backend, "_backend", self.it.storage_backend)

    def keys(self, tokens: Sequence[int]) -> list[str]:
        """SGLang's keys of the pages of a prompt."""
        return list(sglang("srt.mem_cache.utils").get_storage_hash_str(list(tokens), None, page_size=self.page_tokens))

    def random_pages(self, pages: int, seed: int) -> torch.Tensor:
        """Host indices of pages with bytes of their own."""
        indices: torch.Tensor = self.pool.alloc(pages * self.page_tokens)
        fill(self.pool, indices, seed)
        return indices

    def backup(
        self,
        tokens: Sequence[int],
        indices: torch.Tensor,
        first_page: int = 0,
        extra_pools: Any = None,
        timeout_s: float = 30,
    ) -> int:
        """Writes the pages of a prompt from `first_page` on to storage; how many tokens it says that are written."""
        keys = self.keys(tokens)
        prefix = keys[:first_page] if self.pass_prefix_keys else None
        own = list(tokens)[first_page * self.page_tokens :]
        more = {"extra_pools": extra_pools} if extra_pools is not None else {}
        self.it.write_storage(indices, own, keys[first_page:], prefix, **more)
        return int(self.it.ack_backup_queue.get(timeout=timeout_s).completed_tokens)

    def hits(self, tokens: Sequence[int], first_page: int = 0, pool_transfers: Any = None) -> Any:
        """SGLang's operation after it has asked what of a prompt is stored."""
        keys = self.keys(tokens[: first_page * self.page_tokens])
        prefix = keys if self.pass_prefix_keys else None
        last = keys[-1] if keys else None
        own = list(tokens)[first_page * self.page_tokens :]
        self._requests += 1
        if self._hybrid is None:
            self.it.prefetch(f"request {self._requests}", own, last, prefix)
        else:
            handle = self._hybrid.CacheRequestHandle(f"request {self._requests}", 0)
            operation = self._hybrid.PrefetchOperation(handle, own, last, prefix, pool_transfers)
            self.it.prefetch_queue.put(operation)
        return self.it.prefetch_hit_queue.get(timeout=30)

    def fetch(self, operation: Any, timeout_s: float = 60) -> tuple[torch.Tensor, int]:
        """Brings what an operation has found into the host pool: its indices, and how many tokens came."""
        self.make_room(operation)
        self.it.prefetch_buffer.put(operation)
        return operation.host_indices, self.fetched(timeout_s)

    def make_room(self, operation: Any) -> None:
        """Gives an operation host pages for what it has found."""
        operation.host_indices = self.it.alloc_prefetch_host_buffers(operation, operation.storage_hit_count)

    def fetched(self, timeout_s: float = 60) -> int:
        """Waits for the end of a fetch: how many tokens came."""
        completed = 0
        while not (ack := self.it.ack_prefetch_queue.get(timeout=timeout_s)).completed_req:
            completed = completed if ack.completed_tokens is None else int(ack.completed_tokens)
        return completed

    def prefetch(self, tokens: Sequence[int], first_page: int = 0) -> tuple[torch.Tensor | None, int]:
        """Asks for a prompt and brings what is there: host indices, and how many tokens came."""
        operation = self.hits(tokens, first_page)
        if not operation.storage_hit_count:
            return None, 0
        return self.fetch(operation)

    def close(self) -> None:
        """Detaches the backend, as SGLang does at runtime."""
        self.it.detach_storage_backend()


def fill(pool: Any, indices: torch.Tensor, seed: int) -> None:
    """Gives pages bytes of their own."""
    generator = torch.Generator().manual_seed(seed)
    for start in indices[:: pool.page_size].tolist():
        page = pool.get_dummy_flat_data_page()
        raw = torch.randint(0, 256, (page.numel() * page.element_size(),), dtype=torch.uint8, generator=generator)
        pool.set_from_flat_data_page(start, raw.view(page.dtype).reshape(page.shape))


def same(pool: Any, indices: torch.Tensor, seed: int) -> list[bool]:
    """Of pages that `fill` with this seed has made, which have their bytes."""
    generator = torch.Generator().manual_seed(seed)
    equal = []
    for start in indices[:: pool.page_size].tolist():
        page = pool.get_data_page(start, flat=True).contiguous().reshape(-1).view(torch.uint8)
        raw = torch.randint(0, 256, (page.numel(),), dtype=torch.uint8, generator=generator)
        equal.append(bool(torch.equal(page, raw)))
    return equal
