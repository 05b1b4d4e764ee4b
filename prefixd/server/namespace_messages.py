"""Converts namespaces from and to the contract's messages."""

from __future__ import annotations

from prefixd.base.errors import InvalidArgumentError
from prefixd.base.rules.rule_messages import from_message, to_message
from prefixd.cache import NamespaceSpec, PartSpec
from prefixd.cache.namespaces import check_part_count
from prefixd.v1 import cache_pb2 as pb
from prefixd_swap.codecs.part_shape import Axis, PartShape
from prefixd_swap.errors import GeometryError

_AXES: dict[pb.PartShape.Axis, Axis] = {
    pb.PartShape.AXIS_LAYER: "layer",
    pb.PartShape.AXIS_KV: "kv",
    pb.PartShape.AXIS_TOKEN: "token",
    pb.PartShape.AXIS_HEAD: "head",
    pb.PartShape.AXIS_CHANNEL: "channel",
}
_NUMBERS = {axis: number for number, axis in _AXES.items()}


def namespace_spec(wanted: pb.Namespace, tenant: str, salt: bytes) -> NamespaceSpec:
    """Returns the namespace that a message describes, of a tenant and with a salt. Raises InvalidArgumentError."""
    check_part_count(len(wanted.parts))  # before a part is read
    return NamespaceSpec(
        name=wanted.name,
        block_tokens=wanted.block_tokens,
        parts=tuple(
            PartSpec(part.group, part.rank, part.nbytes, from_message(part), shape=_shape(part))
            for part in wanted.parts
        ),
        salt=salt,
        dtype=wanted.dtype,
        layout=wanted.layout,
        tenant=tenant,
        codec=wanted.codec,
    )


def namespace_message(spec: NamespaceSpec) -> pb.Namespace:
    """Returns the message that describes a namespace, without its salt, which is a secret."""
    return pb.Namespace(
        name=spec.name,
        dtype=spec.dtype,
        layout=spec.layout,
        block_tokens=spec.block_tokens,
        parts=[_part(part) for part in spec.parts],
        codec=spec.codec,
    )


def _shape(part: pb.Part) -> PartShape | None:
    if not part.HasField("shape"):
        return None
    shape, order = part.shape, []
    for number in part.shape.order[: len(_AXES) + 1]:
        if number not in _AXES:
            raise InvalidArgumentError(
                f"part {part.group!r}/{part.rank} has a shape with axis number {number}; use {min(_AXES)} to "
                f"{max(_AXES)}"
            )
        order.append(_AXES[number])
    try:
        return PartShape(shape.dtype, shape.layers, shape.tokens, shape.heads, shape.channels, tuple(order))
    except GeometryError as error:
        raise InvalidArgumentError(f"the shape of part {part.group!r}/{part.rank} is not possible: {error}") from error


def _part(part: PartSpec) -> pb.Part:
    message = pb.Part(group=part.group, rank=part.rank, nbytes=part.nbytes, rule=to_message(part.rule))
    if (shape := part.shape) is not None:
        sizes = {"layers": shape.layers, "tokens": shape.tokens, "heads": shape.heads, "channels": shape.channels}
        message.shape.CopyFrom(pb.PartShape(dtype=shape.dtype, order=[_NUMBERS[axis] for axis in shape.order], **sizes))
    return message
