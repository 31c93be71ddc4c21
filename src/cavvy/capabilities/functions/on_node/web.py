"""A replica of the service that answers the requests of a web endpoint.

`python3 web.py APP.json NAME`. It imports only the standard library, files that do, and the app's
own code, and listens on the port in the variable PORT.
"""

import asyncio
import inspect
import json
import os
import re
import sys
import traceback
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import parse_qsl, urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

if __name__ == "__main__":  # the root of the files that were sent with the working folder
    sys.path[0] = os.path.abspath(os.path.join(__file__, *[os.pardir] * 5))

from cavvy.capabilities.functions.app import find_app
from cavvy.capabilities.functions.on_node.worker import explain_load, list_async, load_app
from cavvy.capabilities.functions.web import WebEndpoint, WebError, WebRequest

PROBE = "/-/ready"
_MOST_BODY = 16 << 20  # bytes
_MOST_LINE = 1024  # bytes of the size of a chunk
_TRUE, _FALSE = ("1", "true", "yes"), ("0", "false", "no")
_QUEUE = 128  # connections of a burst
_JSON, _LINES = "application/json", "application/jsonl"
_TEXT, _BYTES = "text/plain; charset=utf-8", "application/octet-stream"


class EndpointServer(ThreadingHTTPServer):
    """Answers requests with a function: each in a thread."""

    request_queue_size = _QUEUE

    def __init__(self, port: int, endpoint: WebEndpoint) -> None:
        super().__init__(("127.0.0.1", port), EndpointHandler)
        self.endpoint = endpoint
        self.kinds = find_kinds(endpoint.raw)


