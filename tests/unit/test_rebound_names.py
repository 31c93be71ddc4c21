"""A name that has a harmless address when it is checked, and another one when it is called."""

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from cavvy.api.images import registry
from cavvy.control import webhooks
from cavvy.store.objects import http
from cavvy.store.objects.base import ObjectDenied

METADATA = "127.0.0.5"  # stands for an address of a metadata service


class Credentials(BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(200)
        self.send_header("Content-Length", "6")
        self.end_headers()
        self.wfile.write(b"secret")

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    Credentials.asked = []
    server = ThreadingHTTPServer((METADATA, 0), Credentials)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    answers = itertools.chain(["127.0.0.1"], itertools.repeat(METADATA))
    resolve = socket.getaddrinfo

    def rebind(host: str, *rest: Any, **more: Any) -> Any:
        return resolve(next(answers) if host == "rebound.test" else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", rebind)
    monkeypatch.setattr(http, "_METADATA", {METADATA})
    yield f"http://rebound.test:{server.server_port}/latest"
    server.shutdown()
    server.server_close()


def open_with(opener: Any) -> Callable[[str], object]:
    def call(url: str) -> object:
        http.check_host(url)
        return opener.open(url, timeout=5)

    return call


@pytest.mark.parametrize(
    "call",
    [
        lambda url: http.ask("GET", url),
        open_with(registry._OPENER),
        open_with(webhooks._OPENER),
    ],
    ids=["bucket", "registry", "webhook"],
)
def test_the_address_that_is_called_is_checked(url: str, call: Callable[[str], object]) -> None:
    with pytest.raises(ObjectDenied, match=r"rebound\.test is a link-local or metadata address"):
        call(url)
    assert Credentials.asked == []
