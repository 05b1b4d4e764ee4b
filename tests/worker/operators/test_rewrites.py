"""Layers with fewer operators: the same tokens, the same memory, and undone where the logits would change."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama import modeling_llama

from prefixd.worker.attention.flash_attention import FlashAttention
from prefixd.worker.model import CausalModel, load_model
from prefixd.worker.operators import compiled_functions, merged_projections, rewrites, single_norms
from prefixd.worker.operators.merged_projections import MergedProjections
from prefixd.worker.operators.rewrites import rewrite
from prefixd.worker.spec.model_spec import read_model_spec
from prefixd.worker_protocol.worker_settings import WorkerSettings
from tests.worker.tiny_models import GROUP_SIZES, WINDOWED, build_recurrent, tiny_config

LAYERS = 2
MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma": (GemmaConfig, GemmaForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
}
ON_DEVICE = ("select", "slice", "transpose", "unsqueeze", "view", "split", "detach", "reshape", "flatten", "unbind")
"""Beginnings of operators that make views: they launch nothing."""


class Operators(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(function).split(".")[1]] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            config, kind = MODELS[name]
            torch.manual_seed(3)
            model = kind(
                config(
                    vocab_size=96,
                    hidden_size=64,
                    intermediate_size=96,
                    num_hidden_layers=LAYERS,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    head_dim=16,
                    max_position_embeddings=256,
                    initializer_range=0.3,
                    tie_word_embeddings=False,
                )
            )
            for parameter in model.parameters():
                if parameter.dim() == 1:  # biases and norms that are not zeros and ones
                    torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.2)
            made[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name])
        return made[name]

    return make


def load(directory: Path, operators: str = "model") -> CausalModel:
    return load_model(read_model_spec(WorkerSettings(model=str(directory))), operators=operators)  # type: ignore[arg-type]


def storages(model: CausalModel) -> dict[int, int]:
    kept = [parameter.untyped_storage() for parameter in model._model.parameters()]
    return {storage.data_ptr(): storage.nbytes() for storage in kept}


def operators_of(model: CausalModel) -> Counter[str]:
    """Operators that launch something, in a pass with one operator for attention and the logits of a token."""
    model.attention = FlashAttention(lambda query, *_, **__: torch.zeros_like(query))
    with Operators() as seen:
        model._check_logits()
    return Counter({name: count for name, count in seen.counts.items() if not name.startswith(ON_DEVICE)})


@pytest.mark.parametrize("name", MODELS)
def test_merged_layers_give_the_same_tokens_in_the_same_memory(
    directory: Callable[[str], Path], rig_type: type, prompt: list[int], name: str
) -> None:
    tokens = []
    for operators in ("model", "merged"):
        model = load(directory(name), operators)
        assert model.operators[:2] == (operators, "")
        rig = rig_type(model)
        requests = [rig.start(prompt[:length], temperature=0.8, seed=length) for length in (1, 40)]
        rig.run()
        tokens.append([rig.tokens[request] for request in requests])
        rig.close()
        if operators == "model":
            nbytes = sum(storages(model).values())
    assert tokens[0] == tokens[1]
    assert sum(storages(model).values()) == nbytes
    attention = model._model.model.layers[0].self_attn
    assert len({each.weight.untyped_storage().data_ptr() for each in (attention.q_proj, attention.v_proj)}) == 1


def test_a_pass_has_fewer_operators(directory: Callable[[str], Path]) -> None:
    single, merged = (operators_of(load(directory("llama"), operators)) for operators in ("model", "merged"))
    passes = 2  # `_check_logits` computes two, one of them without the vocabulary's projection
    assert single["linear"] == passes * 7 * LAYERS + 1
    assert merged["linear"] == passes * 4 * LAYERS + 1
    assert merged["rms_norm"] == passes * (2 * LAYERS + 1)
    assert not any(merged[name] for name in ("pow", "mean", "rsqrt"))
    assert merged.total() <= single.total() - passes * (3 + 2 * 5) * LAYERS


def test_compiled_functions_are_called_once_a_layer(directory: Callable[[str], Path]) -> None:
    calls: Counter[str] = Counter()

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        name = getattr(function, "__name__", "gated")

        def call(*arguments: Any, **keywords: Any) -> Any:
            calls[name] += 1
            return function(*arguments, **keywords)

        return call

    model = load(directory("llama"))
    plain = modeling_llama.apply_rotary_pos_emb
    model.operators = rewrite(model._model, "fused", model._check_logits, compiled=compiled)
    assert model.operators[:2] == ("fused", "")
    assert calls == {"apply_rotary_pos_emb": 2 * LAYERS, "gated": 2 * LAYERS}
    other = load(directory("llama"))
    other.operators = rewrite(other._model, "fused", other._check_logits, compiled=compiled)
    calls.clear()
    other._check_logits()
    assert calls == {"apply_rotary_pos_emb": 2 * LAYERS, "gated": 2 * LAYERS}, "compiled once a process"
    model.rewrite("model")
    assert modeling_llama.apply_rotary_pos_emb is plain
    calls.clear()
    model._check_logits()
    assert not calls


def refuses(function: Callable[..., Any]) -> Callable[..., Any]:
    raise RuntimeError("no compiler for this Python\nsee the log")


def fails(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:
        raise NotImplementedError("no compiler\nsee the log")

    return call


def wrong(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:
        result = function(*arguments, **keywords)
        return 2 * result if isinstance(result, torch.Tensor) else result

    return call


@pytest.mark.parametrize(
    ("compiled", "reason"),
    [
        (refuses, "compiled functions: no compiler for this Python"),
        (fails, "compiled functions: no compiler"),
        (wrong, "compiled functions: the logits differ by"),
    ],
)
def test_functions_that_cannot_be_compiled_or_compute_something_else_are_not_used(
    directory: Callable[[str], Path], compiled: Callable[..., Any], reason: str
) -> None:
    model, plain = load(directory("llama")), modeling_llama.apply_rotary_pos_emb
    expected = model._check_logits()
    rewritten = rewrite(model._model, "fused", model._check_logits, compiled=compiled)
    assert rewritten.operators == "merged" and rewritten.reason.startswith(reason)
    assert modeling_llama.apply_rotary_pos_emb is plain
    torch.testing.assert_close(model._check_logits(), expected, rtol=1e-4, atol=1e-4)
    assert modeling_llama not in compiled_functions._compiled, "another model may have it compiled"


def test_projections_that_change_the_logits_are_undone(
    directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(directory("qwen3"))
    expected = model._check_logits()
    whole = MergedProjections.whole
    monkeypatch.setattr(MergedProjections, "whole", lambda self, inputs: 1.2 * whole(self, inputs))
    model.rewrite("fused")
    assert model.operators.operators == "model" and "merged projections: the logits differ" in model.operators.reason
    assert torch.equal(model._check_logits(), expected)


def test_no_memory_for_a_group_twice_leaves_the_layers_as_they_were(
    directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def short_of_memory(model: torch.nn.Module) -> Iterator[MergedProjections]:
        yield from list(merged_projections.merge_projections(model))[:1]
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nMore")

    model = load(directory("llama"))
    expected = model._check_logits()
    monkeypatch.setattr(rewrites, "merge_projections", short_of_memory)
    model.rewrite("merged")
    assert model.operators[:2] == ("model", "merged projections: CUDA out of memory. Tried to allocate 1 GiB.")
    assert torch.equal(model._check_logits(), expected)


def test_layers_with_different_inputs_compute_by_themselves() -> None:
    """Cross-attention has queries of the text and keys of an image; a layer may skip keys that another shares. And
    nothing is known of layers that no pass has used."""

    class Cross(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(4, 4, bias=False) for _ in range(3))
            self.gate_proj, self.up_proj = (torch.nn.Linear(4, 4, bias=False) for _ in range(2))

        def forward(self, text: torch.Tensor) -> torch.Tensor:
            return self.q_proj(text) + self.k_proj(text + 1) + self.v_proj(text)

    model, text = Cross(), torch.randn(3, 4)
    with torch.inference_mode():
        expected = model(text)
        assert rewrite(model, "merged", lambda: model(text)) == ("merged", "", [])
        assert torch.equal(model(text), expected)
    assert all("forward" not in vars(linear) for linear in model.children())


def test_norms_are_undone_when_one_of_them_cannot_be_compared(
    directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def two_and_an_error(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
        norms = single_norms.single_norms(model)
        yield next(norms)
        yield next(norms)
        raise RuntimeError("expected 4 dimensions")

    model = load(directory("llama"))
    expected = model._check_logits()
    monkeypatch.setattr(rewrites, "single_norms", two_and_an_error)
    model.rewrite("merged")
    assert model.operators[:2] == ("merged", "norms in one operator: expected 4 dimensions")
    assert not [name for name, module in model._model.named_modules() if "norm" in name and "forward" in vars(module)]
    torch.testing.assert_close(model._check_logits(), expected, rtol=1e-4, atol=1e-4)


def test_norms_that_change_the_logits_leave_the_projections_merged(
    directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 16 bits one rounding less in each norm may come to more than the logits of some models may differ by."""

    def wrong_norms(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
        for norm in single_norms.single_norms(model):
            right = norm.forward
            norm.forward = lambda rows, right=right: 1.3 * right(rows)
            yield norm

    model = load(directory("llama"))
    expected = model._check_logits()
    monkeypatch.setattr(rewrites, "single_norms", wrong_norms)
    model.operators = rewrite(model._model, "fused", model._check_logits, compiled=lambda function: function)
    assert model.operators.operators == "fused"
    assert model.operators.reason.startswith("norms in one operator: the logits differ by")
    torch.testing.assert_close(model._check_logits(), expected, rtol=1e-4, atol=1e-4)
    model.rewrite("model")
    assert not [name for name, module in model._model.named_modules() if "forward" in vars(module)]


class Clamped(torch.nn.Module):
    """A gated MLP that clamps, as GLM 5's; tokens of the check may not reach the clamp."""

    most = 7.0

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(16, 32, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = torch.nn.Linear(32, 16, bias=False), torch.nn.SiLU()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(inputs).clamp(max=self.most), self.up_proj(inputs).clamp(-self.most, self.most)
        return self.down_proj(self.act_fn(gate) * up)


def test_an_mlp_that_clamps_keeps_its_formula() -> None:
    torch.manual_seed(0)
    model, small = Clamped(), 0.1 * torch.randn(3, 16)
    with torch.inference_mode():
        expected = model(100 * small)
        found = rewrite(model, "fused", lambda: model(small), compiled=lambda function: function)
        assert found.operators == "fused", "its projections are merged"
        assert model.gate_proj.weight.data_ptr() == found.undo[0].__self__.weight.data_ptr()  # type: ignore[attr-defined]
        torch.testing.assert_close(model(100 * small), expected)


def test_activations_with_weights_of_their_own_share_no_kernel() -> None:
    def layer(slope: float) -> Clamped:
        made = Clamped()
        made.act_fn = torch.nn.PReLU(init=slope)
        return made

    torch.manual_seed(0)
    model, inputs = torch.nn.Sequential(layer(0.1), layer(0.4)), 0.1 * torch.randn(3, 16)
    for made in model:
        made.most = math.inf
    with torch.inference_mode():
        expected = model(inputs)
        found = rewrite(model, "fused", lambda: model(inputs), compiled=lambda function: function)
        assert found.operators == "fused" and ["forward" in vars(made) for made in model] == [True, False]
        torch.testing.assert_close(model(inputs), expected)


@pytest.mark.parametrize("name", ["falcon_h1", "gemma3n_text"])
def test_mlps_with_formulas_of_their_own_are_merged_and_not_compiled(name: str) -> None:
    """Falcon-H1 scales the gate and the result, Gemma 3n drops small activations in some layers."""
    torch.manual_seed(3)
    if name == "falcon_h1":
        model = build_recurrent(name, mlp_multipliers=[0.9, 0.95])
    else:
        config, changes = WINDOWED[name]
        changes = {**changes, "sliding_window": 21, "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0]}
        model = AutoModelForCausalLM.from_config(tiny_config(config, GROUP_SIZES, **changes))
    model = model.to(torch.bfloat16).eval().requires_grad_(False)
    tokens = torch.arange(3, 15)[None]

    def logits() -> torch.Tensor:
        return model(input_ids=tokens, use_cache=False).logits

    with torch.inference_mode():
        merged = rewrite(model, "merged", logits)
        assert merged.operators == "merged"
        expected = logits()
        for undo in reversed(merged.undo):
            undo()
        fused = rewrite(model, "fused", logits, compiled=lambda function: function)
        assert fused.operators == "fused"
        assert torch.equal(logits(), expected)
    replaced = [module for module in model.modules() if hasattr(module, "act_fn") and "forward" in vars(module)]
    assert len(replaced) == (0 if name == "falcon_h1" else 2), "those without the sparsity"
    for undo in reversed(fused.undo):
        undo()


class Quantised(torch.Tensor):
    """Stands for the weights of a package that quantises them: numbers that mean nothing without others beside them."""


def test_quantised_weights_are_not_merged() -> None:
    model = Clamped()
    for linear in (model.gate_proj, model.up_proj):
        linear.weight = torch.nn.Parameter(linear.weight.data.as_subclass(Quantised), requires_grad=False)
    inputs = torch.randn(3, 16)
    with torch.inference_mode():
        assert rewrite(model, "merged", lambda: model(inputs)).operators == "merged"
    assert all(type(linear.weight) is Quantised for linear in (model.gate_proj, model.up_proj))
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]
