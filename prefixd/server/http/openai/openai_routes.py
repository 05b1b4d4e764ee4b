"""OpenAI's API over the daemon's models: `/v1/models`, `/v1/completions` and `/v1/chat/completions`.

Each request passes the same checks as a call of `Generate` over gRPC, in the same order: the caller, the calls that its
tenant may have, the message when its turn has come, then `Generation.run`.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from prefixd.base.errors import ExhaustedError, InvalidArgumentError, PermissionDeniedError
from prefixd.base.long_work.steps import in_thread
from prefixd.base.tenancy.fairness import SharedBytes
from prefixd.base.tenancy.tenants import Role
from prefixd.observability.trace_context import check_client_id, parse_traceparent
from prefixd.server.access.identities import Caller, UnknownCallerError
from prefixd.server.http.openai.answer_shapes import ChatShape, CompletionShape, Shape
from prefixd.server.http.openai.answers import Answer, EventStream
from prefixd.server.http.openai.chat_request import ChatRequest
from prefixd.server.http.openai.completion_request import CompletionRequest
from prefixd.server.http.openai.error_answers import ErrorAnswer, answer_of
from prefixd.server.http.openai.json_pieces import PiecesResponse
from prefixd.server.http.openai.logprob_lists import LogprobLists
from prefixd.server.http.openai.sampling_fields import FieldError
from prefixd.server.http.openai.several_prompts import run_prompts
from prefixd.server.rpc.call_limits import CallLimits
from prefixd.server.rpc.receiving import CURRENT_CALL, Call
from prefixd.serving.generation import Accepted, GenerateParams, Generation

MOST_BODY = 16 << 20
"""Bytes of a request, as of a message over gRPC."""
BODIES = 256 << 20
"""Bytes of the bodies that arrive or are read, of all tenants; `Generation` counts what is kept then."""
_READ_HERE = 32 << 10  # bytes that are read on the event loop, in less than a millisecond
_GENERATE = "/prefixd.v1.Inference/Generate"
_LIST = "/v1/models"

_Body = ChatRequest | CompletionRequest


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a body asks for. The body itself, of which the fields are views, is not kept while the prompts run."""

    prompts: list[GenerateParams]
    request_id: str
    stream: bool
    usage: bool
    running_usage: bool


class Callers(Protocol):
    """Tells who sends a request (`HttpCallers`)."""

    def identify(self, request: Request) -> Caller:
        """Returns the caller. Raises UnknownCallerError."""

    def let_in(self, caller: Caller) -> None:
        """Logs a caller that is let in."""

    async def refuse_turn(self, request: Request, why: object, caller: Caller | None = None) -> None:
        """Waits until a caller may be told of a refusal, and logs it."""

    async def pace_refusal(self, request: Request, caller: Caller | None) -> bool:
        """Waits until a caller may be told of a refusal."""


