"""The connector in vLLM's scheduler: decides which blocks are loaded and saved."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import vllm
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

from prefixd.client import ClientError, NamespaceSpec, PartShape
from prefixd.integrations.engine.connector_counters import ConnectorCounters
from prefixd.integrations.engine.copying.group_pages import NO_BLOCK
from prefixd.integrations.engine.daemon_link import Link
from prefixd.integrations.engine.geometry import Geometry
from prefixd.integrations.engine.jobs import LoadJob, Namespaced, Outcomes
from prefixd.integrations.engine.options import codec_for
from prefixd.integrations.engine.saving.branches import Branches
from prefixd.integrations.engine.saving.save_queue import EngineRequest, SaveQueue
from prefixd.integrations.engine.step_times import StepTimes
from prefixd.integrations.engine.waiting.computing_once import ComputingOnce
from prefixd.integrations.engine.waiting.prefix_lookups import Lookups
from prefixd.integrations.engine.waiting.ready import time_to_ready
from prefixd.integrations.engine.waiting.seen_prefix import SeenPrefix
from prefixd.integrations.vllm.log import log
from prefixd.integrations.vllm.naming.environment import environment_in_name
from prefixd.integrations.vllm.naming.media import MediaRequest, MediaTokens
from prefixd.integrations.vllm.naming.media_content import MediaContents, RequestMedia
from prefixd.integrations.vllm.naming.model_name import Adapters, model_name
from prefixd.integrations.vllm.naming.page_packing import Packing
from prefixd.integrations.vllm.options import ConnectorOptions
from prefixd.integrations.vllm.request_options import (
    NO_REQUEST_OPTIONS,
    RequestOptions,
    read_request_options,
    traceparent_of,
)
from prefixd.integrations.vllm.step_messages import Orders, Report
from prefixd_scheduler import CostModel, Distance, LookAhead, Regret

if TYPE_CHECKING:
    from prefixd.integrations.vllm.kv_events.block_events import BlockEvents

_NULL_BLOCK = 0  # vLLM's id of a missing block: outside the group's window, or freed
_PINNED_SHARE = 0.5  # of vLLM's blocks, at the most, may wait to be saved
_BUSY_PATIENCE_S = 0.002
_IDLE_PATIENCE_S = 0.02  # in steps that compute nothing
_UNLEASED_S = 0.05  # a lease takes as long as a step of a small model, and recently matched memory is still there
_YOUNG_SAVE_S = 0.05
_EVENTS_S = 0.2  # after a save, time in which the daemon sends the change for KV events
_LEAST_OBSERVED_TOKENS = 32
_COMPLAINT_S = 60.0

# Assumed costs of loads until enough were observed: a single load that was delayed by chance must not count for all.
_ASSUMED_BYTES_PER_S = {Distance.CPU: 2e9, Distance.DISK: 3e8, Distance.REMOTE: 1e8}
_ASSUMED_OVER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Loading:
    """A load job that the workers have."""

    blocks: int
    distance: Distance
    start: int
    """The first loaded token."""
    lease_s: float
    """Seconds that the daemon took for its lease."""


class SchedulerHalf:
    """Looks up the prefixes of requests, makes load and save jobs, and learns from the workers' reports."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        geometry: Geometry,
        options: ConnectorOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._geometry = geometry
        self._clock = clock
        self.link = Link(options.address, "vllm scheduler", options.timeout_s, log)
        self.link.wait_first()
        self._cost = CostModel()
        for distance, bytes_per_s in _ASSUMED_BYTES_PER_S.items():
            self._cost.observe_load(distance, _ASSUMED_OVER_BYTES, _ASSUMED_OVER_BYTES / bytes_per_s)
        self.counters = ConnectorCounters()
        cost = self._cost if options.recompute_if_slower else None
        once: ComputingOnce | None = None
        if options.save and options.compute_once_s is not None:
            once = ComputingOnce(self.link, geometry, cost, clock, self.counters, options.compute_once_s)
        self.lookups = Lookups(
            self.link,
            geometry,
            LookAhead(self._cost, clock, None if options.prefetch == "auto" else options.prefetch),
            cost,
            clock,
            unleased_s=_UNLEASED_S,
            once=once,
        )
        self.lookups.patience_s = _IDLE_PATIENCE_S
        self._blocks: Any = None
        self.saves = SaveQueue(
            geometry,
            pin=lambda ids: self._blocks.touch([self._blocks.blocks[block] for block in ids]),
            unpin=lambda ids: self._blocks.free_blocks([self._blocks.blocks[block] for block in ids]),
            hash_tokens=resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1],
            most_pinned=max(1, int(_PINNED_SHARE * kv_cache_config.num_blocks)),
            no_block=_NULL_BLOCK,
            every=options.resume_every,
        )
        self.events: BlockEvents | None = None
        if vllm_config.kv_events_config is not None and vllm_config.kv_events_config.enable_kv_cache_events:
            from prefixd.integrations.vllm.kv_events.block_events import BlockEvents

            self.events = BlockEvents(vllm_config, self.link, geometry, self.saves.hash_tokens)
        self._saved_s = -math.inf
        self._block_tokens = {group.index: group.block_tokens for group in geometry.groups}
        self._branches = Branches()
        self._names: dict[tuple[str, bytes], NamespaceSpec] = {}
        self._adapters = Adapters()
        version = vllm.__version__ if options.strict_version else None
        self._model_facts = model_name(vllm_config, version, environment_in_name())
        self._reset_mark = ""  # ends the names of namespaces after a reset
        self._model = ""  # until the workers have reported how their bytes lie
        self._shapes: tuple[PartShape | None, ...] = ()
        self._codec = ""
        self._unnamed: dict[str, Any] = {}  # requests that came before that
        self._hits: dict[str, int] = {}  # by request, the first token that was found for it
        self._requests: dict[str, Any] = {}
        self._contents = MediaContents(
            2 * kv_cache_config.num_blocks,
            believed=vllm_config.ec_transfer_config is None,  # else embeddings come under other processes' identifiers
        )
        self._media: dict[str, RequestMedia] = {}
        self._request_options: dict[str, RequestOptions] = {}
        self._complained_s = -math.inf
        self._new_loads: list[LoadJob] = []
        self._loading: dict[str, _Loading] = {}
        self._loaded = Outcomes()  # loads that some of the ranks have ended
        self._regret = Regret()
        self._steps = StepTimes()
        self._uncertain_step = 0  # the last step that computes on bytes it waits for; 0: all such steps have ended
        self._last_save_s = 0.0

    def bind_block_pool(self, blocks: Any) -> None:
        self._blocks = blocks

    def name_model(self, packings: Sequence[Packing]) -> None:
        """Names the model, by the workers' digests of how their bytes lie, and looks up the requests that have waited
        for the name."""
        # Engines with other block sizes share nothing; under one name the daemon would refuse the second of them.
        packing = "-".join(dict.fromkeys(packing.digest for packing in packings))
        self._model = f"{self._model_facts}/{self._geometry.block_tokens}/{packing}{self._reset_mark}"
        if self._options.codec_on_device is None:
            self._shapes = packings[0].shapes if len({packing.shapes for packing in packings}) == 1 else ()
            self._codec = codec_for(self._options.codec, self._shapes, log)
        else:
            self._codec = "exact"  # the objects that the workers make are not coded again
        if self.events is not None:
            self.events.begin(self._spec_of(self._model, b""))
        unnamed, self._unnamed = self._unnamed, {}
        for request in unnamed.values():
            self.add_request(request)
            if request.num_computed_tokens:  # one that reads no cache has not waited
                self.lookups.note_turn(request.request_id)
                self.lookups.refuse(request.request_id)

    def add_request(self, request: Any) -> None:
        if not self._model:
            self._unnamed[request.request_id] = request
            return
        if request.resumable:
            self._contents.distrust()  # vLLM does not show connectors the media that such a request brings later
        self._media_of(request)  # for every request, since vLLM's caches have the media of all
        spec = self._spec(request)
        if spec is None:
            return
        self._requests[request.request_id] = request
        if self.events is not None:
            self.events.note_request(spec, request)
        tokens = request.prompt_token_ids
        options, wrong = read_request_options(request.kv_transfer_params, len(tokens))
        if options != NO_REQUEST_OPTIONS:
            self._request_options[request.request_id] = options
        if wrong:
            self._warn_rarely(
                "prefixd: of the kv_transfer_params of request %r is ignored: %s", request.request_id, "; ".join(wrong)
            )
        known, caller = self._known_tokens(request, tokens), traceparent_of(request)
        self.lookups.add(request.request_id, spec, known, saved=not options.read_only, traceparent=caller)

    def find_prefix(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        if request.request_id in self._unnamed:
            return None, False  # the next step's report has the name
        if request.skip_reading_prefix_cache or (request.num_preemptions and request.request_id in self._loading):
            return 0, False
        most = self._geometry.most_loadable(request.num_tokens)
        found = self.lookups.loadable_tokens(request.request_id, local_tokens, most)
        if not found:
            return found, False
        self._hits[request.request_id] = local_tokens
        return found, self._options.load == "async"

    def prepare(self, request: Any, local_tokens: int) -> None:
        most = self._geometry.most_loadable(request.num_tokens)
        self.lookups.prepare(request.request_id, local_tokens, most)

    def ready_s(self, request: Any, local_tokens: int, seen: SeenPrefix) -> float:
        each = self._geometry.block_tokens
        return time_to_ready(
            self._cost, request.num_tokens, local_tokens, seen, lambda tokens: self._geometry.nbytes(-(-tokens // each))
        )

    def start_load(self, request: Any, tables: tuple[list[int], ...], external_tokens: int) -> None:
        request_id = request.request_id
        start = self._hits.pop(request_id, None)
        self.lookups.note_turn(request_id)
        self._retain_cached(request)
        if request_id not in self.lookups or request_id in self._loading:
            return
        if external_tokens and start is not None:
            job = self._load_job(request, tables, start, start + external_tokens)
            distance = max(self.lookups.sources(request_id, start, external_tokens), default=Distance.CPU)
            self._loading[request_id] = _Loading(job.blocks, distance, start, self.lookups.lease_s(request_id))
            self._new_loads.append(job)
            self.lookups.end_partial_lease(request_id)
        else:
            self.lookups.refuse(request_id)

    def hit_distances(self, request: Any, external_tokens: int) -> dict[Distance, int]:
        loading = self._loading.get(request.request_id)
        return self.lookups.sources(request.request_id, loading.start if loading else 0, external_tokens)

    def make_orders(self, step: Any) -> Orders:
        now_s = self._clock()
        number = self._steps.begin(step.total_num_scheduled_tokens, now_s)
        if step.has_sync_kv_loads:
            self._uncertain_step = number
        for request_id in step.preempted_req_ids or ():
            self.saves.stop(request_id)
            if (request := self._requests.get(request_id)) is not None:
                self.lookups.note_preempted(request_id, self._known_tokens(request, request.all_token_ids))
        # Blocks that a step computes on bytes that it still waits for, from prefixd or from a connector beside it, are
        # saved after the step: the bytes may fail to come, and other requests of the step may compute on them too.
        state = step.kv_connector_block_state
        if self._options.save and self.link.up and not self._uncertain_step and state is not None:
            states_of = state.boundary_state_offloads
            for request_id, tokens in step.num_scheduled_tokens.items():
                self._advance(request_id, tokens, state.resolve_block_ids, states_of.get(request_id, ()))
        if self.lookups.abandoned:
            self.counters.abandoned(self.lookups.abandoned)
            self.lookups.abandoned = 0
        self.lookups.idle = idle = step.total_num_scheduled_tokens == 0
        self.lookups.patience_s = _IDLE_PATIENCE_S if idle else _BUSY_PATIENCE_S
        loads, self._new_loads = self._new_loads, []
        saves = self.saves.take_jobs()
        if saves:
            self._last_save_s = now_s
        return Orders(loads, saves, idle, number, not self._model)

    def handle_report(self, report: Report) -> None:
        if report.packings and not self._model:
            self.name_model(report.packings)
        if report.step >= self._uncertain_step:
            self._uncertain_step = 0
        tokens, elapsed_s = self._steps.ended(report.step, self._clock())
        if tokens >= _LEAST_OBSERVED_TOKENS:
            self._cost.observe_compute(tokens, elapsed_s)
        outcomes = report.outcomes
        for job_id, ranks in outcomes.saves.items():
            self.saves.acknowledge(job_id, ranks)
            self._saved_s = self._clock()
        self._loaded.merge(Outcomes(loads=outcomes.loads))
        for request_id in outcomes.loads:
            ranks, outcome = self._loaded.loads[request_id]
            if ranks < self._geometry.ranks:
                continue
            del self._loaded.loads[request_id]
            loading = self._loading.pop(request_id)
            if outcome.failed_blocks:
                self.lookups.note_failed_load(request_id)
            else:
                nbytes = self._geometry.nbytes(loading.blocks)
                self._cost.observe_load(loading.distance, nbytes, loading.lease_s + outcome.elapsed_s)
                if (waited_s := self.lookups.waited_s(request_id)) is not None:
                    compute_s = self._cost.compute_s(loading.blocks * self._geometry.block_tokens, loading.start)
                    self.counters.judged(waited_s, self._regret.judge(waited_s, compute_s))
                self.lookups.refuse(request_id)

    @property
    def needs_steps(self) -> bool:
        """Whether vLLM must make steps without requests: for saves under way, and to take events."""
        has_events = self.events is not None and (self.events.waiting or self._clock() - self._saved_s < _EVENTS_S)
        return self.saves.under_way or has_events

    def close(self) -> None:
        """Ends the session."""
        if self.events is not None:
            self.events.close()
        self.link.close()

    @property
    def frees_soon(self) -> bool:
        """Whether saves are about to unpin blocks."""
        return self.saves.under_way and self._clock() - self._last_save_s < _YOUNG_SAVE_S

    def finish_request(self, request: Any, tables: tuple[list[int], ...]) -> None:
        request_id = request.request_id
        self._unnamed.pop(request_id, None)
        known = self._requests.pop(request_id, None)
        if known is not None and request_id in self.saves and self._options.save and self.link.up:
            # The last token was sampled, so its KV is not computed.
            computed = min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens - 1)
            computed = min(computed, self._sure_tokens(request))
            cached = partial(self._cached, request)
            self.saves.finish(request_id, self._engine_request(request), tables, computed, cached)
        self.saves.stop(request_id)
        if self._sure_tokens(request) < request.num_tokens:
            self.counters.unsure_media()
        self._media.pop(request_id, None)
        self._hits.pop(request_id, None)
        self._request_options.pop(request_id, None)
        self.lookups.forget(request_id, request.num_computed_tokens)

    def reset_cache(self) -> None:
        """Gives this engine namespaces of its own until its next start, as vLLM drops its cache (after a change of
        weights)."""
        self.saves.clear()
        self.lookups.clear()
        self._requests.clear()
        self._request_options.clear()
        self._names.clear()
        if self.events is not None:
            self.events.reset()
        model = self._model.removesuffix(self._reset_mark)
        self._reset_mark = f"#{uuid4().hex}"
        self._model = model and model + self._reset_mark

    # -- inside -------------------------------------------------------------------------------------------------

    def _spec(self, request: Any) -> NamespaceSpec | None:
        """The request's namespace; None for one that is not cached."""
        if not self._model or request.prompt_token_ids is None or request.pooling_params:
            return None
        if request.prompt_embeds is not None or request.resumable:
            return None
        lora = request.lora_request
        name = self._model if lora is None else f"{self._model}/{self._adapters.name(lora)}"
        salt = (request.cache_salt or "").encode()
        spec = self._names.get((name, salt))
        if spec is None:
            spec = self._spec_of(name, salt)
            if len(self._names) > 4096:
                self._names.clear()
            self._names[name, salt] = spec
        return spec

    def _spec_of(self, name: str, salt: bytes) -> NamespaceSpec:
        return self._geometry.spec(name, salt, self._shapes, self._codec)

    def _retain_cached(self, request: Any) -> None:
        """Sets a request's priorities on the cached blocks of its prompt; saves carry them for the other blocks."""
        options = self._request_options.get(request.request_id, NO_REQUEST_OPTIONS)
        if not options.retention:
            return
        seen, spec = self.lookups.seen(request.request_id), self._spec(request)
        if spec is None or seen is None or not seen.tokens:
            return
        tokens = np.asarray(self._identified(request)[: seen.tokens], np.uint32)

        async def retain() -> int:
            return await (await self.link.cache(spec)).retain(tokens, options.retention)

        self.link.start(retain).add_done_callback(self._retained)

    def _retained(self, done: Future[int]) -> None:
        error = None if done.cancelled() else done.exception()
        if isinstance(error, ClientError):
            self._warn_rarely("prefixd: cached blocks do not get the priorities that a request asks for: %s", error)
        else:
            self.link.report(done)

    def _warn_rarely(self, message: str, *about: object) -> None:
        """Logs a warning at most every `_COMPLAINT_S`: wrong options of requests must not fill the log."""
        if self._clock() - self._complained_s > _COMPLAINT_S:
            self._complained_s = self._clock()
            log.warning(message, *about)

    def _cached(self, request: Any, group: int, number: int) -> int:
        """The id of a request's block, by its number in a group, in vLLM's own cache; else the null block."""
        each = self._block_tokens[group] // self.saves.hash_tokens
        hashes = request.block_hashes
        if (number + 1) * each > len(hashes):
            return _NULL_BLOCK
        found = self._blocks.get_cached_block(hashes[(number + 1) * each - 1], [group])
        return int(found[0].block_id) if found else _NULL_BLOCK

    def _identified(self, request: Any, tokens: Sequence[int] | None = None) -> Sequence[int]:
        """The request's token ids (None: all) with ids that stand for its media. Slice it: listing all is slow."""
        tokens = request.all_token_ids if tokens is None else tokens
        media = self._media_of(request)
        return tokens if media is None else MediaTokens(tokens, media.media, self._geometry.block_tokens)

    def _known_tokens(self, request: Any, tokens: Sequence[int]) -> list[int]:
        """The first of `tokens`, up to a medium of unknown content, with ids that stand for media."""
        media = self._media_of(request)
        known = len(tokens) if media is None else int(min(len(tokens), media.known_tokens))
        return list(self._identified(request, tokens)[:known])

    def _media_of(self, request: Any) -> RequestMedia | None:
        """The request's media; None without any. The first call for a request is made at its arrival."""
        if not request.mm_features:
            return None
        media = self._media.get(request.request_id)
        if media is None:
            media = self._media[request.request_id] = self._contents.of(request.mm_features)
            if math.isfinite(self._contents.sure_tokens(media)):
                self._warn_rarely(
                    "prefixd: request %r is not saved from its media on: their content cannot be told, or a medium "
                    "with other content had the same identifier (uuid) before. Give each medium a uuid of its own, and "
                    "leave --mm-processor-cache-type at lru; media of sessions with streaming input, and beside an "
                    "--ec-transfer-config, are never saved",
                    request.request_id,
                )
        return media

    def _sure_tokens(self, request: Any) -> int:
        """How many of the request's tokens have KV that certainly belongs to its media."""
        media = self._media_of(request)
        sure = math.inf if media is None else self._contents.sure_tokens(media)
        return int(min(sure, request.num_tokens))

    def _engine_request(self, request: Any) -> EngineRequest:
        """The request as `SaveQueue` reads it."""
        saved: EngineRequest = request
        return MediaRequest(self._identified(request), request.block_hashes) if request.mm_features else saved

    def _load_job(self, request: Any, tables: tuple[list[int], ...], start: int, end: int) -> LoadJob:
        geometry = self._geometry
        first, last = start // geometry.block_tokens, -(-end // geometry.block_tokens)
        ids = []
        for group in geometry.groups:
            table = tables[group.index]
            wanted = range(start // group.block_tokens, end // group.block_tokens)
            every = range(
                first * geometry.block_tokens // group.block_tokens, last * geometry.block_tokens // group.block_tokens
            )
            ids.append(
                tuple(table[place] if place in wanted and table[place] != _NULL_BLOCK else NO_BLOCK for place in every)
            )
        spec = self._spec(request)
        assert spec is not None
        tokens = np.asarray(self._identified(request)[: last * geometry.block_tokens], "<u4").tobytes()
        return LoadJob(
            request.request_id,
            Namespaced(spec, tokens),
            first,
            last - first,
            tuple(ids),
            self._options.load == "layerwise",
            self.lookups.take_counted_match(request.request_id),
            traceparent_of(request),
        )

    def _advance(
        self,
        request_id: str,
        tokens: int,
        tables_of: Callable[[str], Any],
        states: Sequence[tuple[int, int, int]],
    ) -> None:
        request, options = self._requests.get(request_id), self._request_options.get(request_id, NO_REQUEST_OPTIONS)
        if request is None or options.read_only:
            return
        if request_id not in self.saves:
            seen = self.lookups.seen(request_id)
            spec = self._spec(request)
            if seen is None or spec is None:
                return
            each = self._geometry.block_tokens // self.saves.hash_tokens
            branch = self._branches.follow(request.block_hashes[each - 1 :: each]) * self._geometry.block_tokens
            caller = traceparent_of(request)
            self.saves.begin(request_id, spec, seen.tokens, request.num_tokens, branch, options.retention, caller)
        computed = min(request.num_computed_tokens + tokens, self._sure_tokens(request))
        self.saves.advance(request_id, self._engine_request(request), _Tables(request_id, tables_of), computed, states)


class _Tables:
    """A request's block ids, listed at the first use: the list is too long to make in every step."""

    def __init__(self, request_id: str, tables_of: Callable[[str], Sequence[Sequence[int]]]) -> None:
        self._request_id = request_id
        self._tables_of = tables_of
        self._tables: Sequence[Sequence[int]] | None = None

    def __getitem__(self, group: int) -> Sequence[int]:
        if self._tables is None:
            self._tables = self._tables_of(self._request_id)
        return self._tables[group]
