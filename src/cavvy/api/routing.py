"""The routes of one file. A decorator registers each route; it states who may use the route,
decodes the body, and encodes the answer.

A route receives what its parameters name: `request`, `app_state`, `principal` (who sends the
request), `projects` (whose rows the request may read, for rules of `in_query`) and `ask` (the body,
decoded to its type). All other parameters are FastAPI's. A route returns the body of its answer, or
None for an answer without a body. A route that returns a `Response` documents its body by `answer`.
The first paragraph of a route's docstring is its summary in the OpenAPI document, and the rest its
description.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import wraps
from inspect import Parameter, Signature, getdoc, signature
from typing import Annotated, Any, TypedDict, TypeVar, Unpack, cast

from fastapi import APIRouter, Query
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cavvy.api.app_state import app_state_of
from cavvy.api.errors import ApiProblem
from cavvy.api.openapi import document
from cavvy.api.rules import GANG, MACHINE, RouteRule, filter_projects, principal_of
from cavvy.api.wire import MIB, done, read, reply
from cavvy.control.job_service import JobServiceError

Route = TypeVar("Route", bound=Callable[..., Awaitable[object]])
_ProjectQuery = Annotated[str | None, Query(max_length=63)]


class RouteOptions(TypedDict, total=False):
    """How a route is documented and answers. The server answers a failure of a type in `when` with
    the code of the type. `limit` is the maximum size of a decoded body in bytes, or the name of the
    setting that states it in MiB.
    """

    answer: type
    ask: type[Struct]
    status: int
    errors: Sequence[str]
    when: Mapping[type[Exception], str]
    limit: int | str
    sends: bool
    gives: bool
    headers: Sequence[str]


class RouteGroup:
    """The routes below a prefix, with the tag under which they are documented."""

    def __init__(self, tag: str, prefix: str = "") -> None:
        self._router = APIRouter(prefix=prefix, tags=[tag])

    @property
    def routes(self) -> Sequence[BaseRoute]:
        return self._router.routes

    def get(
        self, path: str, *, rule: RouteRule, **options: Unpack[RouteOptions]
    ) -> Callable[[Route], Route]:
        return self._register("GET", path, rule, options)

    def post(
        self, path: str, *, rule: RouteRule, **options: Unpack[RouteOptions]
    ) -> Callable[[Route], Route]:
        return self._register("POST", path, rule, options)

    def put(
        self, path: str, *, rule: RouteRule, **options: Unpack[RouteOptions]
    ) -> Callable[[Route], Route]:
        return self._register("PUT", path, rule, options)

    def delete(
        self, path: str, *, rule: RouteRule, **options: Unpack[RouteOptions]
    ) -> Callable[[Route], Route]:
        return self._register("DELETE", path, rule, options)

    def options(
        self, path: str, *, rule: RouteRule, **options: Unpack[RouteOptions]
    ) -> Callable[[Route], Route]:
        return self._register("OPTIONS", path, rule, options)

    def _register(
        self, method: str, path: str, rule: RouteRule, options: RouteOptions
    ) -> Callable[[Route], Route]:
        def register(route: Route) -> Route:
            shape = signature(route)
            asked, returned = shape.parameters.get("ask"), shape.return_annotation
            if asked is not None and rule in (GANG, MACHINE):
                raise TypeError(f"{path}: the route must check the token before it reads a body")
            summary, rest = _read_docstring(route)
            described = document(
                summary,
                rule=rule,
                ask=options.get("ask") if asked is None else asked.annotation,
                answer=options.get("answer") if returned in (None, Response) else returned,
                status=options.get("status", 204 if returned is None else 200),
                errors=(*options.get("errors", ()), *options.get("when", {}).values()),
                sends=options.get("sends", False),
                gives=options.get("gives", False),
                headers=options.get("headers", ()),
            )
            endpoint = _make_endpoint(route, shape, rule, options)
            endpoint.__doc__ = rest  # FastAPI reads the description from it
            self._router.add_api_route(path, endpoint, methods=[method], **described)
            return route

        return register


def _read_docstring(route: Callable[..., object]) -> tuple[str, str]:
    """Return the first paragraph, on one line, and the rest."""
    summary, _, rest = (getdoc(route) or route.__name__).partition("\n\n")
    return " ".join(summary.split()), rest


def _make_endpoint(
    route: Callable[..., Awaitable[object]],
    shape: Signature,
    rule: RouteRule,
    options: RouteOptions,
) -> Callable[..., Awaitable[Response]]:
    """Return the function that FastAPI calls: it has FastAPI's parameters of the route."""
    when, status = options.get("when", {}), options.get("status", 200)
    limit, names = options.get("limit", MIB), shape.parameters

    @wraps(route)
    async def endpoint(request: Request, **given: Any) -> Response:
        if "request" in names:
            given["request"] = request
        if "app_state" in names:
            given["app_state"] = app_state_of(request)
        if "principal" in names:
            given["principal"] = principal_of(request)
        if "projects" in names:
            assert rule.permission is not None
            given["projects"] = filter_projects(request, rule.permission, given.pop("project"))
        if "ask" in names:
            setting = app_state_of(request).settings.whole
            most = limit if isinstance(limit, int) else setting(limit) * MIB
            given["ask"] = await read(request, names["ask"].annotation, most)
        try:
            answer = await route(**given)
        except tuple(when) as error:
            code = next(code for kind, code in when.items() if isinstance(error, kind))
            hint = error.hint if isinstance(error, JobServiceError) else ""
            raise ApiProblem(code, str(error), hint) from error
        if isinstance(answer, Response):
            return answer
        return done() if answer is None else reply(answer, status)

    cast(Any, endpoint).__signature__ = Signature(list(_list_parameters(shape)))
    return endpoint


def _list_parameters(shape: Signature) -> Iterator[Parameter]:
    """Yield the parameters that FastAPI reads from a request."""
    kind = Parameter.KEYWORD_ONLY
    yield Parameter("request", kind, annotation=Request)
    for name, each in shape.parameters.items():
        if name == "projects":
            yield Parameter("project", kind, default=None, annotation=_ProjectQuery)
        elif name not in ("request", "app_state", "principal", "ask"):
            yield each.replace(kind=kind)
