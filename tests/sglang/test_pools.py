"""Interface v2 under the real HybridCacheController: windows, states and a draft model's KV beside the KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from benchmarks.engines.sglang_controller import Controller, Ranks, Shape, fill, host_pool, mamba_pool, same
from benchmarks.engines.sglang_without_gpu import sglang
from prefixd.cli.demo.daemon_process import DaemonProcess
from tests.sglang.conftest import MakeController
from tests.sglang.served import accounts, flush, frozen, new_prompt
from tests.waiting import wait_until

WINDOW = 2
_storage = sglang("srt.mem_cache.hicache_storage")
_TRAILING, _ALL = _storage.PoolHitPolicy.TRAILING_PAGES, _storage.PoolHitPolicy.ALL_PAGES


@dataclass
class Hybrid:
    """A controller with windows, states and a draft beside its KV, and what SGLang's tree would say to it."""

    controller: Controller
    pools: dict[str, Any]

    def transfer(self, name: str, keys: list[str], seed: int | None = None, policy: Any = _TRAILING) -> Any:
        """A transfer of pages with their host indices; `seed`: with bytes of their own."""
        pool = self.pools[name]
        indices = pool.alloc(len(keys) * pool.page_size)
        if seed is not None:
            fill(pool, indices, seed)
        return _storage.PoolTransfer(
            name=_storage.PoolName(name), host_indices=indices, keys=list(keys), hit_policy=policy
        )

    def save(self, prompt: list[int], first_page: int, seed: int) -> int:
        """Writes a node: its KV, its draft's, the windows of its last pages and the state at its end."""
        keys = self.controller.keys(prompt)[first_page:]
        extra = [
            self.transfer("swa", keys[-WINDOW:], seed + 1),
            self.transfer("mamba", keys[-1:], seed + 2),
            self.transfer("draft", keys, seed + 3, _ALL),
        ]
        indices = self.controller.random_pages(len(keys), seed)
        return self.controller.backup(prompt, indices, first_page, extra_pools=extra)

    def wanted(self) -> list[Any]:
        """What a prefetch asks for beside the KV."""
        make, names = _storage.PoolTransfer, _storage.PoolName
        return [
            make(name=names.SWA, keys=["__placeholder__"] * WINDOW, hit_policy=_TRAILING),
            make(name=names.MAMBA, keys=["__placeholder__"], hit_policy=_TRAILING),
            make(name=names.DRAFT, indices_from_pool=names.KV, hit_policy=_ALL),
        ]

    def hits(self, prompt: list[int], first_page: int = 0) -> Any:
        return self.controller.hits(prompt, first_page, self.wanted())

    def fetch(self, operation: Any) -> dict[str, torch.Tensor]:
        """Brings what was found; host indices by pool."""
        pages = operation.storage_hit_count // 16
        for transfer in operation.pool_transfers:
            if transfer.indices_from_pool is None:
                pool = self.pools[str(transfer.name)]
                transfer.host_indices = pool.alloc(min(len(transfer.keys), pages) * pool.page_size)
        kv, tokens = self.controller.fetch(operation)
        assert tokens == operation.storage_hit_count
        found = {str(transfer.name): transfer.host_indices for transfer in operation.pool_transfers}
        return {**found, "kv": kv, "draft": kv}


def _hybrid(make_controller: MakeController, daemon: DaemonProcess, **arguments: Any) -> Hybrid:
    shape = Shape(pages=200)
    pools = {"kv": host_pool(shape), "swa": host_pool(Shape(layers=2, pages=200)), "mamba": mamba_pool(200)}
    pools["draft"] = host_pool(Shape(layers=1, pages=200))
    sidecars = {name: pool for name, pool in pools.items() if name != "kv"}
    return Hybrid(make_controller(daemon, shape, pool=pools["kv"], sidecars=sidecars, **arguments), pools)


@pytest.fixture
def hybrid(daemon: DaemonProcess, make_controller: MakeController) -> Hybrid:
    return _hybrid(make_controller, daemon)


