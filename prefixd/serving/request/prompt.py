"""A request's prompt, its parameters, and its blocks in the cache's trie."""

from __future__ import annotations

from dataclasses import dataclass, field

from prefixd.base.sampling import Sampling
from prefixd.cache import BlockChain, Namespace, Trie
from prefixd.cache.index.trie import Rows
from prefixd.cache.placement.paths import PromptPath, path_now
from prefixd.cache.rules import GroupMask
from prefixd.serving.images.image_kv import ImageKv
from prefixd.serving.images.prompt_images import PromptImages
from prefixd.serving.kv_shape import ONE_FRAME, KvShape
from prefixd.worker_protocol.protocol import blocks_needed


@dataclass(slots=True, eq=False, kw_only=True)
class Prompt:
    """A prompt with the tokens that were generated behind it, in blocks.

    Attributes:
        id: unique in the daemon.
        name: as its caller knows it.
        namespace: of its blocks.
        trie: of the namespace.
        chain: prompt and generated tokens, and the keys of their blocks. Other ids stand for images.
        prompt_tokens: how many of them are the prompt.
        kv: how its blocks lie in frames.
        images: the prompt's images, with the tokens as the model reads them; None for a prompt of text alone.
        image_kv: its images as the cache knows them, if layers of the model attend to images and to nothing else.
        read_only: it leaves nothing in the cache, and the blocks that it uses do not count as used.
        uncached: it does not use the cache and leaves nothing there: the blocks that it used before may be damaged, or
            there is no room for another namespace.
    """

    id: int
    name: str
    namespace: Namespace
    trie: Trie
    chain: BlockChain
    prompt_tokens: int
    sampling: Sampling
    kv: KvShape = ONE_FRAME
    images: PromptImages | None = None
    image_kv: ImageKv | None = None
    read_only: bool = False
    uncached: bool = False
    _path: PromptPath = field(default_factory=PromptPath)

    @property
    def generated(self) -> int:
        """Tokens generated so far, in all runs."""
        return self.chain.tokens - self.prompt_tokens

    @property
    def token_ids(self) -> bytes:
        """Prompt and generated tokens as the model reads them, little-endian uint32."""
        return self.chain.token_ids if self.images is None else self.images.token_ids

    @property
    def keeps(self) -> bool:
        """Whether the blocks that it computes are cached."""
        return not (self.read_only or self.uncached)

    @property
    def places(self) -> int:
        """Sequences that the worker computes for it at once."""
        search = self.sampling.beam_search
        return 1 if search is None else search.width

    def append(self, token_ids: bytes) -> None:
        """Adds tokens that were generated."""
        if self.images is None:
            self.chain.append(token_ids)
        else:
            self.images.append(token_ids, self.chain)

    def uncut(self, blocks: int) -> int:
        """The largest number of blocks, at most `blocks`, after which a prefix may end: it must not end in an image."""
        return blocks if self.images is None else self.images.uncut(blocks)

    def next_uncut(self, blocks: int) -> int:
        """The smallest number of blocks above `blocks` after which a prefix may end."""
        return blocks + 1 if self.images is None else self.images.next_uncut(blocks)

    def usable(self, path: Rows, available: GroupMask | None = None) -> Rows:
        """The longest beginning of `path` that every KV group allows (`Trie.usable`), and that cuts no image."""
        rows = self.trie.usable(path, available)
        while (blocks := self.uncut(len(rows))) < len(rows):
            path, available = path[:blocks], None if available is None else available[:blocks]
            rows = self.trie.usable(path, available)
        return rows

    @property
    def prompt_ends(self) -> tuple[int, int]:
        """Numbers of blocks after which a request with the same prompt, and one that continues it, can resume."""
        block_tokens = self.trie.block_tokens
        return self.uncut((self.prompt_tokens - 1) // block_tokens), self.uncut(self.prompt_tokens // block_tokens)

    @property
    def usable_blocks(self) -> int:
        """Full blocks that may come from the cache: at least one token has to be computed, for its logits."""
        if self.uncached:
            return 0
        return self.uncut((self.chain.tokens - 1) // self.trie.block_tokens)

    @property
    def path(self) -> Rows:
        """The rows of its usable blocks that are in the trie, from the first on, wherever their bytes are."""
        trie, namespace, blocks = self.trie, self.namespace, self.usable_blocks
        if not trie.has_rules:
            return path_now(trie, namespace, self.chain, blocks)  # `found` is as long, or nearly
        return self._path.find(trie, namespace, self.chain, blocks)

    @property
    def blocks(self) -> int:
        """Blocks for all known tokens and the next one that will be generated; of a beam search all its blocks."""
        if self.sampling.beam_search is not None:
            return self.most_blocks
        return -(-(self.chain.tokens + 1) // self.trie.block_tokens)

    @property
    def most_blocks(self) -> int:
        """The most blocks that it may have at its end."""
        sampling, block_tokens = self.sampling, self.trie.block_tokens
        if (search := sampling.beam_search) is not None:
            return blocks_needed(self.prompt_tokens, sampling.max_tokens, search.width, block_tokens)
        return -(-(self.prompt_tokens + sampling.max_tokens) // block_tokens)
