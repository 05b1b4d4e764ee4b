"""What the cache keeps of images: a namespace of images in the tiers, beside that of the model.

It depends on the image alone, so an image is a prompt of its own in that namespace. Its ids are drawn from its digest.
All prompts of a tenant share it, whatever their text before it:

```
namespace of the model     [ 5 6 7 8 ][ 9 I I I ][ I 1 2 3 ]     I: an image's tokens
namespace of its images    [ image's frame 0 ][ 1 ] ... [ F-1 ]   needed whole
```

There are two kinds of it (Jenga, section 5.3):

- The keys and values that layers with cross-attention have of an image (Llama 3.2 Vision): all rows of a prompt read
  those of all its images. `CrossAttention` with F blocks, the same for all images; with block tables one block.
- The embedding, whose rows stand in place of the image's tokens: needed while these are computed, and not by a prefix
  behind them. `VisionEmbedding`, with as many blocks as the rows fill.

A prefix of the prompt is usable even without its images: the worker embeds the missing ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress, islice

import numpy as np

from prefixd.base.drawn_tokens import drawn_ids
from prefixd.base.rules.rules import CrossAttention, VisionEmbedding
from prefixd.cache import BlockChain, Namespace, NamespaceSpec, PartSpec, TieredCache, Trie
from prefixd.cache.index.trie import Rows
from prefixd.cache.placement.holds import Hold
from prefixd.cache.placement.paths import PromptPath
from prefixd.images.identity import LEAST_BLOCK_TOKENS
from prefixd.serving.frame_budget import FrameBudget
from prefixd.worker_protocol.protocol import Hello, ImageFrames, PromptImage, embedding_frames

NO_ROWS: Rows = np.zeros(0, np.int64)


def image_namespace(model: NamespaceSpec, hello: Hello) -> NamespaceSpec | None:
    """The namespace for the images of a model, of the same users as the model's; None for a model of text alone.

    A block there is a frame, or with `Hello.whole_pages` all frames of an image's keys and values.
    """
    if hello.image_group is not None:
        frames = hello.image_group.frames
        width = frames if hello.whole_pages else 1
        part = PartSpec("cross", 0, width * hello.frame_bytes, CrossAttention(frames // width))
    elif hello.images is not None:
        part = PartSpec("embedding", 0, hello.frame_bytes, VisionEmbedding())
    else:
        return None
    return model.for_images(LEAST_BLOCK_TOKENS, part)


@dataclass(frozen=True, slots=True)
class ImageKv:
    """The images of a prompt, as the cache knows them.

    Attributes:
        namespace: of images.
        trie: the namespace's trie.
        width: frames of a block.
        every_row: every row of the prompt depends on all images, else only those of their own tokens.
        digests: of the images, in the prompt's order; one may occur several times.
        firsts, ends: of each image, the first of its tokens and their end.
        blocks: number of blocks of each image, by digest.
        chains: of the images, by digest.
        paths: their blocks as far as they are known, by digest.
    """

    namespace: Namespace
    trie: Trie
    width: int
    every_row: bool
    digests: Sequence[bytes]
    firsts: Sequence[int]
    ends: Sequence[int]
    blocks: dict[bytes, int]
    chains: dict[bytes, BlockChain]
    paths: dict[bytes, PromptPath]

    @classmethod
    def of(cls, cache: TieredCache, namespace: Namespace, images: Sequence[PromptImage], hello: Hello) -> ImageKv:
        """From a prompt's images."""
        rule = namespace.spec.parts[0].rule
        cross = rule.image_blocks if isinstance(rule, CrossAttention) else 0
        blocks = {image.digest: cross or embedding_blocks(image, hello) for image in images}
        chains = {}
        for digest, count in blocks.items():
            ids = drawn_ids(np.arange(count * LEAST_BLOCK_TOKENS), digest)
            chains[digest] = cache.chain(namespace, ids.tobytes())
        width = namespace.spec.parts[0].nbytes // hello.frame_bytes
        digests, firsts = [image.digest for image in images], [image.first for image in images]
        ends = [image.first + image.tokens for image in images]
        paths = {digest: PromptPath() for digest in blocks}
        return cls(namespace, cache.trie(namespace), width, cross > 0, digests, firsts, ends, blocks, chains, paths)

    @property
    def frames(self) -> int:
        """Frames of all images; one that occurs several times in the prompt counts once."""
        return sum(self.blocks.values()) * self.width

    def size(self, digest: bytes) -> int:
        """Frames of an image."""
        return self.blocks[digest] * self.width

    def needed(self, computed_tokens: int) -> list[bytes]:
        """The images, each once, that tokens behind the first `computed_tokens` depend on."""
        of_prompt = zip(self.digests, self.ends, strict=True)
        return [*dict.fromkeys(digest for digest, end in of_prompt if self.every_row or end > computed_tokens)]

    def find(self, digest: bytes) -> Rows:
        """The blocks of an image if all its bytes are in some tier; else none."""
        blocks = self.blocks[digest]
        path = self.paths[digest].find(self.trie, self.namespace, self.chains[digest], blocks)
        rows = self.trie.usable(path)
        return rows if len(rows) == blocks else NO_ROWS


