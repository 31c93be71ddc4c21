"""The web application: signs in browsers, makes pages, and refuses requests of other sites."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from http import HTTPStatus
from itertools import chain
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote, urlsplit

from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from cavvy.client import ApiClient, ApiError, Unreachable
from cavvy.console.access import (
    Access,
    DeviceSignIns,
    LocalNames,
    OwnPages,
    SafeHeaders,
    SignInFull,
    SignInRefused,
    is_other_user,
)
from cavvy.console.memory import NOT_RUNNING, ClientPool
from cavvy.console.pages import (
    costs,
    group,
    job,
    jobs,
    machines,
    offers,
    overview,
    submit,
    team,
)
from cavvy.console.pages.page import Form, Page
from cavvy.console.render import render
from cavvy.domain.targets import host_port, is_loopback_name
from cavvy.frame.discover import find_capabilities, load, say_left_out

_T = TypeVar("_T")
_MakePage = Callable[[ApiClient, Request, datetime], Page]
_Act = Callable[[ApiClient, Request, datetime], Page | str]
_LONGEST_FORM = 1 << 20  # bytes; of users who have signed in
_LONGEST_TOKEN = 16 << 10  # bytes of the form that signs in
_MOST_FIELDS = 2000
_FORM_S = 10.0  # seconds for a complete form
_SIGNING_IN = 8  # browsers that sign in at a time, so that attempts leave threads for pages
_MENU = (
    ("/", "Overview"),
    ("/jobs", "Jobs"),
    ("/machines", "Machines"),
    ("/offers", "Offers"),
    ("/queue", "Queue"),
    ("/costs", "Costs"),
    ("/team", "Team"),
)
_log = logging.getLogger(__name__)


class Console:
    """The pages of one server. `access` decides who sees them, `server` is the name of the server,
    and `now` returns the current time. `start` starts the server if it is the embedded server.
    """

    def __init__(
        self,
        access: Access,
        server: str,
        now: Callable[[], datetime],
        start: Callable[[], None] | None = None,
    ) -> None:
        self._access = access
        self._server = server
        self._now = now
        self._start = start
        self._limiter: CapacityLimiter | None = None
        self._sign_ins = DeviceSignIns(access.connect) if access.connect is not None else None
        pages = self._make_app()
        self.app: ASGIApp = SafeHeaders(OwnPages(pages if access.shared else LocalNames(pages)))

    def _make_app(self) -> Starlette:
        app = Starlette(
            routes=[
                self._page("/", overview.make),
                self._page("/jobs", jobs.make),
                self._page("/jobs/{project}/{name}", job.make),
                self._page("/groups", group.make_list),
                self._page("/groups/{project}/{name}", group.make),
                self._page("/machines", machines.make),
                self._page("/offers", offers.make),
                self._page("/capacity", offers.make_capacity),
                self._page("/costs", costs.make),
                self._page("/team", team.make),
                self._page("/queue", jobs.make_queue),
                self._page("/audit", team.make_audit),
                self._page("/compare", jobs.make_comparison),
                self._page("/submit", submit.make),
                *self._actions(),
                *self._own_pages(),
                self._page("/jobs/{project}/{name}/whole-log", job.make_log),
                Route("/jobs/{project}/{name}/log", self._read_log),
                Route("/jobs/{project}/{name}/log.txt", self._send_log),
                Route("/submit/keys", self._list_keys),
                Route("/sign-in", self._show_sign_in),
                Route("/sign-in", self._sign_in, methods=["POST"]),
                Route("/sign-in/with", self._begin_sign_in, methods=["POST"]),
                Route("/sign-in/wait", self._await_sign_in),
                Route("/sign-out", self._sign_out, methods=["POST"]),
                *self._own_files(),
                Mount("/static", StaticFiles(packages=[("cavvy.console", "static")])),
            ],
            exception_handlers={HTTPException: self._on_http, Exception: self._on_fault},
        )
        # Behind a proxy, a redirect would lead to http instead of https.
        app.router.redirect_slashes = False
        return app

    def _actions(self) -> list[Route]:
        return [
            self._action("/submit", submit.send),
            self._action("/jobs", jobs.act),
            self._action("/machines", machines.act),
            self._action("/machines/{project}/{name}/start", machines.start),
            self._action("/machines/{project}/{name}/stop", machines.stop),
            self._action("/machines/{project}/{name}/keep", machines.keep),
            self._action("/budgets", costs.set_budget),
            self._action("/budgets/{name}/remove", costs.remove_budget),
            self._action("/team/{project}/secrets", team.set_secret),
            self._action("/team/{project}/secrets/{name}/remove", team.remove_secret),
            self._action("/team/{project}/policy", team.set_policy),
            self._action("/jobs/{project}/{name}/stop", job.stop),
            self._action("/jobs/{project}/{name}/retry", job.retry),
            self._action("/groups", group.act),
            self._action("/groups/{project}/{name}/stop", group.stop),
            self._action("/groups/{project}/{name}/retry", group.retry),
            self._action("/groups/{project}/{name}/remove", group.remove),
        ]

    def _own_pages(self) -> Iterator[Route]:
        """Yield the pages of capabilities, and the changes that their forms request."""
        for capability in find_capabilities().capabilities:
            kinds: tuple[tuple[Callable[..., Route], Sequence[Any]], ...] = (
                (self._page, capability.pages),
                (self._action, capability.actions),
                (self._data, capability.data),
            )
            for make, own in kinds:
                for each in own:
                    try:
                        yield make(each.path, load(each.place))
                    except Exception as error:  # noqa: BLE001 - code of others raises anything
                        say_left_out(capability, f"the page {each.path}", error)

    def _own_files(self) -> Iterator[Mount]:
        """Yield the files of pages of capabilities, such as scripts."""
        for each in find_capabilities().capabilities:
            if each.static:
                try:
                    files = StaticFiles(packages=[(each.static, "static")])
                except (AssertionError, ImportError) as error:
                    say_left_out(each, "the files of its pages", error)
                    continue
                yield Mount(f"/static/{each.name}", files)

    def _data(
        self, path: str, make: Callable[[ApiClient, Request, datetime], bytes | Response]
    ) -> Route:
        """What a page's script asks for, as JSON, or what a page shows, such as a picture."""

        def send(request: Request) -> Response:
            clients = self._access.find(self._cookie(request))
            if clients is None:
                return JSONResponse({"error": "signed out"}, HTTPStatus.UNAUTHORIZED)
            self._note(request, clients)
            try:
                with clients.lend() as client:
                    found = make(client, request, self._now())
            except ApiError as error:
                self._end_session(request, error)
                return JSONResponse({"error": error.message}, _status_of(error))
            except HTTPException as error:
                return JSONResponse({"error": error.detail}, error.status_code)
            if isinstance(found, Response):
                return found
            return Response(found, media_type="application/json")

        return Route(path, send, methods=["GET"])

    def _page(self, path: str, make: _MakePage) -> Route:
        def show(request: Request) -> Response:
            clients = self._access.find(self._cookie(request))
            if clients is None:
                return self._ask_to_sign_in(request)
            self._note(request, clients)
            try:
                page = self._use(
                    clients, request, lambda client: make(client, request, self._now())
                )
            except ApiError as error:
                return self._show_error(request, error)
            return self._show(request, page)

        return Route(path, show, methods=["GET"])

    def _note(self, request: Request, clients: ClientPool) -> None:
        request.state.memory = clients.memory
        request.state.shared = self._access.shared

    def _use(self, clients: ClientPool, request: Request, act: Callable[[ApiClient], _T]) -> _T:
        """Call `act` with a connection of the user. Raises ApiError."""

        def call() -> _T:
            with clients.lend() as client:
                return act(client)

        return self._start_for(request, call)

    def _start_for(self, request: Request, call: Callable[[], _T]) -> _T:
        """Return the result of `call`. If the embedded server has ended, such as for idleness, a
        user who opens a page or sends a form starts it, as each command does. Raises ApiError.
        """
        try:
            return call()
        except ApiError as error:
            if error.code != NOT_RUNNING or self._start is None or not _is_opened(request):
                raise
        self._start()
        return call()

    def _action(self, path: str, act: _Act) -> Route:
        """A change that a form requests. Afterwards, the browser shows what `act` returns: a page,
        or the page at a path.
        """

        async def change(request: Request) -> Response:
            _refuse_other_sites(request)
            clients = self._access.find(self._cookie(request))
            if clients is None:
                return self._ask_to_sign_in(request)
            self._note(request, clients)
            request.state.form = await _read_form(request, _LONGEST_FORM)
            return await to_thread.run_sync(self._change, act, clients, request)

        return Route(path, change, methods=["POST"])

    def _change(self, act: _Act, clients: ClientPool, request: Request) -> Response:
        try:
            shown = self._use(clients, request, lambda client: act(client, request, self._now()))
        except ApiError as error:
            return self._show_error(request, error)
        if isinstance(shown, Page):
            return self._show(request, shown)
        return RedirectResponse(shown, HTTPStatus.SEE_OTHER)

    def _read_log(self, request: Request) -> Response:
        clients = self._access.find(self._cookie(request))
        if clients is None:
            return JSONResponse({"error": "signed out"}, HTTPStatus.UNAUTHORIZED)
        try:
            with clients.lend() as client:
                return JSONResponse(job.read_log(client, request))
        except ApiError as error:
            self._end_session(request, error)
            return JSONResponse({"error": error.message}, _status_of(error))

    def _send_log(self, request: Request) -> Response:
        """The whole log as a file. An error before the first part is shown as a page."""
        clients = self._access.find(self._cookie(request))
        if clients is None:
            return self._ask_to_sign_in(request)

        def stream() -> Iterator[bytes]:
            with clients.lend() as client:
                yield from job.read_file(client, request)

        parts = stream()
        try:
            first = next(parts, b"")
        except ApiError as error:
            return self._show_error(request, error)
        return StreamingResponse(chain([first], parts), media_type="text/plain; charset=utf-8")

    def _list_keys(self, request: Request) -> Response:
        """The keys of task files, for the editor; they are the same for everyone."""
        return Response(submit.keys_json(), media_type="application/json")

    # Signing in

    def _show_sign_in(self, request: Request) -> Response:
        key = request.query_params.get("key", "")
        if self._access.shared or not key:
            return self._sign_in_page(request, self._access.take_reason(self._cookie(request)))
        return self._admit(request, key)

    async def _sign_in(self, request: Request) -> Response:
        _refuse_other_sites(request)
        secret = (await _read_form(request, _LONGEST_TOKEN)).get("token", "").strip()
        if self._limiter is None:
            self._limiter = CapacityLimiter(_SIGNING_IN)
        return await to_thread.run_sync(self._admit, request, secret, limiter=self._limiter)

    def _admit(self, request: Request, secret: str) -> Response:
        try:
            self._refuse_other_users(request)
            cookie = self._start_for(request, lambda: self._access.sign_in(secret))
        except SignInRefused as refusal:
            return self._sign_in_page(request, str(refusal), HTTPStatus.FORBIDDEN)
        except ApiError as error:
            return self._sign_in_page(request, _say(error), HTTPStatus.FORBIDDEN)
        if self._access.shared:
            self._access.sign_out(self._cookie(request))
        answer = RedirectResponse(_next_of(request), HTTPStatus.SEE_OTHER)
        # With "strict", a link in a chat or in a terminal in the browser would lead to the sign-in
        # page. All changes are POST requests of the console's own pages.
        name, secure = _cookie_name(request), _is_secure(request)
        answer.set_cookie(name, cookie, httponly=True, samesite="lax", secure=secure)
        return answer

    def _refuse_other_users(self, request: Request) -> None:
        """Raises SignInRefused."""
        peer = request.client
        if not self._access.shared and peer is not None and is_other_user(peer.host, peer.port):
            raise SignInRefused("Another user of this machine has started this console.")

    def _sign_out(self, request: Request) -> Response:
        _refuse_other_sites(request)
        self._access.sign_out(self._cookie(request))
        answer = RedirectResponse("/sign-in", HTTPStatus.SEE_OTHER)
        answer.delete_cookie(_cookie_name(request), secure=_is_secure(request))
        return answer

    def _sign_in_with(self, request: Request) -> Response:
        """Begin to sign in at an identity provider."""
        name = request.state.form.get("way", "")
        try:
            key = self._sign_ins.begin(name, find_browser(request)) if self._sign_ins else ""
        except (SignInFull, KeyError) as problem:
            text = str(problem) if isinstance(problem, SignInFull) else "There is no such provider."
            return self._sign_in_page(request, text, HTTPStatus.CONFLICT)
        answer = RedirectResponse(
            f"/sign-in/wait?next={quote(_next_of(request))}", HTTPStatus.SEE_OTHER
        )
        answer.set_cookie(
            _pending_name(request), key, httponly=True, samesite="lax", secure=_is_secure(request)
        )
        return answer

    async def _begin_sign_in(self, request: Request) -> Response:
        _refuse_other_sites(request)
        request.state.form = await _read_form(request, _LONGEST_TOKEN)
        return await to_thread.run_sync(self._sign_in_with, request)

    def _await_sign_in(self, request: Request) -> Response:
        """Show the code until the person has confirmed it; the cookie binds it to this browser."""
        key = request.cookies.get(_pending_name(request), "")
        pending = self._sign_ins.find(key) if self._sign_ins else None
        if pending is None:
            return RedirectResponse("/sign-in", HTTPStatus.SEE_OTHER)
        if pending.problem:
            text = pending.problem[:1].upper() + pending.problem[1:]
            return self._sign_in_page(request, f"{text}.", HTTPStatus.FORBIDDEN)
        if pending.token:
            return self._admit(request, pending.token)
        return HTMLResponse(render("wait.html", self._common(request) | {"pending": pending}))

    def _sign_in_page(self, request: Request, refusal: str, status: int = 200) -> Response:
        ways = self._sign_ins.ways() if self._sign_ins else ()
        values = {
            "shared": self._access.shared,
            "refusal": refusal,
            "next": _next_of(request),
            "ways": ways,
        }
        text = render("sign_in.html", self._common(request) | values)
        return HTMLResponse(text, status)

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

    def _end_session(self, request: Request, error: ApiError) -> bool:
        """End the user's session if the server no longer accepts the user's token. Returns whether
        it has ended.
        """
        if error.status != HTTPStatus.UNAUTHORIZED or not self._access.shared:
            return False
        reason = "You were signed out, because the server no longer accepts your token: "
        self._access.sign_out(self._cookie(request), f"{reason}{error.message}.")
        return True

    def _show_error(self, request: Request, error: ApiError) -> Response:
        if self._end_session(request, error):
            return self._ask_to_sign_in(request)
        message, hint = error.message, error.hint
        if error.status == HTTPStatus.UNAUTHORIZED:
            hint = "Sign in with `cavvy login`, and start `cavvy console` again."
        elif isinstance(error, Unreachable) and error.code != NOT_RUNNING:
            message = f"The server does not answer: {message}."
            hint = "Load this page again later. `cavvy server status` shows the server."
        values = {"title": "Error", "message": message, "hint": hint}
        text = render("error.html", self._common(request) | values)
        return HTMLResponse(text, _status_of(error))

    def _on_http(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = "There is no such page." if error.status_code == 404 else error.detail
        values = {"title": "Error", "message": message, "hint": ""}
        text = render("error.html", self._common(request) | values)
        return HTMLResponse(text, error.status_code)

    def _on_fault(self, request: Request, error: Exception) -> Response:
        _log.error("the page %r failed", request.url.path, exc_info=error)
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
            "menu": _list_menu(),
        }


