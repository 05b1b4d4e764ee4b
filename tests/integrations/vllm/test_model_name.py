"""What a model, an adapter and the packing of pages are called.

The stand-ins have the shape of vLLM 0.32's own objects.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from prefixd.base.errors import ConfigError
from prefixd.base.model_fingerprint import fingerprint_of_folder
from prefixd.integrations.vllm.naming.model_name import Adapters, model_name
from prefixd.integrations.vllm.naming.page_packing import probe_pages


class Hf:
    """A transformers configuration."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def to_dict(self) -> dict[str, Any]:
        return {**self.values, "of this version of transformers": True}

    def to_diff_dict(self) -> dict[str, Any]:
        return {**self.values, "transformers_version": "of the one that runs"}


@dataclass
class Attention:
    backend: str | None = None
    use_prefill_query_quantization: bool = False


@dataclass
class Images:
    mm_processor_kwargs: dict[str, Any] | None = None
    mm_encoder_fp8_scale_path: str | None = None
    mm_processor_cache_gb: float = 4
    allowed_in_a_later_version: bool = False


@dataclass
class Model:
    model: str
    hf_config: Hf
    multimodal_config: Images | None = None
    seed: int = 0
    revision: str | None = None
    dtype: str = "bfloat16"
    quantization: str | None = None
    max_model_len: int = 1024
    served_model_name: str | None = None
    logits_processors: list[Any] | None = None


@dataclass
class Cache:
    cache_dtype: str = "auto"
    block_size: int = 16
    gpu_memory_utilization: float = 0.9


@dataclass
class CacheOfOld(Cache):
    calculate_kv_scales: bool = False


@dataclass
class Load:
    load_format: str = "auto"


@dataclass
class Parallel:
    tensor_parallel_size: int = 1


@dataclass
class Draft:
    draft_model_config: Model | None = None
    method: str = "eagle"
    num_speculative_tokens: int = 3


@dataclass
class Lora:
    target_modules: list[str] | None = None
    max_loras: int = 1


@dataclass
class Engine:
    """The shape of vLLM's own, with what tests change."""

    model_config: Model
    cache_config: Cache = field(default_factory=Cache)
    load_config: Load = field(default_factory=Load)
    parallel_config: Parallel = field(default_factory=Parallel)
    attention_config: Attention = field(default_factory=Attention)
    speculative_config: Draft | None = None
    lora_config: Lora | None = None
    additional_config: dict[str, Any] = field(default_factory=dict)
    instance_id: str = "one"
    of_a_later_version: Any = None


@pytest.fixture(autouse=True)
def own_fingerprints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixd.integrations.vllm.naming.model_name.default_data_dir", lambda: tmp_path / "data")


def a_model(folder: Path, value: float = 1.0) -> Path:
    folder.mkdir(parents=True)
    save_file({"w": torch.full((4,), value)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"hidden_size": 4}))
    return folder


def an_engine(folder: Path, **hf: Any) -> Engine:
    values = {"hidden_size": 4, "rope_theta": 1e4, "_name_or_path": str(folder), **hf}
    return Engine(Model(str(folder), Hf(**values)))


def named(folder: Path, change: Callable[[Engine], object] = lambda engine: None, **hf: Any) -> str:
    engine = an_engine(folder, **hf)
    change(engine)
    return model_name(engine)


def setting(path: str, value: Any) -> Callable[[Engine], object]:
    """A change: "model_config.dtype" to a value."""

    def change(engine: Engine) -> None:
        *sections, name = path.split(".")
        at: Any = engine
        for section in sections:
            at = getattr(at, section)
        setattr(at, name, value)

    return change


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_config.dtype", "float16"),
        ("model_config.quantization", "awq"),
        ("model_config.multimodal_config", Images(mm_processor_kwargs={"do_normalize": False})),
        ("cache_config.cache_dtype", "fp8"),
        ("load_config.load_format", "bitsandbytes"),
        ("parallel_config.tensor_parallel_size", 2),
        ("attention_config.backend", "FLASHINFER"),
        ("additional_config", {"gdn_prefill_backend": "triton"}),
        ("speculative_config", Draft()),
        ("lora_config", Lora(target_modules=["q_proj"])),
        ("of_a_later_version", "on"),
        ("model_config.multimodal_config", Images(allowed_in_a_later_version=True)),
    ],
)
def test_what_changes_the_values_changes_the_name(tmp_path: Path, path: str, value: Any) -> None:
    model = a_model(tmp_path / "model")
    assert named(model, setting(path, value)) != named(model)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_config.served_model_name", "mine"),
        ("model_config.logits_processors", [object()]),
        ("model_config.multimodal_config", Images(mm_processor_cache_gb=0)),
        ("cache_config.gpu_memory_utilization", 0.5),
        ("lora_config", Lora(max_loras=4)),
        ("instance_id", "two"),
    ],
)
def test_what_does_not_does_not(tmp_path: Path, path: str, value: Any) -> None:
    model = a_model(tmp_path / "model")
    assert named(model, setting(path, value)) == named(model)


