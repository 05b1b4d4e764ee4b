"""One run of a request on the worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Run:
    """What the daemon knows of a run, from the hand-over to the worker until the worker has let go.

    Attributes:
        frames: frames[i] is the home of block i.
        computes: blocks of the prompt up to this one are computed by the run, and then cached for everybody.
        computed_tokens: tokens whose KV was in the run's memory when the worker told of it last, cached ones included.
        recording: filled blocks are entered into the trie; False after one could not be.
    """

    frames: list[int]
    computes: int
    recording: bool
    computed_tokens: int = 0
