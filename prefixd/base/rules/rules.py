"""Rules of KV groups in tokens, from the client to the worker: which part of a prefix the layers of a group need.

Full attention needs the whole prefix and has no rule: None. `rule_messages.py` converts rules to the contract's
messages, `to_fields` to msgpack (on disk, and to the worker), and `cache/rules/in_blocks.py` to blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from prefixd.base.errors import InvalidArgumentError

FULL_ATTENTION = "full attention"
"""Text for people if there is no rule."""

_MAX_WINDOW_TOKENS = 1 << 31
_MAX_IMAGE_BLOCKS = 1 << 16


class Rule(ABC):
    """An immutable value: rules of one kind with equal numbers are equal.

    Its numbers are attributes, and their defaults are class attributes. It is not a dataclass, since msgspec would
    write a dataclass without its kind.
    """

    kind: ClassVar[str]
    """Name in the contract and in msgpack. It never changes, since it is on disk."""

    def __init__(self, **numbers: int) -> None:
        vars(self).update(numbers)

    @abstractmethod
    def __str__(self) -> str:
        """Returns a description for people: `sliding window of 1024 tokens`."""

    def check(self, part: str, block_tokens: int) -> None:  # noqa: B027 - a rule without numbers has nothing to check
        """Raises InvalidArgumentError, which names the `part`, if the rule does not fit blocks of `block_tokens`."""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((self.kind, *vars(self).values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={number}' for name, number in vars(self).items())})"

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{self!r} cannot be changed; make another rule")


class Window(Rule):
    """The rule of layers in which a token attends to at most `tokens` tokens, itself included."""

    tokens: int

    def __init__(self, tokens: int) -> None:
        super().__init__(tokens=tokens)

    @abstractmethod
    def first_seen(self, position: int) -> int:
        """Returns the first token that the token at `position` attends to; it never decreases as `position` grows."""


class SlidingWindow(Window):
    """The rule of layers in which a token attends to the last `tokens` tokens only, itself included."""

    kind = "sliding_window"
    tokens: int

    def first_seen(self, position: int) -> int:
        return max(0, position - self.tokens + 1)

    def __str__(self) -> str:
        return f"sliding window of {self.tokens} tokens"

    def check(self, part: str, block_tokens: int) -> None:
        _check_range(part, "a sliding window of", self.tokens, _MAX_WINDOW_TOKENS, "tokens")

    def blocks(self, block_tokens: int) -> int:
        """Returns the number of last blocks of a prefix that hold the `tokens` - 1 tokens that its next token needs.

        At least 1, even for a window of 1 token, so that every prefix has bytes of every group.
        """
        return max(1, -(-(self.tokens - 1) // block_tokens))


class ChunkedWindow(Window):
    """The rule of layers in which a token attends to its own chunk of `tokens` tokens only, up to itself (Llama 4)."""

    kind = "chunked_window"
    tokens: int

    def first_seen(self, position: int) -> int:
        return position // self.tokens * self.tokens

    def __str__(self) -> str:
        return f"chunks of {self.tokens} tokens"

    def check(self, part: str, block_tokens: int) -> None:
        _check_range(part, "chunks of", self.tokens, _MAX_WINDOW_TOKENS, "tokens")


class RecurrentState(Rule):
    """The rule of layers with a state: the bytes of a block are the state after it, and most blocks have none.

    A prefix needs the state after its last block. The cache keeps the states after every `checkpoint_tokens` tokens as
    long as bytes of other groups; a multiple of the namespace's `block_tokens`, or 0 for none.

    Store the other parts first, then each state by itself, with the tokens up to its end:
    `store(tokens[:end], state, parts=[part], first_block=end // block_tokens - 1)`.
    """

    kind = "recurrent_state"
    checkpoint_tokens: int = 0

    def __init__(self, checkpoint_tokens: int = 0) -> None:
        super().__init__(checkpoint_tokens=checkpoint_tokens)

    def __str__(self) -> str:
        if not self.checkpoint_tokens:
            return "recurrent state"
        return f"recurrent state, a checkpoint every {self.checkpoint_tokens} tokens"

    def check(self, part: str, block_tokens: int) -> None:
        tokens = self.checkpoint_tokens
        if not 0 <= tokens <= _MAX_WINDOW_TOKENS or tokens % block_tokens:
            raise InvalidArgumentError(
                f"{part} has a checkpoint every {tokens} tokens; it must be a multiple of block_tokens "
                f"({block_tokens}) and at most {_MAX_WINDOW_TOKENS}, or 0 for no checkpoints"
            )


class CrossAttention(Rule):
    """The rule of layers that attend to the prompt's images: the first `image_blocks` blocks of a prompt hold their KV.

    Every prefix needs all these blocks. Prompts with different images must differ from their first block on, in salt or
    in tokens.
    """

    kind = "cross_attention"
    image_blocks: int = 1

    def __init__(self, image_blocks: int = 1) -> None:
        super().__init__(image_blocks=image_blocks)

    def __str__(self) -> str:
        blocks = "block" if self.image_blocks == 1 else f"{self.image_blocks} blocks"
        return f"cross-attention to images in the first {blocks}"

    def check(self, part: str, block_tokens: int) -> None:
        _check_range(part, "images in the first", self.image_blocks, _MAX_IMAGE_BLOCKS, "blocks")


class VisionEmbedding(Rule):
    """The rule of embeddings of images. They have a namespace of their own, in which a prompt is an image, named by the
    hash of its content.

    Only a whole image can be used: treat a hit of fewer blocks than the image has as a miss.
    """

    kind = "vision_embedding"

    def __str__(self) -> str:
        return "vision embedding"


_KINDS: dict[object, type[Rule]] = {
    rule.kind: rule for rule in (SlidingWindow, ChunkedWindow, RecurrentState, CrossAttention, VisionEmbedding)
}


def rule_of(kind: object, numbers: dict[str, Any]) -> Rule:
    """Makes a rule of this kind; ignores numbers that the kind does not have. Raises ValueError, TypeError."""
    if kind not in _KINDS:
        raise ValueError(f"{kind!r} is no kind of rule that this version knows")
    rule = _KINDS[kind]
    known = {name: number for name, number in numbers.items() if name in rule.__annotations__}
    if not all(type(number) is int for number in known.values()):
        raise ValueError(f"{known} is no {kind}: its numbers must be integers")
    return rule(**known)


def to_fields(rule: object) -> dict[str, str | int]:
    """Converts a rule to a map for msgpack, {"type": "sliding_window", "tokens": 1024}, as msgspec's `enc_hook`.

    Leaves out numbers that have their default.
    """
    if not isinstance(rule, Rule):
        raise NotImplementedError(f"{rule!r} is no rule")
    numbers = {name: number for name, number in vars(rule).items() if number != getattr(type(rule), name, None)}
    return {"type": rule.kind, **numbers}


def from_fields(_: type, fields: Any) -> Rule:
    """Returns the rule from a map of `to_fields`, as msgspec's `dec_hook`; ignores numbers of later versions."""
    if not isinstance(fields, dict):
        raise ValueError(f"{fields!r} is no rule: a rule is a map")
    return rule_of(fields.get("type"), fields)


def _check_range(part: str, name: str, value: int, limit: int, unit: str) -> None:
    if not 1 <= value <= limit:
        raise InvalidArgumentError(f"{part} has {name} {value} {unit}; it must be between 1 and {limit}")
