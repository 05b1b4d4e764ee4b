"""What `gpu.device` means on a machine; torch is loaded only where it may see a GPU."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace

import pytest

from prefixd.base.errors import ConfigError
from prefixd.server.startup.compute_device import resolve_device
from prefixd.settings import Settings


def settings(device: str) -> Settings:
    return Settings.model_validate({"gpu": {"device": device}})


def test_without_a_driver_torch_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", none)
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it raises ImportError
    assert [resolve_device(settings(device)) for device in ("auto", "cpu")] == ["cpu", "cpu"]


@pytest.mark.parametrize(("available", "auto"), [(True, "cuda:0"), (False, "cpu")])
def test_with_a_driver_torch_decides(available: bool, auto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: name)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: available)))
    assert resolve_device(settings("auto")) == auto


def test_a_gpu_that_is_asked_for_and_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False)))
    with pytest.raises(ConfigError, match=r"gpu\.device = cuda, but torch sees no CUDA device here; use auto or cpu"):
        resolve_device(settings("cuda"))