def _list_menu() -> list[tuple[str, str]]:
    """Return the paths and words of the menu, with those of capabilities."""
    menu = list(_MENU)
    for page in (page for each in find_capabilities().capabilities for page in each.pages):
        if page.menu:
            at = next((n for n, (path, _) in enumerate(menu, 1) if path == page.after), len(menu))
            menu.insert(at, (page.path, page.menu))
    return menu


def _next_of(request: Request) -> str:
    """Return the page to show after signing in: a page of this console, never another site's."""
    path = request.query_params.get("next", "/")
    try:
        parts = urlsplit(path)
    except ValueError:  # such as //[
        return "/"
    local = not parts.scheme and not parts.netloc and path.startswith("/")
    return path if local and not path.startswith(("//", "/\\")) else "/"


async def _read_form(request: Request, longest: int) -> Form:
    """Return the fields of a form of at most `longest` bytes. Raises HTTPException."""
    body = b""
    try:
        async with asyncio.timeout(_FORM_S):
            async for piece in request.stream():
                body += piece
                if len(body) > longest:
                    raise HTTPException(413, f"The form has more than {longest:,} bytes.")
    except TimeoutError:
        raise HTTPException(408, "The form did not arrive in time. Try again.") from None
    except ClientDisconnect:
        raise HTTPException(400, "The browser closed the connection.") from None
    text = body.decode(errors="replace")
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=_MOST_FIELDS)
    except ValueError:
        raise HTTPException(413, f"The form has more than {_MOST_FIELDS:,} fields.") from None
    return Form(pairs)


