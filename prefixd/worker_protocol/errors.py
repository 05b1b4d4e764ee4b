"""Errors of the worker. Every message names the value and the remedy."""

from __future__ import annotations

from typing import ClassVar

from prefixd.base.errors import PrefixdError


class WorkerError(PrefixdError):
    """Base of every error the worker raises on purpose."""

    status: ClassVar[str] = "UNAVAILABLE"


class ModelError(WorkerError):
    """A model directory that is not there, is damaged, or holds a model that prefixd cannot run."""


class RequestError(WorkerError):
    """A request the worker cannot run: it ends with `Done(reason="error")`, the others go on."""


class ProtocolError(WorkerError):
    """Bytes on the worker's socket that are not a message."""


class ConnectionClosedError(WorkerError):
    """The other end of the worker's socket is gone."""
