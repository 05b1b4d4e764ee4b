"""What lies where in a state's bytes, and what a layer's cache does with them."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.cache_utils import LinearAttentionLayer

from prefixd.worker.recurrent import RecurrentLayers, StateLayout, StateShape, check_resume, pieces, state_shapes
from prefixd.worker.recurrent.state_cache import StateCache
from tests.worker.tiny_models import RECURRENT, build_recurrent, recurrent_config, tiny_config

SHAPES = [
    StateShape((5, 3), torch.bfloat16),
    StateShape((7, 4), torch.bfloat16, (2, 3, 5), torch.float32),
    StateShape((7, 4), torch.float32, (9,), torch.float32),
]


def test_parts_are_aligned_and_do_not_overlap() -> None:
    layout = StateLayout(SHAPES)
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    views = [view for layer in range(3) for view in layout.views(buffer, layer) if view is not None]
    assert [view.shape for view in views] == [(1, 5, 3), (1, 7, 4), (1, 2, 3, 5), (1, 7, 4), (1, 9)]
    assert all((view.data_ptr() - buffer.data_ptr()) % 64 == 0 for view in views)
    for number, view in enumerate(views, 1):
        view.fill_(number)
    assert [float(view.float().mean()) for view in views] == [1, 2, 3, 4, 5]
    assert layout.nbytes == views[-1].data_ptr() + 36 - buffer.data_ptr()


def test_a_layers_part_is_copied_and_nothing_else() -> None:
    layout = StateLayout(SHAPES)
    source, target = torch.full((layout.nbytes,), 1, dtype=torch.uint8), torch.zeros(layout.nbytes, dtype=torch.uint8)
    layout.copy(source, target, 1)
    for layer in range(3):
        expected, _ = layout.views(source if layer == 1 else torch.zeros_like(source), layer)
        assert torch.equal(layout.views(target, layer)[0], expected)
    layout.copy(source, target, 0)
    layout.copy(source, target, 2)
    for layer in range(3):
        for ours, theirs in zip(layout.views(target, layer), layout.views(source, layer), strict=True):
            assert ours is theirs is None or (ours is not None and theirs is not None and torch.equal(ours, theirs))


@pytest.mark.parametrize("name", RECURRENT)
def test_the_shapes_are_known_without_weights(name: str) -> None:
    with torch.device("meta"):
        meta = type(build_recurrent(name))(recurrent_config(name))
    layers = RecurrentLayers(build_recurrent(name), 16)
    assert state_shapes(meta) == list(layers.layout.shapes)
    assert len(layers.layout.shapes) == {"nemotron_h": 2, "jamba": 3, "bamba": 3, "qwen3_next": 3, "lfm2": 3}.get(
        name, 4
    )


def test_a_state_has_the_models_type_where_the_model_keeps_it_so() -> None:
    for shape in state_shapes(build_recurrent("mamba2").bfloat16()):
        assert shape == StateShape((160, 4), torch.bfloat16, (8, 16, 16), torch.float32)
    for shape in state_shapes(build_recurrent("lfm2").bfloat16()):
        assert shape == StateShape((64, 3), torch.bfloat16)


def test_a_model_of_attention_layers_has_no_states() -> None:
    model = LlamaForCausalLM(tiny_config("LlamaConfig"))
    layers = RecurrentLayers(model, 16)
    assert layers.layout.nbytes == 0 and not layers.modules
    check_resume(model, layers)


def test_the_cache_does_what_transformers_own_does() -> None:
    torch.manual_seed(1)
    for lengths in ([1], [2, 1, 1, 9], [3, 2], [4, 1], [8, 1, 3]):
        theirs = LinearAttentionLayer()
        conv, recurrent = torch.full((1, 5, 4), torch.nan), torch.full((1, 2, 3), torch.nan)
        started = False
        for length in lengths:
            ours = StateCache(conv, recurrent, started)
            assert ours.has_previous_state() == theirs.has_previous_state[0] == started
            if started:
                assert ours.get_conv_state(0) is conv and ours.get_recurrent_state(0) is recurrent
            else:
                assert ours.get_conv_state(0) is None and ours.get_recurrent_state(0) is None
            new, state = torch.randn(1, 5, length), torch.randn(1, 2, 3)
            joined = ours.update_conv_state(new, 0, conv_kernel_size=4)
            assert torch.equal(joined, theirs.update_conv_state(new, conv_kernel_size=4))
            assert ours.update_recurrent_state(state, 0) is recurrent
            theirs.update_recurrent_state(state)
            assert torch.equal(conv, theirs.conv_states[0]) and torch.equal(recurrent, theirs.recurrent_states[0])
            started = True


def test_pieces_end_at_multiples_of_the_cell() -> None:
    assert list(pieces(40, 100, 32)) == [(40, 64), (64, 96), (96, 100)]
    assert list(pieces(32, 64, 32)) == [(32, 64)]
    assert list(pieces(5, 6, 32)) == [(5, 6)]
    assert list(pieces(7, 7, 32)) == []
