"""Windows, capped scores, sinks and expanded latents: transformers' own classes on our attention, and what it reads."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import Cache

from benchmarks.engines.extent_reference import extent_reference
from benchmarks.engines.varlen_reference import varlen_reference
from prefixd.worker.attention.attention import (
    ATTENTION_NAME,
    AttentionBackend,
    AttentionKind,
    prefixd_attention,
    refusal,
    register_attention,
)
from prefixd.worker.attention.chunked_attention import ChunkedAttention
from prefixd.worker.attention.extent_attention import ExtentAttention
from prefixd.worker.attention.flash_attention import FlashAttention
from prefixd.worker.attention.flex_attention import FlexAttention
from prefixd.worker.attention.tile_attention import TileAttention
from prefixd.worker.memory.kv_cache import StepCache
from prefixd.worker.memory.kv_memory import Segment
from prefixd.worker.memory.paged_blocks import BlockTable
from prefixd.worker.memory.paged_kv import PagedStep
from prefixd.worker.memory.virtual_kv import VirtualStep
from prefixd.worker.recurrent.experts import STEADY_EXPERTS, register_experts, set_experts
from prefixd.worker.spec.probe import AttentionLayer
from prefixd.worker.spec.tiles import first_key
from prefixd.worker_protocol.errors import ModelError
from tests.worker.tiny_models import GROUP_SIZES, LATENT, WINDOW, WINDOWED, tiny_config

BLOCK = 16
TOKENS = 96
LENGTHS = (77, 33, 60)


def build(config: str, changes: dict[str, Any]) -> Any:
    register_attention()
    register_experts()
    torch.manual_seed(5)
    made = tiny_config(config, GROUP_SIZES, **changes)
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(2.0, 1.0)
    return model


@pytest.fixture(scope="module", params=[name for name in WINDOWED if name != "gemma3n_text"])  # layers share KV
def model(request: pytest.FixtureRequest) -> Any:
    return build(WINDOWED[request.param][0], {"sliding_window": WINDOW, **WINDOWED[request.param][1]})


@pytest.fixture(scope="module", params=LATENT)
def latent_model(request: pytest.FixtureRequest) -> Any:
    return build(*LATENT[request.param])


def prompts() -> list[list[int]]:
    return [np.random.default_rng(length).integers(3, GROUP_SIZES["vocab_size"], length).tolist() for length in LENGTHS]


@torch.inference_mode()
def own_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    model.set_attn_implementation("eager")
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def check_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """1e-5 of the logits' scale; measured are up to 2e-6."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


