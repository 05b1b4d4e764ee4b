"""Names what must be equal to use vLLM's KV blocks elsewhere: the model and its adapters.

Reads vLLM's configuration objects (0.32) and imports nothing of it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import xxhash

from prefixd.base import clocks
from prefixd.base.errors import ConfigError
from prefixd.base.model_fingerprint import (
    fingerprint,
    fingerprint_of_files,
    fingerprint_of_folder,
    last_change_ns,
    state_of_folder,
)
from prefixd.integrations.engine.naming.arguments import Argument
from prefixd.integrations.vllm.log import log
from prefixd.integrations.vllm.naming.arguments import ADAPTER_TABLE, TABLE, arguments_of
from prefixd.settings import default_data_dir

_COARSEST_FILE_TIME_NS = 2_000_000_000  # FAT's; others have the kernel's tick, and a file server a clock of its own
_NOT_THE_MODEL = ("_name_or_path", "_commit_hash", "transformers_version")


def model_name(vllm_config: Any, vllm_version: str | None = None, environment: Mapping[str, Any] | None = None) -> str:
    """The model's name, and a digest of everything that decides the values of its KV: weights, configuration, and the
    arguments that `TABLE` puts into the name. Example: "vllm/Llama-3.1-8B/3f0c...".

    Args:
        vllm_config: vLLM's.
        vllm_version: its version, if other versions must have other names.
        environment: as from `environment_in_name`.

    Raises:
        ConfigError: an argument makes KV that no other engine could use.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    facts = TABLE.facts(arguments_of(vllm_config))
    facts["weights"] = _weights(model.model, model, load)
    facts["config"] = _plain(model.hf_config.to_diff_dict())
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if draft is not None and draft is not model:
        own = draft.model != model.model
        facts["draft"] = [own and _weights(draft.model, draft, load), _plain(draft.hf_config.to_diff_dict())]
    if environment:
        facts["environment"] = environment
    if vllm_version is not None:
        facts["vllm"] = vllm_version
    rope = json.dumps(_plain(model.hf_config.to_dict()))
    if "longrope" in rope or '"dynamic"' in rope:  # their positions depend on the longest allowed prompt
        facts["max_model_len"] = model.max_model_len
    digest = xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())
    return f"vllm/{Path(model.model).name}/{digest}"


class Adapters:
    """Names LoRA adapters by their names, digests of their files, and how vLLM reads these.

    A connector does not learn when vLLM loads an adapter (`add_lora`, or its first request), so a digest counts only
    for files that are unchanged since before the engine's start. The prefixes of other adapters stay this engine's.

    Args:
        wall_ns: the clock of the files' times.
        elapsed_s: a monotonic clock.
    """

    def __init__(
        self, wall_ns: Callable[[], int] = time.time_ns, elapsed_s: Callable[[], float] = clocks.elapsed_s
    ) -> None:
        self._known: dict[tuple[str, ...], tuple[Any, str]] = {}
        self._wall_ns = wall_ns
        self._elapsed_s = elapsed_s
        self._start = wall_ns(), elapsed_s()

    def name(self, lora: Any) -> str:
        """The name of a request's adapter, with the files that it has at its first use.

        vLLM reads the files again after it has unloaded the adapter, and with `load_inplace`. If they have changed, KV
        may be of the old or the new files, so from then on the adapter's prefixes are this engine's alone.

        Args:
            lora: vLLM's `LoRARequest`.
        """
        read = ADAPTER_TABLE.facts(_fields(lora))
        how = "".join(f"/{field}={value}" for field, value in sorted(read.items()))
        key = (str(lora.lora_int_id), lora.lora_name, lora.lora_path, how)
        folder = Path(lora.lora_path).expanduser()
        files = _files_of(folder)
        known = self._known.get(key)
        if known is not None and known[0] == files:
            return known[1]
        own = f"lora={lora.lora_name}#{uuid4().hex}"
        if known is not None:
            log.warning(
                "prefixd: the files of the LoRA adapter %s at %s have changed: from now on its prefixes are this "
                "engine's alone, until it is started again; give another version another folder, and load it anew",
                *(lora.lora_name, lora.lora_path),
            )
            self._known[key] = files, own
            return own
        why = "it is no folder here"
        if files is not None:
            try:
                digest = fingerprint_of_folder(folder, default_data_dir())
                if last_change_ns(folder) < self._loadable_ns():
                    own, why = f"lora={lora.lora_name}@{digest}{how}", ""
                else:
                    why = "its files have changed since the engine's start, and it may have been loaded before that"
            except OSError as error:
                why = f"{error.filename}: {error.strerror}"
        if why:
            log.warning(
                "prefixd: what the LoRA adapter %s at %s is cannot be told (%s): its prefixes are this engine's "
                "alone, until it is started again; give vLLM the adapter's folder, with files that it may read and "
                "that are there before the engine starts",
                *(lora.lora_name, lora.lora_path, why),
            )
        self._known[key] = files, own
        return own

    def _loadable_ns(self) -> int:
        """The wall-clock time before which a file must have been written to be the one that vLLM loads."""
        wall_ns, elapsed_s = self._start
        set_back_ns = min(0, self._wall_ns() - wall_ns - int((self._elapsed_s() - elapsed_s) * 1e9))
        return wall_ns + set_back_ns - _COARSEST_FILE_TIME_NS


def _fields(lora: Any) -> Iterator[Argument]:
    """The fields of a `LoRARequest`, which is a msgspec.Struct."""
    fields = lora.__struct_fields__
    defaults = dict(zip(reversed(fields), reversed(lora.__struct_defaults__), strict=False))
    for name in fields:
        yield Argument(name, getattr(lora, name), defaults.get(name))


def _files_of(folder: Path) -> Any:
    """The state of the files below a folder, for comparison; None without a folder, or if a file cannot be read."""
    try:
        return state_of_folder(folder) if folder.is_dir() else None
    except OSError:
        return None


def _weights(name: str, model: Any, load: Any) -> str:
    if str(load.load_format) == "dummy":
        return f"dummy {model.seed}"
    path = Path(name).expanduser()
    if path.is_file():  # as GGUF is
        return fingerprint_of_files([path], path.parent, default_data_dir())
    if not path.is_dir():
        commit = getattr(model.hf_config, "_commit_hash", None) or str(model.revision)
        if re.fullmatch("[0-9a-f]{40}", commit):
            return f"{name}@{commit}"
        log.warning(
            "prefixd: of which version the weights of %s are cannot be told: prefixes are this engine's alone, until "
            "it is started again; give vLLM the model's folder, or its commit as --revision",
            name,
        )
        return f"{name}#{uuid4().hex}"
    try:
        return fingerprint(path, default_data_dir())
    except ConfigError:  # no weights of the usual kinds
        return fingerprint_of_folder(path, default_data_dir())


def _plain(value: Any) -> Any:
    """The value without fields that differ between two loads of a model, or between two versions of transformers."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if key not in _NOT_THE_MODEL}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
