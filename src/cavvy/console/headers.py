"""Keeps other sites and injected text from using the pages: refuses requests that no page of the
console makes, and adds response headers.
"""

from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cavvy.domain.web_addresses import host_name, is_host, is_loopback_name

_HEADERS = {
    # scripts, styles and requests only from this console; no frames around it
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class SafeHeaders:
    """Adds the headers to each response. Browsers keep no pages, and check files for changes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                is_file = scope["path"].startswith("/static/")
                headers["Cache-Control"] = "no-cache" if is_file else "no-store"
            await send(message)

        await self._app(scope, receive, send_with_headers)


class OwnPages:
    """Refuses requests that pages of other sites make in the background, such as for images and
    scripts. Other ports of this host are other sites, too, but browsers send them the cookie.
    Another site may only lead to a page by a link.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if not is_host(headers.get("host", "")):
            refusal = "The request names no valid host."
            await PlainTextResponse(refusal, HTTPStatus.BAD_REQUEST)(scope, receive, send)
            return
        is_foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
        wanted = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest"))
        if is_foreign and wanted != ("navigate", "document"):
            refusal = "Pages of other sites may not use the console."
            await PlainTextResponse(refusal, HTTPStatus.FORBIDDEN)(scope, receive, send)
            return
        await self._app(scope, receive, send)


class LocalNames:
    """Serves browsers that call this machine by a loopback name. A site on the internet can let its
    own name point to this machine, and its pages would then count as pages of the console.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "")
        if is_loopback_name(host_name(host)):
            await self._app(scope, receive, send)
            return
        refusal = (
            "This console serves only the browsers of one user. Open it as http://localhost with "
            "the port that `cavvy console` printed. `cavvy console --help` says how to use a "
            "browser of another machine, and how to serve several users."
        )
        answer = PlainTextResponse(refusal, HTTPStatus.MISDIRECTED_REQUEST)
        await answer(scope, receive, send)
