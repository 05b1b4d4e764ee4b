"""In place of `prefixd.images.decode_process`: no transformers, and files that say what becomes of their process."""

from __future__ import annotations

import os
import signal
import struct
import sys
from typing import Any

from prefixd.images import decode_process
from prefixd.images.decoding import Answer, Decoded, Job, Pixels
from prefixd.images.image_files import ImageLimits
from prefixd.images.token_counts import FixedCount, ImageProcessor

PID = struct.Struct("<q")


def work_of(processor: Any, described: ImageProcessor, limits: ImageLimits, memory: int) -> decode_process.Work:
    """What a child does: `spin` for ever, `crash`, or take the file for its pixels."""

    def work(job: Job, data: bytes) -> Answer:
        if data == b"spin":
            os.pwrite(memory, PID.pack(os.getpid()), job.offset)
            while True:
                pass
        if data == b"crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        return Decoded(job.id, 5, Pixels(job.offset, (len(data),), {}))

    return work


if __name__ == "__main__":
    sys.exit(decode_process.main(None, lambda _: (None, ImageProcessor(FixedCount(5), bytes(32))), work_of))
