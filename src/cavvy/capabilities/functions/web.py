"""Web endpoints of apps: `@app.endpoint()`, `@app.asgi_app()` and `@app.wsgi_app()`.

This file also runs on nodes, so it imports only the standard library and files that do.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cavvy.capabilities.functions.options import FunctionOptions, read_options
from cavvy.sdk.errors import CavvyError, InvalidArgument

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_CONCURRENCY = 10  # requests of a replica, unless the options say otherwise


class WebRequest(NamedTuple):
    """The request itself, for an endpoint with a parameter `request`. Names of headers are in lower
    case."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes


class WebError(CavvyError):
    """Raised by an endpoint to answer with this status, from 400 to 599: `raise
    cavvy.WebError(404, "no such")`."""

    def __init__(self, status: int, message: str) -> None:
        if not isinstance(status, int) or not 400 <= status <= 599:
            raise InvalidArgument(f"WebError: {status!r} is no status of a failed request")
        super().__init__(message)
        self.status = status


class WebEndpoint:
    """A function whose requests a service answers: `kind` is endpoint, asgi or wsgi."""

    def __init__(
        self, app: str, raw: Callable[..., Any], kind: str, method: str, keys: Mapping[str, Any]
    ) -> None:
        given = dict(keys)
        self.name = str(given.pop("name", None) or getattr(raw, "__name__", type(raw).__name__))
        if method not in METHODS:
            hint = f"use one of {', '.join(METHODS)}"
            raise InvalidArgument(f"{self.name}: method={method!r} is no method of HTTP", hint)
        for each in ("timeout", "retries", "batch", "wait", "once", "schedule", "priority"):
            if each in given:
                raise InvalidArgument(
                    f"{self.name}: {each} belongs to calls, and a web endpoint gets requests",
                    f"leave it out, or call a function with {each} from the endpoint",
                )
        self.raw, self.kind, self.method = raw, kind, method
        self.options: FunctionOptions = read_options(
            self.name, {"concurrency": _CONCURRENCY, **given}, None
        )
        # names of services have neither capitals nor underscores
        self.service = f"{app}-{self.name}".lower().replace("_", "-")[:50].strip("-")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.raw(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<WebEndpoint {self.service}>"


def _code_of(raw: Callable[..., Any]) -> object:
    """Return what stays the same of a function whose module is loaded again."""
    return getattr(raw, "__code__", raw)


def make_endpoints(
    app: str, table: dict[str, WebEndpoint], kind: str, method: str, keys: Mapping[str, Any]
) -> Callable[[Callable[..., Any]], WebEndpoint]:
    """Return a decorator that adds an endpoint to the table of an app."""

    def add(raw: Callable[..., Any]) -> WebEndpoint:
        if not callable(raw) or inspect.isclass(raw):
            raise InvalidArgument(f"{raw!r} is no function", "put it above a function")
        made = WebEndpoint(app, raw, kind, method, keys)
        for known in table.values():
            if known.service == made.service and _code_of(known.raw) is not _code_of(raw):
                raise InvalidArgument(
                    f"the app {app} has two web endpoints {made.name}"
                    if known.name == made.name
                    else f"the web endpoints {known.name} and {made.name} of the app {app} would "
                    f"both be the service {made.service}",
                    'rename one of them, or pass name="..."',
                )
        table[made.name] = made
        return made

    return add
