"""The storage backend that SGLang loads: maps its calls to prefixd and keeps prefixd's errors away from it.

SGLang calls from three threads: one looks up pages, one loads, one saves. After any error a call answers that pages are
missing, or not kept, and SGLang computes. A wrong option raises an error when SGLang starts.

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
from prefixd.integrations.engine.daemon_link import Link, LinkDown
from prefixd.integrations.engine.pages_by_key.chains import Chain, Chains
from prefixd.integrations.engine.pages_by_key.engine_pages import PagesAt, PagesUnusable
from prefixd.integrations.engine.pages_by_key.page_store import Outcome, PageStore
from prefixd.integrations.engine.pages_by_key.shared_copies import SharedCopies
from prefixd.integrations.sglang import namespace_names
from prefixd.integrations.sglang.contract import RELEASE, VERSION
from prefixd.integrations.sglang.hit_policies import TrailingPool, usable_lengths
from prefixd.integrations.sglang.log import RareWarnings, log
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
    """A pool and the store of its pages; `store` is None for a pool without bytes."""

    name: str
    pages: PoolPages
    store: PageStore | None
    shared: bool


class PrefixdHiCache(HiCacheStorage):
    """SGLang's L3 cache in prefixd; docs/sglang.md is the user's guide.

    The constructor raises ConfigError for an option that cannot work; no other method raises.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        extra = storage_config.extra_config or {}
        self._config = storage_config
        self._options = HiCacheOptions.parse(extra)
        self._flat = not extra.get("interface_v1")
        self._counters = HiCacheCounters(storage_config)
        self._warnings = RareWarnings()
        self._chains = Chains()
        self._copies = SharedCopies()
        self._pools: dict[str, Stored] = {}
        self._waiting: dict[str, Any] = {}  # pools to be registered once there is a link
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
        """Registers SGLang's KV pool."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(namespace_names.KV, mem_pool_host, flat=self._flat)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Registers another pool, or the KV pool once more."""
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
                    codec=self._options.codec,
                )
                store = PageStore(link, spec, self._options.slice_s, self._copies)
                log.info("prefixd: pages of %s are in %s (%s)", name, spec.name, spec.layout)
            self._pools[name] = Stored(name, pages, store, namespace_names.is_shared(self._config, pool, name))
        except Exception as error:  # SGLang goes on without this pool's pages
            self._log_error(f"register {name}", error)

    # -- which pages are there ------------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many pages, from the first on, are cached."""
        return self._answer(0, lambda: self._count_leading(namespace_names.KV, keys, extra_info), "exists")

    def exists(self, key: str) -> bool:
        """Whether a page is cached."""
        return self._answer(False, lambda: self._count_leading(namespace_names.KV, [key], None) > 0, "exists")

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

    def _count_leading(self, name: str, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None) -> int:
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
        kv_pages = self._count_leading(namespace_names.KV, keys, extra_info)
        hits: dict[str, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        most = kv_pages
        trailing: list[tuple[PoolTransfer, TrailingPool]] = []
        until_s = time.monotonic() + self._options.slice_s
        for transfer in transfers:
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                pages = min(kv_pages, self._count_leading(_name(transfer.name), keys[:kv_pages], extra_info))
                if pages:
                    hits[transfer.name] = pages
                most = min(most, pages)
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                there = functools.partial(self._cached_pages, _name(transfer.name), keys, until_s)
                trailing.append((transfer, TrailingPool(len(transfer.keys or ()), there)))
            # A pool with BLOCK_GROUPS gets no answer: it limits no prefix.
        every = self._config.tp_size > 1 or self._config.pp_size > 1 or getattr(self._config, "attn_cp_size", 1) > 1
        for transfer, pool in trailing:
            if own := usable_lengths(kv_pages, [pool], every=False):
                hits[transfer.name] = own[-1]
        lengths = usable_lengths(most, [pool for _, pool in trailing], every=every) if trailing else None
        if lengths is None:
            return PoolTransferResult(most, hits, list(range(1, most + 1)))
        return PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

    def _cached_pages(self, name: str, keys: Sequence[str], until_s: float, pages: Sequence[int]) -> list[bool]:
        """For each page of a pool whether it is cached; False for all when time is over."""
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
        """For each page whether it was loaded into the KV pool: a number of pages from the first on."""
        return self._answer(
            [False] * len(keys), lambda: self._load(namespace_names.KV, keys, self._at(host_indices), extra_info), "get"
        )

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """As `batch_get_v1`, for several pools, by name."""
        return self._move_each(self._load, transfers, extra_info, "get")

    def get(self, key: str, target_location: Any | None = None, target_sizes: Any | None = None) -> torch.Tensor | None:
        """Loads a page into the given tensor; None if it did not come."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any | None = None, target_sizes: Any | None = None
    ) -> list[torch.Tensor | None]:
        """Loads pages into the given tensors; None for one that did not come."""
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
        self._log_outcome(outcome, "get")
        self._counters.loaded(len(keys), outcome.pages, outcome.nbytes, outcome.elapsed_s, outcome.cut)
        return outcome.done

    # -- saving ---------------------------------------------------------------------------------------------------

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """For each page of the KV pool whether it is kept: a number of pages from the first on."""
        return self._answer(
            [False] * len(keys), lambda: self._save(namespace_names.KV, keys, self._at(host_indices), extra_info), "set"
        )

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """As `batch_set_v1`, for several pools, by name."""
        return self._move_each(self._save, transfers, extra_info, "set")

    def set(
        self,
        key: str,
        value: Any | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Saves a page; returns whether it is kept."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Saves pages; returns whether all are kept."""
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
        self._log_outcome(outcome, "set")
        self._counters.saved(len(keys), outcome.pages, outcome.new, outcome.nbytes, outcome.elapsed_s, outcome.cut)
        return outcome.done

    # -- the rest -------------------------------------------------------------------------------------------------

    def clear(self) -> bool:
        """Drops all pages of this rank's pools, also those of other engines with the same model."""
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
        """Counts since the start, by the names in `page_counters.COUNTERS`."""
        return self._counters.values()

    def close(self) -> None:
        """Ends the session; calls under way end with the pages that they have."""
        self._closed = True
        with self._opening:
            link, self._link = self._link, None
        self._copies.close()
        if link is not None:
            self._answer(None, link.close, "close")

    def _open(self) -> Link | None:
        """The link to the daemon, opened at the first call; None while the system gives no thread for it."""
        with self._opening:
            if self._link is not None or self._closed or time.monotonic() < self._link_again_s:
                return self._link
            name = f"sglang {self._config.pp_rank}.{self._config.tp_rank}"
            try:
                self._link = Link(self._options.address, name, self._options.timeout_s, log)
            except ClientError as error:
                self._link_again_s = time.monotonic() + _LINK_AGAIN_S
                self._log_error("open", error)
            return self._link

    def _pool(self, name: str) -> Stored:
        """A registered pool. Raises LinkDown if the daemon is away, PagesUnusable for an unregistered pool."""
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

    def _move_each(
        self, move: Callable[..., list[bool]], transfers: Sequence[PoolTransfer], extra_info: Any, what: str
    ) -> dict[str, list[bool]]:
        def move_one(transfer: PoolTransfer) -> list[bool]:
            return move(_name(transfer.name), transfer.keys or (), self._at(transfer.host_indices), extra_info)

        return {
            transfer.name: self._answer([False] * len(transfer.keys or ()), functools.partial(move_one, transfer), what)
            for transfer in transfers
        }

    def _log_outcome(self, outcome: Outcome, what: str) -> None:
        if outcome.error is not None and not isinstance(outcome.error, LinkDown):
            self._log_error(what, outcome.error)

    def _answer(self, otherwise: T, work: Callable[[], T], what: str) -> T:
        """The result of `work`, or `otherwise` after any error."""
        try:
            return work()
        except LinkDown:  # the link logs it
            return otherwise
        except Exception as error:
            self._log_error(what, error)
            return otherwise

    def _log_error(self, what: str, error: Exception) -> None:
        self._counters.failed()
        foreseen = isinstance(error, ClientError | PagesUnusable)
        self._warnings.warn(
            f"{what} {type(error).__name__}",
            f"{what} failed, SGLang goes on without these pages: {error}",
            None if foreseen else error,
        )


def _name(pool_name: Any) -> str:
    return str(getattr(pool_name, "value", pool_name))


def _at_ends(name: str) -> bool:
    """Whether a pool has pages at the ends of prefixes only. Such pages are paths of their own, since the pages before
    them are missing."""
    return name in _AT_ENDS or name.endswith(_AT_ENDS_SUFFIX)


def _tensors(values: Sequence[Any]) -> Callable[[PoolPages, int], PagesAt]:
    return lambda pages, count: TensorsAt(values, pages.page_bytes)


def _server_args() -> Any:
    """SGLang's `ServerArgs`; None outside a server."""
    from sglang.srt.runtime_context import get_server_args

    try:
        return get_server_args()
    except ValueError:  # none has been published
        return None
