"""Errors as OpenAI's API answers them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from prefixd.base.errors import NotFoundError, PrefixdError, PromptTooLongError
from prefixd.observability.actor import log_fields
from prefixd.server.http.openai.sampling_fields import FieldError, SamplingFields
from prefixd_scheduler import QueueFullError, SchedulerError
from prefixd_swap import OutOfMemoryError, SwapError

log = logging.getLogger(__name__)

CLIENT_GONE = 499
"""Status of a request that was cancelled while its caller waited."""
_INVALID = "invalid_request_error"
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_STATUS = {
    "INVALID_ARGUMENT": 400,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "PERMISSION_DENIED": 403,
    "RESOURCE_EXHAUSTED": 429,
    "FAILED_PRECONDITION": 503,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 408,
    "UNIMPLEMENTED": 400,
}
"""By the names of gRPC's codes, which our errors have."""
_FIELDS = {*SamplingFields.__struct_fields__, "best_of", "max_tokens", "logprobs"}
_AGAIN = {429, 503}
_RETRY_S = "1"


class RequestCancelledError(PrefixdError):
    """A request was cancelled while its caller waited: by its tenant, an operator, or the end of the daemon."""

    def __init__(self) -> None:
        super().__init__("the request was cancelled before its end; send it again")


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error for a caller."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """As JSON; `code` repeats the status where OpenAI has no word for it, as in vLLM's server."""
        kind = _TYPES.get(self.status, _INVALID if self.status < 500 else "server_error")
        code = self.code if self.code is not None else self.status
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": code}}

    def response(self, request_id: str | None = None) -> JSONResponse:
        """The whole answer, if none has begun."""
        headers = dict(self.headers)
        if self.status in _AGAIN:
            headers.setdefault("Retry-After", _RETRY_S)
        if request_id:
            headers["X-Request-Id"] = request_id
        return JSONResponse(self.body, self.status, headers)


def answer_of(error: Exception) -> ErrorAnswer:
    """What a caller is told of an error; an unexpected one is logged."""
    if isinstance(error, HTTPException):  # the body is too large or too slow
        return ErrorAnswer(error.status_code, error.detail, headers=dict(error.headers or {}))
    if isinstance(error, RequestCancelledError):
        return ErrorAnswer(CLIENT_GONE, str(error), code="cancelled")
    if isinstance(error, PromptTooLongError):
        return ErrorAnswer(400, str(error), _param(error), "context_length_exceeded")
    if isinstance(error, NotFoundError):
        return ErrorAnswer(404, str(error), "model", "model_not_found")
    if isinstance(error, PrefixdError):
        return ErrorAnswer(_STATUS.get(error.status, 500), str(error), _param(error))
    if isinstance(error, QueueFullError | OutOfMemoryError):
        return ErrorAnswer(429, str(error))
    if isinstance(error, SchedulerError | SwapError):
        return ErrorAnswer(503, str(error))
    log.error("a request failed with an unexpected error", exc_info=error, extra=log_fields(error))
    return ErrorAnswer(500, f"{type(error).__name__} in the daemon; its log says where. Please report it")


def _param(error: Exception) -> str | None:
    """The field that an error is about: our messages begin with its name."""
    if isinstance(error, FieldError):
        return error.param
    first = str(error).partition(" ")[0]
    return first if first in _FIELDS else None
