"""The other process of test_transfer.py: attaches a memory, checks what it reads, and writes an answer.

Arguments: the number of an inherited socket, the description of the memory, how many descriptors follow, and
"resize" for a memory whose chunks come and go.
"""

from __future__ import annotations

import json
import socket
import sys

import torch

from prefixd_swap.errors import MemoryMisuseError, SwapError
from prefixd_swap.vmem import VirtualMemory, attach_memory, recv_export


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    meta, count = sys.argv[2].encode(), int(sys.argv[3])
    with attach_memory(meta, recv_export(sock, count, timeout_s=30)) as memory:
        if sys.argv[4:] == ["resize"]:
            return resize(sock, memory)
        chunks = sock.recv(64)
        mapped = memory.reserve(len(chunks) * memory.chunk_bytes)
        mapped.map(0, list(chunks))
        view = mapped.tensor((len(chunks), memory.chunk_bytes), torch.uint8)
        seen = [[int(row.min()), int(row.max())] for row in view]
        view[0].fill_(200)
        refused = []
        for change in (lambda: memory.create(1), lambda: memory.destroy(range(1)), memory.export):
            try:
                change()
            except MemoryMisuseError as error:
                refused.append(str(error))
        if memory.device != "cpu":
            torch.cuda.synchronize()
        sock.sendall(json.dumps({"seen": seen, "refused": refused}).encode())
        sock.recv(1)  # hold the mappings until the parent has looked


def resize(sock: socket.socket, memory: VirtualMemory) -> None:
    """Obeys: map a run and report its bytes, unmap it, drop it, adopt a further one."""
    mapped = memory.reserve(8 * memory.chunk_bytes)
    while order := sock.recv(4096):
        what, *numbers = json.loads(order)
        answer: object = None
        try:
            if what == "map":
                mapped.map(0, range(*numbers))
                view = mapped.tensor((len(range(*numbers)), memory.chunk_bytes), torch.uint8)
                answer = [[int(row.min()), int(row.max())] for row in view]
            elif what == "unmap":
                mapped.unmap(0, len(range(*numbers)) * memory.chunk_bytes)
            elif what == "drop":
                memory.drop(range(*numbers))
            else:
                meta, count = numbers
                sock.sendall(b"send")
                adopted = memory.adopt(meta.encode(), recv_export(sock, count, timeout_s=30))
                answer = [adopted.start, adopted.stop]
            memory.check_integrity()
        except SwapError as error:
            answer = str(error)
        sock.sendall(json.dumps([answer, memory.chunk_count]).encode())


if __name__ == "__main__":
    main()
