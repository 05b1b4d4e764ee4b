"""Which parts may have a shape, and thus be stored with lost precision: keys and values of attention."""

from __future__ import annotations

from prefixd.base.errors import InvalidArgumentError
from prefixd.base.rules.rules import RecurrentState, Rule, VisionEmbedding
from prefixd_swap.codecs.part_shape import PartShape


def check_shape(part: str, nbytes: int, rule: Rule | None, shape: PartShape) -> None:
    """Raises InvalidArgumentError unless a part of `nbytes` bytes of a block can have this shape.

    States and vision embeddings have none: an error in a state stays for the rest of the prompt, and nobody has
    measured what a lossy codec does to them.

    Args:
        part: names the part in the error: "part 'full'/0".
        nbytes: of the part in a block.
        rule: of the part; None for full attention.
        shape: the shape. Its tokens need not be `block_tokens`: a client may name blocks otherwise than by their
            tokens, as the connectors do that store an engine's pages by their keys.
    """
    if isinstance(rule, (RecurrentState, VisionEmbedding)):
        raise InvalidArgumentError(f"{part} is a {rule} and has a shape; only keys and values have one, leave it out")
    if shape.nbytes != nbytes:
        raise InvalidArgumentError(
            f"{part} has {nbytes} bytes, and its shape {shape.nbytes} ({shape.layers} layers, keys and values, "
            f"{shape.tokens} tokens, {shape.heads} heads, {shape.channels} channels of {shape.dtype}); correct one of "
            "them, or leave the shape out if there is padding"
        )
