"""The states of a request, and the transitions between them, which alone change the state.

While it waits:

```
    NEW --enqueue--> WAITING --stage--> STAGING --staged--> READY --hand_over--> RUNNING
                      ^   ^                |                  |
                      |   +----unstage-----+                  |
                      +--------unstage------------------------+
```

While it runs on the worker:

```
             +--starve--> STARVED
             |               |
          RUNNING <--extend--+
             |
             +--preempt (from STARVED too)--> PREEMPTING
             |                                    |
             +--cancel (from STARVED too)--> CANCELLING <--cancel--+ (from PREEMPTING)
```

And from there:

```
    RUNNING, STARVED, PREEMPTING                         --put_back--> WAITING
    WAITING, READY, RUNNING, STARVED, PREEMPTING, CANCELLING  --end--> ENDED
    STAGING, RUNNING, STARVED, PREEMPTING, CANCELLING    --withdraw--> WITHDRAWN --let_go--> ENDED
```

A request has a footprint in the GPU tier in every state but NEW, WAITING and ENDED, and a run while the worker has it.
"""

from __future__ import annotations

from enum import Enum, auto


class RequestState(Enum):
    """Where a request is in its life."""

    NEW = auto()
    """Not submitted yet."""
    WAITING = auto()
    """In the queue, without a footprint; its cached blocks may be moved and evicted."""
    STAGING = auto()
    """In the queue; its prefix is held in the GPU tier, and a copy brings up what is missing there."""
    READY = auto()
    """In the queue; its prefix is held in the GPU tier and is there."""
    RUNNING = auto()
    """The worker has it."""
    STARVED = auto()
    """The worker has it; it needs another frame soon."""
    PREEMPTING = auto()
    """The worker was told to end it, so that others get its frames; it runs again later."""
    CANCELLING = auto()
    """The worker was told to end it; its outcome is known."""
    WITHDRAWN = auto()
    """Its caller has had the last event, but a copy or the worker still uses its frames."""
    ENDED = auto()
    """Its caller has had the last event, and it has no footprint."""


_S = RequestState
ON_WORKER = frozenset({_S.RUNNING, _S.STARVED, _S.PREEMPTING, _S.CANCELLING})
TRANSITIONS: dict[str, tuple[frozenset[RequestState], RequestState]] = {
    "enqueue": (frozenset({_S.NEW}), _S.WAITING),
    "stage": (frozenset({_S.WAITING}), _S.STAGING),
    "staged": (frozenset({_S.STAGING}), _S.READY),
    "unstage": (frozenset({_S.STAGING, _S.READY}), _S.WAITING),
    "hand_over": (frozenset({_S.READY}), _S.RUNNING),
    "starve": (frozenset({_S.RUNNING}), _S.STARVED),
    "extend": (frozenset({_S.STARVED}), _S.RUNNING),
    "preempt": (frozenset({_S.RUNNING, _S.STARVED}), _S.PREEMPTING),
    "cancel": (frozenset({_S.RUNNING, _S.STARVED, _S.PREEMPTING}), _S.CANCELLING),
    "put_back": (frozenset({_S.RUNNING, _S.STARVED, _S.PREEMPTING}), _S.WAITING),
    "end": (ON_WORKER | {_S.WAITING, _S.READY}, _S.ENDED),
    "withdraw": (ON_WORKER | {_S.STAGING}, _S.WITHDRAWN),
    "let_go": (frozenset({_S.WITHDRAWN}), _S.ENDED),
}


class IllegalTransitionError(RuntimeError):
    """A transition that the request's state does not allow: a defect."""
