"""Records the prefixes of a daemon in a warm-up file, and brings those of a file to a daemon, one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from prefixd.client import (
    AsyncClient,
    ClientError,
    Finished,
    NotFoundError,
    Sampling,
    ServerUnavailable,
    Tier,
    Unauthenticated,
)
from prefixd.v1 import cache_pb2
from prefixd.workloads.warm_file import WarmFile, WarmNamespace, WarmPrefix

if TYPE_CHECKING:
    from prefixd.v1 import admin_pb2

_KEY_GONE = (
    "no prefix has the key {} here; record with `prefixd warm record --tokens`: token ids are found in the shared "
    "store, or computed"
)
_LAST = (1 << 31) - 1
"""The priority of a request that every other one goes before."""


async def record(
    client: AsyncClient,
    file: WarmFile,
    prefixes: Iterable[admin_pb2.PrefixInfo],
    *,
    tokens: bool,
    progress: Callable[[int], None],
) -> int:
    """Writes prefixes to a file; returns how many were left out: evicted meanwhile, or there was no room."""
    stats = await client.stats()
    models = {model.namespace: model.name for model in stats.models}
    known = {
        each.namespace_id: WarmNamespace(
            each.namespace_id,
            each.tenant,
            models.get(each.namespace.name, "") if each.worker else "",
            MessageToDict(each.namespace),
        )
        for each in stats.namespaces
    }
    left_out = 0
    for number, prefix in enumerate(prefixes, 1):
        namespace = known.get(prefix.namespace_id)
        token_ids: list[int] | None = None
        if namespace is not None and tokens:
            try:
                answer = await client.inspect(f"{prefix.namespace_id.hex()}/{prefix.key}")
                token_ids = [token for block in answer.blocks for token in block.token_ids]
            except NotFoundError:  # evicted meanwhile
                namespace = None
        if namespace is None or not file.add(namespace, prefix.key, prefix.blocks, token_ids):
            left_out += 1
        progress(number)
    return left_out


@dataclass(slots=True)
class Warmed:
    """What became of a file's prefixes.

    Attributes:
        prefixes: how many were asked for.
        tokens: of their full blocks, as far as the daemon said.
        found_tokens: cached before, by the name of their nearest tier.
        brought_tokens: that came to CPU memory.
        left_tokens: cached, and not brought: there was no room for more.
        computed_tokens: that the daemon's worker computed.
        missing_tokens: neither found nor computed.
        failed: of each prefix that failed the line and the reason.
    """

    prefixes: int = 0
    tokens: int = 0
    found_tokens: Counter[str] = field(default_factory=Counter)
    brought_tokens: int = 0
    left_tokens: int = 0
    computed_tokens: int = 0
    missing_tokens: int = 0
    failed: list[tuple[int, str]] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "prefixes": self.prefixes,
            "tokens": self.tokens,
            "found_tokens": dict(self.found_tokens),
            "brought_tokens": self.brought_tokens,
            "left_tokens": self.left_tokens,
            "computed_tokens": self.computed_tokens,
            "missing_tokens": self.missing_tokens,
            "failed": [{"line": line, "reason": reason} for line, reason in self.failed],
        }


class Warming:
    """Brings prefixes to a daemon: from its disk or the shared store, or computed by its own worker.

    Args:
        client: of the daemon.
        compute: whether its worker computes what is cached nowhere, as requests of one token that go last.
    """

    def __init__(self, client: AsyncClient, *, compute: bool) -> None:
        self.warmed = Warmed()
        self._client = client
        self._compute = compute
        self._models: set[str] = set()
        self._tenant = ""

    async def begin(self) -> None:
        """Asks the daemon which models it has, and for whom it would compute."""
        self._models = {model.name for model in (await self._client.stats()).models}
        if self._compute and self._models:
            self._tenant = (await self._client.session()).tenant

    async def warm(self, prefix: WarmPrefix) -> None:
        """Warms one prefix up; notes why it failed. Raises the errors of a daemon that is away."""
        self.warmed.prefixes += 1
        try:
            if prefix.namespace is None:
                await self._run(prefix, prefix.model)
            else:
                await self._bring(prefix, prefix.namespace)
        except (ServerUnavailable, Unauthenticated):
            raise
        except (ClientError, ParseError) as error:
            self.warmed.failed.append((prefix.line, str(error)))

    async def _bring(self, prefix: WarmPrefix, namespace: WarmNamespace) -> None:
        warmed = self.warmed
        spec = ParseDict(namespace.namespace, cache_pb2.Namespace(), ignore_unknown_fields=True)
        computes = self._compute and namespace.model in self._models and namespace.tenant == self._tenant
        try:
            if prefix.token_ids is None:
                key = f"{namespace.namespace_id.hex()}/{prefix.key}"
                answer = await self._client.warm(key=key)
            else:
                answer = await self._client.warm(
                    tokens=prefix.token_ids,
                    namespace_id=namespace.namespace_id,
                    namespace=spec,
                    tenant=namespace.tenant,
                )
        except NotFoundError:
            if prefix.token_ids is None:
                warmed.failed.append((prefix.line, _KEY_GONE.format(prefix.key)))
                return
            if not computes:
                raise
            await self._run(prefix, namespace.model)  # a model that has not computed anything yet
            return
        found = sum(run.blocks for run in answer.found)
        if found < answer.blocks and prefix.token_ids is not None and computes:
            await self._run(prefix, namespace.model)  # it counts what is cached by now, too
            warmed.brought_tokens += answer.brought * spec.block_tokens
            return
        warmed.tokens += answer.blocks * spec.block_tokens
        warmed.missing_tokens += (answer.blocks - found) * spec.block_tokens
        warmed.brought_tokens += answer.brought * spec.block_tokens
        warmed.left_tokens += answer.left * spec.block_tokens
        for run in answer.found:
            warmed.found_tokens[Tier.from_wire(run.tier).label] += run.blocks * spec.block_tokens

    async def _run(self, prefix: WarmPrefix, model: str) -> None:
        """Lets the worker compute a prompt, in a request of one token that goes last."""
        warmed = self.warmed
        if not self._compute:
            warmed.failed.append((prefix.line, "a prompt for a model is computed, which --no-compute forbids"))
            return
        prompt: Any = prefix.prompt if prefix.prompt is not None else prefix.token_ids
        request = self._client.generate(prompt, sampling=Sampling(max_tokens=1), priority=_LAST, model=model)
        async with aclosing(request) as events:
            async for event in events:
                if isinstance(event, Finished):
                    hits = sum(event.hit_tokens.values())
                    warmed.tokens += event.prompt_tokens
                    warmed.computed_tokens += event.prompt_tokens - hits
                    for tier, tokens in event.hit_tokens.items():
                        if tokens:
                            warmed.found_tokens[tier.label] += tokens
