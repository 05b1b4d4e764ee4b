"""Who fills the cache is told by tenant and model, and in bounded space."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prefixd.cache import NamespaceSpec, PartSpec
from prefixd.observability.histogram import MOST_SERIES, OTHERS
from prefixd.server.figures.namespace_figures import fill_figures

PART_BYTES = 100


def spec(name: str, tenant: str, salt: str = "", *, worker: bool = False) -> NamespaceSpec:
    return NamespaceSpec(
        name=name, block_tokens=4, parts=(PartSpec("all", 0, PART_BYTES),), salt=salt, tenant=tenant, worker=worker
    )


def cache_of(specs: list[NamespaceSpec]) -> Any:
    """A cache that has these namespaces, with ordinals from 0 on."""
    return SimpleNamespace(namespaces=[SimpleNamespace(ordinal=at, spec=each) for at, each in enumerate(specs)])


async def test_salts_count_together_and_a_workers_namespaces_by_their_model() -> None:
    specs = [
        spec("engine", "blue"),
        spec("engine", "blue", salt="user 7"),
        spec("5f1e", "red", worker=True),
        spec("5f1e-images", "red", worker=True),
        spec("empty", "red"),
    ]
    found = await fill_figures(cache_of(specs), dict(enumerate((3, 4, 10, 1, 0))), {"5f1e": "llama"})
    assert [(dict(each.labels), each.count) for each in found.bytes] == [
        ({"tenant": "red", "model": "llama"}, 11 * PART_BYTES),
        ({"tenant": "blue", "model": "engine"}, 7 * PART_BYTES),
    ]
    assert [each.count for each in found.blocks] == [11, 7]


async def test_those_with_least_bytes_are_told_together() -> None:
    specs = [spec("m", f"tenant-{number}") for number in range(MOST_SERIES + 10)]
    counted = {at: at + 1 for at in range(len(specs))}
    found = await fill_figures(cache_of(specs), counted, {})
    assert len(found.bytes) == len(found.blocks) == MOST_SERIES + 1
    others = found.blocks[-1]
    assert (dict(others.labels), others.count) == ({"tenant": OTHERS, "model": OTHERS}, sum(range(11)))
    assert sum(each.count for each in found.bytes) == sum(counted.values()) * PART_BYTES
