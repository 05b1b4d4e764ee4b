"""Limits the TCP connections of one host and of all hosts, so that no host keeps the others out.

gRPC accepts connections itself, up to a number for all hosts together. So a thread goes through this process's
descriptors four times a second: if there are too many connections, the hosts with most of them lose their newest, and
the kernel drops their packets that would open others (a filter at the listening socket) until they have closed some.

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
"""Connections that gRPC accepts."""
LIMIT = MOST * 3 // 4
"""Above this number hosts lose connections, so that other hosts can always connect."""
OF_HOST = 16
"""A host with at most this many keeps all of them."""
_EVERY_S = 0.25
_MOST_SHUT_OUT = 64
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
# Classic BPF (linux/filter.h); a packet's network header begins at _NET.
_LOAD_BYTE, _LOAD_WORD, _JUMP_IF, _SHIFT_RIGHT, _RETURN = 0x30, 0x20, 0x15, 0x74, 0x06
_NET = 0xFFF00000


class TcpConnections:
    """Closes connections of hosts that have too many.

    Args:
        port: the TCP port of the daemon.
        limit: number of connections, of all hosts, above which the hosts with most of them lose some.
        of_host: connections that each host keeps in any case.
    """

    def __init__(self, port: int, limit: int = LIMIT, of_host: int = OF_HOST) -> None:
        self.cut_off = 0
        """Connections that were closed."""
        self._port = port
        self._limit = limit
        self._of_host = of_host
        self._shut_out: frozenset[str] = frozenset()
        """Hosts that can open no further connection."""
        self._seen: dict[int, None] = {}
        """Inodes of the connections' sockets, the oldest first."""
        self._warned = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="prefixd-connections", daemon=True)

    def start(self) -> None:
        """Starts the thread that checks the connections. Raises ConfigError if it cannot be started."""
        try:
            self._thread.start()
        except RuntimeError as error:
            raise ConfigError(f"no thread to watch connections ({error}); raise ulimit -u") from error

    def stop(self) -> None:
        """Ends the thread."""
        self._ended.set()

    def enforce_limit(self) -> None:
        """Closes the connections that are too many. Takes some milliseconds for a thousand descriptors."""
        descriptors = os.listdir("/proc/self/fd")
        if len(descriptors) <= self._limit and not self._shut_out:
            self._seen.clear()
            return
        found: dict[int, tuple[str, socket.socket]] = {}
        doors: list[socket.socket] = []
        try:
            for name in descriptors:
                with suppress(OSError):  # it was closed meanwhile, or is no connection
                    self._add_connection(int(name), found, doors)
            self._seen = {inode: None for inode in (*self._seen, *sorted(found)) if inode in found}
            count = Counter(host for host, _ in found.values())
            chosen = self._newest_of_largest(found, count)
            full = count.total() > self._limit * 3 // 4
            shut_out = {found[inode][0] for inode in chosen}
            shut_out |= {host for host in self._shut_out if full and count[host] > self._of_host}
            self._shut_out_hosts(doors, frozenset(sorted(shut_out, key=count.__getitem__)[-_MOST_SHUT_OUT:]))
            for inode in reversed(chosen):
                self._seen.pop(inode)
                with suppress(OSError):
                    found[inode][1].shutdown(socket.SHUT_RDWR)
                self.cut_off += 1
        finally:
            for each in (*doors, *(connection for _, connection in found.values())):
                each.close()

    def _shut_out_hosts(self, doors: list[socket.socket], hosts: frozenset[str]) -> None:
        """Has the kernel drop new connections of these hosts only; if that fails, the next check tries again."""
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
        """Logs a problem, once as long as it lasts."""
        if what != self._warned:
            log.warning("%s", what)
        self._warned = what

    def _add_connection(
        self, descriptor: int, found: dict[int, tuple[str, socket.socket]], doors: list[socket.socket]
    ) -> None:
        """Adds a descriptor that is a connection to `found`, by inode, or one that is the listening socket to `doors`.

        Both get a copy of the descriptor: gRPC may close its own meanwhile.
        """
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
            return
        copy = os.dup(descriptor)
        try:
            connection = socket.socket(fileno=copy)
        except BaseException:  # another file has got the number since `readlink`
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
        except OSError:  # the other end has disconnected
            pass
        connection.close()

    def _newest_of_largest(self, found: dict[int, tuple[str, socket.socket]], count: Counter[str]) -> list[int]:
        """Returns the inodes of the connections to close: again and again the newest of the host that has most."""
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
                self.enforce_limit()
            except OSError:  # out of descriptors: another part of the daemon reports the limit of open files
                pass
            except Exception as error:  # no other thread enforces the limit: this one must go on
                self._warn(f"the number of TCP connections cannot be checked ({error!r}); please report it")


def host_of(address: str) -> str:
    """Returns what counts as one host: an IPv4 address, or the /64 network that an IPv6 host usually has to itself."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, 64), strict=False))


def drop_hosts(hosts: list[str]) -> bytes:
    """Returns a filter for a listening socket (classic BPF) that drops packets from hosts, as `host_of` names them."""

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