def test_positions_count_as_the_configuration_says_them(tmp_path: Path) -> None:
    model = a_model(tmp_path / "model")
    yarn = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    assert len({named(model), named(model, rope_theta=1e6), named(model, **yarn)}) == 3


@pytest.mark.parametrize("name", ["processor_config.json", "preprocessor_config.json", "modeling_mine.py"])
def test_an_edited_file_of_the_model_changes_the_name(tmp_path: Path, name: str) -> None:
    model = a_model(tmp_path / "model")
    (model / name).write_text("{}")
    before = named(model)
    (model / name).write_text("{ }")
    assert named(model) != before


def test_an_argument_that_names_a_file_is_what_is_in_it(tmp_path: Path) -> None:
    model, scales = a_model(tmp_path / "model"), tmp_path / "scales.json"
    change = setting("model_config.multimodal_config", Images(mm_encoder_fp8_scale_path=str(scales)))
    names = set()
    for content in ("1", "2"):
        scales.write_text(content)
        names.add(named(model, change))
    assert len(names) == 2


def test_a_draft_is_its_weights(tmp_path: Path) -> None:
    model, draft = a_model(tmp_path / "model"), a_model(tmp_path / "draft")
    change = setting("speculative_config", Draft(Model(str(draft), Hf())))
    before = named(model, change)
    save_file({"w": torch.full((4,), 3.0)}, draft / "model.safetensors")
    assert named(model, change) != before


def test_the_version_counts_where_it_is_to(tmp_path: Path) -> None:
    """What an upgrade brings, new arguments with the values that they have by themselves, leaves the name as it was."""
    engine = an_engine(a_model(tmp_path / "model"))
    assert len({model_name(engine), model_name(engine, "0.31.0"), model_name(engine, "0.32.0")}) == 3
    older = an_engine(tmp_path / "model")
    older.cache_config = CacheOfOld()
    assert model_name(older) == model_name(engine)


def test_equal_models_in_different_directories_have_one_name_and_others_do_not(tmp_path: Path) -> None:
    one, same = a_model(tmp_path / "x" / "llama"), a_model(tmp_path / "y" / "llama")
    other = a_model(tmp_path / "z" / "llama", value=2.0)
    assert named(one) == named(same) and named(one).startswith("vllm/llama/")
    assert named(other) != named(one), "by the weights' content, of the same size"


def test_positions_that_depend_on_the_longest_prompt_do_so_in_the_name(tmp_path: Path) -> None:
    model = a_model(tmp_path / "model")
    dynamic = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    longer = setting("model_config.max_model_len", 2048)
    assert named(model, longer) == named(model)
    assert named(model, longer, **dynamic) != named(model, **dynamic)


def test_random_weights_are_told_apart_by_their_seed(tmp_path: Path) -> None:
    model = a_model(tmp_path / "model")
    dummy = setting("load_config", Load("dummy"))

    def seeded(engine: Engine) -> None:
        dummy(engine)
        engine.model_config.seed = 1

    assert len({named(model), named(model, dummy), named(model, seeded)}) == 3


def test_a_model_that_is_not_a_directory_is_its_commit() -> None:
    hub, one, other = Path("meta/llama"), "0a" * 20, "1b" * 20
    change = {commit: setting("model_config.revision", commit) for commit in (one, other)}
    assert named(hub, change[one]) == named(hub, change[one]) != named(hub, change[other])


@pytest.mark.parametrize("revision", [None, "main"])
def test_a_model_whose_version_cannot_be_told_shares_with_no_other_start(
    revision: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    hub = Path("meta/llama")
    change = setting("model_config.revision", revision)
    assert named(hub, change) != named(hub, change)
    said = [record.getMessage() for record in caplog.records if record.name == "vllm.prefixd"]
    assert len(said) == 2 and all("of which version the weights of meta/llama" in line for line in said)


def test_scales_that_every_engine_computes_for_itself_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="calculate_kv_scales"):
        named(a_model(tmp_path / "model"), setting("cache_config", CacheOfOld(calculate_kv_scales=True)))


class LoRARequest(msgspec.Struct):
    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
    of_a_later_version: int = 4


def an_adapter(path: object, number: int = 1, name: str = "a", **values: Any) -> LoRARequest:
    return LoRARequest(name, number, str(path), **values)


def later_engine() -> Adapters:
    """Of an engine that starts once all files have been written."""
    return Adapters(lambda: time.time_ns() + 10 * 10**9)


