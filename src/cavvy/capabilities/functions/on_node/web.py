"""A replica of the service that answers the requests of a web endpoint.

`python3 web.py APP.json NAME`. It imports only the standard library, files that do, and the app's
own code, and listens on the port in the variable PORT.
"""

import asyncio
import inspect
import io
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
_MOST_TRAILERS = 64
_LENGTH, _CHUNK = re.compile(r"[0-9]{1,12}"), re.compile(rb"[0-9a-fA-F]{1,8}")
_TRUE, _FALSE = ("1", "true", "yes"), ("0", "false", "no")
_QUEUE = 128  # connections of a burst
_END: Any = object()  # of a stream
_JSON, _LINES = "application/json", "application/jsonl"
_TEXT, _BYTES = "text/plain; charset=utf-8", "application/octet-stream"


class EndpointServer(ThreadingHTTPServer):
    """Answers requests with a function: each in a thread."""

    request_queue_size = _QUEUE

    def __init__(self, port: int, endpoint: WebEndpoint) -> None:
        super().__init__(("127.0.0.1", port), EndpointHandler)
        self.endpoint = endpoint
        self.kinds = find_kinds(endpoint.raw)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # the caller has gone
            super().handle_error(request, client_address)


class EndpointHandler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: EndpointServer

    def handle_request(self) -> None:
        try:
            result = self._call()
        except BaseException as error:  # noqa: BLE001 - the code raises anything, and may exit
            self._fail(error)
        else:
            self._send(result)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_OPTIONS = handle_request

    def _call(self) -> object:
        """Return the result of the endpoint. Raises what the code raises, and WebError."""
        try:
            parts = urlsplit(self.path)
        except ValueError as error:
            self.close_connection = True
            raise WebError(400, f"the address is not valid: {error}") from None
        if parts.path == PROBE:
            return "ready\n"
        endpoint = self.server.endpoint
        body = self._read_body()
        if parts.path != "/":
            raise WebError(404, f"{parts.path} is not here: the endpoint is at /")
        if self.command != endpoint.method:
            raise WebError(405, f"{endpoint.name} answers {endpoint.method}")
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = WebRequest(self.command, parts.path, query, headers, body)
        arguments = bind_request(endpoint.raw, self.server.kinds, request)
        return call_endpoint(endpoint.raw, arguments)

    def _send(self, result: object) -> None:
        if inspect.isgenerator(result):
            self._stream(result)
            return
        try:
            kind, data = write_result(result)
        except (TypeError, ValueError, RecursionError) as error:
            traceback.print_exception(error)
            name = self.server.endpoint.name
            self._tell(500, f"the result of {name} is neither JSON nor UTF-8: {error}")
        else:
            self._answer(200, kind, data)

    def _stream(self, values: Iterator[object]) -> None:
        """Send each value as soon as it is there: texts and bytes as they are, others as lines of
        JSON."""
        begun = False
        while True:
            try:
                each = next(values, _END)
                data = b"" if each is _END else write_piece(each)
            except BaseException as error:  # noqa: BLE001 - the code raises anything
                if not begun:
                    self._fail(error)
                    return
                if not isinstance(error, WebError):
                    traceback.print_exception(error)
                self.close_connection = True  # without an end, the caller sees that some is missing
                return
            try:
                if not begun:
                    self._begin_stream(each)
                    begun = True
                if data or each is _END:
                    self._send_piece(data)
            except OSError:
                self.close_connection = True  # the caller has gone
                return
            if each is _END:
                return

    def _begin_stream(self, first: object) -> None:
        kind = _LINES
        if isinstance(first, str | bytes) or first is _END:
            kind = _BYTES if isinstance(first, bytes) else _TEXT
        self.send_response(200)
        self.send_header("Content-Type", kind)
        if self._is_old:
            self.close_connection = True
        else:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _send_piece(self, data: bytes) -> None:
        """Send a part of a stream; b"" is its end."""
        self.wfile.write(data if self._is_old else b"%x\r\n%s\r\n" % (len(data), data))

    @property
    def _is_old(self) -> bool:
        """Whether the caller knows no chunks: its answer ends with the connection."""
        return self.request_version == "HTTP/1.0"

    def _fail(self, error: BaseException) -> None:
        """Answer that the code has raised this."""
        if isinstance(error, WebError):
            self._tell(error.status, error.message)
            return
        traceback.print_exception(error)
        name = self.server.endpoint.name
        self._tell(500, f"{name} raised {type(error).__name__}; its log says more")

    def _tell(self, status: int, message: object) -> None:
        data = json.dumps({"error": message}, default=str).encode() + b"\n"
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
        length = self.headers.get("Content-Length", "0")
        is_chunked = "chunked" in self.headers.get("Transfer-Encoding", "").lower()
        try:
            return read_chunks(self.rfile) if is_chunked else read_whole(self.rfile, length)
        except WebError:
            self.close_connection = True  # where the next request begins is not known
            raise

    def log_message(self, format: str, *args: object) -> None:
        """The gateway counts requests; the log stays short."""


