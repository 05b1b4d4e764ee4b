"""The nodes of a Valkey cluster by slot, from `CLUSTER NODES`."""

from __future__ import annotations

from binascii import crc_hqx
from dataclasses import dataclass

from prefixd_swap.errors import RemoteStoreError

SLOTS = 16384


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def slot_of(key: bytes) -> int:
    """The slot of a key: CRC16 of the part between the first { and the next }, or of all where there is none.

    Source: the cluster specification of Valkey, "Hash tags".
    """
    left = key.find(b"{")
    if left >= 0:
        right = key.find(b"}", left + 1)
        if right > left + 1:
            key = key[left + 1 : right]
    return crc_hqx(key, 0) % SLOTS


def parse_nodes(text: bytes, asked: Endpoint) -> list[Endpoint | None]:
    """The node of each slot.

    Args:
        text: a reply to `CLUSTER NODES`, one node a line:
            b"07c3... 127.0.0.1:30004@31004,hostname master - 0 1426238317239 4 connected 0-5460 6000 [93-<-292f...]".
        asked: the node that replied; it may not know its own address.

    Raises:
        RemoteStoreError: the text is not a reply to it.
    """
    slots: list[Endpoint | None] = [None] * SLOTS
    try:
        for line in text.decode().splitlines():
            _, address, flags, _, _, _, _, _, *ranges = line.split(" ")
            if "master" not in flags.split(","):
                continue
            place, _, hostname = address.partition(",")
            host, _, port = place.partition("@")[0].rpartition(":")
            node = Endpoint(hostname.partition(",")[0] or host or asked.host, int(port))
            for item in ranges:
                if item.startswith("["):  # a slot that is moving
                    continue
                first, _, last = item.partition("-")
                if not 0 <= int(first) <= int(last or first) < SLOTS:
                    raise ValueError(f"slots {item}")
                for slot in range(int(first), int(last or first) + 1):
                    slots[slot] = node
    except ValueError as error:
        raise RemoteStoreError(
            f"valkey at {asked}: cannot read its reply to CLUSTER NODES ({error}); see whether it is a Valkey cluster"
        ) from error
    return slots
