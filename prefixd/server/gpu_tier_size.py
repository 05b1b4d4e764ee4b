"""How large the GPU tier is at the start (`gpu.bytes = "auto"`), and how large it can ever be."""

from __future__ import annotations

import logging
import resource
from collections.abc import Collection

from prefixd.worker.protocol import Hello
from prefixd_swap import VirtualMemory

log = logging.getLogger(__name__)

SHARE = 0.9
"""Of what is free after the weights; the rest is a reserve for what the estimates miss and for others on the device."""


def automatic_bytes(memory: VirtualMemory, hellos: Collection[Hello], untouched_bytes: int) -> int:
    """What `gpu.bytes = "auto"` means on this device now: below 0 where not even the model fits. It asks the device.

    Args:
        memory: on the device.
        hellos: say what the models will take; their weights are not there yet.
        untouched_bytes: memory of the same device that others have been promised and have not touched yet.
    """
    free = memory.available_bytes()
    weights, working = (sum(getattr(hello, name) for hello in hellos) for name in ("weights_bytes", "working_bytes"))
    nbytes = int((free - untouched_bytes - weights - working) * SHARE)
    log.info(
        "gpu.bytes = auto: %d bytes, %d%% of what is left of %d free on %s after %d for the weights, %d to work with "
        "and %d for the CPU tier",
        *(nbytes, round(SHARE * 100), free, memory.device, weights, working, untouched_bytes),
    )
    return nbytes


def most_frames(memory: VirtualMemory, frame_bytes: int, frames: int) -> int:
    """How many frames the tier can ever have: what the device has in all; addresses are reserved for so many.

    Where the process's addresses are limited (`ulimit -v`) they are not to be spent so: no more than at the start.
    """
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return frames
    return max(frames, memory.total_bytes() // frame_bytes)
