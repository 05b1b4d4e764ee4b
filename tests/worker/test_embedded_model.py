"""The model that comes with prefixd."""

from __future__ import annotations

import hashlib
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from prefixd.serving.models import embedded_model
from prefixd.serving.models.embedded_model import EOS, ensure_embedded_model
from prefixd.worker.model import load_model
from prefixd.worker.spec.model_spec import read_model_spec
from prefixd.worker_protocol.worker_settings import WorkerSettings


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by three callers at once."""
    cache = tmp_path_factory.mktemp("models")
    with ThreadPoolExecutor(3) as threads:
        found = set(threads.map(lambda _: ensure_embedded_model(cache), range(3)))
    assert len(found) == 1
    directory = found.pop()
    assert list(cache.iterdir()) == [directory], "nothing half-built is left"
    return directory


def test_it_is_the_same_everywhere(directory):
    digest = hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
    assert digest == "de879b0ec40dac9f8805765fcd3beb62c1f8d1790c669ba283e05cf7a778e5c8"


def test_its_building_is_said_before_it_begins(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    said = []
    monkeypatch.setattr(embedded_model, "_save_model", lambda _: said.extend(caplog.messages))
    built = ensure_embedded_model(tmp_path)
    assert said == [f"building the embedded model in {built}, once: 95 MB, some seconds"]


def test_it_is_built_once(directory, caplog):
    caplog.set_level(logging.INFO)
    before = (directory / "model.safetensors").stat()
    assert ensure_embedded_model(directory.parent) == directory and not caplog.messages
    assert (directory / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns


def test_a_token_is_a_byte(directory):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = "Grüße,\n\n  ' 日本 \x00\x7f 🙂"
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer("a<eos>").input_ids == [ord("a"), EOS]
    assert tokenizer.eos_token_id == EOS


@pytest.mark.slow
def test_output_is_printable_and_depends_on_the_whole_prompt(directory, make_rig):
    model = load_model(read_model_spec(WorkerSettings(model=str(directory))))
    assert model.spec.geometry.block_tokens == 16
    rig = make_rig(model, max_step_tokens=512)
    rest = " Tell me about the sea, the wind and the light." * 3
    prompts = [first + rest + last for first in "AB" for last in ("", "!")]
    requests = [rig.start(list(prompt.encode()), max_tokens=24) for prompt in prompts]
    rig.run()
    outputs = [bytes(rig.tokens[request]).decode() for request in requests]
    assert all(output.isprintable() for output in outputs)
    assert len(set(outputs)) == 4
    assert all(len(set(output)) > 6 for output in outputs)
