"""Holds a pass before each layer until that layer of its cached blocks has come (`Start.loading`).

```
daemon    copy of layers 0-7 | 8-15      | 16-23     | 24-31 |
worker                       | 0-7, wait | 8-15, wait| 16-23, wait | 24-31
                                         ^ Layers(16): the host goes on; on a GPU layers 0-7 may still be computed
```

The daemon sends `Layers` when the bytes are in memory, so no event of the device has to be shared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from prefixd.worker.decoding.run import Run
from prefixd.worker_protocol.framing import Connection
from prefixd.worker_protocol.protocol import Cancel, Grow, Layers, Ping, Pong, Shutdown, ToWorker

Listen = Callable[[int], Layers | None]
"""Waits for news of a request whose pass waits: more layers; None if the pass is to be dropped."""


class PassDroppedError(Exception):
    """The request whose pass waits for layers is cancelled, or the worker ends."""


class LayerGate:
    """Holds the pass of one run.

    Args:
        run: its cached blocks are loading.
        places: by a layer's number, its place among the layers of a block.
        listen: waits for news of the run.
    """

    def __init__(self, run: Run, places: Mapping[int, int], listen: Listen) -> None:
        self._run = run
        self._places = places
        self._listen = listen

    def wait(self, layer: int) -> None:
        """Returns when a layer of the cached blocks may be read. Raises PassDroppedError."""
        place = self._places[layer]
        while self._run.loading and self._run.layers <= place:
            news = self._listen(self._run.id)
            if news is None:
                raise PassDroppedError
            self._run.note_layers(news.layers)


class Mailbox:
    """The daemon's messages in their order. While a pass waits for layers, only what it has to know is taken before its
    turn.

    Args:
        connection: to the daemon.
        grow: attaches further frames; their descriptors follow a message on the socket, so it cannot wait.
    """

    def __init__(self, connection: Connection[ToWorker], grow: Callable[[Grow], None]) -> None:
        self._connection = connection
        self._grow = grow
        self._kept: deque[ToWorker] = deque()

    def poll(self, timeout_s: float | None = 0.0) -> bool:
        """Whether `receive` would return or raise at once; waits up to `timeout_s`, without end for None."""
        return bool(self._kept) or self._connection.poll(timeout_s)

    def receive(self) -> ToWorker:
        """The next message. Raises as `Connection.receive`."""
        return self._kept.popleft() if self._kept else self._connection.receive()

    def listen(self, request: int) -> Layers | None:
        """Waits for news of a request, as `Listen`, and answers a Ping: a worker that waits does not hang. Other
        messages wait for their turn. Raises as `Connection.receive`."""
        while True:
            message = self._connection.receive()
            if isinstance(message, Layers) and message.id == request:
                return message
            if isinstance(message, Cancel) and message.id == request:
                return None
            if isinstance(message, Ping):
                self._connection.send(Pong())
            elif isinstance(message, Grow):
                self._grow(message)
            else:
                self._kept.append(message)
                if isinstance(message, Shutdown):
                    return None
