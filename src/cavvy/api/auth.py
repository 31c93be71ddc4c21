"""ASGI middleware that checks a request's token before the application receives the request. The
middleware creates the request's principal, which the rules of routes check, and records the time of
the last request of a user.

/v1/health, /v1/sign-in, webhooks, files by hash and the script that joins a machine need no token.
The routes below /agent/v1 accept only tokens of gangs. The routes below /nodes/v1 accept only
tokens of joined machines. Capabilities have routes that check tokens of their own. All other routes
accept the token of the state folder and the tokens of accounts.
"""

import time
from contextlib import suppress
from datetime import datetime
from functools import cache
from hmac import compare_digest

from starlette.types import ASGIApp, Receive, Scope, Send

from cavvy.api.app_state import AppState
from cavvy.api.audit import note_refusal
from cavvy.api.errors import ApiProblem, explain
from cavvy.api.peers import passed_token
from cavvy.api.tokens import hash_token, is_token
from cavvy.api.wire import reply
from cavvy.client.wire import ErrorBody
from cavvy.domain.accounts import AccountCredential
from cavvy.domain.authorization import (
    Principal,
    TokenState,
    judge_credential,
    make_owner,
    make_principal,
    must_touch,
)
from cavvy.frame.discover import find_capabilities
from cavvy.store.base import StoreError, StoreFull

AGENT = "/agent/v1/"
BOOT = "/boot/v1/"  # path prefix of files by hash, which need no token
# path prefix of the routes for joined machines, which check the tokens themselves
NODES = "/nodes/v1/"
HOOKS = "/hooks/v1/"  # path prefix of webhooks, whose route checks signatures instead of tokens
HEALTH = "/v1/health"
SIGN_IN = "/v1/sign-in"  # this route exchanges an ID token for an access token
_NEW_TOKEN = "sign in again with `cavvy login`, or ask an admin for a new token"
_RIGHT_TOKEN = (
    "check the address and the token; an admin creates a token with `cavvy server token create`, "
    "and the "
    "server's own token is in the file `token` of its state folder"
)


class AuthMiddleware:
    """Wraps the application with the token check. `token` is the token of the state folder: a
    caller that sends it has all rights.
    """

    def __init__(self, app: ASGIApp, token: str, app_state: AppState) -> None:
        self._app = app
        self._expected = b"Bearer " + token.encode()
        self._app_state = app_state
        self._last = time.monotonic()
        self._inside = 0

    @property
    def idle_s(self) -> float:
        """Seconds since the last user request was answered; 0 while a request is in progress."""
        return 0.0 if self._inside else time.monotonic() - self._last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path: str = scope["path"]
        shown = _authorization(scope)
        if path.startswith(AGENT):
            # The route itself checks the gang's token, because only the route knows the gang.
            if shown is None or compare_digest(shown, self._expected):
                await _refuse(scope, receive, send, _refusal(scope, shown))
                return
            scope["gang_token"] = shown.removeprefix(b"Bearer ").decode("latin-1")
            await self._app(scope, receive, send)
            return
        if path.startswith((BOOT, NODES, *list_own_roots())):
            await self._app(scope, receive, send)
            return
        if path not in (HEALTH, SIGN_IN) and not path.startswith(HOOKS):
            try:
                scope["principal"] = await self._identify(scope, shown)
            except ApiProblem as problem:
                await _refuse(scope, receive, send, problem)
                return
        self._inside += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._inside -= 1
            self._last = time.monotonic()

    async def _identify(self, scope: Scope, shown: bytes | None) -> Principal:
        """Return who sends the request. Raises ApiProblem if the token is not valid."""
        address = scope["client"][0] if scope.get("client") else ""
        if (passed := passed_token(scope)) is not None:
            if not self._app_state.peers.accepts(scope, passed, self._app_state.now()):
                raise ApiProblem("forbidden", "a server's token is not valid for this request")
            scope["peer"] = True
            return make_owner(
                address
            )  # the server that forwarded the request has checked the user's rights
        if shown is not None and compare_digest(shown, self._expected):
            return make_owner(address)
        text = (shown or b"").removeprefix(b"Bearer ").decode("latin-1")
        if not is_token(text):
            raise _refusal(scope, shown)
        try:
            now = self._app_state.now()
            credential = await self._app_state.store.credential(hash_token(text))
            if credential is None:
                raise _refusal(scope, shown)
            await self._accept(credential, now)
        except StoreError as error:
            raise explain(error) or ApiProblem("internal", str(error)) from error
        return make_principal(credential, now, address)

    async def _accept(self, credential: AccountCredential, now: datetime) -> None:
        """Record the use of a valid token. Raises ApiProblem if the token cannot be used now."""
        token = credential.token
        match judge_credential(credential, now):
            case TokenState.DISABLED:
                problem = f"the account {token.account} is disabled"
                raise ApiProblem(
                    "unauthorised",
                    problem,
                    "an admin enables the account with `cavvy server user enable`",
                )
            case TokenState.EXPIRED:
                raise ApiProblem("unauthorised", "the token has expired", _NEW_TOKEN)
            case TokenState.REVOKED:
                raise ApiProblem("unauthorised", "the token was revoked", _NEW_TOKEN)
        if must_touch(token, now):
            with suppress(StoreFull):  # a full disk must not keep users from stopping jobs
                await self._app_state.store.use_token(token.id, now)


@cache
def list_own_roots() -> tuple[str, ...]:
    """Return the path prefixes of capabilities' routes that check tokens themselves."""
    return tuple(root for each in find_capabilities().capabilities for root in each.own_tokens)


@cache
def _list_open_paths() -> frozenset[str]:
    found = find_capabilities().capabilities
    return frozenset(path for each in found for path in each.open_paths)


def is_open(path: str) -> bool:
    """Return whether requests to this path need no token."""
    return (
        path in (HEALTH, SIGN_IN)
        or path.startswith((BOOT, HOOKS))
        or path.endswith("/script")
        or path in _list_open_paths()
    )


def _authorization(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"authorization":
            return bytes(value)
    return None


def _refusal(scope: Scope, shown: bytes | None) -> ApiProblem:
    if shown is None:
        return ApiProblem("unauthorised", "the request has no token")
    if scope["path"].startswith(AGENT):
        return ApiProblem("forbidden", "a user's token is not valid for agents' routes")
    return ApiProblem("unauthorised", "the token does not belong to this server", _RIGHT_TOKEN)


async def _refuse(scope: Scope, receive: Receive, send: Send, problem: ApiProblem) -> None:
    note_refusal(scope, problem.code)
    body = ErrorBody(code=problem.code, message=problem.message, hint=problem.hint)
    headers = {**problem.headers, "Connection": "close"}
    if problem.status in (401, 403):
        headers["WWW-Authenticate"] = "Bearer"
    await reply(body, problem.status, headers)(scope, receive, send)
