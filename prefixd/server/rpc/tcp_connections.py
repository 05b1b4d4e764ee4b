"""Connections to the TCP door, of one host and of all: none keeps the others out.

gRPC accepts connections itself, up to a number, and knows of no hosts. So from time to time this process's descriptors
are looked through: where there are too many connections, hosts with most of them lose their newest, and the kernel
drops what they send to open others (a filter at the listening socket) until they have closed some.

```
most 512       [ B | C C |  A A A A A A A A A A A A A A A ... A  |  free  ]
                                                     ^ cut off   ^ LIMIT
```
"""

from __future__ import annotations

import ctypes
import ipaddress
import logging
import os
import socket
import struct
import threading
from collections import Counter
from contextlib import suppress

from prefixd.base.errors import ConfigError

log = logging.getLogger(__name__)

MOST = 512
"""Connections that gRPC takes."""
LIMIT = MOST * 3 // 4
"""From here on hosts lose connections, so that there are always some for others."""
OF_HOST = 16
"""A host with no more keeps them."""
_EVERY_S = 0.25
_MOST_SHUT_OUT = 64
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
# Classic BPF (linux/filter.h); a packet's network header is at _NET.
_LOAD_BYTE, _LOAD_WORD, _JUMP_IF, _SHIFT_RIGHT, _RETURN = 0x30, 0x20, 0x15, 0x74, 0x06
_NET = 0xFFF00000


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
        self._shut_out: frozenset[str] = frozenset()
        """Hosts that can open no connection."""
        self._seen: dict[int, None] = {}
        """Inodes of the connections' sockets, the oldest first."""
        self._warned = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="prefixd-connections", daemon=True)

    def start(self) -> None:
        """Looks four times a second, in a thread. Raises ConfigError: there is none."""
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
        if len(descriptors) <= self._limit and not self._shut_out:
            self._seen.clear()
            return
        found: dict[int, tuple[str, socket.socket]] = {}
        doors: list[socket.socket] = []
        try:
            for name in descriptors:
                with suppress(OSError):  # it was closed meanwhile, or is no connection
                    self._add(int(name), found, doors)
            self._seen = {inode: None for inode in (*self._seen, *sorted(found)) if inode in found}
            count = Counter(host for host, _ in found.values())
            chosen = self._newest_of_largest(found, count)
            full = count.total() > self._limit * 3 // 4
            shut_out = {found[inode][0] for inode in chosen}
            shut_out |= {host for host in self._shut_out if full and count[host] > self._of_host}
            self._shut(doors, frozenset(sorted(shut_out, key=count.__getitem__)[-_MOST_SHUT_OUT:]))
            for inode in reversed(chosen):
                self._seen.pop(inode)
                with suppress(OSError):
                    found[inode][1].shutdown(socket.SHUT_RDWR)
                self.cut_off += 1
        finally:
            for each in (*doors, *(connection for _, connection in found.values())):
                each.close()

    def _shut(self, doors: list[socket.socket], hosts: frozenset[str]) -> None:
        """From now on these hosts can open no connection; where that cannot be, the next look tries again."""
        if hosts == self._shut_out or not doors:
            return
        program = drop_hosts(sorted(hosts))
        buffer = ctypes.create_string_buffer(program)
        try:
            for door in doors:
                if hosts:
                    of_program = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
                    door.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, of_program)
                else:
                    door.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        except OSError as error:
            self._warn(f"hosts with too many connections can open others ({error.strerror})")
            return
        for host in sorted(hosts - self._shut_out):
            log.warning("%s has too many TCP connections, and can open no more until it has closed some", host)
        self._shut_out = hosts
        self._warned = ""

    def _warn(self, what: str) -> None:
        """Logs what is wrong, once while it is."""
        if what != self._warned:
            log.warning("%s", what)
        self._warned = what

    def _add(self, descriptor: int, found: dict[int, tuple[str, socket.socket]], doors: list[socket.socket]) -> None:
        """A copy of a descriptor, if it is the door or a connection to it: what it is of is not closed meanwhile."""
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
            return
        copy = os.dup(descriptor)
        try:
            connection = socket.socket(fileno=copy)
        except BaseException:  # the number has become another file's since it was looked at
            os.close(copy)
            raise
        try:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getsockname()[1] == self._port:
                if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    doors.append(connection)
                    return
                host, inode = host_of(connection.getpeername()[0]), os.fstat(connection.fileno()).st_ino
                if inode not in found:
                    found[inode] = host, connection
                    return
        except OSError:  # its other end has gone
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
            try:
                self.look()
            except OSError:  # no descriptor to look with: the limit of open files is told elsewhere
                pass
            except Exception as error:  # this thread is the only one that looks: it must go on
                self._warn(f"connections to the TCP door cannot be looked at ({error!r}); please report it")


def host_of(address: str) -> str:
    """What counts as one host: an IPv4 address, or the network of 64 bits that an IPv6 host has to itself."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, 64), strict=False))


def drop_hosts(hosts: list[str]) -> bytes:
    """A filter for a listening socket (classic BPF) that drops the packets of hosts, as `host_of` calls them."""

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("@HBBI", code, if_true, if_false, value)

    networks = [ipaddress.ip_network(host) for host in hosts]
    drop, keep = step(_RETURN, 0), step(_RETURN, 0xFFFFFFFF)
    version_4 = [step(_LOAD_WORD, _NET + 12)]
    version_6 = []
    for network in networks:
        if isinstance(network, ipaddress.IPv4Network):
            version_4 += [step(_JUMP_IF, int(network.network_address), 0, 1), drop]
        else:
            high, low = struct.unpack_from("!II", network.network_address.packed)
            version_6 += [step(_LOAD_WORD, _NET + 8), step(_JUMP_IF, high, 0, 3)]
            version_6 += [step(_LOAD_WORD, _NET + 12), step(_JUMP_IF, low, 0, 1), drop]
    version_4.append(keep)
    version_6.append(keep)
    begin = [step(_LOAD_BYTE, _NET), step(_SHIFT_RIGHT, 4), step(_JUMP_IF, 4, 0, len(version_4))]
    return b"".join([*begin, *version_4, *version_6])
