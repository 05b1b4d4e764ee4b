"""The check accepts the models that are mended, and refuses each of them when its mend or its state is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prefixd.worker.recurrent import RecurrentLayers, check_resume, mends
from prefixd.worker.recurrent.state_cache import StateCache
from prefixd.worker_protocol.errors import ModelError
from tests.worker.tiny_models import RECURRENT, build_recurrent

CELL = 16


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mended_models_pass(name: str, dtype: torch.dtype) -> None:
    model = build_recurrent(name).to(dtype)
    check_resume(model, RecurrentLayers(model, CELL))


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("lost", ["get_recurrent_state", "update_conv_state"])
def test_a_lost_state_is_found(name: str, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "lfm2" and lost == "get_recurrent_state":
        pytest.skip("it has none")
    model = build_recurrent(name, initializer_range=0.02)  # logits need not show it
    layers = RecurrentLayers(model, CELL)
    method = getattr(StateCache, lost)

    def losing(cache: StateCache, *args: Any, **kwargs: Any) -> Any:
        result = method(cache, *args, **kwargs)
        if lost == "get_recurrent_state":
            return None if result is None else torch.zeros_like(result)
        kept = args[0].shape[-1]
        return torch.cat((torch.zeros_like(result[..., :-kept]), result[..., -kept:]), dim=-1)

    monkeypatch.setattr(StateCache, lost, losing)
    with pytest.raises(ModelError, match=r"recurrent layers \(\w+, 1 of \d\) .* kept state"):
        check_resume(model, layers)


@pytest.mark.parametrize(
    ("name", "mend"),
    [
        ("mamba", "mamba_selective_scan"),
        ("jamba", "mamba_selective_scan"),
        ("zamba2", "mamba2_selective_state_update"),
        ("nemotron_h", "mamba2_selective_state_update"),
    ],
)
def test_a_model_that_needs_a_mend_is_refused_without_it(name: str, mend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_recurrent(name)
    monkeypatch.delitem(mends._MENDS, mend)
    layers = RecurrentLayers(model, CELL)
    with pytest.raises(ModelError, match="cannot be run"):
        check_resume(model, layers)


@pytest.mark.parametrize("name", RECURRENT)
def test_a_model_by_itself_computes_what_it_did(name: str) -> None:
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        before = build_recurrent(name)(input_ids=ids, use_cache=False).logits
        model = build_recurrent(name)
        check_resume(model, RecurrentLayers(model, CELL))
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)