def test_all_pools_come_back(hybrid: Hybrid) -> None:
    prompt = new_prompt(6)
    assert hybrid.save(prompt, 0, seed=100) == 96
    operation = hybrid.hits(prompt)
    assert operation.storage_hit_count == 96
    assert operation.query_pool_hit_pages == {"kv": 6, "swa": 6, "mamba": 6, "draft": 6}
    hybrid.pools["draft"].kv_buffer.zero_()
    found = hybrid.fetch(operation)
    assert same(hybrid.pools["kv"], found["kv"], 100) == [True] * 6
    assert same(hybrid.pools["swa"], found["swa"], 101) == [True] * WINDOW
    assert same(hybrid.pools["mamba"], found["mamba"], 102) == [True]
    assert same(hybrid.pools["draft"], found["draft"], 103) == [True] * 6
    assert hybrid.controller.backend.counters["errors"] == 0


def test_a_prompt_can_stop_where_windows_and_states_are(hybrid: Hybrid) -> None:
    """Nodes end after pages 4 and 9: states are there, and windows before."""
    prompt = new_prompt(12)
    hybrid.save(prompt[: 4 * 16], 0, seed=110)
    hybrid.save(prompt[: 9 * 16], 4, seed=120)
    assert hybrid.hits(prompt).storage_hit_count == 9 * 16
    assert hybrid.hits(prompt[: 8 * 16]).storage_hit_count == 4 * 16
    assert hybrid.hits(prompt[: 3 * 16]).storage_hit_count == 0
    rest = hybrid.hits(prompt, first_page=4)
    assert rest.storage_hit_count == 5 * 16
    found = hybrid.fetch(rest)
    assert same(hybrid.pools["kv"], found["kv"], 120) == [True] * 5
    assert same(hybrid.pools["mamba"], found["mamba"], 122) == [True]


def test_the_restorable_lengths_are_told(daemon: DaemonProcess, make_controller: MakeController) -> None:
    """Ranks that each have pages of their own need all lengths to find one that all of them can use."""
    prompt = new_prompt(10)
    for rank in range(2):
        hybrid = _hybrid(make_controller, daemon, ranks=Ranks(rank, 2))
        hybrid.save(prompt[: 4 * 16], 0, seed=130)
        hybrid.save(prompt[: 9 * 16], 4, seed=140)
        backend, keys = hybrid.controller.backend, hybrid.controller.keys(prompt)
        result = backend.batch_exists_v2(keys, hybrid.wanted(), None)
        assert (result.kv_hit_pages, result.restorable_prefix_pages) == (9, [4, 9])
        assert result.extra_pool_hit_pages == {"kv": 9, "swa": 9, "mamba": 9, "draft": 9}


def test_a_pool_that_lacks_pages_shortens_the_prefix(hybrid: Hybrid) -> None:
    prompt = new_prompt(6)
    keys = hybrid.controller.keys(prompt)
    extra = [hybrid.transfer("draft", keys[:4], 150, _ALL)]
    indices = hybrid.controller.random_pages(6, 151)
    hybrid.controller.backup(prompt, indices, extra_pools=extra)
    make = _storage.PoolTransfer
    backend = hybrid.controller.backend
    result = backend.batch_exists_v2(keys, [make(name=_storage.PoolName.DRAFT, hit_policy=_ALL)], None)
    assert (result.kv_hit_pages, result.extra_pool_hit_pages) == (4, {"kv": 6, "draft": 4})
    assert result.restorable_prefix_pages == [1, 2, 3, 4]
    result = backend.batch_exists_v2(keys, hybrid.wanted(), None)
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (0, [])
    result = backend.batch_exists_v2(keys, None, None)
    assert result.kv_hit_pages == 6