class _ThreadingWsgiServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = _QUEUE


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """The gateway counts requests."""


def read_whole(file: io.BufferedIOBase, length: str) -> bytes:
    """Return a body of this length. Raises WebError."""
    if not _LENGTH.fullmatch(length) or int(length) > _MOST_BODY:
        raise WebError(413, f"a body has at most {_MOST_BODY:,} bytes")
    return _read_exactly(file, int(length))


def read_chunks(file: io.BufferedIOBase) -> bytes:
    """Return a body that comes in chunks. Raises WebError."""
    body = bytearray()
    while True:
        text = file.readline(_MOST_LINE).partition(b";")[0].strip()
        if not _CHUNK.fullmatch(text):
            raise WebError(400, "a chunk of the body has no size")
        size = int(text, 16)
        if len(body) + size > _MOST_BODY:
            raise WebError(413, f"a body has at most {_MOST_BODY:,} bytes")
        if not size:
            break
        body += _read_exactly(file, size)
        file.readline(_MOST_LINE)
    for _ in range(_MOST_TRAILERS):
        if not file.readline(_MOST_LINE).strip():
            return bytes(body)
    raise WebError(400, "the body has too many trailers")


def _read_exactly(file: io.BufferedIOBase, size: int) -> bytes:
    """Raises WebError: a caller that has gone must not get half of its body handled."""
    data = file.read(size)
    if len(data) < size:
        raise WebError(400, f"the body has only {len(data):,} of {size:,} bytes")
    return data


def write_result(value: object) -> tuple[str, bytes]:
    """Return the content type of a result, and its bytes. Raises TypeError, ValueError,
    RecursionError."""
    if isinstance(value, bytes):
        return _BYTES, value
    if isinstance(value, str):
        return _TEXT, value.encode()
    return _JSON, json.dumps(value, allow_nan=False).encode()


def write_piece(value: object) -> bytes:
    """Return a value of a stream as bytes. Raises as `write_result`."""
    kind, data = write_result(value)
    return data + b"\n" if kind == _JSON else data


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


def make_wsgi(app: Callable[..., Any]) -> Callable[..., Iterable[bytes]]:
    """Return the app as a server of wsgiref calls it: with an answer to probes, and with whole
    bodies."""

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ.get("PATH_INFO") == PROBE:
            start("200 OK", [("Content-Type", "text/plain")])
            return iter([b"ready\n"])
        environ["SCRIPT_NAME"] = read_prefix(environ.get("HTTP_X_FORWARDED_PREFIX", ""))
        if "chunked" in environ.get("HTTP_TRANSFER_ENCODING", "").lower():  # wsgiref reads none
            try:
                body = read_chunks(environ["wsgi.input"])
            except WebError as error:
                start(f"{error.status} Refused", [("Content-Type", _TEXT)])
                return iter([f"{error.message}\n".encode()])
            del environ["HTTP_TRANSFER_ENCODING"]
            environ["wsgi.input"], environ["CONTENT_LENGTH"] = io.BytesIO(body), str(len(body))
        found: Iterator[bytes] = app(environ, start)
        return found

    return answer


def serve_wsgi(app: Callable[..., Any], port: int) -> None:
    """Serve an app of WSGI, each request in a thread."""
    server = _ThreadingWsgiServer(("127.0.0.1", port), _QuietHandler)
    server.set_app(make_wsgi(app))
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