class EndpointHandler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: EndpointServer

    def handle_request(self) -> None:
        parts = urlsplit(self.path)
        if parts.path == PROBE:
            self._answer(200, _TEXT, b"ready\n")
            return
        endpoint = self.server.endpoint
        try:
            body = self._read_body()
            if parts.path != "/":
                raise WebError(404, f"{parts.path} is not here: the endpoint is at /")
            if self.command != endpoint.method:
                raise WebError(405, f"{endpoint.name} answers {endpoint.method}")
            query = dict(parse_qsl(parts.query, keep_blank_values=True))
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = WebRequest(self.command, parts.path, query, headers, body)
            arguments = bind_request(endpoint.raw, self.server.kinds, request)
            result = call_endpoint(endpoint.raw, arguments)
        except WebError as error:
            self._fail(error.status, error.message)
        except Exception as error:  # noqa: BLE001 - the code raises anything
            traceback.print_exception(error)
            self._fail(500, f"{endpoint.name} raised {type(error).__name__}; its log says more")
        else:
            self._send(result)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_OPTIONS = handle_request

    def _send(self, result: object) -> None:
        if inspect.isgenerator(result):
            self._stream(result)
        elif isinstance(result, bytes | str):
            kind = _TEXT if isinstance(result, str) else _BYTES
            self._answer(200, kind, result.encode() if isinstance(result, str) else result)
        else:
            try:
                data = json.dumps(result).encode()
            except (TypeError, ValueError) as error:
                traceback.print_exception(error)
                self._fail(500, f"the result of {self.server.endpoint.name} is no JSON: {error}")
                return
            self._answer(200, _JSON, data)

    def _stream(self, values: Iterable[object]) -> None:
        """Send each value as soon as it is there: texts and bytes as they are, others as lines of
        JSON."""
        begun = False
        try:
            for each in values:
                data = write_piece(each)
                if not begun:
                    begun = True
                    kind = _LINES
                    if isinstance(each, str | bytes):
                        kind = _TEXT if isinstance(each, str) else _BYTES
                    self.send_response(200)
                    self.send_header("Content-Type", kind)
                    self.send_header("Transfer-Encoding", "chunked")
                    self.end_headers()
                if data:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        except WebError as error:
            if not begun:
                self._fail(error.status, error.message)
                return
            self.close_connection = True  # without an end, the caller sees that some is missing
        except OSError:
            self.close_connection = True  # the caller has gone
        except Exception as error:  # noqa: BLE001 - the code raises anything
            traceback.print_exception(error)
            if not begun:
                name = type(error).__name__
                self._fail(500, f"{self.server.endpoint.name} raised {name}; its log says more")
                return
            self.close_connection = True
        else:
            if begun:
                self.wfile.write(b"0\r\n\r\n")
            else:
                self._answer(200, _TEXT, b"")

    def _fail(self, status: int, message: str) -> None:
        data = json.dumps({"error": message}).encode() + b"\n"
        self._answer(status, _JSON, data)

    def _answer(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if status == 405:
            self.send_header("Allow", self.server.endpoint.method)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _read_body(self) -> bytes:
        """Return the body. Raises WebError."""
        if "chunked" in self.headers.get("Transfer-Encoding", "").lower():
            return self._read_chunks()
        text = self.headers.get("Content-Length", "0")
        if not text.isdecimal() or int(text) > _MOST_BODY:
            self.close_connection = True
            raise WebError(413, f"a body has at most {_MOST_BODY:,} bytes")
        return self.rfile.read(int(text))

    def _read_chunks(self) -> bytes:
        body = bytearray()
        while True:
            text = self.rfile.readline(_MOST_LINE).partition(b";")[0].strip()
            try:
                size = int(text, 16)
            except ValueError:
                self.close_connection = True
                raise WebError(400, "a chunk of the body has no size") from None
            if size < 0 or len(body) + size > _MOST_BODY:
                self.close_connection = True
                raise WebError(413, f"a body has at most {_MOST_BODY:,} bytes")
            body += self.rfile.read(size)
            self.rfile.readline(_MOST_LINE)
            if not size:
                return bytes(body)

    def log_message(self, format: str, *args: object) -> None:
        """The gateway counts requests; the log stays short."""


class _ThreadingWsgiServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = _QUEUE


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """The gateway counts requests."""


def write_piece(value: object) -> bytes:
    """Return a value of a stream as bytes."""
    if isinstance(value, bytes):
        return value
    return value.encode() if isinstance(value, str) else json.dumps(value).encode() + b"\n"


def find_kinds(raw: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of the parameters of a function, as far as it says them."""
    try:
        return typing.get_type_hints(raw)
    except Exception:  # noqa: BLE001 - annotations are code
        return {}


def bind_request(
    raw: Callable[..., Any], kinds: Mapping[str, Any], request: WebRequest
) -> dict[str, Any]:
    """Return the arguments that a request has: those of the query, and of a body that is an object
    of JSON. Raises WebError."""
    parameters = inspect.signature(raw).parameters
    found: dict[str, Any] = {
        name: _read_text(name, text, kinds.get(name, str)) for name, text in request.query.items()
    }
    if "request" in parameters:
        found = {name: each for name, each in found.items() if name in parameters}
        found["request"] = request
    elif request.body:
        try:
            given = json.loads(request.body)
        except (ValueError, RecursionError) as error:
            raise WebError(400, f"the body is no JSON: {error}") from None
        if not isinstance(given, dict):
            raise WebError(400, "the body must be an object of JSON with the arguments by name")
        found |= given
    try:
        inspect.signature(raw).bind(**found)
    except TypeError as error:
        listed = ", ".join(parameters) or "none"
        raise WebError(422, f"{error}; the arguments are: {listed}") from None
    return found


def _read_text(name: str, text: str, kind: Any) -> Any:
    """Return an argument of the query as its parameter wants it. Raises WebError."""
    choices = [each for each in typing.get_args(kind) if each is not type(None)] or [kind]
    if bool in choices and text.lower() in (*_TRUE, *_FALSE):
        return text.lower() in _TRUE
    for each in (int, float):
        if each in choices:
            try:
                return each(text)
            except ValueError:
                raise WebError(422, f"{name}={text!r} is not of type {each.__name__}") from None
    return text


def call_endpoint(raw: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Return the result of an endpoint, or a generator of its values."""
    result = raw(**arguments)
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    return list_async(result) if inspect.isasyncgen(result) else result


def read_prefix(text: str) -> str:
    """Return the path that the gateway has taken off the URL, so that an app makes right links."""
    return text.rstrip("/") if re.fullmatch(r"(/[\w.~-]+)+/?", text, re.ASCII) else ""


def serve_wsgi(app: Callable[..., Any], port: int) -> None:
    """Serve an app of WSGI, each request in a thread."""

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ.get("PATH_INFO") == PROBE:
            start("200 OK", [("Content-Type", "text/plain")])
            return iter([b"ready\n"])
        environ["SCRIPT_NAME"] = read_prefix(environ.get("HTTP_X_FORWARDED_PREFIX", ""))
        found: Iterator[bytes] = app(environ, start)
        return found

    server = _ThreadingWsgiServer(("127.0.0.1", port), _QuietHandler)
    server.set_app(answer)
    server.serve_forever()


def serve_asgi(app: Callable[..., Any], port: int) -> None:
    """Serve an app of ASGI with uvicorn, which images get and the node's own Python must have."""
    try:
        import uvicorn
    except ImportError:
        sys.exit(
            "@app.asgi_app() needs uvicorn where it runs: "
            "image=cavvy.Image.python().pip_install('uvicorn')"
        )

    async def answer(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == PROBE:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"ready\n"})
            return
        if scope["type"] in ("http", "websocket"):
            found = dict(scope["headers"]).get(b"x-forwarded-prefix", b"").decode("latin-1")
            scope["root_path"] = prefix = read_prefix(found)
            # as the specification of ASGI says, the path has the prefix
            scope["path"] = prefix + scope["path"]
            scope["raw_path"] = prefix.encode() + (scope.get("raw_path") or b"")
        await app(scope, receive, send)

    uvicorn.run(answer, host="127.0.0.1", port=port, access_log=False, log_level="warning")


def main() -> None:
    """Serve the endpoint of the arguments."""
    with open(sys.argv[1], encoding="utf-8") as file:
        spec = json.load(file)
    name, port = sys.argv[2], int(os.environ["PORT"])
    try:
        load_app(spec, name)
        app = find_app(spec["app"])
        assert app is not None
        endpoint = app.web[name]
        served = endpoint.raw if endpoint.kind == "endpoint" else endpoint.raw()
    except Exception as error:  # noqa: BLE001 - the code raises anything
        traceback.print_exception(error)
        sys.exit(f"the web endpoint {name} cannot be loaded: {explain_load(error)}")
    if endpoint.kind == "endpoint":
        EndpointServer(port, endpoint).serve_forever()
    elif endpoint.kind == "wsgi":
        serve_wsgi(served, port)
    else:
        serve_asgi(served, port)


if __name__ == "__main__":
    main()
