"""The table knows every argument of the installed vLLM, and all that its configuration has."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest

from prefixd.integrations.vllm.naming.arguments import ADAPTER_TABLE, NAMED_OTHERWISE, TABLE, arguments_of
from prefixd.integrations.vllm.naming.model_name import model_name
from tests.vllm.schedulers import make_config


def sections(kind: Any) -> list[type]:
    """The configurations in a field's type."""
    if dataclasses.is_dataclass(kind):
        return [typing.cast(type, kind)]
    return [found for part in typing.get_args(kind) for found in sections(part)]


def names(config: type, section: str = "") -> Iterator[str]:
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        name = f"{section}{field.name}"
        inner = sections(hints[field.name])
        if name in TABLE.names or not inner:
            yield name
        for each in inner if name not in TABLE.names else []:
            yield from names(each, f"{name}.")


def fields_below(config: type) -> Iterator[str]:
    """All fields, with those of sections that the table has as a whole."""
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        yield field.name
        for each in sections(hints[field.name]):
            if each is not config:
                yield from fields_below(each)


ALL = sorted(names(VllmConfig))


def test_every_field_of_the_configuration_is_in_the_table() -> None:
    unknown = [name for name in ALL if name not in TABLE]
    assert not unknown, "decide whether they change KV, and put them into prefixd/integrations/vllm/naming/arguments.py"


def test_every_argument_is() -> None:
    known = {part for name in {*ALL} | TABLE.names for part in name.split(".")} | {*fields_below(VllmConfig)}
    for argument in (field.name for field in dataclasses.fields(AsyncEngineArgs)):
        place = NAMED_OTHERWISE.get(argument)
        assert (place in TABLE) if place else (argument in known), f"{argument}: decide whether it changes KV"


def test_every_field_of_an_adapter_is_in_its_table() -> None:
    assert {*LoRARequest.__struct_fields__} == ADAPTER_TABLE.names


def test_nothing_that_the_table_says_has_gone() -> None:
    """What only older versions had is refused there."""
    here = {*ALL} | {name.partition(".")[0] for name in ALL}
    assert TABLE.names - here == {"cache_config.calculate_kv_scales"}


@pytest.mark.parametrize(
    "arguments",
    [
        {"load_format": "dummy"},
        {"kv_cache_dtype": "fp8"},
        {"hf_overrides": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                              "original_max_position_embeddings": 512}}},
        {"additional_config": {"gdn_prefill_backend": "triton"}},
        {"model_impl": "transformers"},
    ],
    ids=lambda arguments: next(iter(arguments)),
)  # fmt: skip
def test_an_argument_that_changes_kv_changes_the_name(llama: Path, arguments: dict[str, Any]) -> None:
    plain, other = (make_config(llama, asynchronous=False, blocks=9, **each) for each in ({}, arguments))
    assert model_name(other) != model_name(plain)


def test_arguments_that_do_not_and_another_start_leave_it(llama: Path) -> None:
    plain = make_config(llama, asynchronous=False, blocks=9)
    other = make_config(
        llama,
        asynchronous=True,
        blocks=99,
        max_num_seqs=3,
        served_model_name="mine",
        enforce_eager=True,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.3,
        max_num_batched_tokens=512,
        max_model_len=512,
        seed=7,
    )
    assert model_name(other) == model_name(plain)
    unknown = {argument.name for argument in arguments_of(plain) if argument.name not in TABLE}
    assert unknown == {"speculative_config", "lora_config", "model_config.multimodal_config"}, "sections that are None"
