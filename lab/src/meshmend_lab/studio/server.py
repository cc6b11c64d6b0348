"""Server: the page, and answers to its questions, over HTTP.

Whoever can reach it can use this machine's processors, so it listens on loopback by default, and other web sites cannot
reach through a visitor's browser: the Host header must name this machine by an address (a name that is rebound to
127.0.0.1 is refused), and what is posted must come from the page itself. It serves the page's own files, which it has
read when it started, and opens nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
from collections.abc import AsyncGenerator, AsyncIterator
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshmend import __version__
from meshmend.cost import PRESETS
from meshmend.errors import MeshmendError, ParameterError
from meshmend.planning import Auto
from meshmend.planning.auto import CHOICES
from meshmend_lab.studio import answers
from meshmend_lab.studio.state import MAX_WORD, State
from meshmend_lab.studio.workers import AnswerProcesses, NoAnswerError

MAX_QUESTION_BYTES = 2**20
_OWN, _SCRIPT = files("meshmend_lab.studio") / "page", "text/javascript; charset=utf-8"
PAGE = {
    "": (_OWN / "index.html", "text/html; charset=utf-8"),
    "studio.css": (_OWN / "studio.css", "text/css; charset=utf-8"),
    "icon.svg": (_OWN / "icon.svg", "image/svg+xml"),
    **{
        f"{name}.js": (_OWN / f"{name}.js", _SCRIPT)
        for name in ("studio", "state", "mesh", "film", "panels", "client", "theme")
    },
    "player.js": (files("meshmend.drawing") / "player.js", _SCRIPT),
}
"""What is served, by path. There is no way to any other file."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
LINES = "application/x-ndjson"
DEFAULTS = ("shape", "wrap", "hardware", "payload", "planner", "budget")
"""Fields of a state that have one value each."""


def make_app(listens_on: str = "127.0.0.1") -> Starlette:
    """Return the application. `listens_on` is the host that it was told to listen on, which may be named as such."""
    contents = {path: file.read_bytes() for path, (file, _) in PAGE.items()}

    async def show(request: Request) -> Response:
        path = request.url.path.lstrip("/")
        return Response(contents[path], media_type=PAGE[path][1])

    studio = _Studio()
    return Starlette(
        routes=[
            *(Route(f"/{path}", show, methods=["GET"]) for path in PAGE),
            Route("/about", studio.about, methods=["GET"]),
            Route("/layout", studio.layout, methods=["GET"]),
            Route("/plan", studio.plan, methods=["POST"]),
            *(Route(f"/{job}", studio.answer, methods=["POST"]) for job in ("answer", "alternatives", "steps")),
        ],
        middleware=[Middleware(_Guard, listens_on=listens_on)],
        exception_handlers={MeshmendError: _refuse, NoAnswerError: _refuse, 404: _not_found, 405: _not_found},
        lifespan=studio.lifespan,
    )


class _Guard:
    """Refuses requests that do not come from the page or the address bar, and adds the headers to every response."""

    def __init__(self, app: ASGIApp, listens_on: str) -> None:
        self._app = app
        self._listens_on = listens_on

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        headers = Headers(scope=scope)
        why = self._refusal(headers, scope["method"])
        if why is None:
            await self._app(scope, receive, send_guarded)
        else:
            await _error("ForbiddenError", why, 403)(scope, receive, send_guarded)

    def _refusal(self, headers: Headers, method: str) -> str | None:
        host = headers.get("host", "")
        if not is_own_name(host, self._listens_on):
            return (
                f"The Host header is {host[:MAX_WORD]!r}, expected an IP address or localhost: other names may be "
                "rebound to this machine by a web site. Open the address that meshmend lab studio prints."
            )
        origin = headers.get("origin")
        if method != "GET" and origin is not None and origin != f"http://{host}":
            return f"This came from {origin[:MAX_WORD]!r}, expected the studio's own page at http://{host}."
        kind = headers.get("content-type", "").split(";")[0]
        if method != "GET" and kind != "application/json":
            return f"The content type is {kind[:MAX_WORD]!r}, expected application/json."
        return None


