"""Figures of namespaces: the blocks of each, and who fills the cache."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping

from prefixd.base.long_work.pacer import Pacer, give_way
from prefixd.cache import TieredCache
from prefixd.observability.histogram import MOST_SERIES, OTHERS
from prefixd.server.figures.measured_figures import labelled_counts
from prefixd.server.namespace_messages import namespace_message
from prefixd.v1 import admin_pb2 as pb

_MOST_NAMESPACES = 1000
_NAMESPACES_BYTES = 4 << 20  # a quarter of the largest message
_NAMESPACE_WORK = 10  # pieces of work, see `Pacer`
_WHO = ("tenant", "model")


async def namespace_figures(
    cache: TieredCache, on_gpu: Mapping[int, int], counted: Mapping[int, int]
) -> tuple[list[pb.NamespaceStats], int]:
    """Returns figures of the namespaces with most blocks, at most 1000 and 4 MiB; and the number of the others."""
    namespaces = list(cache.namespaces)
    found: list[pb.NamespaceStats] = []
    left, pacer = _NAMESPACES_BYTES, Pacer()
    for namespace in heapq.nlargest(_MOST_NAMESPACES, namespaces, key=lambda each: counted[each.ordinal]):
        spec = namespace.spec
        stats = pb.NamespaceStats(
            namespace_id=namespace.id,
            namespace=namespace_message(spec),
            blocks=counted[namespace.ordinal],
            gpu_blocks=on_gpu[namespace.ordinal],
            tenant=spec.tenant,
            worker=spec.worker,
        )
        left -= stats.ByteSize()
        if left < 0:
            break
        found.append(stats)
        await pacer.worked(_NAMESPACE_WORK + len(spec.parts))
    return found, len(namespaces) - len(found)


def blocks_by_namespace(cache: TieredCache) -> Counter[int]:
    """Returns the number of blocks of each namespace, by its ordinal."""
    counted = Counter[int]()
    for trie in cache.tries:
        counted.update(dict(enumerate(trie.blocks_by_namespace().tolist())))
    return counted


async def fill_figures(cache: TieredCache, counted: Mapping[int, int], models: Mapping[str, str]) -> pb.FillStats:
    """Returns the bytes and blocks of each tenant and model, those with most bytes first.

    Args:
        cache: the cache.
        counted: `blocks_by_namespace`.
        models: by the name of a worker's namespace, the model's name.
    """
    nbytes, blocks, pacer = Counter[tuple[str, str]](), Counter[tuple[str, str]](), Pacer()
    for namespace in list(cache.namespaces):
        await pacer.worked(1 + len(namespace.spec.parts) // 8)
        if not (count := counted.get(namespace.ordinal, 0)):
            continue
        tenant, name = namespace.spec.tenant, namespace.spec.of_prompts
        if namespace.spec.worker:
            name = models.get(name, name)
        nbytes[tenant, name] += count * sum(part.nbytes for part in namespace.spec.parts)
        blocks[tenant, name] += count
    shown = [who for who, _ in nbytes.most_common(MOST_SERIES)]
    if len(nbytes) > len(shown):
        others = (OTHERS, OTHERS)
        nbytes[others], blocks[others] = (each.total() - sum(each[who] for who in shown) for each in (nbytes, blocks))
        shown.append(others)
    found = pb.FillStats(bytes=labelled_counts(_WHO, [(who, nbytes[who]) for who in shown]))
    await give_way()
    found.blocks.extend(labelled_counts(_WHO, [(who, blocks[who]) for who in shown]))
    return found