def starting_now() -> Adapters:
    """Of an engine that takes files for older than itself from this moment back, and not two seconds before."""
    return Adapters(lambda: time.time_ns() + 2 * 10**9)


def wait_until_files_are_later(folder: Path, than_ns: int) -> None:
    """Files' times are the kernel's, which lag some milliseconds behind."""
    probe, deadline = folder / "probe", time.monotonic() + 10
    while probe.write_bytes(b"") or probe.stat().st_ctime_ns < than_ns:
        assert time.monotonic() < deadline


def test_an_adapter_is_its_files_wherever_the_path_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"some weights")
    paths = [tmp_path / "adapter", "~/adapter", "adapter"]
    before = {later_engine().name(an_adapter(path)) for path in paths}
    assert len(before) == 1
    status = weights.stat()
    weights.write_bytes(b"more weights")
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert weights.stat().st_size == status.st_size
    after = {later_engine().name(an_adapter(path)) for path in paths}
    assert len(after) == 1 and not before & after, "trained again, at the same path, of the same size"


def test_an_adapter_that_changes_while_it_is_used_is_this_engines_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM may read it again, or not."""
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"some weights")
    adapters, adapter = later_engine(), an_adapter(weights.parent)
    before = adapters.name(adapter)
    assert adapters.name(adapter) == before
    weights.write_bytes(b"more weights")
    during = adapters.name(adapter)
    assert adapters.name(adapter) == during
    anew = adapters.name(an_adapter(weights.parent, number=2))
    assert anew == later_engine().name(adapter)
    assert len({before, during, anew}) == 3
    assert [record.getMessage() for record in caplog.records if "have changed" in record.getMessage()]


def trained(folder: Path, weights: bytes = b"some weights") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def rewritten(path: Path) -> None:
    trained(path, b"more weights")


def replaced_with_its_times(path: Path) -> None:
    weights = path / "adapter_model.safetensors"
    status = weights.stat()
    trained(path, b"more weights")
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))


def renamed(path: Path) -> None:
    path.rename(path.parent / "version 0")
    (path.parent / "version 2").rename(path)


def linked(path: Path) -> None:
    path.unlink()
    path.symlink_to("version 2")


def linked_further_away(path: Path) -> None:
    (path.parent / "newest").unlink()
    (path.parent / "newest").symlink_to("version 2")


@pytest.mark.parametrize("change", [rewritten, replaced_with_its_times, renamed, linked, linked_further_away])
def test_an_adapter_that_changes_between_its_load_and_its_first_request_is_this_engines_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[Path], None]
) -> None:
    """vLLM has the weights that were there at `add_lora`. All versions are older than the engine, and so are their
    files where only a link or a folder's name is changed."""
    trained(tmp_path / "version 1")
    trained(tmp_path / "version 2", b"more weights")
    (tmp_path / "newest").symlink_to("version 1")
    path = tmp_path / "adapter"
    if change in (linked, linked_further_away):
        path.symlink_to("newest")
    else:
        trained(path)
    engine, replica, other = (starting_now() for _ in range(3))
    assert "@" in other.name(an_adapter(path))
    wait_until_files_are_later(tmp_path, time.time_ns())
    change(path)
    assert (path / "adapter_model.safetensors").read_bytes() == b"more weights"
    names = [adapters.name(an_adapter(path)) for adapters in (engine, engine, replica)]
    assert names[0] == names[1] != names[2] and all("#" in name for name in names)
    assert "have changed since the engine's start" in caplog.text
    assert "@" in later_engine().name(an_adapter(path)), "another start of the engine loads what is there now"


def test_an_adapter_that_changes_while_its_digest_is_made_is_this_engines_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = trained(tmp_path / "adapter")
    engine = starting_now()
    wait_until_files_are_later(tmp_path, time.time_ns())

    def digest(*arguments: Any) -> str:
        rewritten(path)
        return fingerprint_of_folder(*arguments)

    monkeypatch.setattr("prefixd.integrations.vllm.naming.model_name.fingerprint_of_folder", digest)
    assert "#" in engine.name(an_adapter(path))


def test_a_wall_clock_that_is_set_back_hides_no_change(tmp_path: Path) -> None:
    """A file that is written after the start then has a time before it."""
    path, ahead_ns, elapsed_s = trained(tmp_path / "adapter"), [3600 * 10**9], [100.0]
    engine = Adapters(lambda: time.time_ns() + ahead_ns[0], lambda: elapsed_s[0])
    assert "@" in Adapters(lambda: time.time_ns() + ahead_ns[0]).name(an_adapter(path))
    ahead_ns[0], elapsed_s[0] = 0, 130.0
    assert "#" in engine.name(an_adapter(path))


