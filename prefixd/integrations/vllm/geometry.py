"""What vLLM's KV cache looks like, and what must be equal for its bytes to be usable elsewhere.

Reads vLLM's configuration objects (0.32) and imports nothing of it.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import xxhash

from prefixd.client import NamespaceSpec, PartSpec
from prefixd.errors import ConfigError
from prefixd.integrations.vllm.options import DEFAULT_BLOCK_TOKENS, ConnectorOptions
from prefixd.integrations.vllm.pages import GroupPages, PageRun
from prefixd.model_fingerprint import fingerprint
from prefixd.settings import default_data_dir

log = logging.getLogger("vllm.prefixd")


@dataclass(frozen=True, slots=True)
class Group:
    """One of vLLM's KV cache groups whose blocks prefixd keeps."""

    index: int
    """In vLLM's tables of block ids."""
    block_tokens: int
    """Tokens of one of its blocks."""
    part_bytes: int
    """Bytes of a prefixd block that belong to it, on one rank."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """How prefixd blocks are made of vLLM's."""

    groups: tuple[Group, ...]
    block_tokens: int
    """Tokens of a prefixd block."""
    unit_tokens: int
    """Tokens after which every group has a whole number of blocks: what vLLM's scheduler counts in."""
    ranks: int
    single: bool = True
    """Whether vLLM has one KV cache group, those that are not kept here included: only then does the id of one of its
    blocks say whose it is."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a prefixd block, all groups and ranks."""
        return self.ranks * sum(group.part_bytes for group in self.groups)

    def spec(self, name: str, salt: bytes) -> NamespaceSpec:
        """The namespace: rank-major, one part per (rank, group)."""
        return NamespaceSpec(
            name=name,
            salt=salt,
            layout="vllm",
            block_tokens=self.block_tokens,
            parts=tuple(
                PartSpec(f"group{group.index}", rank, group.part_bytes)
                for rank in range(self.ranks)
                for group in self.groups
            ),
        )

    def parts_of(self, rank: int) -> list[int]:
        """Indexes of a rank's parts in `spec`."""
        return list(range(rank * len(self.groups), (rank + 1) * len(self.groups)))


