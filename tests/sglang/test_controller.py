"""The real HiCacheController: backup, exists, prefetch; the daemon and the controller started again; bytes equal."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY

from benchmarks.engines.sglang_controller import Ranks, Shape, host_pool, same
from prefixd.cli.demo.daemon_process import DaemonProcess
from tests.sglang.conftest import MakeController
from tests.sglang.served import DAEMON, accounts, flush, new_prompt
from tests.waiting import wait_until

LAYOUTS = ["page_first", "layer_first", "page_first_direct"]


@pytest.mark.parametrize("v1", [True, False], ids=["v1", "v0"])
@pytest.mark.parametrize("allocator", ["default", "shm"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_pages_come_back_as_they_were(
    daemon: DaemonProcess, make_controller: MakeController, kind: str, layout: str, allocator: str, v1: bool
) -> None:
    controller = make_controller(daemon, Shape(kind, layout, allocator), v1=v1)
    prompt = new_prompt(10)
    assert controller.prefetch(prompt) == (None, 0)
    saved = controller.random_pages(8, seed=1)
    assert controller.backup(prompt[: 8 * 16], saved) == 8 * 16

    indices, tokens = controller.prefetch(prompt)

    assert tokens == 8 * 16
    assert indices is not None
    assert same(controller.pool, indices, seed=1) == [True] * 8
    assert not set(indices.tolist()) & set(saved.tolist())
    counters = controller.backend.counters
    assert (counters["save_pages"], counters["load_pages"], counters["errors"]) == (8, 8, 0)
    assert counters["save_bytes"] == counters["load_bytes"] == 8 * Shape(kind, layout).page_bytes


def test_pages_are_stored_once(daemon: DaemonProcess, make_controller: MakeController) -> None:
    controller = make_controller(daemon)
    prompt = new_prompt(4)
    saved = controller.random_pages(4, seed=2)
    assert controller.backup(prompt, saved) == controller.backup(prompt, saved) == 64
    assert controller.backend.counters["save_pages"] == 4
    assert controller.backend.counters["duplicate_pages"] == 4


def test_a_prompt_longer_than_a_call(daemon: DaemonProcess, make_controller: MakeController) -> None:
    controller = make_controller(daemon, Shape(page_tokens=1, layers=1, heads=1, head_dim=8, pages=900))
    prompt = new_prompt(300, page_tokens=1)
    assert controller.backup(prompt, controller.random_pages(300, seed=3)) == 300
    indices, tokens = controller.prefetch(prompt)
    assert tokens == 300
    assert indices is not None and all(same(controller.pool, indices, seed=3))


@pytest.mark.parametrize("pass_prefix_keys", [True, False])
def test_a_prompt_that_goes_on(daemon: DaemonProcess, make_controller: MakeController, pass_prefix_keys: bool) -> None:
    controller = make_controller(daemon, pass_prefix_keys=pass_prefix_keys)
    prompt = new_prompt(9)
    assert controller.hits(prompt).storage_hit_count == 0
    assert controller.backup(prompt[: 4 * 16], controller.random_pages(4, seed=4)) == 64
    assert controller.backup(prompt, controller.random_pages(5, seed=5), first_page=4) == 80

    whole, tokens = controller.prefetch(prompt)
    assert tokens == 9 * 16
    assert whole is not None and all(same(controller.pool, whole[:64], seed=4))
    assert all(same(controller.pool, whole[64:], seed=5))
    rest, tokens = controller.prefetch(prompt, first_page=4)
    assert tokens == 80
    assert rest is not None and all(same(controller.pool, rest, seed=5))


def test_another_controller_finds_them(daemon: DaemonProcess, make_controller: MakeController) -> None:
    prompt = new_prompt(6)
    first = make_controller(daemon)
    first.backup(prompt, first.random_pages(6, seed=6))
    first.close()
    second = make_controller(daemon)
    indices, tokens = second.prefetch(prompt)
    assert tokens == 96
    assert indices is not None and all(same(second.pool, indices, seed=6))


def test_what_is_on_disk_outlives_the_daemon(own_daemon: DaemonProcess, make_controller: MakeController) -> None:
    prompt = new_prompt(6)
    controller = make_controller(own_daemon)
    controller.backup(prompt, controller.random_pages(6, seed=7))
    flush(own_daemon)
    own_daemon.restart()
    wait_until(lambda: controller.hits(prompt).storage_hit_count, "no hits after a restart of the daemon")
    indices, tokens = controller.prefetch(prompt)
    assert tokens == 96
    assert indices is not None and all(same(controller.pool, indices, seed=7))
    assert accounts(own_daemon) == []


def test_a_prompt_goes_on_after_the_daemon_has_lost_its_beginning(make_controller: MakeController) -> None:
    """SGLang hands over a page once: where it goes on with pages that prefixd has lost, what follows is stored
    alone."""
    with DaemonProcess({**DAEMON, "disk.bytes": 0}) as daemon:
        prompt = new_prompt(9)
        controller = make_controller(daemon)
        controller.backup(prompt[: 4 * 16], controller.random_pages(4, seed=8))
        daemon.kill()
        daemon.start()
        wait_until(lambda: controller.backend._link.up, "the link is not up again")

        assert controller.backup(prompt[: 7 * 16], controller.random_pages(3, seed=9), first_page=4) == 48
        assert controller.backup(prompt, controller.random_pages(2, seed=10), first_page=7) == 32
        assert controller.prefetch(prompt) == (None, 0)
        rest, tokens = controller.prefetch(prompt, first_page=4)
        assert tokens == 80
        assert rest is not None and all(same(controller.pool, rest[:48], seed=9))
        assert all(same(controller.pool, rest[48:], seed=10))

        # Computed and stored again, the prompt is whole: its parts are found one after the other.
        controller.backup(prompt[: 4 * 16], controller.random_pages(4, seed=8))
        whole, tokens = controller.prefetch(prompt)
        assert tokens == 9 * 16
        assert whole is not None and all(same(controller.pool, whole[:64], seed=8))
        assert all(same(controller.pool, whole[112:], seed=10))
        assert accounts(daemon) == []


def test_models_ranks_and_shapes_do_not_share(daemon: DaemonProcess, make_controller: MakeController) -> None:
    prompt = new_prompt(4)
    first = make_controller(daemon)
    first.backup(prompt, first.random_pages(4, seed=11))
    others = [
        make_controller(daemon, model="another"),
        make_controller(daemon, prefixd={"model": "tiny, trained on"}),
        make_controller(daemon, ranks=Ranks(0, 2)),
        make_controller(daemon, ranks=Ranks(1, 2)),
        make_controller(daemon, Shape(layout="layer_first")),
        make_controller(daemon, Shape(layers=8)),
        make_controller(daemon, v1=False),
    ]
    assert [other.hits(prompt).storage_hit_count for other in others] == [0] * len(others)
    assert first.hits(prompt).storage_hit_count == 64


def test_each_rank_has_its_own_heads(daemon: DaemonProcess, make_controller: MakeController) -> None:
    prompt = new_prompt(4)
    ranks = [make_controller(daemon, ranks=Ranks(rank, 2)) for rank in range(2)]
    for rank, controller in enumerate(ranks):
        controller.backup(prompt, controller.random_pages(4, seed=20 + rank))
    for rank, controller in enumerate(ranks):
        indices, tokens = controller.prefetch(prompt)
        assert tokens == 64
        assert indices is not None and all(same(controller.pool, indices, seed=20 + rank))


def test_of_mla_one_rank_writes_for_all(daemon: DaemonProcess, make_controller: MakeController) -> None:
    prompt = new_prompt(4)
    writer, reader = (make_controller(daemon, Shape("mla"), ranks=Ranks(rank, 2)) for rank in range(2))
    assert reader.backup(prompt, reader.random_pages(4, seed=30)) == 0
    assert reader.backend.batch_set_v1(reader.keys(prompt), reader.random_pages(4, seed=30)) == [True] * 4
    assert reader.hits(prompt).storage_hit_count == 0
    writer.backup(prompt, writer.random_pages(4, seed=31))
    indices, tokens = reader.prefetch(prompt)
    assert tokens == 64
    assert indices is not None and all(same(reader.pool, indices, seed=31))


def test_an_engine_that_only_reads(daemon: DaemonProcess, make_controller: MakeController) -> None:
    prompt = new_prompt(2)
    reader = make_controller(daemon, prefixd={"save": False})
    reader.backup(prompt, reader.random_pages(2, seed=32))
    assert reader.hits(prompt).storage_hit_count == 0


def test_the_pool_can_be_registered_again(daemon: DaemonProcess, make_controller: MakeController) -> None:
    prompt = new_prompt(4)
    controller = make_controller(daemon)
    controller.backup(prompt, controller.random_pages(4, seed=33))
    controller.backend.register_mem_pool_host(controller.pool)
    other = host_pool(Shape())
    controller.backend.register_mem_pool_host(other)
    indices = other.alloc(64)
    assert controller.backend.batch_get_v1(controller.keys(prompt), indices) == [True] * 4
    assert all(same(other, indices, seed=33))


def test_metrics(daemon: DaemonProcess, make_controller: MakeController) -> None:
    controller = make_controller(daemon, metrics=True)
    prompt = new_prompt(4)
    controller.backup(prompt, controller.random_pages(4, seed=34))
    controller.prefetch(prompt)
    metrics = controller.it.storage_backend.get_stats()
    assert type(metrics).__name__ == "StorageMetrics"
    assert (metrics.prefetch_pgs, metrics.backup_pgs) == ([4.0], [4.0])
    assert len(metrics.prefetch_bandwidth) == len(metrics.backup_bandwidth) == 1
    assert metrics.prefetch_bandwidth[0] > 0
    assert metrics.prefixd["hit_pages"] == 4
    again = controller.it.storage_backend.get_stats()
    assert (again.prefetch_pgs, again.prefixd["hit_pages"]) == ([], 4)


def test_metrics_by_tier(own_daemon: DaemonProcess, make_controller: MakeController) -> None:
    controller = make_controller(own_daemon, metrics=True, model="tiers")
    prompt = new_prompt(4)
    controller.backup(prompt, controller.random_pages(4, seed=36))
    flush(own_daemon)
    own_daemon.restart()
    wait_until(lambda: controller.hits(prompt).storage_hit_count, "no hits after a restart of the daemon")
    controller.prefetch(prompt)
    counted = controller.backend.get_stats().prefixd
    assert (counted["hit_pages_disk"], counted["hit_bytes_disk"]) == (8, 8 * Shape().page_bytes)

    again = make_controller(own_daemon, metrics=True, model="tiers")  # a process can register the name of a metric once
    again.hits(prompt)
    assert again.backend.get_stats().prefixd["hit_pages_cpu"] == 4
    labels = {"model_name": "tiers", "tp_rank": "0", "pp_rank": "0", "dp_rank": "0"}
    for tier, pages in {"disk": 8, "cpu": 4}.items():
        found = REGISTRY.get_sample_value("sglang:prefixd_hit_pages_total", {**labels, "tier": tier})
        assert found == pages, tier
    assert REGISTRY.get_sample_value("sglang:prefixd_load_pages_total", labels) == 4


def test_clear_drops_the_pages(daemon: DaemonProcess, make_controller: MakeController) -> None:
    controller = make_controller(daemon)
    prompt = new_prompt(4)
    controller.backup(prompt, controller.random_pages(4, seed=35))
    assert controller.it.storage_backend.clear() is True
    assert controller.hits(prompt).storage_hit_count == 0
