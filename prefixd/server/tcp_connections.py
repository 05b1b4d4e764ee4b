"""Connections to the TCP door, of one host and of all: none keeps the others out.

gRPC accepts connections itself, up to a number, and knows of no hosts. So from time to time this process's descriptors
are looked through: where there are too many connections, hosts with most of them lose their newest.

```
most 512       [ B | C C |  A A A A A A A A A A A A A A A ... A  |  free  ]
                                                     ^ cut off   ^ LIMIT
```
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from collections import Counter
from contextlib import suppress

from prefixd.errors import ConfigError

MOST = 512
"""Connections that gRPC takes."""
LIMIT = MOST * 3 // 4
"""From here on hosts lose connections, so that there are always some for others."""
OF_HOST = 16
"""A host with no more keeps them."""
_EVERY_S = 0.5


class TcpConnections:
    """Cuts connections off where one host has too many.

    Args:
        port: of the door.
        limit: connections of all hosts, from which on those with most lose some.
        of_host: connections that each host keeps.
    """

    def __init__(self, port: int, limit: int = LIMIT, of_host: int = OF_HOST) -> None:
        self.cut_off = 0
        """Connections that were."""
        self._port = port
        self._limit = limit
        self._of_host = of_host
        self._seen: dict[int, None] = {}
        """Inodes of the connections' sockets, the oldest first."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="prefixd-connections", daemon=True)

    def start(self) -> None:
        """Looks twice a second, in a thread. Raises ConfigError: there is none."""
        try:
            self._thread.start()
        except RuntimeError as error:
            raise ConfigError(f"no thread to watch connections ({error}); raise ulimit -u") from error

    def stop(self) -> None:
        """Looks no more."""
        self._ended.set()

    def look(self) -> None:
        """Cuts off what is too much. Takes some milliseconds for a thousand descriptors."""
        descriptors = os.listdir("/proc/self/fd")
        if len(descriptors) <= self._limit:
            self._seen.clear()
            return
        found: dict[int, tuple[str, socket.socket]] = {}
        try:
            for name in descriptors:
                with suppress(OSError):  # it was closed meanwhile, or is no connection
                    self._add(int(name), found)
            self._seen = {inode: None for inode in (*self._seen, *sorted(found)) if inode in found}
            count = Counter(host for host, _ in found.values())
            for inode in reversed(self._newest_of_largest(found, count)):
                self._seen.pop(inode)
                with suppress(OSError):
                    found[inode][1].shutdown(socket.SHUT_RDWR)
                self.cut_off += 1
        finally:
            for _, connection in found.values():
                connection.close()

    def _add(self, descriptor: int, found: dict[int, tuple[str, socket.socket]]) -> None:
        """A copy of a descriptor, if it is a connection to the door: what it is of is not closed meanwhile."""
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
            return
        connection = socket.socket(fileno=os.dup(descriptor))
        try:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getsockname()[1] == self._port:
                host, inode = host_of(connection.getpeername()[0]), os.fstat(connection.fileno()).st_ino
                if inode not in found:
                    found[inode] = host, connection
                    return
        except OSError:  # it listens, or its other end has gone
            pass
        connection.close()

    def _newest_of_largest(self, found: dict[int, tuple[str, socket.socket]], count: Counter[str]) -> list[int]:
        """The connections to cut off: one after the other the newest of the host that has most."""
        lines: dict[str, list[int]] = {}
        for inode in self._seen:
            lines.setdefault(found[inode][0], []).append(inode)
        chosen: list[int] = []
        while count.total() > self._limit:
            host, most = count.most_common(1)[0]
            if most <= self._of_host:
                break
            chosen.append(lines[host].pop())
            count[host] -= 1
        return chosen

    def _watch(self) -> None:
        while not self._ended.wait(_EVERY_S):
            with suppress(OSError):  # no descriptor to look with: the limit of open files is told elsewhere
                self.look()


def host_of(address: str) -> str:
    """What counts as one host: an IPv4 address, or the network of 64 bits that an IPv6 host has to itself."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, 64), strict=False))
