"""Web endpoints: how requests become arguments, and results answers."""

import http.client
import io
import json
import socket
import sys
import threading
from collections.abc import Iterator
from functools import partial
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cavvy
from cavvy.capabilities.functions import apps_command, web_deploy
from cavvy.capabilities.functions.on_node import web
from cavvy.capabilities.functions.on_node.web import EndpointServer, bind_request, find_kinds
from cavvy.capabilities.functions.web import WebEndpoint, WebError, WebRequest
from cavvy.capabilities.functions.web_deploy import make_web_task
from cavvy.sdk.errors import InvalidArgument


def ask(query: dict[str, str] | None = None, body: bytes = b"") -> WebRequest:
    return WebRequest("POST", "/", query or {}, {"x-a": "1"}, body)


def score(text: str, times: int = 1, loud: bool = False, share: float | None = None) -> Any:
    return [text, times, loud, share]


def bind(request: WebRequest, raw: Any = score) -> dict[str, Any]:
    return bind_request(raw, find_kinds(raw), request)


def test_arguments_come_from_the_query_and_the_body() -> None:
    query = {"times": "2", "loud": "yes", "share": "0.5"}
    found = bind(ask(query, b'{"text": "a", "times": 3}'))
    assert found == {"text": "a", "times": 3, "loud": True, "share": 0.5}
    raw = lambda request, name="": request  # noqa: E731
    found = bind(ask({"name": "x", "other": "y"}, b"no json"), raw)
    assert (found["name"], found["request"].body) == ("x", b"no json")


@pytest.mark.parametrize(
    ("request_", "status", "told"),
    [
        (ask(), 422, "'text'; the arguments are: text, times"),
        (ask({"text": "a", "no": "1"}), 422, "'no'"),
        (ask({"text": "a", "times": "x"}), 422, "times='x' is not of type int"),
        (ask(body=b"{"), 400, "no JSON"),
        (ask(body=b"[" * 100_000), 400, "no JSON"),
        (ask(body=b"[1]"), 400, "an object of JSON"),
    ],
)
def test_wrong_requests_are_told_why(request_: WebRequest, status: int, told: str) -> None:
    with pytest.raises(WebError, match=told) as caught:
        bind(request_)
    assert caught.value.status == status


def answer(kind: str = "json", count: int = 3) -> Any:
    if kind == "stream":
        return (f"{number};" for number in range(count))
    if kind == "error":
        raise ValueError("a secret")
    if kind == "refused":
        raise cavvy.WebError(404, "no such item")
    if kind == "broken":
        return broken()
    if kind == "unopened":
        return unopened()
    if kind == "exit":
        sys.exit(3)
    if kind == "deep":
        return nest(100_000)
    return {
        "json": {"a": [1]},
        "text": "ä",
        "bytes": b"\xff",
        "set": {1},
        "nan": nan,
        "half": "\ud800",
    }[kind]


def broken() -> Iterator[int]:
    yield 1
    raise ValueError("a secret")


def unopened() -> Iterator[int]:
    raise FileNotFoundError("a secret")
    yield 1


