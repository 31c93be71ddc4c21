"""A name that has a harmless address when it is checked, and another one when it is called."""

import asyncio
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

ALLOWED, INSIDE = "127.0.0.1", "127.0.0.5"  # an administrator allows the first one only


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
    server = ThreadingHTTPServer((INSIDE, 0), Credentials)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    answers = itertools.chain([ALLOWED], itertools.repeat(INSIDE))
    resolve = socket.getaddrinfo

    def rebind(host: str, *rest: Any, **more: Any) -> Any:
        return resolve(next(answers) if host == "rebound.test" else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", rebind)
    yield f"http://rebound.test:{server.server_port}/latest"
    server.shutdown()
    server.server_close()


def pull(url: str) -> None:
    registry.ImageRepository(registry.parse_image("a/b"), None, ALLOWED)._send(url, (), "")


@pytest.mark.parametrize(
    "call",
    [
        lambda url: http.ask("GET", url, targets=ALLOWED),
        pull,
        lambda url: asyncio.run(webhooks.post_json(url, b"{}", ALLOWED)),
    ],
    ids=["bucket", "registry", "webhook"],
)
def test_the_address_that_is_called_is_checked(url: str, call: Callable[[str], object]) -> None:
    with pytest.raises(
        (ObjectDenied, registry.RegistrySilent), match=r"rebound\.test is not a public address"
    ):
        call(url)
    assert Credentials.asked == []
