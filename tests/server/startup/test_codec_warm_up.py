"""Codecs in use are compiled at the start, and a failure to do so stops nothing."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from prefixd.server.startup.codec_warm_up import codecs_in_use, warm_up_codecs
from prefixd.settings import Settings
from prefixd_swap import SlabStore
from prefixd_swap.codecs.registry import CODECS
from prefixd_swap.codecs.warm_up import WarmUp
from prefixd_swap.errors import UnavailableCodecError
from tests.server.startup.test_disk_codecs import write_coded
from tests.waiting import WAIT_S


def settings(tmp_path: Path, **values: Any) -> Settings:
    return Settings.load(None, {"data_dir": tmp_path, "disk.bytes": 1 << 20, **values})


def test_those_of_tiers_and_tenants_are_in_use(tmp_path: Path) -> None:
    assert codecs_in_use(settings(tmp_path), None) == []
    assert codecs_in_use(settings(tmp_path, **{"disk.codec": "int8"}), None) == ["lossless", "int8"]
    assert codecs_in_use(settings(tmp_path, **{"disk.codec": "int8", "disk.bytes": 0}), None) == []
    values = {"disk.codec": "lossless", "tenants.acme.codec": "k8v4", "tenants.other.codec": "exact"}
    assert codecs_in_use(settings(tmp_path, **values), None) == ["lossless", "k8v4"]


def test_those_of_blocks_on_disk_are_in_use(tmp_path: Path) -> None:
    write_coded(tmp_path / "blocks", CODECS["int8"])
    store = SlabStore.open(tmp_path / "blocks", 1 << 20)
    assert codecs_in_use(settings(tmp_path), store) == ["lossless", "int8"]
    store.close()


async def test_they_are_compiled_and_that_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(WarmUp, "run", lambda work: compiled.extend(work.names))
    with caplog.at_level(logging.INFO):
        await warm_up_codecs(settings(tmp_path), None)
        assert not caplog.records and not compiled
        await warm_up_codecs(settings(tmp_path, **{"disk.codec": "int8", "tenants.acme.codec": "lossless"}), None)
    assert compiled == ["lossless", "int8"] and "codecs are compiled (lossless, int8) after 0.0 s" in caplog.text


async def test_without_a_package_the_daemon_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(work: WarmUp) -> None:
        raise UnavailableCodecError(f"no package for {work.names}")

    monkeypatch.setattr(WarmUp, "run", fail)
    await warm_up_codecs(settings(tmp_path, **{"disk.codec": "int8"}), None)
    assert "when their first block comes, which then waits: no package for ['lossless', 'int8']" in caplog.text


async def test_the_end_of_the_daemon_does_not_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()

    def run(work: WarmUp) -> None:
        begun.set()
        assert ended.wait(WAIT_S)

    monkeypatch.setattr(WarmUp, "run", run)
    monkeypatch.setattr(WarmUp, "end", lambda work: ended.set())
    task = asyncio.create_task(warm_up_codecs(settings(tmp_path, **{"disk.codec": "int8"}), None))
    assert await asyncio.to_thread(begun.wait, WAIT_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
