"""The distance of a block, by the tier that it has to be brought from, and the weight of a prompt."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class Distance(IntEnum):
    """Where a block has to be brought from, nearest first.

    Source: "Prefix cache as long-term memory", section V.F, which knows no store that other hosts share.
    """

    GPU = 0
    CPU = 1
    DISK = 2
    REMOTE = 3
    NONE = 4

    @property
    def weight(self) -> float:
        """4 - N in equation 4 of the paper: 4 on the GPU, 3 on the CPU, 2 on disk, 1 for a prefix that is not computed
        yet; a shared store lies in the middle between the last two."""
        return _WEIGHTS[self]


_WEIGHTS = {Distance.GPU: 4.0, Distance.CPU: 3.0, Distance.DISK: 2.0, Distance.REMOTE: 1.5, Distance.NONE: 1.0}

WEIGHT_CLASSES = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
"""The weights that a prompt can have; every `Distance.weight` is one of them."""
_ROUNDED_DOWN = 0.125


def weight_class(mean: float) -> float:
    """The class of a mean weight: the next one above, or the one below if the mean is at most 0.125 above that.

    Examples: 1.125 -> 1.0, 1.13 -> 1.5, 2.88 -> 3.0, 3.82 -> 4.0.
    """
    return next((known for known in WEIGHT_CLASSES if mean <= known + _ROUNDED_DOWN), WEIGHT_CLASSES[-1])


def prompt_weight(cached: Iterable[tuple[Distance, int]], prompt_tokens: int) -> float:
    """4 - N of a whole prompt: the class of the mean weight of its tokens. Tokens that are not cached weigh 1.

    The paper has one N for a prefix, because a prefix is cached as a whole. A prompt whose prefix lies in one tier,
    with a question of less than an eighth of the prompt behind it, has that tier's weight, as in the paper: the mean
    is more than w - (w - 1) / 8, which is at least 0.125 above the class below w. Where all prompts begin with the
    same header (`Header`), only what lies behind it is passed: with the header, all weights would be nearly alike.

    Example: of 4,096 tokens 512 on the GPU, the others not cached: (512 * 4 + 3584 * 1) / 4096 = 1.375 -> 1.5. If the
    512 are the header: 1.0.

    Args:
        cached: (tier, tokens) of the parts behind the header that are cached.
        prompt_tokens: of the prompt behind the header, at least as many as are cached; 0 counts as not cached.
    """
    gained = sum((distance.weight - 1.0) * tokens for distance, tokens in cached)
    return weight_class(1.0 + gained / prompt_tokens if prompt_tokens else 1.0)
