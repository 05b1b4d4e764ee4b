"""Namespaces of the load harnesses, and their prompts by number."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.common.block_bytes import BlockBytes, Bytes, Tokens, wrong_bytes
from benchmarks.common.harness import BenchmarkError
from prefixd.base.codec_names import LOSSY
from prefixd.client import Client, NamespaceSpec, PartShape, PartSpec

SHAPE = PartShape("bfloat16", 4, 16, 2, 128, ("layer", "kv", "token", "head", "channel"))
SHAPE_BYTES = 64 << 10
NAMESPACES = (
    NamespaceSpec("load", 16, (PartSpec("full", 0, 32 << 10),), salt=b"one"),
    NamespaceSpec("load", 16, (PartSpec("full", 0, 32 << 10),), salt=b"two"),
    # Two parts; the size of one is no multiple of any alignment.
    NamespaceSpec("load-parts", 8, (PartSpec("full", 0, 20 << 10), PartSpec("window", 0, 5999))),
    NamespaceSpec("load-large", 4, (PartSpec("full", 0, 160 << 10),)),
    # Keys and values, of which the disk tier stores fewer bytes.
    NamespaceSpec("load-coded", 16, (PartSpec("full", 0, SHAPE_BYTES, shape=SHAPE),), codec="lossless"),
    NamespaceSpec("load-altered", 16, (PartSpec("full", 0, SHAPE_BYTES, shape=SHAPE),), codec="int8"),
)
BRIEF_SALTS = 4
FAMILIES = 6
"""Prefixes that many prompts begin with, in each namespace."""

_LONGEST_TAIL = 4


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt by its numbers. All clients ask for the prompts of `owner` 0; only its owner asks for any other prompt.

    It begins with the blocks of its family (`number % FAMILIES`); the rest is in no other prompt.
    """

    namespace: int
    owner: int
    number: int

    @property
    def spec(self) -> NamespaceSpec:
        return NAMESPACES[self.namespace]

    @property
    def shared_blocks(self) -> int:
        """Blocks at the beginning that it has in common with its family."""
        return 1 + self.number % FAMILIES % 3

    @property
    def blocks(self) -> int:
        return len(self.tokens) // self.spec.block_tokens

    @property
    def tokens(self) -> Tokens:
        """Its token ids; the last block may be incomplete."""
        return _tokens(self)

    @property
    def whole(self) -> Tokens:
        """The token ids of its whole blocks."""
        return self.tokens[: self.blocks * self.spec.block_tokens]


def brief_namespace(owner: int) -> NamespaceSpec:
    """Returns the namespace that a client fills with small blocks and evicts as a whole; clients share a few of
    them."""
    return NamespaceSpec("load-brief", 4, (PartSpec("full", 0, 3000),), salt=b"brief %d" % (owner % BRIEF_SALTS))


def prompts(numbers: int) -> Iterator[Prompt]:
    """Yields the first `numbers` prompts of each namespace that all clients ask for."""
    for number in range(numbers):
        for namespace in range(len(NAMESPACES)):
            yield Prompt(namespace, 0, number)


def content(prompt: Prompt, first_block: int = 0, parts: Sequence[int] | None = None) -> Bytes:
    """The right bytes of the prompt's blocks from `first_block` on, block after block, part after part."""
    return BlockBytes(prompt.spec, prompt.tokens).content(first_block, parts)


def right_bytes(prompt: Prompt, got: Bytes) -> Bytes:
    """The right bytes of the prompt's first blocks, as many as `got` has, all parts of each.

    In a namespace with a lossy codec a block is right as it was stored, and as the codec gives it back: then that is
    what it has to be, to the bit.
    """
    nbytes = prompt.spec.block_bytes
    right = content(prompt)[: len(got)]
    if prompt.spec.codec in LOSSY:
        right = right.copy()
        for start in range(0, len(right), nbytes):
            block = slice(start, start + nbytes)
            if not np.array_equal(got[block], right[block]):
                right[block] = _altered(prompt, start // nbytes)
    return right


def store_prompt(client: Client, prompt: Prompt, *, durable: bool = False) -> int:
    """Stores the whole blocks of a prompt; returns the number of new ones."""
    return client.register(prompt.spec).store(prompt.whole, content(prompt), durable=durable).committed


def read_prompt(client: Client, prompt: Prompt) -> tuple[int, list[int]]:
    """Returns the number of blocks that were served, and the indexes of those with a wrong byte."""
    got = np.zeros_like(content(prompt))
    there = client.register(prompt.spec).load(prompt.tokens, got)
    size = prompt.spec.block_bytes
    expected = right_bytes(prompt, got)
    return there, [at for at in range(there) if wrong_bytes(got[at * size :][:size], expected[at * size :][:size])]


def block_key(prompt: Prompt, block: int) -> str:
    """The key of one of its blocks, as an administrator names it; for clients of the default tenant."""
    from benchmarks.common.daemons import as_the_daemon_has_it
    from prefixd.cache.namespaces import namespace_digest

    return key_in_namespace(namespace_digest(as_the_daemon_has_it(prompt.spec)), prompt, block)


def key_in_namespace(namespace_id: bytes, prompt: Prompt, block: int) -> str:
    """The key of one of its blocks in the namespace that a daemon has given this id: each tenant has its own."""
    from prefixd.cache.index.keys.block_keys import BlockChain

    seed = int.from_bytes(namespace_id, "little")
    return BlockChain(prompt.tokens.tobytes(), prompt.spec.block_tokens, seed).key(block).hex()


@functools.lru_cache(256)
def _altered(prompt: Prompt, block: int) -> Bytes:
    """A block as the codec of its namespace gives it back."""
    from prefixd_swap.codecs.coding import Coded, Coding, code, decode_object
    from prefixd_swap.codecs.part_shape import PartShape as StoredShape
    from prefixd_swap.codecs.registry import find_codec

    shape = StoredShape(SHAPE.dtype, SHAPE.layers, SHAPE.tokens, SHAPE.heads, SHAPE.channels, SHAPE.order)
    exact = content(prompt)[block * prompt.spec.block_bytes :][: prompt.spec.block_bytes]
    coded = code(exact, Coding(find_codec(prompt.spec.codec), shape))
    if not isinstance(coded, Coded):
        raise BenchmarkError(f"block {block} of {prompt} is not stored by its codec: {coded}")
    altered = np.empty_like(exact)
    decode_object(coded.data, altered)
    return altered


@functools.lru_cache(1024)
def _tokens(prompt: Prompt) -> Tokens:
    family = np.random.default_rng([prompt.number % FAMILIES])
    own = np.random.default_rng([prompt.owner, prompt.number])
    width = prompt.spec.block_tokens
    tail = int(own.integers(1, _LONGEST_TAIL + 1)) * width + int(own.integers(0, width))
    return np.concatenate(
        [
            family.integers(0, 1 << 32, prompt.shared_blocks * width, dtype=np.uint32),
            own.integers(0, 1 << 32, tail, dtype=np.uint32),
        ]
    )