def nest(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.fixture
def served() -> Iterator[http.client.HTTPConnection]:
    server = EndpointServer(0, WebEndpoint("a", answer, "endpoint", "POST", {}))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    yield connection
    connection.close()
    server.shutdown()
    server.server_close()


def post(served: http.client.HTTPConnection, target: str, **given: Any) -> tuple[int, str, bytes]:
    served.request(given.pop("method", "POST"), target, **given)
    got = served.getresponse()
    return got.status, got.headers["Content-Type"], got.read()


def test_results_are_answers(served: http.client.HTTPConnection) -> None:
    assert post(served, "/") == (200, "application/json", b'{"a": [1]}')
    assert post(served, "/?kind=text") == (200, "text/plain; charset=utf-8", "ä".encode())
    assert post(served, "/?kind=bytes") == (200, "application/octet-stream", b"\xff")
    assert post(served, "/?kind=stream&count=2")[2] == b"0;1;"
    assert post(served, "/?kind=stream&count=0") == (200, "text/plain; charset=utf-8", b"")
    body = json.dumps({"kind": "stream"}).encode()
    assert post(served, "/", body=iter([body[:5], body[5:]]), encode_chunked=True, headers={
        "Transfer-Encoding": "chunked"
    })[2] == b"0;1;2;"  # fmt: skip
    assert post(served, web.PROBE, method="GET")[0] == 200


def test_failures_are_answers_without_secrets(served: http.client.HTTPConnection) -> None:
    status, _, body = post(served, "/?kind=error")
    assert (status, b"secret" in body, b"ValueError" in body) == (500, False, True)
    status, _, body = post(served, "/?kind=refused")
    assert (status, json.loads(body)) == (404, {"error": "no such item"})
    assert post(served, "/?kind=set")[0] == 500
    assert post(served, "/other")[0] == 404
    assert post(served, "/", method="GET")[0] == 405
    assert post(served, "/")[0] == 200  # the connection goes on
    with pytest.raises(http.client.IncompleteRead):
        post(served, "/?kind=broken")


@pytest.mark.parametrize("kind", ["unopened", "exit", "deep", "nan", "half"])
def test_what_cannot_be_sent_is_an_answer_too(
    served: http.client.HTTPConnection, kind: str
) -> None:
    status, _, body = post(served, f"/?kind={kind}")
    assert (status, b"secret" in body) == (500, False)
    assert post(served, "/")[0] == 200


def exchange(served: http.client.HTTPConnection, sent: bytes, *, ends: bool = True) -> bytes:
    """Send bytes, and return all that is answered until the connection is closed."""
    with socket.create_connection((served.host, served.port), timeout=30) as connection:
        connection.sendall(sent)
        if ends:
            connection.shutdown(socket.SHUT_WR)
        found = b""
        while data := connection.recv(65536):
            found += data
    return found


CHUNKED = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_half_a_body_is_not_handled(served: http.client.HTTPConnection) -> None:
    found = exchange(served, b"POST /?kind=exit HTTP/1.1\r\nContent-Length: 9\r\n\r\nabc")
    assert b" 400 " in found
    assert b"only 3 of 9 bytes" in found
    assert b" 400 " in exchange(served, CHUNKED + b"9\r\nabc")


def test_odd_requests_are_answered(served: http.client.HTTPConnection) -> None:
    found = exchange(served, b"POST http://[::1 HTTP/1.1\r\nHost: a\r\n\r\n", ends=False)
    assert b" 400 " in found
    found = exchange(served, b"POST /?kind=stream HTTP/1.0\r\n\r\n", ends=False)
    assert found.endswith(b"\r\n\r\n0;1;2;")  # without chunks, which HTTP/1.0 does not know
    trailers = CHUNKED + b"0\r\nA: b\r\nC: d\r\n\r\n"
    assert exchange(served, trailers + trailers).count(b" 200 OK") == 2
    assert b" 400 " in exchange(served, CHUNKED + b"0\r\n" + b"A: b\r\n" * 99, ends=False)


def test_wsgi_apps_get_bodies_that_come_in_chunks() -> None:
    started = list[str]()

    def app(environ: dict[str, Any], start: Any) -> list[bytes]:
        start("200 OK", [])
        return [environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))]

    def send(body: bytes) -> bytes:
        environ = {"HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input": io.BytesIO(body)}
        return b"".join(web.make_wsgi(app)(environ, lambda status, _: started.append(status)))

    assert send(b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n") == b"abcde"
    send(b"9\r\nabc")
    assert [each[:3] for each in started] == ["200", "400"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Length": str(1 << 40)},
        {"Content-Length": "9" * 5000},
        {"Content-Length": "-1"},
        {"Content-Length": "x"},
    ],
)
def test_bodies_are_bounded(served: http.client.HTTPConnection, headers: dict[str, str]) -> None:
    served.putrequest("POST", "/")
    for name, value in headers.items():
        served.putheader(name, value)
    served.endheaders()
    assert served.getresponse().status == 413


@pytest.mark.parametrize("chunk", [b"zz\r\n", b"-5\r\n", b"fffffffff\r\n"])
def test_chunks_are_bounded(served: http.client.HTTPConnection, chunk: bytes) -> None:
    served.putrequest("POST", "/")
    served.putheader("Transfer-Encoding", "chunked")
    served.endheaders()
    served.send(chunk)
    assert served.getresponse().status in (400, 413)


