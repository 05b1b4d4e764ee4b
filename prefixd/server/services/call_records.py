"""Records of engines' calls: how much of a prompt was found in which tier, and how long looking, loading and storing
took."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from prefixd.base.tiers import Tier
from prefixd.cache import Namespace, Session, TieredCache
from prefixd.cache.index.keys.block_keys import BlockChain
from prefixd.cache.index.trie import NONE
from prefixd.cache.moving.beginnings import Reader
from prefixd.cache.placement.lacked_blocks import note_missing
from prefixd.cache.sessions.leasing import BlockTiers
from prefixd.observability.eviction_journal import acting
from prefixd.observability.request_log import RequestLog, end_with_error
from prefixd.observability.request_record import Kind, RequestRecord, StageName, Value
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

    @contextmanager
    def record(self, kind: Kind, method: str, session: Session, namespace: Namespace | None) -> Iterator[RequestRecord]:
        """A context around a call's work; the record ends with it."""
        call, clock = current_call(), self._clock
        now_s = clock()
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
        try:
            with acting(record.id):
                yield record
        except BaseException as error:
            end_with_error(record, error, clock())
            raise
        record.end("ok", clock())

    @contextmanager
    def store(
        self, method: str, session: Session, namespace: Namespace | None, stage: StageName, **attributes: Value
    ) -> Iterator[RequestRecord]:
        """A context around a call that stores blocks, whose work is one stage."""
        with self.record(Kind.STORE, method, session, namespace) as record:
            work = record.begin(stage, self._clock(), **attributes)
            yield record
            work.end(self._clock(), blocks=record.blocks)

    def lookup(self, record: RequestRecord, namespace: Namespace, chain: BlockChain) -> Lookup:
        """Notes the stages of a lookup that begins now."""
        record.prompt_tokens = chain.tokens
        return Lookup(record, namespace, chain, self._clock)


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

    def matched(self, reader: Reader, tiers: BlockTiers) -> None:
        """The blocks to read are known, with the tiers in which they lay when the prompt arrived."""
        now_s, trie = self._clock(), reader.trie
        self._record.missing = note_missing(self._namespace, self._chain, len(reader.path), len(self._chain))
        self._stage.end(now_s)
        self._tiers, self._block_tokens = tiers[reader.first_block : reader.end], trie.block_tokens
        self._record.found_tokens = self._by_tier(len(self._tiers))
        wanted = reader.wanted if trie.has_rules else None
        lacking = trie.lacking(reader.rows, Tier.CPU, wanted)
        if lacking.any():
            nbytes = int(np.bincount(lacking, minlength=len(trie.group_bytes)) @ trie.group_bytes)
            far = int(trie.nearest[reader.rows[lacking != 0]].max())
            tier = Tier(far).label if far < NONE else "none"
            blocks = int(np.count_nonzero(lacking))
            self._stage = self._record.begin(
                StageName.LOAD, now_s, tier=tier, blocks=blocks, bytes=nbytes, urgency="demand"
            )

    def leased(self, blocks: int) -> None:
        """So many blocks are leased; those behind them are not read."""
        complete = blocks == len(self._tiers)
        self._record.blocks = blocks
        self._record.hit_tokens = list(self._record.found_tokens) if complete else self._by_tier(blocks)
        self._stage.end(self._clock(), outcome="complete" if complete else "cut", arrived_blocks=blocks)

    def _by_tier(self, blocks: int) -> list[int]:
        found: list[int] = (np.bincount(self._tiers[:blocks], minlength=NONE)[:NONE] * self._block_tokens).tolist()
        return found
