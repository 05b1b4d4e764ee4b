"""Daemons that are away, killed, frozen; SGLang's own fault injection; arguments that make no sense."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.engines.sglang_controller import Controller, Shape, fill, host_pool, same
from benchmarks.engines.sglang_without_gpu import sglang
from prefixd.base.errors import ConfigError
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client
from prefixd.integrations.sglang.pool_pages import BuffersAt
from tests.sglang.conftest import MakeController
from tests.sglang.served import accounts, frozen, new_prompt, options
from tests.waiting import wait_until

TIMEOUT_S = 2.0


def _saved(controller: Controller, pages: int, seed: int) -> list[int]:
    prompt = new_prompt(pages)
    assert controller.backup(prompt, controller.random_pages(pages, seed=seed)) == pages * 16
    return prompt


def _back(controller: Controller, prompt: list[int]) -> None:
    wait_until(lambda: controller.hits(prompt).storage_hit_count, "no hits after the daemon is back")


def test_no_daemon_when_sglang_starts(own_daemon: DaemonProcess, make_controller: MakeController) -> None:
    own_daemon.kill()
    controller = make_controller(own_daemon, prefixd={"timeout_s": TIMEOUT_S})
    prompt, saved = new_prompt(4), controller.random_pages(4, seed=1)
    assert controller.backup(prompt, saved) == 0
    own_daemon.start()
    wait_until(lambda: controller.backup(prompt, saved), "nothing is saved")
    assert controller.hits(prompt).storage_hit_count == 64


def test_daemon_killed(own_daemon: DaemonProcess, make_controller: MakeController) -> None:
    controller = make_controller(own_daemon, prefixd={"timeout_s": TIMEOUT_S})
    prompt = _saved(controller, 4, seed=2)
    own_daemon.kill()
    assert controller.prefetch(prompt) == (None, 0)
    assert controller.backup(new_prompt(4), controller.random_pages(4, seed=3)) == 0
    own_daemon.start()
    wait_until(lambda: controller.backend._link.up, "the link is not up again")
    again = _saved(controller, 4, seed=4)
    indices, tokens = controller.prefetch(again)
    assert tokens == 64
    assert indices is not None and all(same(controller.pool, indices, seed=4))


def test_a_replaced_daemon(
    own_daemon: DaemonProcess, make_controller: MakeController, caplog: pytest.LogCaptureFixture
) -> None:
    """Another daemon with an empty data directory in its place: the next save counts, and one line says it."""
    controller = make_controller(own_daemon, prefixd={"timeout_s": TIMEOUT_S})
    prompt = _saved(controller, 4, seed=20)
    own_daemon.replace()
    caplog.clear()
    assert controller.hits(prompt).storage_hit_count == 0
    again = _saved(controller, 4, seed=21)
    indices, tokens = controller.prefetch(again)
    assert tokens == 64
    assert indices is not None and all(same(controller.pool, indices, seed=21))
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1 and "replaced by a daemon with another data directory" in said[0]


def test_daemon_frozen(own_daemon: DaemonProcess, make_controller: MakeController) -> None:
    """The first call waits for `timeout_s`; the others, while the daemon is away, for nothing."""
    controller = make_controller(own_daemon, prefixd={"timeout_s": TIMEOUT_S})
    prompt = _saved(controller, 4, seed=5)
    keys, indices = controller.keys(prompt), controller.pool.alloc(64)
    backend = controller.backend
    with frozen(own_daemon):
        assert backend.batch_exists(keys) == 0
        began_s = time.monotonic()
        assert backend.batch_exists(keys) == 0
        assert backend.batch_get_v1(keys, indices) == [False] * 4
        assert backend.batch_set_v1(keys, indices) == [False] * 4
        assert not backend.clear()
        assert time.monotonic() - began_s < 4 * TIMEOUT_S, "each waits"
        assert controller.backup(new_prompt(4), controller.random_pages(4, seed=6)) == 0
    _back(controller, prompt)
    assert accounts(own_daemon) == []


@pytest.mark.parametrize("ended", [signal.SIGSTOP, signal.SIGKILL])
def test_daemon_lost_while_pages_are_loaded(
    own_daemon: DaemonProcess, make_controller: MakeController, monkeypatch: pytest.MonkeyPatch, ended: signal.Signals
) -> None:
    """That the lease cannot be given back leaves the bytes unproved: they do not count."""
    controller = make_controller(own_daemon, prefixd={"timeout_s": TIMEOUT_S})
    prompt = _saved(controller, 4, seed=7)
    operation = controller.hits(prompt)
    original = BuffersAt.load

    def load(self: BuffersAt, *arguments: Any) -> None:
        os.kill(own_daemon.pid, ended)
        original(self, *arguments)

    monkeypatch.setattr(BuffersAt, "load", load)
    _, tokens = controller.fetch(operation)
    assert tokens == 0
    monkeypatch.undo()
    if ended == signal.SIGSTOP:
        os.kill(own_daemon.pid, signal.SIGCONT)
        _back(controller, prompt)
        indices, tokens = controller.prefetch(prompt)
        assert tokens == 64
        assert indices is not None and all(same(controller.pool, indices, seed=7))
        assert accounts(own_daemon) == []


def test_daemon_frozen_while_pages_are_saved(
    own_daemon: DaemonProcess, make_controller: MakeController, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = make_controller(own_daemon, prefixd={"timeout_s": TIMEOUT_S})
    original = BuffersAt.save

    def save(self: BuffersAt, *arguments: Any) -> None:
        os.kill(own_daemon.pid, signal.SIGSTOP)
        original(self, *arguments)

    monkeypatch.setattr(BuffersAt, "save", save)
    prompt = new_prompt(4)
    assert controller.backup(prompt, controller.random_pages(4, seed=8)) == 0
    monkeypatch.undo()
    os.kill(own_daemon.pid, signal.SIGCONT)
    wait_until(lambda: controller.backend._link.up, "the link is not up again")
    assert controller.backup(prompt, controller.random_pages(4, seed=8)) == 64
    indices, _ = controller.prefetch(prompt)
    assert indices is not None and all(same(controller.pool, indices, seed=8))
    assert accounts(own_daemon) == []


def test_a_copy_that_fails_gives_its_holds_back(
    daemon: DaemonProcess, make_controller: MakeController, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = make_controller(daemon)
    prompt = _saved(controller, 4, seed=9)

    def fail(self: BuffersAt, *arguments: Any) -> None:
        raise MemoryError("no memory for a view")

    with monkeypatch.context() as patch:
        patch.setattr(BuffersAt, "load", fail)
        patch.setattr(BuffersAt, "save", fail)
        assert controller.backend.batch_get_v1(controller.keys(prompt), controller.pool.alloc(64)) == [False] * 4
        other = new_prompt(4)
        assert controller.backup(other, controller.random_pages(4, seed=10)) == 0
    with Client(daemon.address) as client:
        wait_until(lambda: sum(session.leases for session in client.stats().sessions) == 0, "a hold was not given back")
    assert controller.backup(other, controller.random_pages(4, seed=10)) == 64


def test_a_slow_load_ends_with_what_has_come(
    daemon: DaemonProcess, make_controller: MakeController, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = make_controller(daemon, prefixd={"slice_s": 0.2})
    prompt = _saved(controller, 8, seed=11)
    store = controller.backend._pools["kv"].store
    monkeypatch.setattr(store, "_slice", 2)
    original, now_s = BuffersAt.load, [0.0]
    monkeypatch.setattr(store, "_clock", lambda: now_s[0])

    def slowly(self: BuffersAt, *arguments: Any) -> None:
        now_s[0] += 0.15
        original(self, *arguments)

    monkeypatch.setattr(BuffersAt, "load", slowly)
    operation = controller.hits(prompt)
    indices, tokens = controller.fetch(operation)
    assert tokens == 4 * 16
    assert all(same(controller.pool, indices[:64], seed=11))
    assert controller.backend.counters["cut_calls"] == 1


def test_a_prefetch_that_is_given_up_ends(
    daemon: DaemonProcess, make_controller: MakeController, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(page_tokens=1, layers=1, heads=1, head_dim=8, pages=900)
    controller = make_controller(daemon, shape)
    prompt = new_prompt(300, page_tokens=1)
    assert controller.backup(prompt, controller.random_pages(300, seed=12)) == 300
    original = BuffersAt.load
    began, given_up = threading.Event(), threading.Event()

    def slowly(self: BuffersAt, *arguments: Any) -> None:
        began.set()
        assert given_up.wait(30)
        original(self, *arguments)

    monkeypatch.setattr(BuffersAt, "load", slowly)
    operation = controller.hits(prompt)
    operation.host_indices = controller.it.alloc_prefetch_host_buffers(operation, 300)
    controller.it.prefetch_buffer.put(operation)
    assert began.wait(30)
    controller.it.terminate_prefetch(operation)
    given_up.set()
    assert controller.fetched(timeout_s=30) == 128


def test_sglangs_fault_injection(
    own_daemon: DaemonProcess, make_controller: MakeController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.005")
    controller = make_controller(own_daemon, Shape(pages=400))
    assert type(controller.it.storage_backend).__name__ == "HiCacheStorageFailureInjector"
    came = 0
    for seed in range(40):
        prompt = new_prompt(6)
        saved = controller.random_pages(6, seed=seed)
        controller.backup(prompt, saved)
        controller.pool.free(saved)
        operation = controller.hits(prompt)
        if operation.storage_hit_count:
            indices, tokens = controller.fetch(operation)
            assert all(same(controller.pool, indices[:tokens], seed=seed))
            controller.pool.free(indices)
            came += tokens > 0
    assert 0 < came < 40
    assert accounts(own_daemon) == []


def test_arguments_that_make_no_sense(daemon: DaemonProcess, make_controller: MakeController) -> None:
    controller = make_controller(daemon)
    prompt = _saved(controller, 4, seed=13)
    keys, backend, pool = controller.keys(prompt), controller.backend, controller.pool
    before = pool.kv_buffer.view(torch.uint8).clone()
    good = torch.arange(64)
    wrong: list[Any] = [
        good[:48],  # fewer than the keys
        torch.arange(80),
        good + pool.size - 32,  # beyond the pool's end
        good - 16,
        good.flip(0),
        torch.stack([good, good]),
        torch.tensor([]),
        None,
        "indices",
        10**12 + good,
    ]
    for indices in wrong:
        assert backend.batch_get_v1(keys, indices) == [False] * 4
        assert backend.batch_set_v1([*keys[:3], "f" * 64], indices) == [False] * 4
    assert torch.equal(pool.kv_buffer.view(torch.uint8), before)

    assert backend.batch_exists([]) == 0
    assert backend.batch_get_v1([], torch.tensor([], dtype=torch.int64)) == []
    assert backend.batch_exists(["not hexadecimal"]) == 0
    assert backend.batch_exists([7]) == 0
    assert backend.batch_exists([key.upper() for key in keys]) == 0
    assert backend.batch_set_v1([None] * 4, good) == [False] * 4
    assert backend.get("key") is None and backend.set("key", torch.zeros(4)) is False
    assert backend.batch_get(keys, None) == [None] * 4
    assert backend.batch_exists(keys) == 4
    assert accounts(daemon) == []


def test_pages_of_whole_page_layouts_begin_at_pages(daemon: DaemonProcess, make_controller: MakeController) -> None:
    controller = make_controller(daemon, Shape(layout="page_first_direct"))
    prompt = _saved(controller, 4, seed=14)
    assert controller.backend.batch_get_v1(controller.keys(prompt), torch.arange(8, 72)) == [False] * 4


def test_keys_that_are_no_sha256_name_pages_too(daemon: DaemonProcess, make_controller: MakeController) -> None:
    controller = make_controller(daemon)
    keys = [f"page {number} of {time.time_ns()}" for number in range(3)]
    saved = controller.random_pages(3, seed=15)
    assert controller.backend.batch_set_v1(keys, saved) == [True] * 3
    assert controller.backend.batch_exists(keys) == 3
    indices = controller.pool.alloc(48)
    assert controller.backend.batch_get_v1(keys, indices) == [True] * 3
    assert all(same(controller.pool, indices, seed=15))


def test_pool_destroyed(daemon: DaemonProcess, make_controller: MakeController) -> None:
    controller = make_controller(daemon)
    prompt = _saved(controller, 4, seed=16)
    indices = controller.pool.alloc(64)
    controller.pool.destroy()
    controller.pool.destroy()
    assert controller.backend.batch_get_v1(controller.keys(prompt), indices) == [False] * 4
    assert controller.backend.batch_set_v1(controller.keys(prompt), indices) == [False] * 4


def test_closed_during_a_call(
    daemon: DaemonProcess, make_controller: MakeController, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = make_controller(daemon)
    prompt = _saved(controller, 4, seed=17)
    original = BuffersAt.load
    began, closed = threading.Event(), threading.Event()

    def slowly(self: BuffersAt, *arguments: Any) -> None:
        began.set()
        assert closed.wait(30)
        original(self, *arguments)

    monkeypatch.setattr(BuffersAt, "load", slowly)
    backend, keys, indices = controller.backend, controller.keys(prompt), controller.pool.alloc(64)
    answers: list[list[bool]] = []
    caller = threading.Thread(target=lambda: answers.append(backend.batch_get_v1(keys, indices)))
    caller.start()
    assert began.wait(30)
    backend.close()
    assert caller.is_alive()  # it does not wait for the copy
    closed.set()
    caller.join(30)
    assert answers == [[False] * 4]
    assert backend.batch_exists(keys) == 0
    assert backend.batch_set_v1(keys, indices) == [False] * 4
    backend.close()


def test_no_threads_when_sglang_starts(
    daemon: DaemonProcess, make_controller: MakeController, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = sglang("srt.mem_cache.hicache_storage")
    from prefixd.integrations.sglang import PrefixdHiCache, backend

    config = storage.HiCacheStorageConfig(
        0, 1, 0, 1, 0, 1, False, False, True, "tiny", extra_config=options(daemon.address)
    )
    original = threading.Thread.start

    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(backend, "_LINK_AGAIN_S", 0.0)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    made = PrefixdHiCache(config, {})
    pool = host_pool(Shape())
    made.register_mem_pool_host(pool)
    keys = [f"{number:064x}" for number in range(4)]
    indices = pool.alloc(64)
    fill(pool, indices, 18)
    assert made.batch_exists(keys) == 0
    assert made.batch_set_v1(keys, indices) == [False] * 4
    monkeypatch.setattr(threading.Thread, "start", original)
    wait_until(lambda: made.batch_set_v1(keys, indices) == [True] * 4, "nothing is saved with threads again")
    made.close()


def test_no_room(make_controller: MakeController) -> None:
    with DaemonProcess({"cpu.bytes": "1MiB", "disk.bytes": 0}) as daemon:
        controller = make_controller(daemon, Shape(pages=128))
        with Client(daemon.address) as client:
            prompt = new_prompt(64)
            controller.backup(prompt, controller.random_pages(64, seed=19))
            hits = controller.hits(prompt).storage_hit_count // 16
            assert 0 < hits <= 32
            indices, tokens = controller.prefetch(prompt)
            assert tokens == hits * 16
            assert indices is not None and all(same(controller.pool, indices, seed=19)[:hits])
            assert list(client.check_integrity().violations) == []


def test_a_prompt_longer_than_the_daemons_memory(make_controller: MakeController) -> None:
    """It has 32 pages of 32 KiB: all 64 pages come, and that many count as found."""
    with DaemonProcess({"cpu.bytes": "1MiB", "disk.bytes": "64MiB"}) as daemon:
        controller = make_controller(daemon, Shape(pages=160))
        prompt = new_prompt(64)
        saved = controller.random_pages(64, seed=20)
        wait_until(lambda: controller.backup(prompt, saved) == 64 * 16, "not all is saved")
        with Client(daemon.address) as client:
            before = client.stats()
            (namespace,) = before.namespaces
            assert namespace.namespace.parts[0].nbytes == 32 << 10
            for _ in range(2):
                indices, tokens = controller.prefetch(prompt)
                assert tokens == 64 * 16
                assert indices is not None and all(same(controller.pool, indices, seed=20))
                controller.pool.free(indices)
            after = client.stats()
        asked = after.asked_tokens - before.asked_tokens
        assert asked == after.hit_tokens - before.hit_tokens > 0


def test_a_trouble_is_said_once(
    daemon: DaemonProcess, make_controller: MakeController, caplog: pytest.LogCaptureFixture
) -> None:
    controller = make_controller(daemon)
    with caplog.at_level(logging.WARNING, "sglang.prefixd"):
        for _ in range(20):
            assert controller.backend.batch_get_v1(["a" * 64], torch.arange(7)) == [False]
    assert len([record for record in caplog.records if record.name == "sglang.prefixd"]) == 1
    assert controller.backend.counters["errors"] == 20


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"adress": "unix:/x"}, "adress"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"slice_s": 60}, "slice_s"),
        ({"address": "host:7000"}, "unix socket"),
    ],
)
def test_an_option_that_cannot_work_is_said_at_the_start(given: dict[str, Any], said: str) -> None:
    extra = {**options("unix:/nowhere"), "prefixd": given}
    with pytest.raises(ConfigError, match=said):
        Controller(host_pool(Shape()), extra=extra)


def test_model_by_content(
    daemon: DaemonProcess, make_controller: MakeController, tmp_path: Path, monkeypatch: Any
) -> None:
    """The same folder with other weights is another model."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    prompt = new_prompt(2)
    first = make_controller(daemon, prefixd={"model": str(folder)})
    first.backup(prompt, first.random_pages(2, seed=20))
    same_model = make_controller(daemon, prefixd={"model": str(folder)})
    assert same_model.hits(prompt).storage_hit_count == 32
    (folder / "model.safetensors").write_bytes(b"others.")
    other = make_controller(daemon, prefixd={"model": str(folder)})
    assert other.hits(prompt).storage_hit_count == 0


def test_a_memory_tier_smaller_than_a_prompt(make_controller: MakeController) -> None:
    """Of a prompt of 2 MiB, 1 MiB is in memory at a time."""
    with DaemonProcess({"cpu.bytes": "1MiB", "disk.bytes": "64MiB"}) as daemon:
        controller = make_controller(daemon, Shape(pages=256))
        prompt = new_prompt(64)
        saved = controller.random_pages(64, seed=21)
        wait_until(lambda: controller.backup(prompt, saved) == 64 * 16, "the prompt is not saved as a whole")
        indices, tokens = controller.prefetch(prompt)
        assert tokens > 0
        assert indices is not None and all(same(controller.pool, indices, seed=21)[: tokens // 16])
        assert tokens == 64 * 16
        assert accounts(daemon) == []


def test_closed_while_the_daemon_is_frozen(own_daemon: DaemonProcess, make_controller: MakeController) -> None:
    controller = make_controller(own_daemon, prefixd={"timeout_s": TIMEOUT_S})
    _saved(controller, 2, seed=22)
    with frozen(own_daemon):
        controller.close()
