"""Reads a namespace from its message."""

from __future__ import annotations

from prefixd.base.rules.rule_messages import from_message
from prefixd.cache import NamespaceSpec, PartSpec
from prefixd.cache.namespaces import check_part_count
from prefixd.v1 import cache_pb2 as pb


def namespace_spec(wanted: pb.Namespace, tenant: str, salt: bytes) -> NamespaceSpec:
    """Returns the namespace that a message describes, of a tenant and with a salt. Raises InvalidArgumentError."""
    check_part_count(len(wanted.parts))  # before a part is read
    return NamespaceSpec(
        name=wanted.name,
        block_tokens=wanted.block_tokens,
        parts=tuple(PartSpec(part.group, part.rank, part.nbytes, from_message(part)) for part in wanted.parts),
        salt=salt,
        dtype=wanted.dtype,
        layout=wanted.layout,
        tenant=tenant,
    )
