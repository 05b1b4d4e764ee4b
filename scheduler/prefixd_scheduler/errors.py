"""Errors of the queue and the policies. Every message names the value and the remedy."""

from __future__ import annotations


class SchedulerError(Exception):
    """Base of every error this package raises on purpose."""


class QueueFullError(SchedulerError):
    """The queue holds as many requests as it may.

    Args:
        limit: most requests that may wait.
        had: number of the tenant's own, if the places left are kept for other tenants.
        reserved: places kept for each tenant.
    """

    def __init__(self, limit: int, had: int | None = None, reserved: int = 0) -> None:
        if had is None:
            full = f"the queue is full: {limit} requests wait and {limit} is the limit"
        else:
            full = (
                f"{had} requests of the tenant wait; of the queue's {limit} places {reserved} are kept for each tenant"
            )
        super().__init__(f"{full}; send the request again later, or raise the limit")
        self.limit = limit


class DuplicateRequestError(SchedulerError):
    """A request with this id already waits."""


class UnknownRequestError(SchedulerError):
    """No request with this id waits."""


class UnknownPolicyError(SchedulerError):
    """A policy name that does not exist."""


class InvalidValueError(SchedulerError, ValueError):
    """An argument outside its range."""


class IntegrityError(SchedulerError):
    """The queue contradicts itself: a defect, not a state to recover from."""
