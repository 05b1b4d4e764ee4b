"""What must be equal for the bytes of vLLM's KV blocks to be usable elsewhere: the model, its adapters, the packing.

Reads vLLM's configuration objects (0.32) and imports nothing of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import xxhash

from prefixd.errors import ConfigError
from prefixd.integrations.vllm.log import log
from prefixd.model_fingerprint import fingerprint
from prefixd.settings import default_data_dir


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
