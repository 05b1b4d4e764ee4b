"""The methods that a hostile client finds, and the statuses that each may answer with."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from prefixd.base.tenancy.tenants import Role
from prefixd.v1 import admin_pb2, cache_pb2, inference_pb2

_WORDS = {
    "any": "OK INVALID_ARGUMENT",
    "known": "NOT_FOUND",
    "session": "NOT_FOUND PERMISSION_DENIED",
    "room": "RESOURCE_EXHAUSTED",
    "taken": "ALREADY_EXISTS",
    "state": "FAILED_PRECONDITION",
    "none": "UNIMPLEMENTED",
    "quiet": "DEADLINE_EXCEEDED",  # a stream that has nothing to tell until its deadline
}
# As the comments of proto/prefixd/v1 say: what can be the matter with a call of this method.
_CAUSES = {
    "OpenSession": "any room",
    "RegisterNamespace": "any known room taken",
    "Match": "any session",
    "MatchMany": "any session",
    "Claim": "any session room quiet",  # it waits for another's claim
    "Acquire": "any session room",
    "Reserve": "any session room state",
    "Commit": "any session room state",
    "Persist": "any session room state",
    "Release": "any session",
    "Retain": "any session room",
    "Renew": "any session",
    "Prefetch": "any session",
    "WatchBlocks": "any session room quiet",  # a session without namespaces has no blocks to report
    "Get": "any session room",
    "Put": "any session room state",
    "Generate": "any known room taken none",
    "Cancel": "any none",
    "Stats": "any",
    "ListPrefixes": "any known",
    "FindPrefix": "any known state none",
    "Inspect": "any known",
    "Warm": "any known room",
    "Pin": "any known",
    "Unpin": "any known",
    "Evict": "any known state",
    "Flush": "any state",
    "Drain": "any",
    "Undrain": "any state",
    "Verify": "any state",
    "ResizeTier": "any room state none",
    "Why": "any known",
    "WhatIf": "any known state",
    "RecordTrace": "any state quiet",  # its caller ends it
    "ListTenants": "any",
    "SetTenant": "any known",
    "CheckIntegrity": "any",
    "Check": "any known",
    "Watch": "any room",
    "ServerReflectionInfo": "any",
}


@dataclass(frozen=True, slots=True)
class Method:
    """A method of the daemon. `endless`: its stream ends with the call only."""

    service: str
    name: str
    request: Descriptor
    streams_requests: bool
    endless: bool

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"

    @property
    def may_be_quiet(self) -> bool:
        """Whether its stream may end at the caller's deadline without a message."""
        return "quiet" in _CAUSES[self.name].split()

    def open_to(self, role: Role) -> bool:
        """Whether a caller with this role may use it."""
        if self.service.startswith("grpc.health."):
            return True
        return role is Role.ADMIN or (role is Role.CLIENT and self.service != "prefixd.v1.Admin")

    @property
    def statuses(self) -> frozenset[str]:
        """Those that its contract has; KeyError for a method that `_CAUSES` lacks."""
        return frozenset(status for cause in _CAUSES[self.name].split() for status in _WORDS[cause].split())


def all_methods() -> list[Method]:
    """Every method of every service, by what the contracts declare."""
    files = [(cache_pb2, "PrefixCache"), (inference_pb2, "Inference"), (admin_pb2, "Admin")]
    files += [(health_pb2, "Health"), (reflection_pb2, "ServerReflection")]
    return [
        Method(
            service.full_name,
            method.name,
            method.input_type,
            method.client_streaming,
            endless=method.name in ("OpenSession", "RecordTrace", "Watch", "WatchBlocks"),
        )
        for service in (module.DESCRIPTOR.services_by_name[name] for module, name in files)
        for method in service.methods
    ]
