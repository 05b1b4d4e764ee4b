"""The options of a Mooncake Store, and the memory that this process gives to it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """A Mooncake Store.

    Args:
        master: host and port of mooncake_master, for example "10.0.0.1:50051".
        hostname: the name by which other hosts reach this one.
        metadata: "P2PHANDSHAKE", or the URL of a metadata server.
        segment_bytes: memory that this process gives to the store, for objects of all hosts; 0: none.
        buffer_bytes: the client's own buffer.
        protocol: "tcp" or "rdma".
        device: names of RDMA devices, separated by commas; empty for tcp.
        tenant: the tenant of the objects; needs a master with --enable_multi_tenants.
        prefix: the beginning of every key.
        threads: calls that run side by side.
        bounce_bytes: buffer of each thread, for objects in memory that is not registered; no such object may be longer.
        native_timeout_s: timeout of a call to the master, and of a transfer without progress (whole seconds for
            transfers). It holds for the whole process; the environment overrides it (MC_RPC_TIMEOUT_MS,
            MC_RPC_CONNECT_TIMEOUT_MS, MC_TCP_PROGRESS_TIMEOUT_SEC, MC_TCP_STATUS_TIMEOUT_SEC,
            MC_STORE_CLIENT_SETUP_RETRIES).

    Raises:
        ValueError: a value is not possible.
    """

    master: str
    hostname: str = "127.0.0.1"
    metadata: str = "P2PHANDSHAKE"
    segment_bytes: int = 0
    buffer_bytes: int = 16 << 20
    protocol: str = "tcp"
    device: str = ""
    tenant: str = "default"
    prefix: str = "prefixd:"
    threads: int = 4
    bounce_bytes: int = 16 << 20
    native_timeout_s: float = 1.0

    def __post_init__(self) -> None:
        host, _, port = self.master.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"master is {self.master!r}; set host and port, like '10.0.0.1:50051'")
        if self.protocol not in ("tcp", "rdma"):
            raise ValueError(f"protocol is {self.protocol!r}; set 'tcp' or 'rdma'")
        for name, least in (("threads", 1), ("bounce_bytes", 4096), ("buffer_bytes", 1 << 20), ("segment_bytes", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; set {least} or more")
        if not 0.05 <= self.native_timeout_s <= 600:
            raise ValueError(f"native_timeout_s is {self.native_timeout_s}; set something between 0.05 and 600")

    @property
    def address(self) -> str:
        """For messages: the master's."""
        return self.master
