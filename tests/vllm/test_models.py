"""Models of which a block has several parts, and models that are several: tensor parallel, LoRA."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client
from tests.vllm.served import Expected, NewRequests, StartEngine, cacheable, run, tokens_of
from tests.vllm.tiny_models import save_lora, save_mla

LENGTHS = (700, 389, 512, 1000, 129)


def left_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if not path.is_dir()]


def test_tensor_parallel(
    llama: Path,
    daemon: DaemonProcess,
    make_engine: StartEngine,
    expected: Expected,
    new_requests: NewRequests,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
) -> None:
    requests = new_requests(*LENGTHS)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    with make_engine(llama, daemon, tensor_parallel_size=2) as engine:
        assert left_in(folder), "what vLLM's ranks meet in"
        cold, none = run(engine, requests)
        warm, hits = run(engine, requests)
        with Client(daemon.address) as client:
            ranks = {part.rank for known in client.stats().namespaces for part in known.namespace.parts}
    assert not left_in(folder)
    assert cold == warm == expected(requests)
    assert none == 0
    assert hits == cacheable(requests)
    assert ranks == {0, 1}


def test_adapters_are_kept_apart(
    llama: Path, daemon: DaemonProcess, make_engine: StartEngine, tmp_path: Path, new_requests: NewRequests
) -> None:
    loras = {name: save_lora(tmp_path / name, seed) for seed, name in enumerate(("poet", "clerk"), 1)}
    plain = new_requests(*LENGTHS)
    poet, clerk = ([replace(request, lora=name) for request in plain] for name in loras)
    with make_engine(llama, None, loras=loras, enable_prefix_caching=False) as alone:
        expected = [tokens_of(alone.generate(requests)) for requests in (plain, poet, clerk)]
    assert all(len({each[place] for each in expected}) == 3 for place in range(len(plain))), "the adapters do nothing"
    with make_engine(llama, daemon, loras=loras) as engine:
        first = [run(engine, requests) for requests in (plain, poet, clerk)]
        second = [run(engine, requests) for requests in (plain, poet, clerk)]
        assert "environment variables" not in engine.log.read_text(), "vLLM sets one that prefixd does not know"
    with make_engine(llama, daemon, loras=loras, forked=False) as engine:
        assert [run(engine, requests) for requests in (plain, poet, clerk)] == second, "another start finds all"
    assert [tokens for tokens, _ in first] == [tokens for tokens, _ in second] == expected
    assert [hits for _, hits in first] == [0, 0, 0]
    assert [hits for _, hits in second] == [cacheable(plain)] * 3


def test_an_adapter_that_is_replaced_after_vllm_has_loaded_it_is_not_taken_for_the_new_one(
    llama: Path, daemon: DaemonProcess, make_engine: StartEngine, tmp_path: Path, new_requests: NewRequests
) -> None:
    """Trained again at the same path between `add_lora` and the first request: vLLM has the old weights."""
    loras = {"poet": save_lora(tmp_path / "poet", 1)}
    requests = [replace(request, lora="poet") for request in new_requests(*LENGTHS)]
    with make_engine(llama, daemon, loras=loras) as engine:
        assert engine.load_adapter("poet")
        save_lora(tmp_path / "poet", 2)
        old, _ = run(engine, requests)
        again, hits = run(engine, requests)
        said = engine.log.read_text()
    assert again == old and hits == cacheable(requests), "the engine finds its own"
    with make_engine(llama, None, loras=loras, enable_prefix_caching=False) as alone:
        expected = tokens_of(alone.generate(requests))
    assert all(mine != other for mine, other in zip(old, expected, strict=True)), "the weights do nothing"
    with make_engine(llama, daemon, loras=loras) as engine:
        assert run(engine, requests) == (expected, 0)
    assert "have changed since the engine's start" in said


def test_a_model_that_vllm_computes_from_the_start_only(
    daemon: DaemonProcess, make_engine: StartEngine, tmp_path: Path, new_requests: NewRequests
) -> None:
    """Multi-head latent attention on a CPU: vLLM turns its own prefix cache off, and what is cached would be no use.

    One request at a time: in a batch, vLLM alone gives other tokens for this model.
    """
    model = save_mla(tmp_path / "mla")
    requests = new_requests(*LENGTHS)
    with make_engine(model, None) as alone:
        expected = [alone.generate([request])[0].token_ids for request in requests]
    with make_engine(model, daemon) as engine:
        for _ in range(2):
            assert [engine.generate([request])[0].token_ids for request in requests] == expected
        cached = engine.metrics().prompt_tokens_by_source
        assert "runs without prefixd" in engine.log.read_text()
    assert cached["external_kv_transfer"] == cached["local_cache_hit"] == 0, "vLLM has learned to: test its hits"