class Runner:
    """Requests whose KV lies in one tensor, or whose latents lie in lists, computed on one attention."""

    def __init__(self, model: Any, backend: AttentionBackend | None = None, *, latent: bool = False) -> None:
        model.set_attn_implementation(ATTENTION_NAME)
        set_experts(model, STEADY_EXPERTS)
        config = model.config
        self.layers = config.num_hidden_layers
        self.backend = backend or TileAttention(BLOCK, torch.float32, range(self.layers) if latent else ())
        chunked = [number for number, name in enumerate(_types(config)) if name == "chunked_attention"]
        self.chunks = {layer: config.attention_chunk_size for layer in chunked}
        if self.chunks:
            self.backend = ChunkedAttention(self.backend)
        self.latents: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] | None = {} if latent else None
        head_dim = 1 if latent else getattr(config, "head_dim", None) or 16
        self.shape = (1 if latent else config.num_key_value_heads, head_dim)
        self.kv = torch.zeros(len(LENGTHS), TOKENS, self.layers, 2, *self.shape)
        self._model = model

    @torch.inference_mode()
    def forward(self, parts: Sequence[tuple[int, int, int]], tokens: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """parts: (request, start, stop); returns each part's logits."""
        segments = [Segment(None, start, stop) for _, start, stop in parts]  # type: ignore[arg-type]
        step = VirtualStep(self.kv, segments, [request for request, _, _ in parts])
        ids = [token for request, start, stop in parts for token in tokens[request][start:stop]]
        positions = [position for _, start, stop in parts for position in range(start, stop)]
        padding = [0] * (-len(ids) % 16)
        layers = {layer: AttentionLayer(layer, 4, *self.shape) for layer in range(self.layers)}
        places = torch.tensor([[*positions, *padding]])
        cache: Cache = StepCache(step, places, layers)
        if self.latents is not None:
            cache = _LatentCache(self.latents, parts)
        logits = self._model(
            input_ids=torch.tensor([[*ids, *padding]]),
            position_ids=places,
            past_key_values=cache,
            use_cache=True,
            prefixd_step=self.backend.begin(step),
            prefixd_chunks=self.chunks,
        ).logits[0, : len(ids)]
        return list(logits.split([len(segment) for segment in segments]))

    def run(self, tokens: Sequence[Sequence[int]], cuts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """All requests side by side, cut at these places; the logits of all their tokens."""
        found: list[list[torch.Tensor]] = [[] for _ in tokens]
        ends = [[0, *sorted(each), len(prompt)] for each, prompt in zip(cuts, tokens, strict=True)]
        for number in range(max(map(len, ends)) - 1):
            parts = [(i, *each[number : number + 2]) for i, each in enumerate(ends) if number + 1 < len(each)]
            for (request, _, _), logits in zip(parts, self.forward(parts, tokens), strict=True):
                found[request].append(logits)
        return [torch.cat(each) for each in found]


def _types(config: Any) -> Sequence[str]:
    return getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers


class _LatentCache(Cache):
    """Returns the latents of all tokens so far, of one segment after the other, in whole sixteens of rows."""

    def __init__(self, latents: dict[Any, Any], parts: Sequence[tuple[int, int, int]]) -> None:
        super().__init__(layers=[])
        self._latents = latents
        self._parts = parts

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        joined: list[list[torch.Tensor]] = [[], []]
        row = 0
        for request, start, stop in self._parts:
            kept = self._latents.get((layer_idx, request), (key_states[0, 0, :0], value_states[0, 0, :0]))
            new = [states[0, 0, row : row + stop - start] for states in (key_states, value_states)]
            both = tuple(torch.cat((old[:start], more)) for old, more in zip(kept, new, strict=True))
            self._latents[layer_idx, request] = both
            for rows, each in zip(joined, both, strict=True):
                rows.append(each)
            row += stop - start
        for rows in joined:
            rows.append(rows[0].new_full((-sum(map(len, rows)) % 16, rows[0].shape[1]), 7.0))
        return tuple(torch.cat(rows)[None, None] for rows in joined)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def random_cuts(seed: int, pieces: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [sorted(random.choice(np.arange(1, length), pieces, replace=False).tolist()) for length in LENGTHS]


CUTS = [[20, 61], [16, 17], [3, 48]]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("way", ["tiles", "flash", "extents", "flex"])
def test_three_requests_in_one_row_match_the_models_own_attention(model: Any, way: str) -> None:
    backends = {
        "flash": FlashAttention(varlen_reference),
        "extents": ExtentAttention(extent_reference),
        "flex": FlexAttention(BLOCK, compiled=False),
    }
    tokens = prompts()
    theirs = [own_logits(model, prompt) for prompt in tokens]
    if way == "flash" and model.config.model_type in ("gemma2", "gpt_oss"):
        pytest.skip("refused: see test_what_a_backend_cannot_do_is_refused")
    for ours, expected in zip(Runner(model, backends.get(way)).run(tokens, CUTS), theirs, strict=True):
        check_close(ours, expected)


def test_latents_expanded_by_the_model_match_its_own_attention(latent_model: Any) -> None:
    tokens = prompts()
    theirs = [own_logits(latent_model, prompt) for prompt in tokens]
    cuts = [[20, *range(61, 77)], [16, 17], [3, 48]]
    for ours, expected in zip(Runner(latent_model, latent=True).run(tokens, cuts), theirs, strict=True):
        check_close(ours, expected)


def check_bits(model: Any, *, latent: bool) -> None:
    """Random cuts, a token at a time, and alone: the bits of the whole prompt, beside others, at once."""
    tokens = prompts()
    whole = Runner(model, latent=latent).run(tokens, [[]] * 3)
    decoded = [list(range(length - 20, length)) for length in LENGTHS]
    for cuts in [random_cuts(1, 5), random_cuts(2, 11), decoded]:
        for found, expected in zip(Runner(model, latent=latent).run(tokens, cuts), whole, strict=True):
            assert torch.equal(found, expected), cuts
    alone = Runner(model, latent=latent)
    alone.forward([(2, 0, 37)], tokens)
    assert torch.equal(alone.forward([(2, 37, LENGTHS[2])], tokens)[0], whole[2][37:])


def test_bits_depend_neither_on_cuts_nor_on_the_batch(model: Any) -> None:
    check_bits(model, latent=False)


def test_bits_of_expanded_latents_depend_neither_on_cuts_nor_on_the_batch(latent_model: Any) -> None:
    check_bits(latent_model, latent=True)


@pytest.mark.parametrize("position", [48, 53, 63])
def test_memory_before_a_window_is_never_read(model: Any, position: int) -> None:
    """What may be given up holds NaN; between that and the window, bytes are read and change nothing."""
    tokens = prompts()
    windowed = [layer for layer, name in enumerate(_types(model.config)) if name == "sliding_attention"]
    if not windowed:
        pytest.skip("chunks, of whole blocks: tests/worker/spec/test_kv_groups.py")
    runner = Runner(model)
    runner.forward([(0, 0, position)], tokens)
    kept = runner.kv.clone()
    plain = runner.forward([(0, position, 77)], tokens)[0]
    start = first_key(position, WINDOW, 16)
    assert 0 < start <= position - WINDOW + 1 < start + 32
    for layer in windowed:
        runner.kv[0, position:] = kept[0, position:]
        runner.kv[0, :start, layer] = float("nan")
        runner.kv[0, start : position - WINDOW + 1, layer] = 1e3
    assert torch.equal(runner.forward([(0, position, 77)], tokens)[0], plain)
    for seen, altered in ((position - WINDOW + 1, windowed[0]), (position - 1, windowed[-1])):
        runner.kv[0, :position] = kept[0, :position]
        runner.kv[0, seen, altered] += 1.0
        assert not torch.equal(runner.forward([(0, position, 77)], tokens)[0][0], plain[0]), seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind",
    [
        AttentionKind(),
        AttentionKind(window=WINDOW),
        AttentionKind(window=1),
        AttentionKind(softcap=2.0),
        AttentionKind(window=WINDOW, sinks=torch.tensor([0.0, 2.0, -1.0, 5.0])),
    ],
    ids=str,
)
def test_given_keys_and_values_are_as_those_in_memory(kind: AttentionKind, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    kv = torch.randn(2, TOKENS, 1, 2, 2, 16, generator=generator).to(dtype)
    query = torch.randn(1, 4, 32, 16, generator=generator).to(dtype)
    segments = [Segment(None, 50, 65), Segment(None, 3, 15)]  # type: ignore[arg-type]
    begun = TileAttention(BLOCK, dtype, expanded=[0]).begin(VirtualStep(kv, segments, [1, 0]))
    assert begun.expands(0) and not begun.expands(1)
    given = torch.cat((kv[1, :65, 0], kv[0, :15, 0], torch.full((4, 2, 2, 16), float("nan"), dtype=dtype)))
    keys, values = given.permute(1, 2, 0, 3)[:, None].unbind(0)
    found = begun.attend_given(query, keys, values, 0.3, kind)
    assert found.dtype == dtype
    assert torch.equal(found, begun.attend(query, 0, 0.3, kind))
    assert not found[0, 27:].any(), "padding"
    if kind.window == 1 and kind.sinks is None:  # a query that sees itself alone gives its value
        own = torch.cat((kv[1, 50:65, 0, 1], kv[0, 3:15, 0, 1])).repeat_interleave(2, dim=1)
        torch.testing.assert_close(found[0, :27], own)


def test_what_a_tile_reads_begins_at_a_tile_and_depends_on_its_first_position_alone() -> None:
    assert first_key(40, None, 16) == 0
    for tile in (1, 2, 8, 16):
        for window in (1, 2, 15, 16, 17, 33, 128):
            for position in range(0, 300, 7):
                first = position // tile * tile
                assert first_key(position, window, tile) == max(0, (first - window + 1) // tile * tile)


def test_both_memories_read_spans() -> None:
    """Several lists of spans in one pass; blocks before a span have no frame."""
    kv = torch.randn(2, 64, 2, 2, 2, 8)
    pool = torch.full((9, BLOCK, 2, 2, 2, 8), float("nan"))
    tables = [[-1, 3, 8, 1], [7, 2, 4, 5]]
    for row, table in zip(kv, tables, strict=True):
        for frame, block in zip(table, row.split(BLOCK), strict=True):
            pool[frame] = block if frame >= 0 else float("nan")
    segments = [Segment(BlockTable(table), 50, 60) for table in tables]
    virtual, paged = VirtualStep(kv, segments, [0, 1]), PagedStep(pool, segments)
    for spans in [((24, 64), (0, 64)), ((16, 60), (40, 41)), ((24, 64), (0, 64))]:
        for layer in range(2):
            for read in (virtual.read(layer, spans), paged.read(layer, spans)):
                for (start, end), row, (keys, values) in zip(spans, kv, read, strict=True):
                    assert torch.equal(keys, row[start:end, layer, 0].transpose(0, 1))
                    assert torch.equal(values, row[start:end, layer, 1].transpose(0, 1))


def test_what_a_backend_cannot_do_is_refused() -> None:
    sinks, capped, expanded = (
        AttentionKind(sinks=torch.zeros(4)),
        AttentionKind(softcap=50.0),
        AttentionKind(expanded=True),
    )
    window = AttentionKind(window=16)
    flash, flex = FlashAttention(varlen_reference), FlexAttention(BLOCK, compiled=False)
    extents = ExtentAttention(extent_reference)
    assert refusal(flash, [AttentionKind(), window]) is None
    assert "has layers with attention sinks, which FlashAttention cannot compute" in str(
        refusal(flash, [window, sinks])
    )
    assert "scores capped at 50.0" in str(refusal(flash, [capped]))
    assert refusal(flex, [window, sinks, capped]) is None
    assert refusal(extents, [window, sinks, capped, AttentionKind(both_ways=True)]) is None
    for backend in (flash, flex, extents):
        assert "set worker.device to cpu" in str(refusal(backend, [expanded]))
    assert refusal(TileAttention(BLOCK, torch.float32), [window, sinks, capped, expanded]) is None
    chunked, chunks = ChunkedAttention(flash), AttentionKind(chunk=32)
    assert refusal(chunked, [window, chunks]) is None
    assert "sinks" in str(refusal(chunked, [replace(sinks, chunk=32)]))
    assert "chunks of 32 tokens" in str(refusal(chunked, [replace(chunks, both_ways=True)]))


def test_biases_by_position_are_refused() -> None:
    states = torch.zeros(1, 1, 1, 8)
    step: Any = object()
    with pytest.raises(ModelError, match="biases by position"):
        prefixd_attention(
            types.SimpleNamespace(), states, states, states, None, prefixd_step=step, position_bias=states
        )  # type: ignore[arg-type]
