"""ASGI middleware that checks a request's token before the application gets the request. It also
records the time of the last request of a user.

/v1/health, files by hash and the script that joins a machine need no token. /agent/v1 accepts only
tokens of gangs, /nodes/v1 only tokens of joined machines, and all other routes only the user's
token.
"""

import time
from hmac import compare_digest

from starlette.types import ASGIApp, Receive, Scope, Send

from cavvy.api.errors import ApiProblem
from cavvy.api.wire import reply
from cavvy.client.wire import ErrorBody

AGENT = "/agent/v1/"
BOOT = "/boot/v1/"  # path prefix of files by hash, which need no token
# path prefix of the routes for joined machines, which check the tokens themselves
NODES = "/nodes/v1/"
HEALTH = "/v1/health"


class AuthMiddleware:
    """Wraps the application with the token check."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = b"Bearer " + token.encode()
        self._last = time.monotonic()
        self._inside = 0

    @property
    def idle_s(self) -> float:
        """Seconds since the last user request was answered; 0 while one is in progress."""
        return 0.0 if self._inside else time.monotonic() - self._last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path: str = scope["path"]
        shown = _authorization(scope)
        if path.startswith(AGENT):
            # The route itself checks the gang's token, because only the route knows the gang.
            if shown is None or compare_digest(shown, self._expected):
                await _refuse(scope, receive, send, shown)
                return
            scope["gang_token"] = shown.removeprefix(b"Bearer ").decode("latin-1")
            await self._app(scope, receive, send)
            return
        if path.startswith((BOOT, NODES)):
            await self._app(scope, receive, send)
            return
        if path != HEALTH and (shown is None or not compare_digest(shown, self._expected)):
            await _refuse(scope, receive, send, shown)
            return
        self._inside += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._inside -= 1
            self._last = time.monotonic()


def is_open(path: str) -> bool:
    """Whether requests to this path need no token."""
    return path == HEALTH or path.startswith(BOOT) or path.endswith("/script")


def _authorization(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"authorization":
            return bytes(value)
    return None


async def _refuse(scope: Scope, receive: Receive, send: Send, shown: bytes | None) -> None:
    if shown is None:
        problem = ApiProblem("unauthorised", "the request has no token")
    elif scope["path"].startswith(AGENT):
        problem = ApiProblem("forbidden", "a user's token is not valid for agents' routes")
    else:
        problem = ApiProblem("unauthorised", "the token does not belong to this server")
    body = ErrorBody(code=problem.code, message=problem.message, hint=problem.hint)
    headers = {"WWW-Authenticate": "Bearer", "Connection": "close"}
    await reply(body, problem.status, headers)(scope, receive, send)
