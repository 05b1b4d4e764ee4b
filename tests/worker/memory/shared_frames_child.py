"""The other process of test_shared_frames.py: a worker without a model.

Arguments: the number of an inherited socket, and "virtual" or "paged". After Memory it obeys: for Start it has a
sequence on the frames, fills their blocks with the request's number and ends it; Grow and Shrink as a worker does.
"""

from __future__ import annotations

import json
import socket
import sys

import torch

from prefixd.worker.memory.frame_window import FrameWindow
from prefixd.worker.memory.paged_kv import PagedKv
from prefixd.worker.memory.shared_frames import SharedFrames
from prefixd.worker.memory.virtual_kv import VirtualKv
from prefixd.worker_protocol.framing import Connection, to_worker
from prefixd.worker_protocol.protocol import Done, Grow, Memory, Ready, Shrink, Start
from prefixd_swap.group_shape import KvGeometry
from prefixd_swap.vmem import attach_memory, recv_export
from prefixd_swap.vtensor import VirtualTensorManager

BLOCKS = 4


def main() -> None:
    connection = Connection(socket.socket(fileno=int(sys.argv[1])), to_worker())
    geometry = KvGeometry(**json.loads(sys.argv[3]))
    message = connection.receive()
    assert isinstance(message, Memory)
    with attach_memory(message.meta, recv_export(connection.socket, message.fds)) as memory:
        frames = SharedFrames(memory, geometry.chunks_per_block(memory.chunk_bytes), message)
        tokens = BLOCKS * geometry.block_tokens
        if sys.argv[2] == "paged":
            window = FrameWindow(memory, frames.table, message.frame_bytes, message.most_frames)
            kv = PagedKv(window, geometry, max_tokens=tokens)
        else:
            kv = VirtualKv(VirtualTensorManager(memory, frames.table, geometry, requests=3, max_tokens=tokens))
        connection.send(Ready())
        while True:
            message = connection.receive()
            if isinstance(message, Start):
                sequence = kv.open(message.frames)
                if isinstance(kv, PagedKv):
                    kv.pool[message.frames] = float(message.id)
                else:
                    sequence.kv[: len(message.frames) * geometry.block_tokens] = float(message.id)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                kv.close(sequence, lambda: None)
                kv.poll(wait=True)
                connection.send(Done(message.id, "length"))
            elif isinstance(message, Grow):
                frames.grow(message, connection.socket)
            elif isinstance(message, Shrink):
                connection.send(frames.shrink(message, kv))
                memory.check_integrity()
            else:
                break
        kv.end()


if __name__ == "__main__":
    main()
