"""After which lengths later prompts are likely to continue: there, and only there, the end of a prefix is worth saving.

Layers with a sliding window and layers with a state need the end of a prefix only, and an end serves prefixes of one
length. To save it after every block costs the most bytes and is seldom of use, since prompts continue others after few
lengths (Marconi, "Prefix Caching for the Era of Hybrid LLMs", section 4): the end of a prompt, which is asked again or
answered anew; the end of an answer, which the next turn of a chat continues; and where a prompt left others before. For
prompts that will part where none has yet, there is a point every so often.

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
        every: so many ends' lengths are between points inside the prompt; 1: all bytes are saved; 0: there are none.
        branch: where the prompt left others before; 0: nowhere.
    """

    prompt_blocks: int
    every: int
    branch: int = 0

    def __contains__(self, blocks: int) -> bool:
        """Whether a prefix of so many blocks is one of them."""
        return self.every == 1 or blocks in (self.prompt_blocks, self.branch)

    def need(self, block: int, span: int) -> bool:
        """Whether one of them needs the bytes that a group has of a block, when a prefix needs those of its last `span`
        blocks."""
        if self.every == 1 or any(end - span <= block < end for end in (self.prompt_blocks, self.branch)):
            return True
        if not self.every:
            return False
        apart = self.every * span
        following = (block // apart + 1) * apart
        return following - span <= block and following <= self.prompt_blocks
