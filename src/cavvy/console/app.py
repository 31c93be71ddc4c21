"""The web application: signs in browsers, makes pages, and refuses requests of other sites."""

import logging
from collections.abc import Callable
from datetime import datetime
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from cavvy.client import ApiClient, ApiError
from cavvy.console.access import SESSION_S, Access, SignInRefused
from cavvy.console.headers import SafeHeaders
from cavvy.console.pages import capacity, costs, job, jobs, machines, overview, services, team
from cavvy.console.pages.page import Page
from cavvy.console.render import render

_MakePage = Callable[[ApiClient, Request, datetime], Page]
_LONGEST_FORM = 16 << 10  # bytes
_log = logging.getLogger(__name__)


class Console:
    """The pages of one server. `access` decides who sees them, `server` is the name of the server,
    and `now` returns the current time.
    """

    def __init__(self, access: Access, server: str, now: Callable[[], datetime]) -> None:
        self._access = access
        self._server = server
        self._now = now
        self.app = Starlette(
            routes=[
                self._page("/", overview.make),
                self._page("/jobs", jobs.make),
                self._page("/jobs/{project}/{name}", job.make),
                self._page("/services", services.make),
                self._page("/services/{project}/{name}", services.make_one),
                self._page("/machines", machines.make),
                self._page("/capacity", capacity.make),
                self._page("/costs", costs.make),
                self._page("/team", team.make),
                *self._actions(),
                Route("/jobs/{project}/{name}/log", self._read_log),
                Route("/sign-in", self._show_sign_in),
                Route("/sign-in", self._sign_in, methods=["POST"]),
                Route("/sign-out", self._sign_out, methods=["POST"]),
                Mount("/static", StaticFiles(packages=[("cavvy.console", "static")])),
            ],
            middleware=[Middleware(SafeHeaders)],
            exception_handlers={HTTPException: self._on_http, Exception: self._on_fault},
        )

    def _actions(self) -> list[Route]:
        return [
            self._action("/jobs/{project}/{name}/stop", job.stop, _job_path),
            self._action("/jobs/{project}/{name}/retry", job.retry, _job_path),
            # an ended service may be gone at once
            self._action("/services/{project}/{name}/end", services.end, lambda _: "/services"),
            self._action("/services/{project}/{name}/retry", services.retry, _service_path),
            self._action(
                "/services/{project}/{name}/calls/{call}/retry",
                services.retry_one,
                _service_path,
            ),
        ]

    def _page(self, path: str, make: _MakePage) -> Route:
        def show(request: Request) -> Response:
            clients = self._access.find(self._cookie(request))
            if clients is None:
                return self._ask_to_sign_in(request)
            request.state.memory = clients.memory
            try:
                with clients.lend() as client:
                    page = make(client, request, self._now())
            except ApiError as error:
                return self._show_error(request, error)
            return self._show(request, page)

        return Route(path, show, methods=["GET"])

    def _action(
        self,
        path: str,
        act: Callable[[ApiClient, Request], None],
        next_path: Callable[[Request], str],
    ) -> Route:
        """A change that a form requests. Afterwards, the browser shows the page at `next_path`."""

        def change(request: Request) -> Response:
            _refuse_other_sites(request)
            clients = self._access.find(self._cookie(request))
            if clients is None:
                return self._ask_to_sign_in(request)
            try:
                with clients.lend() as client:
                    act(client, request)
            except ApiError as error:
                return self._show_error(request, error)
            return RedirectResponse(next_path(request), HTTPStatus.SEE_OTHER)

        return Route(path, change, methods=["POST"])

    def _read_log(self, request: Request) -> Response:
        clients = self._access.find(self._cookie(request))
        if clients is None:
            return JSONResponse({"error": "signed out"}, HTTPStatus.UNAUTHORIZED)
        try:
            with clients.lend() as client:
                return JSONResponse(job.read_log(client, request))
        except ApiError as error:
            return JSONResponse({"error": error.message}, _status_of(error))

    # Signing in

    def _show_sign_in(self, request: Request) -> Response:
        key = request.query_params.get("key", "")
        if self._access.shared or not key:
            return self._sign_in_page(request, "")
        return self._admit(request, key)

    async def _sign_in(self, request: Request) -> Response:
        _refuse_other_sites(request)
        secret = await _read_token(request)
        return await run_in_threadpool(self._admit, request, secret)

    def _admit(self, request: Request, secret: str) -> Response:
        try:
            cookie = self._access.sign_in(secret)
        except SignInRefused as refusal:
            return self._sign_in_page(request, str(refusal))
        answer = RedirectResponse(_next_of(request), HTTPStatus.SEE_OTHER)
        answer.set_cookie(
            _cookie_name(request),
            cookie,
            max_age=SESSION_S,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return answer

    def _sign_out(self, request: Request) -> Response:
        _refuse_other_sites(request)
        self._access.sign_out(self._cookie(request))
        answer = RedirectResponse("/sign-in", HTTPStatus.SEE_OTHER)
        answer.delete_cookie(_cookie_name(request))
        return answer

    def _sign_in_page(self, request: Request, refusal: str) -> Response:
        values = {"shared": self._access.shared, "refusal": refusal, "next": _next_of(request)}
        text = render("sign_in.html", self._common(request) | values)
        return HTMLResponse(text, HTTPStatus.FORBIDDEN if refusal else HTTPStatus.OK)

    def _ask_to_sign_in(self, request: Request) -> Response:
        here = request.url.path if request.method == "GET" else "/"
        if request.method == "GET" and request.url.query:
            here += f"?{request.url.query}"
        return RedirectResponse(f"/sign-in?next={quote(here)}", HTTPStatus.SEE_OTHER)

    def _cookie(self, request: Request) -> str:
        return request.cookies.get(_cookie_name(request), "")

    # Showing

    def _show(self, request: Request, page: Page) -> Response:
        values = self._common(request) | {"title": page.title} | dict(page.values)
        return HTMLResponse(render(page.template, values), page.status)

    def _show_error(self, request: Request, error: ApiError) -> Response:
        values = {"title": "Error", "message": error.message, "hint": error.hint}
        text = render("error.html", self._common(request) | values)
        return HTMLResponse(text, _status_of(error))

    def _on_http(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = "There is no such page." if error.status_code == 404 else error.detail
        values = {"title": "Error", "message": message, "hint": ""}
        text = render("error.html", self._common(request) | values)
        return HTMLResponse(text, error.status_code)

    def _on_fault(self, request: Request, error: Exception) -> Response:
        _log.error("the page %s failed", request.url.path, exc_info=error)
        values = {
            "title": "Error",
            "message": f"This page failed: {type(error).__name__}.",
            "hint": "The terminal that runs `cavvy console` shows the details.",
        }
        text = render("error.html", self._common(request) | values)
        return HTMLResponse(text, HTTPStatus.INTERNAL_SERVER_ERROR)

    def _common(self, request: Request) -> dict[str, Any]:
        return {
            "server": self._server,
            "path": request.url.path,
            "shared": self._access.shared,
            "now": self._now(),
        }


def _job_path(request: Request) -> str:
    return _path_of("jobs", request)


def _service_path(request: Request) -> str:
    return _path_of("services", request)


def _path_of(kind: str, request: Request) -> str:
    """Return the path of the job's or service's page to which a request belongs."""
    project, name = (quote(request.path_params[each], safe="") for each in ("project", "name"))
    return f"/{kind}/{project}/{name}"


def _next_of(request: Request) -> str:
    """Return the page to show after signing in: a page of this console, never another site's."""
    path = request.query_params.get("next", "/")
    parts = urlsplit(path)
    local = not parts.scheme and not parts.netloc and path.startswith("/")
    return path if local and not path.startswith(("//", "/\\")) else "/"


async def _read_token(request: Request) -> str:
    """Return the token that a form contains, or "". Raises HTTPException."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _LONGEST_FORM:
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "The token is too long.")
    return parse_qs(body.decode(errors="replace")).get("token", [""])[0].strip()


def _cookie_name(request: Request) -> str:
    """Cookies are shared by all ports of a host, so the name contains the port."""
    return f"cavvy-console-{request.url.port or 'default'}"


def _refuse_other_sites(request: Request) -> None:
    """Refuse a change that another site's page requests in the name of a signed-in user. Other
    ports of this host are other sites, too. Raises HTTPException.
    """
    site = request.headers.get("sec-fetch-site")
    origin = request.headers.get("origin", "")
    same = urlsplit(origin).netloc == request.headers.get("host", "") if origin else False
    if not (site == "same-origin" if site is not None else same):
        raise HTTPException(
            HTTPStatus.FORBIDDEN, "The request did not come from a page of this console."
        )


def _status_of(error: ApiError) -> int:
    return error.status if 400 <= error.status < 600 else HTTPStatus.BAD_GATEWAY
