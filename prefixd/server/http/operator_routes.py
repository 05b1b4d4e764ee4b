"""What operators and their machines ask for over HTTP: metrics, health, figures and a page for people."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from prefixd.base.errors import InvalidArgumentError, NotFoundError
from prefixd.base.long_work.steps import in_thread
from prefixd.base.plain_messages import to_plain
from prefixd.base.tenancy.tenants import Role
from prefixd.observability.request_log import RequestLog
from prefixd.server.figures.figure_pages import FigurePages
from prefixd.server.http.http_callers import HttpCallers
from prefixd.server.http.operator_page import OperatorPage
from prefixd.server.http.recent_requests import recent_requests
from prefixd.v1 import admin_pb2 as pb

_NEVER_STORED = {"Cache-Control": "no-store"}


class OperatorRoutes:
    """The routes of the operators, at their own port and at the users'.

    `/healthz` and `/readyz` are for everyone who reaches the port, since the probes of a load balancer or of Kubernetes
    have no token; so is the page `/`, which has no figures itself and asks for a token. `/api/why/ID` shows parts of
    prompts and needs the role admin, all others metrics or admin (`HttpCallers.refuse_operator`).

    Args:
        pages: the figures.
        records: the last requests.
        why: explains requests, as `Admin.Why`.
        not_ready: returns the reasons why the daemon takes no work; none: it does.
    """

    def __init__(
        self,
        pages: FigurePages,
        records: RequestLog,
        why: Callable[[pb.WhyRequest], Awaitable[pb.WhyResponse]],
        not_ready: Callable[[], Sequence[str]],
    ) -> None:
        self._pages = pages
        self._records = records
        self._explain = why
        self._page = OperatorPage()
        self._not_ready = not_ready

    def routes(self, callers: HttpCallers) -> list[Route]:
        """Returns the routes for a port whose callers are identified so."""

        def route(path: str, answer: Callable[[Request], Awaitable[Response]], role: Role = Role.METRICS) -> Route:
            async def checked(request: Request) -> Response:
                return await callers.refuse_operator(request, role) or await answer(request)

            return Route(path, functools.wraps(answer)(checked), methods=["GET"])

        return [
            Route("/", self._index, methods=["GET"]),
            Route("/healthz", self._healthz, methods=["GET"]),
            Route("/readyz", self._readyz, methods=["GET"]),
            Route("/health", self._readyz, methods=["GET"]),  # by this name clients of vLLM's server ask for it
            route("/metrics", self._metrics),
            route("/api/stats", self._stats),
            route("/api/requests", self._requests),
            route("/api/why/{id:path}", self._why, Role.ADMIN),
        ]

    async def _index(self, request: Request) -> Response:
        return self._page.response()

    async def _healthz(self, request: Request) -> Response:
        await asyncio.sleep(0)  # the event loop has turned
        return PlainTextResponse("alive\n", headers=_NEVER_STORED)

    async def _readyz(self, request: Request) -> Response:
        reasons = self._not_ready()
        text = "; ".join(reasons) or "ready"
        return PlainTextResponse(f"{text}\n", 503 if reasons else 200, _NEVER_STORED)

    async def _metrics(self, request: Request) -> Response:
        page, content_type = await self._pages.metrics(",".join(request.headers.getlist("accept")))
        return Response(page, headers={"Content-Type": content_type} | _NEVER_STORED)

    async def _stats(self, request: Request) -> Response:
        text = request.query_params.get("last_s", "0")
        try:
            last_s = float(text)
        except ValueError:
            return PlainTextResponse(f"last_s={text[:20]} is no number; write /api/stats?last_s=3600\n", 400)
        try:
            page = await self._pages.stats(last_s)
        except InvalidArgumentError as error:
            return PlainTextResponse(f"{error}\n", 400)
        return Response(page, media_type=JSONResponse.media_type, headers=_NEVER_STORED)

    async def _requests(self, request: Request) -> Response:
        text = request.query_params.get("last", "20")
        if not text.isdecimal():
            return PlainTextResponse(f"last={text[:20]} is no number; write /api/requests?last=20\n", 400)
        return JSONResponse(recent_requests(self._records, int(text[:9])), headers=_NEVER_STORED)

    async def _why(self, request: Request) -> Response:
        try:
            answer = await self._explain(pb.WhyRequest(request_id=request.path_params["id"]))
        except NotFoundError as error:
            return PlainTextResponse(f"{error}\n", 404)
        except InvalidArgumentError as error:
            return PlainTextResponse(f"{error}\n", 400)
        page = await in_thread(lambda: json.dumps(to_plain(answer)).encode())  # 30 ms for 64 requests of 48 stages
        return Response(page, media_type=JSONResponse.media_type, headers=_NEVER_STORED)