def test_pools_outlive_the_daemon(own_daemon: DaemonProcess, make_controller: MakeController) -> None:
    hybrid = _hybrid(make_controller, own_daemon)
    prompt = new_prompt(5)
    hybrid.save(prompt, 0, seed=160)
    flush(own_daemon)
    own_daemon.restart()
    wait_until(lambda: hybrid.hits(prompt).storage_hit_count, "no hits after a restart of the daemon")
    found = hybrid.fetch(hybrid.hits(prompt))
    assert same(hybrid.pools["swa"], found["swa"], 161) == [True] * WINDOW
    assert same(hybrid.pools["mamba"], found["mamba"], 162) == [True]
    assert accounts(own_daemon) == []


def test_v2_with_the_daemon_frozen(own_daemon: DaemonProcess, make_controller: MakeController) -> None:
    hybrid = _hybrid(make_controller, own_daemon, prefixd={"timeout_s": 0.5})
    prompt = new_prompt(4)
    hybrid.save(prompt, 0, seed=170)
    keys = hybrid.controller.keys(prompt)
    backend = hybrid.controller.backend
    with frozen(own_daemon):
        result = backend.batch_exists_v2(keys, hybrid.wanted(), None)
        assert (result.kv_hit_pages, result.extra_pool_hit_pages) == (0, {})
        transfers = [hybrid.transfer("swa", keys[-2:]), hybrid.transfer("mamba", keys[-1:])]
        assert backend.batch_get_v2(transfers, None) == {"swa": [False, False], "mamba": [False]}
        assert backend.batch_set_v2(transfers, None) == {"swa": [False, False], "mamba": [False]}


def test_v2_arguments_that_make_no_sense(hybrid: Hybrid) -> None:
    backend, make, names = hybrid.controller.backend, _storage.PoolTransfer, _storage.PoolName
    keys = hybrid.controller.keys(new_prompt(2))
    unknown = make(name=names.INDEXER, host_indices=torch.arange(32), keys=keys)
    no_indices = make(name=names.SWA, keys=keys)
    short = make(name=names.SWA, host_indices=torch.arange(16), keys=keys)
    empty = make(name=names.MAMBA)
    assert backend.batch_get_v2([unknown, no_indices], None) == {"indexer": [False] * 2, "swa": [False] * 2}
    assert backend.batch_set_v2([short, empty], None) == {"swa": [False] * 2, "mamba": []}
    groups = make(name=names.DEEPSEEK_V4_C128, keys=keys, hit_policy=_storage.PoolHitPolicy.BLOCK_GROUPS)
    assert backend.batch_exists_v2(keys, [groups], None).kv_hit_pages == 0


def test_of_an_mla_model_states_belong_to_ranks(daemon: DaemonProcess, make_controller: MakeController) -> None:
    """Its latents are the same on all ranks; states, and a draft's heads, are not."""
    prompt = new_prompt(3)
    shape = Shape("mla")
    controllers = []
    for rank in range(2):
        pools = {"kv": host_pool(shape), "mamba": mamba_pool(50), "draft": host_pool(Shape(layers=1))}
        sidecars = {name: pools[name] for name in ("mamba", "draft")}
        made = make_controller(daemon, shape, pool=pools["kv"], sidecars=sidecars, ranks=Ranks(rank, 2))
        controllers.append(Hybrid(made, pools))
    keys = controllers[0].controller.keys(prompt)
    for rank, hybrid in enumerate(controllers):
        extra = [hybrid.transfer("mamba", keys[-1:], 180 + rank), hybrid.transfer("draft", keys, 190 + rank, _ALL)]
        hybrid.controller.backup(prompt, hybrid.controller.random_pages(3, 185), extra_pools=extra)
    for rank, hybrid in enumerate(controllers):
        backend = hybrid.controller.backend
        assert backend.batch_exists(keys) == 3
        states = hybrid.transfer("mamba", keys[-1:])
        draft = hybrid.transfer("draft", keys, policy=_ALL)
        came = backend.batch_get_v2([states, draft], None)
        assert came["mamba"] == [True]
        assert same(hybrid.pools["mamba"], states.host_indices, 180 + rank) == [True]
        # SGLang has rank 0 write an MLA model's drafts: no other rank may take its heads for its own.
        assert came["draft"] == [rank == 0] * 3