def _cookie_name(request: Request) -> str:
    """Cookies are shared by all ports of a host, so the name contains the port. With the prefix,
    browsers accept the cookie only from this host and only over TLS.
    """
    prefix = "__Host-" if _is_secure(request) else ""
    return f"{prefix}cavvy-console-{host_port(request.headers.get('host', '')) or 'default'}"


def _pending_name(request: Request) -> str:
    return f"{_cookie_name(request)}-pending"


def _is_secure(request: Request) -> bool:
    """Return whether the browser uses TLS. A proxy that ends TLS says so in a header."""
    return "https" in (request.url.scheme, request.headers.get("x-forwarded-proto", ""))


def _is_opened(request: Request) -> bool:
    """Return whether the user opened the page or sent a form, rather than the page's script
    updating the page. Without TLS, browsers send Sec-Fetch headers only to loopback addresses.
    """
    mode = request.headers.get("sec-fetch-mode")
    if mode is None:
        return "text/html" in request.headers.get("accept", "")
    return mode == "navigate"


def find_browser(request: Request) -> str:
    """Return the address of the browser. A proxy on this machine adds it to X-Forwarded-For, where
    the last address is the one that the proxy has seen.
    """
    host = request.client.host if request.client else ""
    if not is_loopback_name(host):
        return host
    return request.headers.get("x-forwarded-for", "").rpartition(",")[2].strip()[:64] or host


def _refuse_other_sites(request: Request) -> None:
    """Refuse a change that another site's page requests in the name of a signed-in user. Other
    ports of this host are other sites, too. Raises HTTPException.
    """
    site = request.headers.get("sec-fetch-site")
    origin = request.headers.get("origin", "")
    same = origin.partition("://")[2] == request.headers.get("host")
    if not (site == "same-origin" if site is not None else same):
        raise HTTPException(
            HTTPStatus.FORBIDDEN, "The request did not come from a page of this console."
        )


def _say(error: ApiError) -> str:
    """Return an error as sentences."""
    parts = (text[:1].upper() + text[1:].rstrip(".") for text in (error.message, error.hint))
    return " ".join(f"{each}." for each in parts if each)


def _status_of(error: ApiError) -> int:
    return error.status if 400 <= error.status < 600 else HTTPStatus.BAD_GATEWAY