def is_own_name(host: str, listens_on: str) -> bool:
    """Return whether a Host header names this machine in a way that no web site can forge by DNS.

    >>> [is_own_name(host, "127.0.0.1") for host in ("127.0.0.1:8737", "localhost", "[::1]:80", "evil.example:8737")]
    [True, True, True, False]
    """
    name, colon, port = host.rpartition(":")
    if not colon or not port.isdecimal():
        name = host
    if name in ("localhost", listens_on):
        return True
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name[1:-1] if name.startswith("[") and name.endswith("]") else name)
        return True
    return False


class _Studio:
    """The routes, which share the workers."""

    _workers: AnswerProcesses

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._workers = AnswerProcesses()
        yield

    async def about(self, _: Request) -> Response:
        """Say what there is to choose from."""
        return JSONResponse(
            {
                "version": __version__,
                "defaults": {name: getattr(State(), name) for name in DEFAULTS},
                "planners": [Auto.name, *(kind.name for kind in CHOICES)],
                "hardware": {name: str(hardware) for name, hardware in PRESETS.items()},
            }
        )

    async def layout(self, request: Request) -> Response:
        """Say where the chips and cables of a machine lie."""
        shape, wrap = request.query_params.get("shape", ""), request.query_params.get("wrap", "none")
        return JSONResponse(await asyncio.to_thread(answers.layout, shape, wrap))

    async def answer(self, request: Request) -> Response:
        """Answer a question about a state, one JSON object per line as soon as it is known."""
        return await _stream(request, self._workers.run(request.url.path.lstrip("/"), await _asked(request)))

    async def plan(self, request: Request) -> Response:
        """Return the plan as a file."""
        async with contextlib.aclosing(self._workers.run("plan_file", await _asked(request))) as found:
            return Response(await anext(found), media_type="application/octet-stream")


async def _asked(request: Request) -> State:
    """Return the state that was posted, and stop reading where it is too long."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MAX_QUESTION_BYTES:
            raise NoAnswerError(
                "PayloadTooLargeError", f"The request has more than {MAX_QUESTION_BYTES:,} bytes, which is the limit."
            )
    try:
        question = json.loads(data)
    except (ValueError, RecursionError):
        raise ParameterError("The question is not JSON, expected one object with the fields of a state.") from None
    return State.read(question)


async def _stream(request: Request, found: AsyncGenerator[Any, None]) -> Response:
    """Send what a worker finds, line by line; stop the worker when the page no longer listens.

    A task of its own owns the worker, so that it is ended wherever sending stops.
    """
    ready: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def work() -> None:
        try:
            async with contextlib.aclosing(found):
                async for value in found:
                    ready.put_nowait(json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n")
        except NoAnswerError as error:
            ready.put_nowait(json.dumps({"error": error.kind, "message": str(error)}).encode() + b"\n")
        finally:
            ready.put_nowait(None)

    working, gone = asyncio.ensure_future(work()), asyncio.ensure_future(_gone(request))
    gone.add_done_callback(lambda _: working.cancel())

    async def lines() -> AsyncIterator[bytes]:
        try:
            while (line := await ready.get()) is not None:
                yield line
        finally:
            gone.cancel()

    return StreamingResponse(lines(), media_type=LINES)


async def _gone(request: Request) -> None:
    """Wait until the page has closed the connection, as it does when it asks something newer."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _error(kind: str, message: str, status: int) -> Response:
    return JSONResponse({"error": kind, "message": message}, status_code=status)


async def _refuse(_: Request, error: Exception) -> Response:
    """Answer with the reason why there is no answer.

    That is an answer like others, with their status: a mesh in two parts is a state that a visitor clicks together, and
    browsers report every other status on their console as a failure of the page.
    """
    kind = error.kind if isinstance(error, NoAnswerError) else type(error).__name__
    return _error(kind, str(error), 413 if kind == "PayloadTooLargeError" else 200)


async def _not_found(request: Request, _: Exception) -> Response:
    path = request.url.path[:MAX_WORD]
    return _error("NotFoundError", f"There is nothing at {request.method} {path}. The page is at /.", 404)