def read_geometry(vllm_config: Any, kv_cache_config: Any, options: ConnectorOptions) -> Geometry | None:
    """The geometry; None for a model whose state prefixd does not keep (state-space layers, KV in host memory).

    Raises ConfigError for what the connector cannot work with; the message names it.
    """
    parallel = vllm_config.parallel_config
    for what in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, what, 1) > 1:
            raise ConfigError(f"{what} = {getattr(parallel, what)}: PrefixdConnector works with 1 only")
    if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise ConfigError(
            'kv_load_failure_policy = "fail" makes vLLM fail requests whose prefix could not be loaded; set '
            '"kv_load_failure_policy": "recompute" beside "kv_connector"'
        )
    if vllm_config.kv_transfer_config.kv_role != "kv_both":
        raise ConfigError(
            f'kv_role = "{vllm_config.kv_transfer_config.kv_role}": PrefixdConnector loads and saves; set "kv_both", '
            'and "save": false in kv_connector_extra_config for an engine that is to read only'
        )
    if options.load == "layerwise":
        _check_layerwise(vllm_config, len(kv_cache_config.kv_cache_groups))
    chosen = kv_cache_config.prefix_cacheable_group_ids
    specs = {index: kv_cache_config.kv_cache_groups[index].kv_cache_spec for index in chosen}
    if not specs or any("Mamba" in type(spec).__name__ for spec in specs.values()):
        return None
    if any(getattr(group, "host_resident", False) for group in kv_cache_config.kv_cache_groups):
        return None  # HiSparse: its blocks are counted in a pool of their own, which the connector is not told of
    unit = math.lcm(*(spec.block_size for spec in specs.values()))
    block_tokens = options.block_tokens or unit * math.ceil(DEFAULT_BLOCK_TOKENS / unit)
    if block_tokens % unit:
        raise ConfigError(f"block_tokens = {block_tokens} is no multiple of {unit}, the tokens of a vLLM block here")
    # vLLM lets go of what lies before a window: of a block that is longer, the first part before the last is computed.
    windows = [spec.sliding_window for spec in specs.values() if getattr(spec, "sliding_window", None)]
    if windows:
        window = min(windows)
        longest = max(unit, window // unit * unit)
        if options.block_tokens and block_tokens > longest:
            raise ConfigError(
                f"block_tokens = {block_tokens} is more than this model's sliding window of {window} tokens holds; "
                f"set {longest} or less"
            )
        block_tokens = min(block_tokens, longest)
    runs = _page_runs(kv_cache_config)
    groups = []
    for index, spec in specs.items():
        names = [name for name in kv_cache_config.kv_cache_groups[index].layer_names if name in runs]
        page_bytes = sum(run.nbytes for name in names for run in runs[name])
        groups.append(Group(index, spec.block_size, block_tokens // spec.block_size * page_bytes))
    single = len(kv_cache_config.kv_cache_groups) == 1
    return Geometry(tuple(groups), block_tokens, unit, parallel.tensor_parallel_size, single)


def _check_layerwise(vllm_config: Any, groups: int) -> None:
    """A step that computes on bytes which then turn out not to have come has to be undone: where vLLM does not do that,
    a token of it would reach the user."""
    if groups > 1:
        raise ConfigError(
            f'load = "layerwise" needs a model with one KV cache group, and this one has {groups}; use "async"'
        )
    if vllm_config.scheduler_config.async_scheduling:
        raise ConfigError(
            'load = "layerwise" and asynchronous scheduling: vLLM keeps the token of the step after one whose load '
            'failed; start with --no-async-scheduling, or use load = "async"'
        )
    if vllm_config.speculative_config is not None:
        raise ConfigError(
            'load = "layerwise" and speculative decoding: vLLM samples before the layers of the draft model have come; '
            'use load = "async"'
        )


def computes_from_the_middle(vllm_config: Any) -> bool:
    """Whether vLLM can go on behind a prefix that it did not compute in the same step.

    Where it cannot (multi-head latent attention on a CPU without AMX), it turns both of these off itself.
    """
    return bool(vllm_config.cache_config.enable_prefix_caching or vllm_config.scheduler_config.enable_chunked_prefill)


def read_pages(kv_cache_config: Any, kv_caches: Mapping[str, Any], geometry: Geometry) -> list[GroupPages]:
    """Where the pages of every group are, given the tensors that vLLM has allocated (layer's name to tensor)."""
    runs = _page_runs(kv_cache_config)
    pages = []
    for group in geometry.groups:
        layers = []
        on_device = False
        for name in kv_cache_config.kv_cache_groups[group.index].layer_names:
            if name not in runs:
                continue
            base = kv_caches[name].untyped_storage()
            on_device = kv_caches[name].device.type != "cpu"
            end = max(run.address + (kv_cache_config.num_blocks - 1) * run.stride + run.nbytes for run in runs[name])
            if end > base.nbytes():
                raise ConfigError(f"the KV cache of {name} has {base.nbytes()} bytes where {end} were expected")
            layers.append(tuple(PageRun(base.data_ptr() + run.address, run.stride, run.nbytes) for run in runs[name]))
        pages.append(GroupPages(tuple(layers), on_device))
        if pages[-1].block_bytes * (geometry.block_tokens // group.block_tokens) != group.part_bytes:
            raise ConfigError(
                f"KV cache group {group.index} is laid out on this rank otherwise than vLLM's scheduler says"
            )
    return pages


def layer_names(kv_cache_config: Any, geometry: Geometry) -> list[str]:
    """The layers of the first group in the order of `GroupPages.layers`."""
    runs = _page_runs(kv_cache_config)
    return [name for name in kv_cache_config.kv_cache_groups[geometry.groups[0].index].layer_names if name in runs]


def packing(vllm_config: Any, kv_caches: Mapping[str, Any]) -> str:
    """What decides how keys and values lie inside a page on this rank, as a digest: backends, shapes, processor."""
    context = vllm_config.compilation_config.static_forward_context
    facts: list[object] = [torch.__version__, torch.backends.cpu.get_cpu_capability()]
    for name, tensor in sorted(kv_caches.items()):
        backend = getattr(context.get(name), "get_attn_backend", None)
        # What lies outside a block (heads, in one layout) is further apart the more blocks there are: no two starts of
        # an engine on a GPU may have the same number.
        inside = [stride if stride <= tensor.stride(0) else "outside" for stride in tensor.stride()]
        facts.append((tuple(tensor.shape[1:]), inside, str(tensor.dtype), str(tensor.device.type)))
        facts.append(f"{backend().__module__}.{backend().__qualname__}" if backend else "")
        facts.append(getattr(context.get(name), "isa", ""))
        if tensor.device.type == "cuda":
            facts.append(torch.cuda.get_device_capability(tensor.device))
    return xxhash.xxh3_128_hexdigest(repr(facts).encode())


def model_name(vllm_config: Any, vllm_version: str) -> str:
    """What the model is, for people to read and for caches to tell apart: its name and a digest of what decides the
    values of its KV (weights, dtype, quantization, positions, KV dtype)."""
    model, cache, load = vllm_config.model_config, vllm_config.cache_config, vllm_config.load_config
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales = true gives every engine KV scales of its own; load them with the model"
        )
    speculative = vllm_config.speculative_config
    facts = {
        "weights": _weights(Path(model.model), model, load),
        "config": _plain(model.hf_config.to_dict()),
        "dtype": str(model.dtype),
        "kv dtype": str(cache.cache_dtype),
        "quantization": str(model.quantization),
        "draft": str(getattr(speculative, "model", "")),
        "tensor parallel": vllm_config.parallel_config.tensor_parallel_size,
        "vllm": vllm_version,
    }
    rope = json.dumps(facts["config"])
    if "longrope" in rope or '"dynamic"' in rope:  # their positions depend on the longest prompt that is allowed
        facts["max_model_len"] = model.max_model_len
    digest = xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())
    return f"vllm/{Path(model.model).name}/{digest}"


def adapter_name(name: str, path: str) -> str | None:
    """What a LoRA adapter is: its name, and a digest of what tells its files from others; None for one whose files
    cannot be seen, as that of a hub, which vLLM fetches in the version that is the newest then."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return None
    return f"lora={name}@{xxhash.xxh3_64_hexdigest(repr((path, _files(folder))).encode())}"


def _weights(path: Path, model: Any, load: Any) -> str:
    if str(load.load_format) == "dummy":
        return f"dummy {model.seed}"
    if not path.is_dir():
        commit = getattr(model.hf_config, "_commit_hash", None) or str(model.revision)
        if re.fullmatch("[0-9a-f]{40}", commit):
            return f"{model.model}@{commit}"
        log.warning(
            "prefixd: of which version the weights of %s are cannot be told: prefixes are this engine's alone, until "
            "it is started again; give vLLM the model's folder, or its commit as --revision",
            model.model,
        )
        return f"{model.model}#{uuid4().hex}"
    try:
        return fingerprint(path, default_data_dir())
    except ConfigError:  # no weights of the kinds that are read by content
        return repr(_files(path))


def _files(folder: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of modification of the files below a folder; nothing for what is no folder."""
    files = sorted(file for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else []
    return [(str(file.relative_to(folder)), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def _plain(value: Any) -> Any:
    """Without what differs between two loads of the same model."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if key not in ("_name_or_path", "_commit_hash")}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _page_runs(kv_cache_config: Any) -> dict[str, tuple[PageRun, ...]]:
    """Every layer's runs of pages; addresses count from the start of the layer's allocation.

    vLLM places layer `l` of a tensor at `offset + l * layer_stride`, its block `b` a further `b * block_stride` on.
    Layers outermost: a region a layer, or several, one a group of heads. Blocks outermost: the layers of a block
    together, a layer's page in one piece, or in several with the other layers' between them, one a group of heads.
    """
    page_bytes: dict[str, int] = {}
    for group in kv_cache_config.kv_cache_groups:
        of_layers = getattr(group.kv_cache_spec, "kv_cache_specs", {})  # where the layers of a group differ
        for name in group.layer_names:
            page_bytes[name] = of_layers.get(name, group.kv_cache_spec).page_size_bytes
    runs: dict[str, tuple[PageRun, ...]] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        span = kv_cache_config.num_blocks * tensor.block_stride
        for place, name in enumerate(tensor.layers):
            if name not in page_bytes:
                continue
            start = tensor.offset + place * tensor.layer_stride
            if tensor.layer_stride >= span:
                pieces = range(start, start + tensor.layer_stride - span + 1, span)
                nbytes = tensor.block_stride
            else:
                apart = len(tensor.layers) * tensor.layer_stride
                pieces = range(start, start + max(1, page_bytes[name] // tensor.layer_stride) * apart, apart)
                nbytes = min(page_bytes[name], tensor.layer_stride)
            if len(pieces) * nbytes < page_bytes[name]:
                raise ConfigError(
                    f"the KV cache of {name} lies in a way that PrefixdConnector does not know: "
                    f"{len(pieces)} x {nbytes} bytes for a page of {page_bytes[name]}; set VLLM_KV_CACHE_LAYOUT"
                )
            runs[name] = tuple(PageRun(piece, tensor.block_stride, nbytes) for piece in pieces)
    return runs
