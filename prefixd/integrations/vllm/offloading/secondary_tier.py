"""The secondary tier that vLLM's `OffloadingConnector` loads by its module path.

    lookup                      a thread of its own answers; until then vLLM asks again, one step later
    submit_store, submit_load   one thread each; `get_finished_jobs` returns the ended jobs
    drain_jobs                  vLLM drops its cache: from then on this engine's chunks are its own

vLLM's scheduler calls from one thread, which never waits for the daemon. After any error a chunk counts as missing, or
not kept, and vLLM computes. A configuration that cannot work raises an error when vLLM starts.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from prefixd.client import ClientError
from prefixd.integrations.engine.daemon_link import Link, LinkDown
from prefixd.integrations.engine.pages_by_key.engine_pages import PagesUnusable
from prefixd.integrations.engine.pages_by_key.page_store import SINGLES, Outcome, PageStore
from prefixd.integrations.engine.pages_by_key.shared_copies import SharedCopies
from prefixd.integrations.vllm.log import log
from prefixd.integrations.vllm.offloading.naming import namespace_of, own_name, prefix_groups
from prefixd.integrations.vllm.offloading.options import TierOptions
from prefixd.integrations.vllm.offloading.row_copies import Rows
from prefixd.integrations.vllm.offloading.tier_releases import (
    base_arguments,
    callers_configuration,
    chunk_ids,
    job_result,
)
from prefixd_swap import started_threads

_JOB_S = 10.0  # a longer job ends with the chunks that have come: vLLM keeps memory of its pool for the rest
_GROUP_BYTES = 4  # at the end of a key


class PrefixdTier(SecondaryTierManager):
    """Stores vLLM's offloaded chunks in prefixd. `TierOptions` are its options, docs/vllm.md is the guide.

    Raises ConfigError, which ends vLLM's start, for a configuration that cannot work.
    """

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(
            **base_arguments(
                offloading_spec=offloading_spec,
                primary_kv_view=primary_kv_view,
                tier_type=tier_type,
                backpressure_detector=backpressure_detector,
            )
        )
        self._options = TierOptions.parse(options)
        vllm_config, kv_cache_config = callers_configuration()
        self._prefix_groups = prefix_groups(kv_cache_config)
        device = f"{current_platform.device_type} {current_platform.get_device_capability()}"
        row_bytes = primary_kv_view.nbytes // len(primary_kv_view)
        self._spec = namespace_of(
            vllm_config, kv_cache_config, offloading_spec.config, row_bytes, device, self._options.codec
        )
        self._rows = Rows(primary_kv_view)
        self._copies = SharedCopies()
        self._link = Link(self._options.address, "vllm offloading", self._options.timeout_s, log)
        self._link.wait_first()
        self._store = PageStore(self._link, self._spec, _JOB_S, self._copies)
        self._loads = started_threads(1, "prefixd-tier-load")
        self._stores = started_threads(1, "prefixd-tier-store")
        self._jobs: dict[int, Future[None]] = {}
        self._finished: deque[tuple[Any, Collection[bytes]]] = deque()  # results, and keys of chunks that did not come
        self._lookups = _Lookups(self, tier_type)
        self._requests: set[str] = set()
        self._outdated: set[str] = set()  # requests that computed before vLLM dropped its cache
        self._last_error = ""  # in the log
        log.info("prefixd: chunks of %d bytes are in %s (%s)", row_bytes, self._spec.name, self._spec.layout)

    # -- which chunks are there -----------------------------------------------------------------------------------

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        found = self._lookups.lookup(key, req_context) if self._link.up else False
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def cached(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key whether its chunk is cached; for use in the thread of the lookups."""
        groups: dict[int, list[int]] = {}
        for place, key in enumerate(keys):
            groups.setdefault(int.from_bytes(key[-_GROUP_BYTES:], "big"), []).append(place)
        there = [False] * len(keys)
        try:
            for group, places in groups.items():
                for first in range(0, len(places), SINGLES):
                    some = places[first : first + SINGLES]
                    found = self._store.each(_digests(keys[place] for place in some))
                    for place, one in zip(some, found, strict=True):
                        there[place] = one
                    if group in self._prefix_groups and not all(found):
                        break  # chunks behind a missing one are useless
        except (LinkDown, ClientError) as error:
            self._log_error("lookup", error)
        return there

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        self._requests.add(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._requests.discard(req_context.req_id)
        self._outdated.discard(req_context.req_id)
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    # -- copies ---------------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: Any) -> None:
        if not self._options.save or not self._link.up or job_metadata.req_context.req_id in self._outdated:
            self._finished.append((job_result(job_id=job_metadata.job_id, success=False), ()))
            return
        self._start(self._stores.submit, job_metadata, partial(self._save, job_metadata))

    def submit_load(self, job_metadata: Any) -> None:
        self._start(self._loads.submit, job_metadata, partial(self._load, job_metadata))

    def get_finished_jobs(self) -> Iterable[Any]:
        results = []
        while self._finished:
            result, failed = self._finished.popleft()
            self._jobs.pop(result.job_id, None)
            self._lookups.mark_miss(failed)  # otherwise vLLM would load them again and again
            results.append(result)
        return results

    def drain_jobs(self) -> None:
        """Waits for all jobs. vLLM calls it before it drops its cache, as after a change of weights."""
        wait(list(self._jobs.values()))
        self._outdated |= self._requests
        self._spec = dataclasses.replace(self._spec, name=own_name(self._spec.name))
        self._store = PageStore(self._link, self._spec, _JOB_S, self._copies)

    def shutdown(self) -> None:
        """Ends the session after the jobs under way; cancels the others."""
        self._lookups.shutdown()
        for threads in (self._loads, self._stores):
            threads.shutdown(cancel_futures=True)
        self._copies.close()
        self._link.close()
        self._rows.close()

    def _start(self, submit: Callable[..., Future[None]], job: Any, work: Callable[[], Outcome]) -> None:
        self._jobs[job.job_id] = submit(self._run, job, list(job.keys), work)

    def _run(self, job: Any, keys: list[bytes], work: Callable[[], Outcome]) -> None:
        """Runs a job in its thread and queues its result, also after an error."""
        try:
            outcome = work()
        except Exception as error:
            outcome = Outcome([False] * len(keys), error=error)
        if outcome.error is not None:
            self._log_error("load" if job.is_promotion else "store", outcome.error)
        came = tuple(key for key, done in zip(keys, outcome.done, strict=True) if done)
        result = job_result(
            job_id=job.job_id,
            success=len(came) == len(keys),
            successful_keys=came if job.is_promotion and came else None,
            transfer_time=outcome.elapsed_s,
            transfer_bytes=outcome.nbytes,
        )
        failed = [key for key, done in zip(keys, outcome.done, strict=True) if not done] if job.is_promotion else []
        self._finished.append((result, failed))

    def _load(self, job: Any) -> Outcome:
        """Loads from the last chunk to the first, so that a prefix's end is least recently used and evicted first."""
        keys, chunks = list(job.keys)[::-1], chunk_ids(job)[::-1]
        outcome = self._store.load_each(_digests(keys), self._rows.at(chunks))
        outcome.done.reverse()
        return outcome

    def _save(self, job: Any) -> Outcome:
        return self._store.save_each(_digests(job.keys), self._rows.at(chunk_ids(job)))

    def _log_error(self, what: str, error: Exception) -> None:
        if isinstance(error, LinkDown) or self._last_error == f"{what} {error}":  # the link logs LinkDown
            return
        self._last_error = f"{what} {error}"
        trace = None if isinstance(error, ClientError | PagesUnusable) else error
        log.warning("prefixd: %s failed, vLLM goes on without these chunks: %s", what, error, exc_info=trace)


class _Lookups(AsyncLookupManager):
    """vLLM's thread for lookups, and its memory of the answers for as long as a request lives."""

    def __init__(self, tier: PrefixdTier, tier_type: str) -> None:
        self._tier = tier
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[bytes], req_context: Any) -> Iterable[bool]:
        return self._tier.cached(keys)


def _digests(keys: Iterable[bytes]) -> bytes:
    """A digest of 32 bytes for each key: vLLM's keys are a hash, of a length by its algorithm, and the group."""
    return b"".join(hashlib.sha256(b"prefixd offload key " + key).digest() for key in keys)