def embedding_blocks(image: PromptImage, hello: Hello) -> int:
    """Blocks of an image's embedding: frames."""
    assert hello.images is not None, "the model reads images"
    return embedding_frames(image.tokens, hello.images.row_bytes, hello.frame_bytes)


@dataclass(slots=True)
class ImageHolds:
    """A request's images in the GPU tier, a part of its footprint.

    It holds the images that were found when the request was staged, and those that its run has filled. The others lie
    in frames of the request's own while it runs. An embedding is released as soon as its tokens are computed, and
    stays cached while there is room.

    Args:
        cache: where the images are.
        budget: counts the frames of held images, of all requests.
        owner: the request, for logs.
        kv: the images.
        finding: False finds nothing in the cache.
        keeping: False keeps nothing there.
        computed_tokens: tokens of the prompt that need no images any more; see `need`.
    """

    cache: TieredCache
    budget: FrameBudget
    owner: str
    kv: ImageKv
    finding: bool
    keeping: bool
    computed_tokens: int = 0
    _needed: list[bytes] = field(default_factory=list)
    _held: dict[bytes, Hold] = field(default_factory=dict)
    _own: dict[bytes, list[int]] = field(default_factory=dict)
    _filled: set[bytes] = field(default_factory=set)
    _given_up: set[bytes] = field(default_factory=set)
    _counted: bool = True

    def __post_init__(self) -> None:
        self.need(self.computed_tokens)
        for digest in self._needed if self.finding else ():
            if len(rows := self.kv.find(digest)):
                self._hold(digest, rows)

    def need(self, computed_tokens: int) -> None:
        """The prefix that the request holds has so many tokens: those behind it need their images."""
        self._needed = self.kv.needed(computed_tokens)

    @property
    def held(self) -> Rows:
        """The blocks of the images that it holds."""
        return np.concatenate([NO_ROWS, *(hold.rows for hold in self._held.values())])

    @property
    def first_rows(self) -> list[int]:
        """The first block of each held image."""
        return [int(hold.rows[0]) for hold in self._held.values()]

    def filling(self, computed_tokens: int) -> set[bytes]:
        """The images that its run fills before it has computed so many tokens of the prompt."""
        kv = self.kv
        reached = {
            digest
            for digest, first in zip(kv.digests, kv.firsts, strict=True)
            if kv.every_row or first < computed_tokens
        }
        return reached & (self._own.keys() - self._filled)

    @property
    def grew(self) -> bool:
        """Whether an image that it does not hold, and has not given up, has been cached meanwhile."""
        sought = (digest for digest in self._missing if digest not in self._given_up)
        return self.finding and any(len(self.kv.find(digest)) for digest in sought)

    @property
    def complete(self) -> bool:
        """Whether all held images are in the GPU tier."""
        return not self.kv.trie.lacking(self.held, self.cache.tiers.compute.level).any()

    @property
    def found(self) -> int:
        """How many images of the prompt it holds, each as often as it occurs there."""
        return sum(digest in self._held for digest in self.kv.digests)

    @property
    def missing_blocks(self) -> int:
        """Blocks of the images that it needs and does not hold."""
        return sum(self.kv.blocks[digest] for digest in self._missing)

    @property
    def missing_bytes(self) -> int:
        """Bytes of the images that it holds which are not in the GPU tier yet."""
        lacking = self.kv.trie.lacking(self.held, self.cache.tiers.compute.level)
        return int(self.kv.trie.group_bytes[lacking].sum())

    def touch(self) -> None:
        """Counts a use of the held images."""
        self.cache.placement.touch(self.kv.trie, self.held)

    @property
    def tiers(self) -> list[int]:
        """The tier from which each block that it holds has to be brought."""
        tiers: list[int] = self.kv.trie.nearest[self.held].tolist()
        return tiers

    @property
    def lacking(self) -> list[Rows]:
        """The blocks of each image that it holds and that is not wholly in the GPU tier."""
        return [hold.rows for hold in self._held.values() if self._lacks(hold)]

    def release_missing(self) -> None:
        """Ends the holds of images that are not wholly in the GPU tier: the worker computes them."""
        for digest, hold in list(self._held.items()):
            if self._lacks(hold):
                del self._held[digest]
                self._given_up.add(digest)
                self._end(hold)

    def yield_frames(self) -> None:
        """From now on the request can be made to give its frames up, so they do not count in the budget."""
        for hold in self._held.values():
            self.budget.remove(hold.rows)
        self._counted = False

    def claim_frames(self, own: list[int]) -> list[ImageFrames]:
        """From now on the request keeps its frames, and gets `own` frames for the images that it needs and does not
        hold.

        Returns the frames of all images, in the prompt's order; none for those that it does not need.
        """
        kv, level = self.kv, self.cache.tiers.compute.level
        for hold in self._held.values():
            self.budget.add(kv.trie, hold.rows)
        self._counted = True
        taken = iter(own)
        for digest in self._missing:
            self._own[digest] = [*islice(taken, kv.blocks[digest])]
        frames = []
        for digest in kv.digests:
            if digest in self._held:
                slots = kv.trie.slots[self._held[digest].rows, level, 0]
                frames.append(ImageFrames(slots.tolist(), True))
            else:
                frames.append(ImageFrames(self._own.get(digest, []), False))
        return frames

    def filled(self, images: Iterable[int]) -> list[int]:
        """The worker has filled the frames of these images of the prompt: enters those that the trie lacks. Returns the
        frames that belong to the trie now."""
        given: list[int] = []
        kv = self.kv
        for digest in {kv.digests[image] for image in images} - self._filled:
            self._filled.add(digest)
            frames = self._own.get(digest, [])
            if not frames or not self.keeping:
                continue
            rows, taken = self.cache.record(kv.namespace, kv.namespace.root, kv.chains[digest], 0, frames)
            given += compress(frames, taken.tolist())
            if taken.any():  # else another request has entered it first, and this one uses its own frames
                self._own[digest] = [*compress(frames, (~taken).tolist())]
                self._hold(digest, rows[taken])
        return given

    def pass_by(self, computed_tokens: int) -> list[int]:
        """The run has computed so many tokens: releases the images that no later one needs. Returns the own frames of
        these, which are to be freed."""
        passed = {*self._needed} - {*self.kv.needed(computed_tokens)}
        if not passed:
            return []
        self.need(computed_tokens)
        for digest in passed & self._held.keys():
            self._end(self._held.pop(digest))
        return [frame for digest in passed for frame in self._own.pop(digest, ())]

    def end(self) -> None:
        """Ends all holds."""
        for hold in self._held.values():
            self._end(hold)
        self._held.clear()

    @property
    def _missing(self) -> list[bytes]:
        return [digest for digest in self._needed if digest not in self._held]

    def _lacks(self, hold: Hold) -> bool:
        return bool(self.kv.trie.lacking(hold.rows, self.cache.tiers.compute.level).any())

    def _hold(self, digest: bytes, rows: Rows) -> None:
        compute = self.cache.tiers.compute
        self._held[digest] = self.cache.holds.hold(self.owner, self.kv.trie, rows, compute, counted=compute)
        if self._counted:
            self.budget.add(self.kv.trie, rows)

    def _end(self, hold: Hold) -> None:
        if self._counted:
            self.budget.remove(hold.rows)
        hold.end()
