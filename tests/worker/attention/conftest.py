"""Engines with a chosen attention backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prefixd.worker.attention.attention import AttentionBackend
from prefixd.worker.model import load_model
from prefixd.worker.spec.model_spec import read_model_spec
from prefixd.worker_protocol.worker_settings import WorkerSettings


@pytest.fixture
def rig_with(llama_directory: Path, rig_type: type) -> Iterator[Callable[..., object]]:
    """A rig with an attention backend, a KV memory and a layout."""
    rigs = []

    def make(attention: AttentionBackend | None, kv: str = "virtual", layout: str = "token") -> object:
        settings = WorkerSettings(model=str(llama_directory), layout=layout, chunk_bytes=4096)
        model = load_model(read_model_spec(settings))
        model.attention = attention or model.attention
        rigs.append(rig_type(model, kv=kv))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
