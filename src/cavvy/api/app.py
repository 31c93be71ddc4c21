"""The application: registers all routes, turns errors into answers, and creates the OpenAPI
document.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cavvy import __version__
from cavvy.api.app_state import AppState
from cavvy.api.audit import note_refusal
from cavvy.api.direct import QueryReader
from cavvy.api.errors import KNOWN, ApiProblem, explain
from cavvy.api.openapi import describe
from cavvy.api.routes import (
    accounts,
    agents,
    arrays,
    blobs,
    budgets,
    checkpoints,
    credentials,
    data,
    execs,
    fleet,
    jobs,
    logs,
    machines,
    maintenance,
    metrics,
    model_folder,
    offers,
    policies,
    pools,
    recipes,
    secrets,
    trusts,
    volumes,
)
from cavvy.api.rules import RouteRule, authorize, list_rules
from cavvy.api.wire import reply
from cavvy.client.wire import ErrorBody
from cavvy.frame.discover import load_all, say_left_out

_ROUTERS = (
    metrics.router,
    trusts.router,
    jobs.router,
    model_folder.router,
    logs.router,
    arrays.router,
    budgets.router,
    execs.router,
    secrets.router,
    volumes.router,
    accounts.router,
    metrics.audit_router,
    blobs.router,
    fleet.router,
    machines.router,
    maintenance.router,
    pools.router,
    fleet.share_router,
    maintenance.joined_router,
    policies.router,
    credentials.router,
    recipes.router,
    offers.router,
    checkpoints.router,
    data.router,
    agents.router,
    agents.boot_router,
)
_AGENTS = "/agent/"
_log = logging.getLogger(__name__)


class Application(FastAPI):
    """FastAPI with Cavvy's descriptions of bodies and answers in the OpenAPI document.

    `direct` are the routes of which FastAPI would read only parameters of the query, by method and
    path. The application calls them itself, because FastAPI would search all routes and pass nine
    layers, which costs more than the routes that agents and devices call do themselves.
    """

    direct: Mapping[tuple[str, str], tuple[APIRoute, RouteRule, QueryReader]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self.direct.get((scope.get("method", ""), scope.get("path", "")))
        given = None if found is None else found[2].read(scope["query_string"])
        if found is None or given is None:
            await super().__call__(scope, receive, send)
            return
        route, rule, _ = found
        scope.update(app=self, route=route, path_params={})
        request = Request(scope, receive, send)
        try:
            authorize(request, rule)
            answer = await route.endpoint(request=request, **given)
        except Exception as error:  # noqa: BLE001 - as FastAPI calls the handlers below
            answer = await _on_error(request, error)
        await answer(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = describe(self)
        return self.openapi_schema


def make_app(app_state: AppState) -> Application:
    """Build the application, whose routes use `app_state`."""
    app = Application(
        title="Cavvy",
        version=__version__,
        description="One control plane for every GPU a team can rent or own.",
        openapi_url="/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.app_state = app_state
    app_state.control_plane.own.open(app_state)
    add_routes(app)
    for kind in (
        ApiProblem,
        *KNOWN,
        # one handler per class, because starlette logs errors as faults if only Exception has one
    ):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_error)
    return app


def list_routes() -> Sequence[tuple[APIRoute, RouteRule]]:
    """Return all routes with their rules, those of the capabilities last. Raises TypeError if a
    route has no rule.
    """
    found = list(list_rules(route for each in _ROUTERS for route in each.routes))
    taken = {call for route, _ in found for call in _list_calls(route)}
    for capability, group in load_all(lambda each: each.routes):
        try:
            more = list(list_rules(group.routes))
        except (AttributeError, TypeError) as error:
            say_left_out(capability, "its routes", error)
            continue
        for route, rule in more:
            if calls := taken & _list_calls(route):
                say_left_out(capability, " ".join(min(calls)), "another route has this path")
            else:
                found.append((route, rule))
                taken |= _list_calls(route)
    return found


def _list_calls(route: APIRoute) -> set[tuple[str, str]]:
    """Return the methods and the path of a route, without the names of parameters."""
    path = re.sub(r"{\w+", "{", route.path)
    return {(method, path) for method in route.methods or ()}


def add_routes(app: FastAPI) -> None:
    """Register all routes with an application. Raises TypeError if a route has no rule.

    The function does not use `include_router`, which would analyse the parameters of all routes a
    second time at the application's first request. This would take a third of the CPU time that the
    server needs to start.
    """
    found = list_routes()
    # Routes are tried one after another, and agents send most requests.
    routes = sorted(
        (route for route, _ in found), key=lambda route: not route.path.startswith(_AGENTS)
    )
    app.router.routes.extend(routes)
    if isinstance(app, Application):
        app.direct = {
            (method, route.path): (route, rule, reader)
            for route, rule in found
            if "{" not in route.path and (reader := make_reader(route)) is not None
            for method in route.methods or ()
        }


def make_reader(route: APIRoute) -> QueryReader | None:
    """Return what reads the parameters of the route, or None if FastAPI must read them."""
    try:
        return QueryReader(signature(route.endpoint))
    except TypeError:
        return None


async def _on_error(request: Request, error: Exception) -> Response:
    """Answer a request whose route raised a documented or unexpected error."""
    problem = error if isinstance(error, ApiProblem) else explain(error)
    if problem is None:
        _log.error(
            "request failed",
            exc_info=error,
            extra={"method": request.method, "path": request.url.path},
        )
        problem = ApiProblem(
            "internal", f"{type(error).__name__} in {request.method} {request.url.path}"
        )
    if problem.status in (401, 403):
        note_refusal(request.scope, problem.code)
    return _answer(problem)


_FORMS: Mapping[str, str] = {  # pattern of a name -> description of the allowed characters
    r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$": "may contain only a-z, 0-9 and, between them, -",
    r"^[A-Za-z_][A-Za-z0-9_]*$": "may contain only letters, digits and _, "
    "and must not begin with a digit",
    r"^[0-9a-f]+$": "may contain only 0-9 and a-f",
}


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    told = "; ".join(_invalid(**each) for each in error.errors())
    return _answer(ApiProblem("invalid-request", told))


def _invalid(loc: Sequence[str | int], type: str, msg: str, **about: Any) -> str:
    """Describe what is wrong with a request's parameter: "project: 'A B' may contain only ..."."""
    name = next((part for part in reversed(loc) if isinstance(part, str)), "the request")
    given, limits = about.get("input"), about.get("ctx") or {}
    match type:
        case "enum" | "literal_error":
            text = f"{given!r} is not one of {limits['expected']}"
        case "string_pattern_mismatch":
            text = f"{given!r} {_FORMS.get(limits['pattern'], 'has the wrong form')}"
        case "string_too_long":
            text = f"longer than {limits['max_length']} characters"
        case _:
            text = msg.removeprefix("Input ").replace("should be", "must be")
    return f"{name}: {text}"


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        problem = ApiProblem(
            "wrong-method",
            f"{request.url.path} does not allow {request.method}",
            headers=error.headers,
        )
    elif error.status_code == 404:
        problem = ApiProblem("not-found", f"the route {request.url.path} does not exist")
    else:
        problem = ApiProblem("invalid-request", str(error.detail))
    return _answer(problem)


def _answer(problem: ApiProblem) -> Response:
    body = ErrorBody(code=problem.code, message=problem.message, hint=problem.hint)
    return reply(body, problem.status, problem.headers)
