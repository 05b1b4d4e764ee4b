"""Records of engines' calls: how much of a prompt was found in which tier, and how long looking, loading and storing
took."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

import numpy as np

from prefixd.base.tiers import Tier
from prefixd.cache import Lease, Namespace, Session, TieredCache
from prefixd.cache.index.keys.block_keys import BlockChain
from prefixd.cache.index.trie import NONE
from prefixd.cache.moving.beginnings import Reader
from prefixd.cache.placement.lacked_blocks import note_missing
from prefixd.cache.sessions.leasing import BlockTiers, tokens_by_tier
from prefixd.observability.actor import acting
from prefixd.observability.request_log import RequestLog, end_with_error
from prefixd.observability.request_record import Kind, RequestRecord, Stage, StageName, Value
from prefixd.server.rpc.receiving import current_call


class CallRecords:
    """Makes a record of each call that reads or stores blocks.

    Args:
        cache: the cache.
        log: gets the records.
    """

    def __init__(self, cache: TieredCache, log: RequestLog) -> None:
        self._clock = cache.clock
        self._log = log

    def record(self, kind: Kind, method: str, session: Session, namespace: Namespace | None) -> Recording:
        """A context around a call's work; the record ends with it."""
        call, now_s = current_call(), self._clock()
        record = self._log.begin(
            kind,
            method,
            tenant=session.tenant.name,
            model="" if namespace is None else namespace.spec.name,
            arrival_s=now_s - call.waited_s,
            client_id=call.headers.client_id,
            trace=call.headers.trace,
        )
        record.note(StageName.RECEIVE, record.arrival_s, now_s)
        return Recording(record, self._clock)

    def store(
        self, method: str, session: Session, namespace: Namespace | None, stage: StageName, **attributes: Value
    ) -> Recording:
        """A context around a call that stores blocks, whose work is one stage."""
        recording = self.record(Kind.STORE, method, session, namespace)
        recording.work = recording.record.begin(stage, self._clock(), **attributes)
        return recording

    def lookup(self, record: RequestRecord, namespace: Namespace, chain: BlockChain) -> Lookup:
        """Notes the stages of a lookup that begins now."""
        record.prompt_tokens = chain.tokens
        return Lookup(record, namespace, chain, self._clock)


class Recording(AbstractContextManager[RequestRecord]):
    """One call's work; entering it gives the record.

    Attributes:
        record: of the call.
        work: the stage that the work is; None if it has several.
    """

    __slots__ = ("_acting", "_clock", "record", "work")

    def __init__(self, record: RequestRecord, clock: Callable[[], float]) -> None:
        self.record = record
        self.work: Stage | None = None
        self._clock = clock
        self._acting = acting(record.id)

    def __enter__(self) -> RequestRecord:
        self._acting.__enter__()
        return self.record

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._acting.__exit__()
        record, now_s = self.record, self._clock()
        if error is not None:
            end_with_error(record, error, now_s)
            return
        if self.work is not None:
            self.work.end(now_s, blocks=record.blocks)
        record.end("ok", now_s)


class Lookup:
    """One call's lookup: the match, then the load of what was found.

    Args:
        record: of the call.
        namespace: the prompt's.
        chain: the prompt's blocks.
        clock: seconds.
    """

    def __init__(
        self, record: RequestRecord, namespace: Namespace, chain: BlockChain, clock: Callable[[], float]
    ) -> None:
        self._record = record
        self._namespace = namespace
        self._chain = chain
        self._stage = record.begin(StageName.MATCH, clock())
        self._clock = clock
        self._tiers: BlockTiers = np.empty(0, np.int8)
        self._block_tokens = 0

    def matched(self, reader: Reader, tiers: BlockTiers, *, loads: bool = True) -> None:
        """The blocks to read are known, with the tiers in which they lay when the prompt arrived.

        Args:
            reader: which blocks.
            tiers: [blocks of the prompt's cached prefix].
            loads: False if it is known that no bytes must be brought up.
        """
        now_s = self._clock()
        self._record.missing = note_missing(self._namespace, self._chain, len(reader.path), len(self._chain))
        self._stage.end(now_s)
        self._tiers, self._block_tokens = tiers[reader.first_block : reader.end], reader.trie.block_tokens
        self._record.found_tokens = self._by_tier(len(self._tiers))
        if loads:
            self._begin_load(reader, now_s)

    def _begin_load(self, reader: Reader, now_s: float) -> None:
        trie = reader.trie
        lacking = trie.lacking(reader.rows, Tier.CPU, reader.wanted if trie.has_rules else None)
        if lacking.any():
            nbytes = int(np.bincount(lacking, minlength=len(trie.group_bytes)) @ trie.group_bytes)
            far = int(trie.nearest[reader.rows[lacking != 0]].max())
            tier = Tier(far).label if far < NONE else "none"
            blocks = int(np.count_nonzero(lacking))
            self._stage = self._record.begin(
                StageName.LOAD, now_s, tier=tier, blocks=blocks, bytes=nbytes, urgency="demand"
            )

    def leased(self, lease: Lease | None) -> None:
        """The blocks of the lease are held; those behind them are not read."""
        blocks = 0
        if lease is not None:
            blocks = len(lease.rows)
            self._record.altered_blocks = lease.trie.count_decoded(lease.rows, lease.hold.wanted)
        complete = blocks == len(self._tiers)
        self._record.blocks = blocks
        self._record.hit_tokens = self._record.found_tokens if complete else self._by_tier(blocks)
        self._stage.end(self._clock(), outcome="complete" if complete else "cut", arrived_blocks=blocks)

    def _by_tier(self, blocks: int) -> list[int]:
        return tokens_by_tier(self._tiers[:blocks], self._block_tokens)
