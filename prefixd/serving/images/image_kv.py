"""The keys and values that layers with cross-attention have of images: a namespace of images in the tiers.

They depend on the image alone, so an image is a prompt of its own in that namespace, with as many blocks as it takes
frames (one block with block tables, whose frames lie side by side). Its ids are drawn from its digest. All prompts of a
tenant share it, whatever their text before it:

```
namespace of the model     [ 5 6 7 8 ][ 9 I 3 4 ][ I 1 2 3 ]     I: an image's placeholder, one token
namespace of its images    [ image's frame 0 ][ 1 ] ... [ F-1 ]   needed whole: CrossAttention with F blocks
```

A prefix of the prompt is usable even without its images: the worker embeds the missing ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np
from msgspec.structs import replace

from prefixd.base.drawn_tokens import drawn_ids
from prefixd.base.rules.rules import CrossAttention
from prefixd.cache import BlockChain, Namespace, NamespaceSpec, PartSpec, TieredCache, Trie
from prefixd.cache.index.trie import Rows
from prefixd.cache.placement.holds import Hold
from prefixd.cache.placement.paths import path_now
from prefixd.images.identity import LEAST_BLOCK_TOKENS
from prefixd.serving.frame_budget import FrameBudget
from prefixd.worker_protocol.protocol import ImageFrames, PromptImage

NO_ROWS: Rows = np.zeros(0, np.int64)


def image_namespace(model: NamespaceSpec, frames: int, frame_bytes: int, *, whole_pages: bool = False) -> NamespaceSpec:
    """The namespace for the images of a model, each of `frames` frames; of the same users as the model's.

    A block there is a frame, or with `whole_pages` (see `Hello`) all frames of an image.

    Its name: "5f1e...-images".
    """
    width = frames if whole_pages else 1
    part = PartSpec("cross", 0, width * frame_bytes, CrossAttention(frames // width))
    return replace(model, name=f"{model.name}-images", block_tokens=LEAST_BLOCK_TOKENS, parts=(part,))


@dataclass(frozen=True, slots=True)
class ImageKv:
    """The images of a prompt whose model has layers with cross-attention, as the cache knows them.

    Attributes:
        namespace: of images.
        trie: the namespace's trie.
        blocks: number of blocks of an image.
        width: frames of a block.
        digests: of the images, in the prompt's order; one may occur several times.
        chains: of the images, by digest.
    """

    namespace: Namespace
    trie: Trie
    blocks: int
    width: int
    digests: Sequence[bytes]
    chains: dict[bytes, BlockChain]

    @classmethod
    def of(cls, cache: TieredCache, namespace: Namespace, images: Sequence[PromptImage], frame_bytes: int) -> ImageKv:
        """From a prompt's images."""
        blocks, digests = blocks_of(namespace.spec), [image.digest for image in images]
        width = namespace.spec.parts[0].nbytes // frame_bytes
        ids = np.arange(blocks * LEAST_BLOCK_TOKENS)
        chains = {digest: cache.chain(namespace, drawn_ids(ids, digest).tobytes()) for digest in dict.fromkeys(digests)}
        return cls(namespace, cache.trie(namespace), blocks, width, digests, chains)

    @property
    def size(self) -> int:
        """Frames of an image."""
        return self.blocks * self.width

    @property
    def frames(self) -> int:
        """Frames of all images; one that occurs several times in the prompt counts once."""
        return len(self.chains) * self.size

    def find(self, digest: bytes) -> Rows:
        """The blocks of an image if all its bytes are in some tier; else none."""
        return self.trie.usable(path_now(self.trie, self.namespace, self.chains[digest], self.blocks))


def blocks_of(spec: NamespaceSpec) -> int:
    """Blocks of an image in a namespace of images."""
    rule = spec.parts[0].rule
    assert isinstance(rule, CrossAttention), "a namespace of images has that rule"
    return rule.image_blocks


