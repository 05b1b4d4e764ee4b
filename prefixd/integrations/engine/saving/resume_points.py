"""Chooses the lengths after which later prompts are likely to continue; only there the end of a prefix is saved.

Layers with a sliding window and layers with a state need the end of a prefix only, and an end serves prefixes of one
length. Saving an end after every block costs the most bytes and seldom helps, since prompts continue others after few
lengths (Marconi, "Prefix Caching for the Era of Hybrid LLMs", section 4): the end of a prompt, which is asked again or
answered anew; the end of an answer, which the next turn of a chat continues; and the length at which a prompt parted
from earlier ones. Points at regular distances serve prompts that will part where none has yet.

    window of 2 blocks, points every 8 blocks (4 windows), a prompt of 11 blocks, and 2 blocks of its answer
    block            0 1 2 3 4 5 6 7 8 9 10 | 11 12
    full attention   x x x x x x x x x x x  |  x  x
    window                       x x   x x  |  x  x      points: 8, 11 (the prompt's end), 13 (the answer's)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResumePoints:
    """The points of one prompt. Lengths are in prefixd blocks.

    Attributes:
        prompt_blocks: the longest prefix of the prompt that can be loaded for the same prompt again.
        every: distance of the points inside the prompt, in lengths of the end that a group needs (4 with a window of 2
            blocks: a point every 8 blocks); 1: all bytes are saved; 0: no points inside.
        branch: length at which the prompt parted from earlier ones; 0: it did not.
    """

    prompt_blocks: int
    every: int
    branch: int = 0

    def __contains__(self, blocks: int) -> bool:
        """Whether a prefix of `blocks` blocks ends at the prompt's end or at the branch, or every end is saved."""
        return self.every == 1 or blocks in (self.prompt_blocks, self.branch)

    def need(self, block: int, span: int) -> bool:
        """Whether a point needs a group's bytes of a block, where a prefix needs those of its last `span` blocks."""
        if self.every == 1 or any(end - span <= block < end for end in (self.prompt_blocks, self.branch)):
            return True
        if not self.every:
            return False
        apart = self.every * span
        following = (block // apart + 1) * apart
        return following - span <= block and following <= self.prompt_blocks
