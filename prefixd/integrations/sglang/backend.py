"""The storage backend that SGLang loads: what its calls mean in prefixd, and nothing that it could be harmed by.

SGLang calls from three threads: one asks which pages are there, one loads, one saves. Whatever goes wrong, a call
answers that pages are not there, or not kept; SGLang then computes. What cannot work at all (a wrong option) is said
when SGLang starts, as an error.

    register_mem_pool_host, register_mem_host_pool_v2     the pools, and with them the namespaces
    batch_exists, batch_get_v1, batch_set_v1              the KV pool; pages lie in the pool itself
    batch_exists_v2, batch_get_v2, batch_set_v2           other pools: windows, states, draft models
    exists, get, set, batch_get, batch_set                without "interface_v1": pages as tensors
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from prefixd.client import ClientError
from prefixd.integrations.engine.link import Link, LinkDown
from prefixd.integrations.engine.pages_by_key.chains import Chain, Chains
from prefixd.integrations.engine.pages_by_key.engine_pages import PagesAt, PagesUnusable
from prefixd.integrations.engine.pages_by_key.page_store import Outcome, PageStore
from prefixd.integrations.engine.pages_by_key.shared_copies import SharedCopies
from prefixd.integrations.sglang import namespace_names
from prefixd.integrations.sglang.contract import RELEASE, VERSION
from prefixd.integrations.sglang.hit_policies import TrailingPool, usable_lengths
from prefixd.integrations.sglang.log import SaidOnce, log
from prefixd.integrations.sglang.options import HiCacheOptions
from prefixd.integrations.sglang.page_keys import digests_of
from prefixd.integrations.sglang.pool_pages import NoPages, PoolPages, TensorsAt, pages_of
from prefixd.integrations.sglang.stats import HiCacheCounters

T = TypeVar("T")

_LINK_AGAIN_S = 5.0

_AT_ENDS = ("mamba", "swa", "auxiliary_swa", "draft_swa")
_AT_ENDS_SUFFIX = "_state"


@dataclass(frozen=True, slots=True)
class Stored:
    """A pool and where its pages are kept; no store for a pool without bytes."""

    name: str
    pages: PoolPages
    store: PageStore | None
    shared: bool


class PrefixdHiCache(HiCacheStorage):
    """SGLang's L3 cache in prefixd. See docs/sglang.md.

    Raises ConfigError for an option that cannot work; no other method raises.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        extra = storage_config.extra_config or {}
        self._config = storage_config
        self._options = HiCacheOptions.parse(extra)
        self._flat = not extra.get("interface_v1")
        self._counters = HiCacheCounters(storage_config)
        self._said = SaidOnce()
        self._chains = Chains()
        self._copies = SharedCopies()
        self._pools: dict[str, Stored] = {}
        self._waiting: dict[str, Any] = {}  # pools that could not be registered yet, for want of a link
        self._closed = False
        self._opening = threading.Lock()
        self._link: Link | None = None
        self._link_again_s = 0.0
        server_args = _server_args()
        self._arguments = namespace_names.arguments_in_name(server_args)
        self._model = namespace_names.model_of(storage_config.model_name, self._options.model, server_args)
        self._version = f"sglang {VERSION}, torch {torch.__version__.partition('+')[0]}"
        if (link := self._open()) is not None:
            link.wait_first()

    # -- pools ----------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """SGLang's KV pool."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(namespace_names.KV, mem_pool_host, flat=self._flat)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Another pool, or the KV pool once more."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = _name(host_pool_name)
        known = self._pools.get(name)
        if known is None or known.pages.pool is not host_pool:
            self._register(name, host_pool, flat=self._flat and name == namespace_names.KV)

    def _register(self, name: str, pool: Any, *, flat: bool) -> None:
        self._pools.pop(name, None)
        self._waiting.pop(name, None)
        link = self._open()
        try:
            pages = pages_of(pool, flat=flat)
            store = None
            if not isinstance(pages, NoPages):
                if link is None:
                    self._waiting[name] = pool
                    return
                spec = namespace_names.spec_of(
                    self._config,
                    self._model,
                    self._arguments,
                    name,
                    pages,
                    self._version,
                    strict=self._options.strict_version,
                )
                store = PageStore(link, spec, self._options.slice_s, self._copies)
                log.info("prefixd: pages of %s are in %s (%s)", name, spec.name, spec.layout)
            self._pools[name] = Stored(name, pages, store, namespace_names.is_shared(self._config, pool, name))
        except Exception as error:  # SGLang goes on without this pool's pages
            self._failed(f"register {name}", error)

    # -- which pages are there ------------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many pages, from the first on, are cached."""
        return self._answer(0, lambda: self._leading(namespace_names.KV, keys, extra_info), "exists")

    def exists(self, key: str) -> bool:
        """Whether a page is cached."""
        return self._answer(False, lambda: self._leading(namespace_names.KV, [key], None) > 0, "exists")

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The longest prefix of which each pool has what it needs, all such lengths, and what each pool has."""
        return self._answer(
            PoolTransferResult(0, {}, []), lambda: self._exists_v2(keys, pool_transfers or [], extra_info), "exists"
        )

    def _leading(self, name: str, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None) -> int:
        if not keys:
            return 0
        chain = self._chain(keys, extra_info)
        pool = self._pool(name)
        if pool.store is None:
            return len(keys)
        hits = pool.store.leading(chain)
        if name == namespace_names.KV:
            self._counters.asked(len(keys), hits, pool.store.page_bytes)
        return sum(hits.values())

    def _exists_v2(
        self, keys: Sequence[str], transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None
    ) -> PoolTransferResult:
        kv_pages = self._leading(namespace_names.KV, keys, extra_info)
        hits: dict[str, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        most = kv_pages
        trailing: list[tuple[PoolTransfer, TrailingPool]] = []
        until_s = time.monotonic() + self._options.slice_s
        for transfer in transfers:
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                pages = min(kv_pages, self._leading(_name(transfer.name), keys[:kv_pages], extra_info))
                if pages:
                    hits[transfer.name] = pages
                most = min(most, pages)
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                there = functools.partial(self._there, _name(transfer.name), keys, until_s)
                trailing.append((transfer, TrailingPool(len(transfer.keys or ()), there)))
            # Of BLOCK_GROUPS nothing is said: such a pool limits no prefix.
        every = self._config.tp_size > 1 or self._config.pp_size > 1 or getattr(self._config, "attn_cp_size", 1) > 1
        for transfer, pool in trailing:
            if own := usable_lengths(kv_pages, [pool], every=False):
                hits[transfer.name] = own[-1]
        lengths = usable_lengths(most, [pool for _, pool in trailing], every=every) if trailing else None
        if lengths is None:
            return PoolTransferResult(most, hits, list(range(1, most + 1)))
        return PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

    def _there(self, name: str, keys: Sequence[str], until_s: float, pages: Sequence[int]) -> list[bool]:
        """Which pages of a pool are cached; none any more when time is over."""
        if time.monotonic() >= until_s:
            return [False] * len(pages)
        pool = self._pool(name)
        if pool.store is None:
            return [True] * len(pages)
        return pool.store.each(digests_of([keys[page] for page in pages]))

    # -- loading --------------------------------------------------------------------------------------------------

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Which pages were brought into the KV pool: some from the first on."""
        return self._answer(
            [False] * len(keys), lambda: self._load(namespace_names.KV, keys, self._at(host_indices), extra_info), "get"
        )

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """The same for several pools."""
        return {
            transfer.name: self._answer(
                [False] * len(transfer.keys or ()),
                functools.partial(
                    self._load, _name(transfer.name), transfer.keys or (), self._at(transfer.host_indices), extra_info
                ),
                "get",
            )
            for transfer in transfers
        }

    def get(self, key: str, target_location: Any | None = None, target_sizes: Any | None = None) -> torch.Tensor | None:
        """A page, in the tensor that is given."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any | None = None, target_sizes: Any | None = None
    ) -> list[torch.Tensor | None]:
        """Pages, in the tensors that are given; None for one that did not come."""
        targets = list(target_locations or [])
        if not self._flat or len(targets) != len(keys):
            return [None] * len(keys)
        came = self._answer(
            [False] * len(keys), lambda: self._load(namespace_names.KV, keys, _tensors(targets), None), "get"
        )
        return [target if ok else None for target, ok in zip(targets, came, strict=True)]

    def _load(
        self,
        name: str,
        keys: Sequence[str],
        at: Callable[[PoolPages, int], PagesAt],
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> list[bool]:
        pool = self._pool(name)
        if pool.store is None or not keys:
            return [True] * len(keys)
        pages = at(pool.pages, len(keys))
        if _at_ends(name):
            outcome = pool.store.load_each(digests_of(keys), pages)
        else:
            outcome = pool.store.load(self._chain(keys, extra_info), pages)
        self._note(outcome, "get")
        self._counters.loaded(len(keys), outcome.pages, outcome.nbytes, outcome.elapsed_s, outcome.cut)
        return outcome.done

    # -- saving ---------------------------------------------------------------------------------------------------

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Which pages of the KV pool are kept: some from the first on."""
        return self._answer(
            [False] * len(keys), lambda: self._save(namespace_names.KV, keys, self._at(host_indices), extra_info), "set"
        )

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """The same for several pools."""
        return {
            transfer.name: self._answer(
                [False] * len(transfer.keys or ()),
                functools.partial(
                    self._save, _name(transfer.name), transfer.keys or (), self._at(transfer.host_indices), extra_info
                ),
                "set",
            )
            for transfer in transfers
        }

    def set(
        self,
        key: str,
        value: Any | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Keeps a page."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Keeps pages; whether all are kept."""
        if not self._flat or len(values or []) != len(keys):
            return False
        kept = self._answer(
            [False] * len(keys), lambda: self._save(namespace_names.KV, keys, _tensors(values or []), None), "set"
        )
        return all(kept)

    def _save(
        self,
        name: str,
        keys: Sequence[str],
        at: Callable[[PoolPages, int], PagesAt],
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> list[bool]:
        pool = self._pool(name)
        written_elsewhere = not self._options.save or (pool.shared and not RELEASE.is_storage_writer(self._config))
        if pool.store is None or not keys or written_elsewhere:
            return [True] * len(keys)
        pages = at(pool.pages, len(keys))
        if _at_ends(name):
            outcome = pool.store.save_each(digests_of(keys), pages)
        else:
            outcome = pool.store.save(self._chain(keys, extra_info), pages)
        self._note(outcome, "set")
        self._counters.saved(len(keys), outcome.pages, outcome.new, outcome.nbytes, outcome.elapsed_s, outcome.cut)
        return outcome.done

    # -- the rest -------------------------------------------------------------------------------------------------

    def clear(self) -> bool:
        """Has the daemon drop all pages of this rank's pools, those of other engines of the same model too."""
        return self._answer(False, self._clear, "clear")

    def _clear(self) -> bool:
        for pool in list(self._pools.values()):
            if pool.store is not None:
                pool.store.clear()
        return True

    def get_stats(self) -> Any:
        """SGLang's StorageMetrics since the last call; its attribute `prefixd` has our counters since the start."""
        return self._answer(None, self._counters.storage_metrics, "stats")

    @property
    def counters(self) -> dict[str, float]:
        """Counts since the start, see `prefixd.integrations.sglang.stats.COUNTERS`."""
        return self._counters.values()

    def close(self) -> None:
        """Ends the session; calls under way end with what they have."""
        self._closed = True
        with self._opening:
            link, self._link = self._link, None
        self._copies.close()
        if link is not None:
            self._answer(None, link.close, "close")

    def _open(self) -> Link | None:
        """The line to the daemon; None while the system gives no thread for it."""
        with self._opening:
            if self._link is not None or self._closed or time.monotonic() < self._link_again_s:
                return self._link
            name = f"sglang {self._config.pp_rank}.{self._config.tp_rank}"
            try:
                self._link = Link(self._options.address, name, self._options.timeout_s, log)
            except ClientError as error:
                self._link_again_s = time.monotonic() + _LINK_AGAIN_S
                self._failed("open", error)
            return self._link

    def _pool(self, name: str) -> Stored:
        """A registered pool. Raises LinkDown where the daemon is known to be away, PagesUnusable for one that is not
        registered."""
        pool = self._pools.get(name)
        if pool is None and name in self._waiting and self._open() is not None:
            self._register(name, self._waiting[name], flat=self._flat and name == namespace_names.KV)
            pool = self._pools.get(name)
        if pool is None:
            raise PagesUnusable(f"SGLang has registered no usable pool {name!r}")
        if pool.store is not None and (self._link is None or not self._link.up):
            raise LinkDown("the daemon is away")
        return pool

    def _chain(self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None) -> Chain:
        prefix = None if extra_info is None else extra_info.prefix_keys
        return self._chains.chain(digests_of(keys), digests_of(prefix or ()))

    def _at(self, host_indices: Any) -> Callable[[PoolPages, int], PagesAt]:
        return lambda pages, count: pages.at(host_indices, count)

    def _note(self, outcome: Outcome, what: str) -> None:
        if outcome.error is not None and not isinstance(outcome.error, LinkDown):
            self._failed(what, outcome.error)

    def _answer(self, otherwise: T, work: Callable[[], T], what: str) -> T:
        """What `work` returns; `otherwise` when it fails, whatever it fails with."""
        try:
            return work()
        except LinkDown:  # the link has said so
            return otherwise
        except Exception as error:
            self._failed(what, error)
            return otherwise

    def _failed(self, what: str, error: Exception) -> None:
        self._counters.failed()
        foreseen = isinstance(error, ClientError | PagesUnusable)
        self._said.warn(
            f"{what} {type(error).__name__}",
            f"{what} failed, SGLang goes on without these pages: {error}",
            None if foreseen else error,
        )


def _name(pool_name: Any) -> str:
    return str(getattr(pool_name, "value", pool_name))


def _at_ends(name: str) -> bool:
    """Whether a pool has pages at the ends of prefixes only. Its pages are paths by themselves: where nothing leads up
    to a page, no path could."""
    return name in _AT_ENDS or name.endswith(_AT_ENDS_SUFFIX)


def _tensors(values: Sequence[Any]) -> Callable[[PoolPages, int], PagesAt]:
    return lambda pages, count: TensorsAt(values, pages.page_bytes)


def _server_args() -> Any:
    """What SGLang was started with; None outside a server."""
    from sglang.srt.runtime_context import get_server_args

    try:
        return get_server_args()
    except ValueError:  # none has been published
        return None