def test_an_endpoint_becomes_a_service(tmp_path: Path) -> None:
    app = cavvy.App("site")
    app.place = app.place._replace(module="__main__", file=str(tmp_path / "app.py"))

    @app.endpoint(method="POST", max_replicas=3, idle="1m", cpu=2)
    def my_score(text: str) -> str:
        return text

    @app.wsgi_app()
    def plain() -> Any: ...

    assert my_score("a") == "a"
    task, files = make_web_task(app, app.web["my_score"], "site-my-score")
    assert "max: 3" in task.text
    assert app.web["my_score"].service == "site-my-score"
    assert any(path.endswith("on_node/web.py") for path in files)
    assert "cpu: 0.25" in make_web_task(app, app.web["plain"], "site-plain")[0].text


@pytest.mark.parametrize(
    ("image", "added"),
    [
        (cavvy.Image.python().pip_install("fastapi"), True),
        (cavvy.Image.from_registry("python:3.12"), True),
        (cavvy.Image.python("3.12"), True),
        (None, False),
    ],
)
def test_an_image_gets_the_server_of_asgi(tmp_path: Path, image: Any, added: bool) -> None:
    app = cavvy.App("site", image=image)
    app.place = app.place._replace(module="__main__", file=str(tmp_path / "app.py"))

    @app.asgi_app()
    def web() -> Any: ...

    @app.wsgi_app()
    def plain() -> Any: ...

    assert ("uvicorn" in make_web_task(app, app.web["web"], "site-web")[0].text) is added
    assert "uvicorn" not in make_web_task(app, app.web["plain"], "site-plain")[0].text


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"method": "FETCH"}, "no method of HTTP"),
        ({"retries": 2}, "retries belongs to calls"),
        ({"gpus": 1}, "gpus is no option"),
    ],
)
def test_wrong_options_are_refused(keys: dict[str, Any], told: str) -> None:
    app = cavvy.App("wrong")
    with pytest.raises(InvalidArgument, match=told):
        app.endpoint(**keys)(score)
    with pytest.raises(InvalidArgument, match="is no function"):
        app.wsgi_app(dict)


@pytest.mark.parametrize(
    ("told", "prefix"),
    [
        ("/default/shop-web", "/default/shop-web"),
        ("/a/", "/a"),
        ("", ""),
        ("shop", ""),
        ("/a//b", ""),
        ('/a"><script>', ""),
        ("/a\nb", ""),
        ("//example.com", ""),
    ],
)
def test_apps_learn_the_path_that_the_gateway_took_off(told: str, prefix: str) -> None:
    assert web.read_prefix(told) == prefix


def test_two_endpoints_are_not_one_service() -> None:
    app = cavvy.App("site")
    app.endpoint(name="my_score")(score)
    app.endpoint(name="my_score")(score)  # its module was loaded again
    with pytest.raises(InvalidArgument, match="would both be the service site-my-score"):
        app.endpoint(name="My-Score")(answer)
    with pytest.raises(InvalidArgument, match="two web endpoints my_score"):
        app.endpoint(name="my_score")(answer)
    assert app.endpoint()(partial(score, "a")).name == "partial"


@pytest.mark.parametrize("status", [204, 99, 1000, "404", None])
def test_an_error_has_the_status_of_one(status: Any) -> None:
    with pytest.raises(InvalidArgument, match="no status"):
        WebError(status, "no")


def test_endpoints_are_listed_with_their_apps(monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(name: str, state: str = "ready", url: str = "", **tags: str) -> Any:
        return SimpleNamespace(name=name, state=state, url=url, tags=tags)

    services = [
        serve("site-score", url="http://x/score", **{"cavvy-app": "site"}),
        serve("site-api", "starting", **{"cavvy-app": "site"}),
        serve("site-score", url="http://x/dev", **{"cavvy-app": "site-dev"}),
        serve("site-old", "ending", **{"cavvy-app": "site"}),
        serve("chat", url="http://x/chat"),
    ]
    monkeypatch.setattr(web_deploy, "list_named_services", lambda client, project: services)
    client: Any = None
    assert web_deploy.list_endpoints(client, "default") == {
        "site": {"score": "http://x/score", "api": "starting"},
        "site-dev": {"score": "http://x/dev"},
    }
    row = apps_command._make_row(client, "default", "site", None, {"score": "http://x/score"})
    assert row["endpoints"] == {"score": "http://x/score"}
    assert row["functions"] == ""
