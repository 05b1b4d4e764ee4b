"""Whether a daemon accounts for everything."""

from __future__ import annotations

import grpc

from prefixd.client import Client
from prefixd.v1 import admin_pb2
from prefixd.v1.admin_pb2_grpc import AdminStub


def violations_of(client: Client) -> list[str]:
    """What `Admin.CheckIntegrity` has to say, a line each."""
    with grpc.insecure_channel(client.address) as channel:
        try:
            return list(AdminStub(channel).CheckIntegrity(admin_pb2.CheckIntegrityRequest(), timeout=60).violations)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNKNOWN):
                return []
            raise