class OpenAIRoutes:
    """The routes of one port.

    Args:
        generation: does the work.
        callers: tells who calls.
        limits: of the calls of each tenant.
    """

    def __init__(self, generation: Generation, callers: Callers, limits: CallLimits) -> None:
        self._generation = generation
        self._callers = callers
        self._limits = limits
        self._bodies = SharedBytes(BODIES, "body", "the daemon", lambda: limits.tenants.calling)
        self._since = int(time.time())

    def routes(self) -> list[Route]:
        """The routes, each with its errors as OpenAI answers them."""
        return [
            Route("/v1/models", self._behind(_LIST, self._list_models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._behind(_LIST, self._describe_model), methods=["GET"]),
            Route("/v1/completions", self._behind(_GENERATE, self._complete), methods=["POST"]),
            Route("/v1/chat/completions", self._behind(_GENERATE, self._chat), methods=["POST"]),
            *(
                Route(path, _no_such_route, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
                for path in ("/v1", "/v1/{rest:path}")
            ),
        ]

    def _behind(
        self, method: str, answer: Callable[[Request, Call], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint that lets a caller in, and turns errors into answers."""

        @functools.wraps(answer)
        async def endpoint(request: Request) -> Response:
            call = await self._let_in(method, request)
            if isinstance(call, ErrorAnswer):
                return call.response(_client_id(request))
            try:
                return await answer(request, call)
            except Exception as error:
                refusal = answer_of(error)
            if refusal.status == 429:
                await self._callers.pace_refusal(request, call.caller)
            return refusal.response(_client_id(request))

        return endpoint

    async def _let_in(self, method: str, request: Request) -> Call | ErrorAnswer:
        """Counts a call until its answer is sent, or returns why its caller may not have it, once that may be told."""
        caller: Caller | None = None
        try:
            caller = self._callers.identify(request)
            if caller.role is Role.METRICS:
                why = f"{caller.name} has the role metrics; use a token with the role client or admin"
                raise PermissionDeniedError(why)
            task = asyncio.current_task()
            assert task is not None
            call = self._limits.begin(method, caller, task)
        except UnknownCallerError as error:
            await self._callers.refuse_turn(request, error)
            how = f"{error}; send `Authorization: Bearer TOKEN`"
            return ErrorAnswer(401, how, None, "invalid_api_key", {"WWW-Authenticate": "Bearer"})
        except (PermissionDeniedError, ExhaustedError) as error:
            await self._callers.refuse_turn(request, error, caller)
            return answer_of(error)
        CURRENT_CALL.set(call)
        self._callers.let_in(caller)
        return call

    # -- models -------------------------------------------------------------------------------------------------------

    async def _list_models(self, request: Request, call: Call) -> Response:
        models = [self._model(name, tokens) for name, tokens in self._generation.model_lengths().items()]
        return JSONResponse({"object": "list", "data": models})

    async def _describe_model(self, request: Request, call: Call) -> Response:
        name, models = request.path_params["name"], self._generation.model_lengths()
        if name not in models:
            message = f"there is no model {name[:256]!r}; this daemon has {', '.join(models) or 'none'}"
            return ErrorAnswer(404, message, "model", "model_not_found").response()
        return JSONResponse(self._model(name, models[name]))

    def _model(self, name: str, tokens: int | None) -> dict[str, Any]:
        about = {"id": name, "object": "model", "created": self._since, "owned_by": "prefixd"}
        return {**about, "root": name, "parent": None, "max_model_len": tokens}

    # -- generation ---------------------------------------------------------------------------------------------------

    async def _chat(self, request: Request, call: Call) -> Response:
        return await self._answer(request, call, ChatRequest, ChatShape)

    async def _complete(self, request: Request, call: Call) -> Response:
        return await self._answer(request, call, CompletionRequest, CompletionShape)

    async def _answer(
        self, request: Request, call: Call, kind: type[_Body], shape: Callable[[LogprobLists], Shape]
    ) -> Response:
        asked = await self._receive(request, call, kind)
        client_id = _client_id(request) or check_client_id(asked.request_id)
        prompts = _with_call(asked.prompts, request, call, client_id, kept=not asked.stream)
        asked.prompts.clear()
        named, logprobs = prompts[0].model, prompts[0].sampling.logprobs is not None
        events = run_prompts(self._generation, prompts)
        del prompts
        try:
            accepted = await anext(events)
            assert isinstance(accepted, Accepted), "the first event"
            tokens = await self._generation.token_bytes(named) if logprobs else None
        except BaseException:
            await events.aclose()
            raise
        answer = Answer(
            shape(LogprobLists(tokens)),
            client_id or accepted.request_id,
            named or next(iter(self._generation.model_lengths()), ""),
            int(time.time()),
            events,
            accepted.prompt_tokens,
            usage=asked.usage,
            running_usage=asked.running_usage,
        )
        headers = {"X-Request-Id": answer.request_id, "prefixd-request-id": accepted.request_id}
        if asked.stream:
            return EventStream(answer.pieces(), headers)
        return PiecesResponse(await answer.whole(), headers)

    async def _receive(self, request: Request, call: Call, kind: type[_Body]) -> _Asked:
        """What a request asks for. Its body is received when its turn has come.

        Raises HTTPException, ExhaustedError and InvalidArgumentError.
        """
        assert call.caller is not None
        given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if given != "application/json":  # a page in a user's browser can send any other type to a port of its host
            raise HTTPException(415, f"the Content-Type is {given[:100] or 'missing'}; send application/json")
        announced = request.headers.get("content-length", "")
        nbytes = min(int(announced), MOST_BODY) if announced.isdigit() else MOST_BODY
        pieces: list[bytes] = []
        with ExitStack() as held:
            async with call.first() as line:
                held.enter_context(self._bodies.held(call.caller.tenant, nbytes))
                async for piece in request.stream():
                    pieces.append(piece)
                    call.message_bytes += len(piece)
                if line is not None:
                    await line.turn()  # one tenant's large messages are read one after the other
            body = b"".join(pieces)
            del pieces
            if len(body) <= _READ_HERE:
                asked = _read(body, kind)
            else:
                asked = await in_thread(functools.partial(_read, body, kind))
        request.state.free_body()
        return asked


def _with_call(
    prompts: Sequence[GenerateParams], request: Request, call: Call, client_id: str, *, kept: bool
) -> list[GenerateParams]:
    """The prompts with what the call says of them."""
    assert call.caller is not None
    return [
        replace(
            params,
            tenant=call.caller.tenant,
            message_bytes=call.message_bytes // len(prompts),
            waited_s=call.waited_s,
            client_id=client_id,
            trace=parse_traceparent(request.headers.get("traceparent", "")),
            kept=kept,
        )
        for params in prompts
    ]


def _read(body: bytes, kind: type[_Body]) -> _Asked:
    """What a body asks for. Raises InvalidArgumentError."""
    try:
        fields = msgspec.json.decode(body, type=kind)
        options = fields.stream_options
        return _Asked(
            fields.params(),
            fields.request_id or "",
            stream=bool(fields.stream),
            usage=options is not None and bool(options.include_usage),
            running_usage=options is not None and bool(options.continuous_usage_stats),
        )
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        param = path.strip("`").partition(".")[0].partition("[")[0]
        wrong = FieldError(param, f"{param}: {message}") if param else InvalidArgumentError(message)
        raise wrong from error
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise InvalidArgumentError(f"the body is not valid JSON ({error})") from error


def _client_id(request: Request) -> str:
    """The caller's own id of a request; empty without one."""
    headers = request.headers
    return check_client_id(headers.get("x-request-id") or headers.get("prefixd-request-id") or "")


async def _no_such_route(request: Request) -> Response:
    there_is = "GET /v1/models, POST /v1/completions and POST /v1/chat/completions"
    return ErrorAnswer(404, f"there is no {request.method} {request.url.path[:256]} here; use {there_is}").response()