@dataclass(slots=True)
class ImageHolds:
    """A request's images in the GPU tier, a part of its footprint.

    It holds the images that were found when the request was staged, and those that its run has filled. The others lie
    in frames of the request's own while it runs.

    Args:
        cache: where the images are.
        budget: counts the frames of held images, of all requests.
        owner: the request, for logs.
        kv: the images.
        finding: False finds nothing in the cache.
        keeping: False keeps nothing there.
    """

    cache: TieredCache
    budget: FrameBudget
    owner: str
    kv: ImageKv
    finding: bool
    keeping: bool
    _held: dict[bytes, Hold] = field(default_factory=dict)
    _own: dict[bytes, list[int]] = field(default_factory=dict)
    _counted: bool = True

    def __post_init__(self) -> None:
        for digest in self.kv.chains if self.finding else ():
            if len(rows := self.kv.find(digest)):
                self._hold(digest, rows)

    @property
    def held(self) -> Rows:
        """The blocks of the images that it holds."""
        return np.concatenate([NO_ROWS, *(hold.rows for hold in self._held.values())])

    @property
    def first_rows(self) -> list[int]:
        """The first block of each held image."""
        return [int(hold.rows[0]) for hold in self._held.values()]

    @property
    def filling(self) -> Collection[bytes]:
        """The images that its run is about to fill."""
        return self._own.keys()

    @property
    def grew(self) -> bool:
        """Whether an image that it does not hold has been cached meanwhile."""
        missing = self.kv.chains.keys() - self._held.keys()
        return self.finding and any(len(self.kv.find(digest)) for digest in missing)

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
        """Blocks of the images that it does not hold."""
        return (len(self.kv.chains) - len(self._held)) * self.kv.blocks

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

    def release_missing(self) -> None:
        """Ends the holds of images that are not wholly in the GPU tier: the worker computes them."""
        level = self.cache.tiers.compute.level
        for digest, hold in list(self._held.items()):
            if self.kv.trie.lacking(hold.rows, level).any():
                del self._held[digest]
                self._end(hold)

    def yield_frames(self) -> None:
        """From now on the request can be made to give its frames up, so they do not count in the budget."""
        for hold in self._held.values():
            self.budget.remove(hold.rows)
        self._counted = False

    def claim_frames(self, own: list[int]) -> list[ImageFrames]:
        """From now on the request keeps its frames, and gets `own` frames for the images that it does not hold.

        Returns the frames of all images, in the prompt's order.
        """
        kv, level = self.kv, self.cache.tiers.compute.level
        for hold in self._held.values():
            self.budget.add(kv.trie, hold.rows)
        self._counted = True
        missing = [digest for digest in kv.chains if digest not in self._held]
        for number, digest in enumerate(missing):
            self._own[digest] = own[number * kv.blocks : (number + 1) * kv.blocks]
        frames = []
        for digest in kv.digests:
            if digest in self._held:
                slots = kv.trie.slots[self._held[digest].rows, level, 0]
                frames.append(ImageFrames(slots.tolist(), True))
            else:
                frames.append(ImageFrames(self._own[digest], False))
        return frames

    def filled(self) -> list[int]:
        """The worker has filled the frames of all images: enters those that the trie lacks. Returns the frames that
        belong to the trie now."""
        given: list[int] = []
        own, self._own = self._own, {}
        for digest, frames in own.items() if self.keeping else ():
            kv = self.kv
            rows, taken = self.cache.record(kv.namespace, kv.namespace.root, kv.chains[digest], 0, frames)
            given += compress(frames, taken.tolist())
            if taken.any():  # else another request has entered it first, and this one uses its own frames
                self._hold(digest, rows[taken])
        return given

    def end(self) -> None:
        """Ends all holds."""
        for hold in self._held.values():
            self._end(hold)
        self._held.clear()

    def _hold(self, digest: bytes, rows: Rows) -> None:
        compute = self.cache.tiers.compute
        self._held[digest] = self.cache.holds.hold(self.owner, self.kv.trie, rows, compute, counted=compute)
        if self._counted:
            self.budget.add(self.kv.trie, rows)

    def _end(self, hold: Hold) -> None:
        if self._counted:
            self.budget.remove(hold.rows)
        hold.end()
