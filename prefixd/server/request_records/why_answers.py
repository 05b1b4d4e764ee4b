"""Answers `Why`: a request's record, what was found out about it since, and the main cause of its late first token."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

import numpy as np

from prefixd.base.errors import InvalidArgumentError, NotFoundError
from prefixd.base.tiers import Tier
from prefixd.cache import TieredCache
from prefixd.observability.causes import judge
from prefixd.observability.eviction_journal import Cause, Keys, Removal
from prefixd.observability.explanations import Difference, Evicted, Findings
from prefixd.observability.missing_blocks import MissingBlocks
from prefixd.observability.request_log import RequestLog
from prefixd.observability.request_record import Kind, RequestRecord, Stage, StageName
from prefixd.server.request_records.nearest_prefix import find_difference, find_elsewhere
from prefixd.serving.generation import Generation
from prefixd.v1 import admin_pb2 as pb

_MOST = 64
"""Requests of one answer that asks for the last ones."""
_FOUND_KEPT = 256


class WhyAnswers:
    """Explains requests. Looks into the cache and into the journal of evictions only when asked, and for a request that
    has ended only once: `prefixd top` asks for the last ones every 2 s, and each takes some milliseconds.

    Args:
        cache: the cache.
        generation: has the records of requests, and the models' tokenizers.
    """

    def __init__(self, cache: TieredCache, generation: Generation) -> None:
        self._cache = cache
        self._generation = generation
        self._log: RequestLog = generation.records
        self._found: OrderedDict[int, tuple[RequestRecord, Findings]] = OrderedDict()  # by the record's id()

    async def answer(self, request: pb.WhyRequest) -> pb.WhyResponse:
        """Explains the requests that are asked for.

        Raises:
            InvalidArgumentError: neither an id nor a number was given, or too many are asked for.
            NotFoundError: no request with this id is remembered.
        """
        return pb.WhyResponse(requests=[await self._explain(record) for record in self._chosen(request)])

    def _chosen(self, request: pb.WhyRequest) -> list[RequestRecord]:
        if request.request_id:
            records = self._log.find(request.request_id)
            if not records:
                kept = "none: server.request_records is 0" if not self._log.kept else f"the last {self._log.kept:,}"
                raise NotFoundError(
                    f"no request {request.request_id[:256]!r} is remembered (the daemon remembers {kept}); "
                    "`prefixd why --last 20` shows the last ones"
                )
            return records
        if not request.last:
            raise InvalidArgumentError("no request was named; send request_id, or last = 10 for the last ten")
        if request.last > _MOST:
            raise InvalidArgumentError(f"last is {request.last}; ask for at most {_MOST} requests")
        kinds = None if request.calls else (Kind.GENERATE,)
        return self._log.last(request.last, kinds=kinds)

    async def _explain(self, record: RequestRecord) -> pb.RequestInfo:
        now_s = self._log.now_s
        findings = await self._findings(record)
        verdict = judge(record, findings, now_s)
        info = pb.RequestInfo(
            id=record.id,
            client_id=record.client_id,
            trace_id="" if record.trace is None else record.trace.trace_id,
            kind=record.kind,
            method=record.method,
            tenant=record.tenant,
            model=record.model,
            arrived_unix_s=record.arrival_unix_s,
            age_s=now_s - record.arrival_s,
            handed_over_s=_since(record, record.handed_over_s),
            first_token_s=_since(record, record.first_token_s),
            ended_s=_since(record, record.ended_s),
            outcome=record.outcome,
            status=record.status,
            reason=record.reason,
            sequences=record.sequences,
            prompt_tokens=record.prompt_tokens,
            output_tokens=record.output_tokens,
            blocks=record.blocks,
            altered_blocks=record.altered_blocks,
            found=_by_tier(record.found_tokens),
            used=_by_tier(record.hit_tokens or ()),
            stages=[_stage(record, stage) for stage in record.stages],
            stages_left_out=record.left_out,
            waits=list(_waits(record, now_s)),
            decisions=list(_decisions(record)),
            preempted=record.preempted,
            preempted_for=record.preempted_for,
            restarts=record.restarts,
            degraded=record.degraded,
            uncached=record.uncached,
            cause=verdict.cause,
            sentence=verdict.sentence,
            cause_s=verdict.seconds,
        )
        if record.missing is not None:
            info.missing.CopyFrom(self._missing(record, record.missing, findings))
        return info

    async def _findings(self, record: RequestRecord) -> Findings:
        if (known := self._found.get(id(record))) is not None:
            return known[1]
        ended = record.ended_s is not None
        findings = await self._find_out(record)
        if ended:
            self._found[id(record)] = record, findings
            if len(self._found) > _FOUND_KEPT:
                self._found.popitem(last=False)
        return findings

    async def _find_out(self, record: RequestRecord) -> Findings:
        """Looks for the nearest cached prefix, and for the missing blocks in the journal of evictions."""
        journal, failed = self._cache.placement.evictions, None
        if (load := _failed_load(record)) is not None:
            key, until_s = load
            (failed,) = await journal.find(key, until_s)
        missing = record.missing
        if missing is None:
            return Findings(failed_load=failed)
        keys = np.frombuffer(missing.keys, np.uint8).reshape(-1, 16)
        removals = await journal.find(keys, record.arrival_s)
        return Findings(
            difference=await find_difference(self._cache, missing),
            elsewhere=await find_elsewhere(self._cache, missing),
            evicted=_grouped(removal for removal in removals if removal is not None),
            failed_load=failed,
            looked_for=len(keys),
        )

    def _missing(self, record: RequestRecord, missing: MissingBlocks, findings: Findings) -> pb.MissingInfo:
        other = findings.elsewhere
        info = pb.MissingInfo(
            found_blocks=missing.found,
            missing_blocks=missing.missing,
            block_tokens=missing.block_tokens,
            evictions=[_eviction(record, evicted) for evicted in findings.evicted],
            looked_for=findings.looked_for,
            other_namespace="" if other is None else other.name,
            other_tenant="" if other is None else other.tenant,
            other_differs=() if other is None else other.differs,
        )
        if (differs := findings.difference) is not None:
            info.difference.CopyFrom(self._difference(record, differs))
        return info

    def _difference(self, record: RequestRecord, differs: Difference) -> pb.TokenDifference:
        text = self._generation.token_text if record.kind is Kind.GENERATE else lambda model, token: ""
        return pb.TokenDifference(
            token=differs.token,
            block=differs.block,
            expected_id=differs.expected,
            actual_id=differs.actual,
            expected_text=text(record.model, differs.expected),
            actual_text=text(record.model, differs.actual),
            equal_tokens=differs.equal,
            compared_tokens=differs.compared,
        )


def _grouped(removals: Iterable[Removal]) -> list[Evicted]:
    """One entry for all blocks that left the same tier for the same cause, the largest first."""
    groups: dict[tuple[int, Cause], list[Removal]] = {}
    for removal in removals:
        groups.setdefault((removal.tier, removal.cause), []).append(removal)
    found = [Evicted(max(each, key=lambda one: one.at_s), len(each)) for each in groups.values()]
    return sorted(found, key=lambda each: -each.blocks)


def _since(record: RequestRecord, at_s: float | None) -> float | None:
    return None if at_s is None else at_s - record.arrival_s


def _by_tier(tokens: Iterable[int]) -> list[pb.TierTokens]:
    return [pb.TierTokens(tier=Tier(level).wire, tokens=count) for level, count in enumerate(tokens) if count]


def _stage(record: RequestRecord, stage: Stage) -> pb.StageInfo:
    return pb.StageInfo(
        name=stage.name,
        start_s=stage.start_s - record.arrival_s,
        end_s=_since(record, stage.end_s),
        attributes={name: _text(value) for name, value in stage.attributes.items()},
    )


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _waits(record: RequestRecord, now_s: float) -> Iterator[pb.WaitInfo]:
    for reason, seconds in record.waits_until(now_s).items():
        yield pb.WaitInfo(reason=reason, seconds=seconds)
    for reason, seconds in record.later_waits.items():
        yield pb.WaitInfo(reason=reason, seconds=seconds, later=True)


def _decisions(record: RequestRecord) -> Iterator[pb.LoadDecision]:
    for decision in record.decisions:
        yield pb.LoadDecision(
            at_s=decision.at_s - record.arrival_s,
            blocks=decision.blocks,
            tier=Tier[decision.tier.upper()].wire,
            load_s=decision.load_s,
            compute_s=decision.compute_s,
            by_setting=decision.by_setting,
        )


def _eviction(record: RequestRecord, evicted: Evicted) -> pb.Eviction:
    removal = evicted.removal
    return pb.Eviction(
        blocks=evicted.blocks,
        before_s=record.arrival_s - removal.at_s,
        tier=Tier(removal.tier).wire,
        reason=removal.cause.reason,
        tenant=removal.cause.tenant,
        by=removal.cause.by,
    )


def _failed_load(record: RequestRecord) -> tuple[Keys, float] | None:
    """The key of the block at which a load failed last, and when the load ended."""
    for stage in reversed(record.stages):
        key = stage.attributes.get("block_key")
        if stage.name is StageName.LOAD and isinstance(key, str) and stage.end_s is not None:
            return np.frombuffer(bytes.fromhex(key), np.uint8).reshape(1, 16), stage.end_s
    return None
