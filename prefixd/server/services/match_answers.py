"""Answers what of a prompt is cached, and who computes the rest: `Match`, `MatchMany` and `Claim`."""

from __future__ import annotations

from prefixd.base.errors import InvalidArgumentError
from prefixd.base.long_work.pacer import Pacer
from prefixd.cache import BlockChain, Namespace, Session, TieredCache
from prefixd.cache.prompt_listeners import Lookup
from prefixd.cache.sessions.claims import ClaimedByOther
from prefixd.server.services.load_estimates import LoadEstimates
from prefixd.server.tier_runs import tier_runs
from prefixd.v1 import cache_pb2 as pb

PROMPTS = 256
"""Most prompts of a MatchMany."""
_PROMPTS_BYTES = 4 << 20
_PROMPT_WORK = 50  # of finding a prompt, beside its blocks; see `Pacer`


class MatchAnswers:
    """Finds prompts and describes what it finds.

    Args:
        cache: the cache.
        estimates: of loading a prefix.
    """

    def __init__(self, cache: TieredCache, estimates: LoadEstimates) -> None:
        self._cache = cache
        self._estimates = estimates

    async def match(self, session: Session, namespace: Namespace, request: pb.MatchRequest) -> pb.MatchResponse:
        """Returns the answer to `Match`."""
        chain = self._cache.chain(namespace, request.token_ids)
        prefill = request.prefill if request.HasField("prefill") else None
        return await self._find(session, namespace, chain, prefill, asked=request.asked, counted=request.counted)

    async def match_many(
        self, session: Session, namespace: Namespace, request: pb.MatchManyRequest
    ) -> pb.MatchManyResponse:
        """Returns the answer to `MatchMany`; others run after about a millisecond of it.

        Raises:
            InvalidArgumentError: there are too many prompts, or one is invalid; none has counted then.
        """
        cache = self._cache
        if len(request.prompts) > PROMPTS:
            raise InvalidArgumentError(f"prompts has {len(request.prompts)} prompts; send {PROMPTS} at most in a call")
        nbytes = sum(len(prompt.token_ids) for prompt in request.prompts)
        if nbytes > _PROMPTS_BYTES:  # a million blocks at most
            raise InvalidArgumentError(
                f"prompts has {nbytes} bytes of token ids; send {_PROMPTS_BYTES} bytes at most in a call"
            )
        chains = [cache.chain(namespace, prompt.token_ids) for prompt in request.prompts]
        prefill, pacer = request.prefill if request.HasField("prefill") else None, Pacer()
        answers = []
        for prompt, chain in zip(request.prompts, chains, strict=True):
            answers.append(await self._find(session, namespace, chain, prefill, asked=prompt.asked))
            await pacer.worked(_PROMPT_WORK + answers[-1].blocks)
        return pb.MatchManyResponse(answers=answers)

    async def claim(self, session: Session, namespace: Namespace, request: pb.ClaimRequest) -> pb.ClaimResponse:
        """Returns the answer to `Claim`."""
        cache = self._cache
        chain = cache.chain(namespace, request.token_ids)
        answer = await cache.computing.claim(session, namespace, chain, request.ttl_s, request.wait_s)
        response = pb.ClaimResponse(first_block=answer.cached_blocks, cached_blocks=answer.cached_blocks)
        if answer.claim is not None:
            response.claim_id, response.blocks = answer.claim.id, answer.claim.blocks
            response.ttl_s = answer.claim.expires_s - cache.clock()
        if answer.other is not None:
            response.other.CopyFrom(_message(answer.other))
        return response

    async def add_claim(
        self,
        response: pb.MatchResponse | pb.AcquireResponse,
        session: Session,
        namespace: Namespace,
        chain: BlockChain,
        cached_blocks: int,
    ) -> None:
        """Adds another session's claim on the block behind a prompt's cached ones, if there is one."""
        if self._cache.computing.concern(namespace):
            other = await self._cache.computing.seen(session, namespace, chain, cached_blocks)
            if other is not None:
                response.claimed.CopyFrom(_message(other))

    async def _find(
        self,
        session: Session,
        namespace: Namespace,
        chain: BlockChain,
        prefill: pb.Prefill | None,
        *,
        asked: bool,
        counted: bool = False,
    ) -> pb.MatchResponse:
        cache = self._cache
        path = await cache.match(namespace, chain)
        if asked:
            cache.counters.ask(namespace.spec.who, len(chain) * namespace.spec.block_tokens)
            lookup = Lookup(len(chain) * namespace.spec.block_tokens, len(chain), len(path))
            cache.prompts.tell_looked_up(namespace, chain, lookup)
        elif counted:
            cache.count_lookup(session, namespace, chain, path)
        trie = cache.trie(namespace)
        estimate = self._estimates.estimate(trie, path, 0, chain.tokens, prefill)
        response = pb.MatchResponse(blocks=len(path), runs=await tier_runs(trie, path), estimate=estimate)
        await self.add_claim(response, session, namespace, chain, len(path))
        return response


def _message(other: ClaimedByOther) -> pb.ClaimedByOther:
    return pb.ClaimedByOther(
        first_block=other.first_block,
        end_block=other.end_block,
        prompt_blocks=other.prompt_blocks,
        age_s=other.age_s,
        left_s=other.left_s,
    )