def test_how_an_adapters_files_are_read_is_in_its_name(tmp_path: Path) -> None:
    path = trained(tmp_path / "adapter")
    changed: list[dict[str, Any]] = [{}, {"is_3d_lora_weight": True}, {"of_a_later_version": 5}]
    assert len({later_engine().name(an_adapter(path, **values)) for values in changed}) == 3
    engine = later_engine()
    assert len({engine.name(an_adapter(path, **values)) for values in changed}) == 3
    harmless = an_adapter(path, number=7, base_model_name="llama", load_inplace=True)
    assert engine.name(harmless) == engine.name(an_adapter(path))


def test_an_adapter_whose_files_cannot_be_seen_is_this_engines_alone() -> None:
    adapters, adapter = Adapters(), an_adapter("somebody/adapter-of-the-hub")
    assert adapters.name(adapter) == adapters.name(adapter) != Adapters().name(adapter)


@pytest.mark.parametrize("fails", ["state_of_folder", "fingerprint_of_folder"])
def test_an_adapter_that_is_written_at_the_moment_does_not_end_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """A file goes between the listing and the look at it."""

    def gone(*_: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "adapter_model.safetensors.tmp")

    monkeypatch.setattr(f"prefixd.integrations.vllm.naming.model_name.{fails}", gone)
    adapters, adapter = Adapters(), an_adapter(tmp_path)
    assert adapters.name(adapter) == adapters.name(adapter) != Adapters().name(adapter)


class Layer:
    """As vLLM's: what writes keys and values into pages (blocks, heads, tokens, 2 * size)."""

    num_kv_heads, head_size, isa = 2, 4, "amx"

    def __init__(self, turned: bool = False) -> None:
        self.impl = self
        self._turned = turned

    def do_kv_cache_update(
        self, layer: Any, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor
    ) -> None:
        pair = (values, keys) if self._turned else (keys, values)
        for slot in slots.tolist():
            pages[slot // pages.shape[2], :, slot % pages.shape[2]] = torch.cat([each[slot] for each in pair], dim=-1)


def a_packing(tensor: torch.Tensor, layer: Layer | None = None, versions: str = "") -> str:
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={} if layer is None else {"a": layer}),
        model_config=SimpleNamespace(dtype=torch.float32),
    )
    return probe_pages(config, {"a": tensor}, versions).digest


def test_what_a_backend_writes_counts_and_the_version_only_where_that_cannot_be_seen(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "vllm.prefixd")
    pages = torch.zeros(5, 2, 16, 8)
    assert a_packing(pages, Layer(), "0.31") == a_packing(pages, Layer(), "0.32")
    assert a_packing(pages, Layer()) != a_packing(pages, Layer(turned=True)), (
        "another order in a page of the same shape"
    )
    assert a_packing(pages, None, "0.31") != a_packing(pages, None, "0.32")
    assert not pages.any(), "vLLM's own pages are left alone"
    assert "so the version counts" not in caplog.text
    otherwise = torch.zeros(5, 16, 2, 8)  # the layer's call fails on it
    assert a_packing(otherwise[:, :1], Layer(), "0.31") != a_packing(otherwise[:, :1], Layer(), "0.32")
    assert "so the version counts" in caplog.text


@pytest.mark.parametrize("heads_outside", [False, True])
def test_how_pages_are_packed_does_not_depend_on_the_number_of_blocks(heads_outside: bool) -> None:
    def pages(blocks: int, tokens: int = 16) -> torch.Tensor:
        """(blocks, heads, tokens, head size)"""
        if heads_outside:
            return torch.zeros(2, blocks, tokens, 8).transpose(0, 1)
        return torch.zeros(blocks, 2, tokens, 8)

    assert a_packing(pages(5)) == a_packing(pages(7))
    assert a_packing(pages(5)) != a_packing(pages(5, tokens=32))
    assert a_packing(pages(5)) != a_packing(pages(5).to(torch.bfloat16))


def test_layers_of_a_block_that_lie_together_are_packed_as_layers_that_lie_apart() -> None:
    """vLLM's layouts LBNHC and BLNHC: a page is the same, and so is a part of prefixd, which has layer after layer."""
    apart = torch.zeros(3, 5, 16, 2, 8).permute(0, 1, 3, 2, 4)[1]  # [blocks, heads, tokens, size] of a layer
    together = torch.zeros(5, 3, 16, 2, 8).permute(1, 0, 3, 2, 4)[1]
    assert together.stride(0) == 3 * apart.stride(0)
    assert a_packing(together) == a_packing(apart) and a_packing(together, Layer()) == a_packing(apart, Layer())


def test_heads_before_tokens_are_packed_otherwise_than_tokens_before_heads() -> None:
    assert a_packing(torch.zeros(5, 2, 16, 8)) != a_packing(torch.zeros(5, 16, 2, 8).transpose(1, 2))
