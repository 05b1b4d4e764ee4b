"""Who acts: a request, or a task of the daemon. Evictions name it, and log lines have the request's id."""

from __future__ import annotations

from contextvars import ContextVar
from enum import StrEnum


class DaemonTask(StrEnum):
    """A task of the daemon, which acts for no request."""

    NONE = ""
    WRITE_BACK = "write-back"
    TIER_RESIZE = "tier resize"
    """`prefixd tier resize`."""
    ELASTIC_TIER = "elastic tier"


_ACTOR: ContextVar[str] = ContextVar("actor", default=DaemonTask.NONE)


class acting:  # in lower case, as `contextlib.closing`
    """A context in which a request (its id) or a `DaemonTask` acts; tasks that begin inside have it too."""

    __slots__ = ("_actor", "_before")

    def __init__(self, actor: str) -> None:
        self._actor = actor

    def __enter__(self) -> None:
        self._before = _ACTOR.set(self._actor)

    def __exit__(self, *_: object) -> None:
        _ACTOR.reset(self._before)


def current_actor() -> str:
    """Returns the id of the request, or the `DaemonTask`, that acts now."""
    return _ACTOR.get()


def current_request() -> str:
    """Returns the id of the request that acts now; empty if none does."""
    actor = _ACTOR.get()
    return "" if isinstance(actor, DaemonTask) else actor


def failed_in(request_id: str, error: Exception) -> None:
    """Notes in which request an unexpected error occurred; whoever logs it may be outside of the request's context."""
    error.__dict__["request_id"] = request_id


def log_fields(error: Exception) -> dict[str, str]:
    """Returns what a log line about an error has as `extra`: the request that `failed_in` noted, if any."""
    request_id = error.__dict__.get("request_id")
    return {"request_id": request_id} if isinstance(request_id, str) else {}
