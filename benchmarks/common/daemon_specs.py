"""Namespaces of clients as the daemon has them."""

from __future__ import annotations

from prefixd import cache
from prefixd.client import NamespaceSpec


def as_the_daemon_has_it(spec: NamespaceSpec) -> cache.NamespaceSpec:
    """A namespace of the default tenant. Without rules: no namespace of a harness here has any."""
    parts = tuple(cache.PartSpec(part.group, part.rank, part.nbytes) for part in spec.parts)
    return cache.NamespaceSpec(spec.name, spec.block_tokens, parts, spec.salt, spec.dtype, spec.layout)
