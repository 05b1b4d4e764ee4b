"""Converts rules to and from the contract's messages, for client and daemon: `Rule` in proto/prefixd/v1/cache.proto.

Messages are annotated as Any, since the base does not import the contract's types.
"""

from __future__ import annotations

from typing import Any

from prefixd.base.errors import InvalidArgumentError
from prefixd.base.rules.rules import Rule, rule_of


def to_message(rule: Rule | None) -> dict[str, dict[str, int]] | None:
    """Returns the argument `rule` of a `Part`: {"sliding_window": {"tokens": 1024}}; None for full attention."""
    return None if rule is None else {rule.kind: dict(vars(rule))}


def from_message(part: Any) -> Rule | None:
    """Returns the rule of a `Part`; None for full attention.

    Raises:
        InvalidArgumentError: this version does not know the kind of rule.
    """
    kind = part.rule.WhichOneof("kind")
    if kind is None and part.rule.ByteSize():  # a field that this contract does not have
        raise InvalidArgumentError(
            f"part {part.group!r}/{part.rank} has a rule of a kind that this daemon does not know; update the "
            "daemon, or register the part without a rule: the daemon then keeps and needs all its bytes"
        )
    if kind in (None, "full_attention"):
        return None
    message = getattr(part.rule, kind)
    numbers = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
    if kind == "cross_attention":
        numbers["image_blocks"] = numbers["image_blocks"] or 1
    return rule_of(kind, numbers)
