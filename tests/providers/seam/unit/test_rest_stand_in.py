"""The stand-ins for REST APIs accept every method and text, and report what they cannot read. Without
the socket they hear and say the same.
"""

import asyncio
import io
import socket
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from cavvy.http_client import HttpClient, NoReply
from cavvy.providers.contract.memory_cloud import MemoryCloud
from cavvy.providers.contract.rest_stand_in import (
    RestRequest,
    RestServer,
    RestStandIn,
    WithHeaders,
)
from cavvy.providers.vm.cloud import CloudFault, CloudTraits
from cavvy.providers.vm.rest import RestClient


class Echo(RestStandIn):
    """Answers with what it received."""

    def answer(self, request: RestRequest) -> tuple[int, object]:
        return 200, {"method": request.method, "body": request.body}

    def describe(self, fault: CloudFault) -> object:
        return {"code": fault.code}


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = RestServer()
    yield Echo(MemoryCloud(CloudTraits()), server)
    server.close()


def client(echo: Echo) -> RestClient:
    return RestClient(echo.url, lambda: echo.key, lambda told: (told["code"], ""))


def test_every_method_reaches_the_stand_in(echo: Echo) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
        told = asyncio.run(client(echo).send(method, "/x", {"a": 1}))
        assert told == {"method": method, "body": {"a": 1}}


def test_text_reaches_the_stand_in_as_text(echo: Echo) -> None:
    told = asyncio.run(client(echo).send("PATCH", "/x", "#!/bin/sh\n"))
    assert told == {"method": "PATCH", "body": "#!/bin/sh\n"}


def test_a_body_that_is_not_json_is_recorded_as_a_bug(echo: Echo) -> None:
    headers = {"Content-Type": "application/json"}
    with pytest.raises(CloudFault, match="no reply"):
        asyncio.run(client(echo).send("POST", "/x", "a: 1", headers=headers))
    (bug,) = echo.bugs
    assert "the body of POST /0/x has the type application/json but is not JSON: 'a: 1'" in str(bug)


class Strict(RestStandIn):
    """Remembers each request; the path says how to reply."""

    def set_up(self) -> None:
        self.heard: list[RestRequest] = []

    def authorize(self, request: RestRequest) -> None:
        self.heard.append(request)

    def answer(self, request: RestRequest) -> tuple[int, object]:
        match request.path.removeprefix("/").split("/")[0]:
            case "empty":
                return 204, None
            case "bytes":
                return 200, bytes(range(256)) * 300
            case "headers":
                return 202, WithHeaders({"a": [1]}, {"Link": '</2>; rel="next"', "X-Total": "3"})
            case "bug":
                raise RuntimeError("the stand-in's own")
            case word if word.isdigit():
                raise CloudFault(int(word), "code", "words")
        return 200, {"text": "é", "list": [None, 1.5, True]}

    def describe(self, fault: CloudFault) -> object:
        return {"code": fault.code, "message": fault.message}


REQUESTS: list[tuple[str, str, bytes | None, dict[str, str]]] = [
    ("GET", "/a/b?x=1&x=2&y=%2F&empty=#fragment", None, {}),
    ("GET", "/", None, {"X-Odd": "caf\xe9", "content-type": "text/plain"}),
    ("HEAD", "/a", None, {}),
    ("HEAD", "/bytes", None, {}),
    ("POST", "/a", b'{"a": "\xc3\xa9"}', {"Content-Type": "application/json"}),
    ("POST", "/empty", b"", {}),
    ("PUT", "/bytes", b"line\r\n\r\nline", {"Content-Type": "text/plain; charset=utf-8"}),
    ("PATCH", "/headers", b"null", {"Accept": "*/*"}),
    ("DELETE", "/empty", None, {"Authorization": "Bearer x"}),
    ("OPTIONS", "/a", None, {}),
    ("GET", "/404", None, {}),
    ("POST", "/429", b"1", {}),
    ("GET", "/503", None, {}),
    ("POST", "/0", b"1", {}),
    ("GET", "/bug", None, {}),
    ("GET", "/a b", None, {}),
    ("GET", "/\xe9", None, {}),
    ("GET", "/a", None, {"X-Two": "lines\r\nX-More: 1"}),
    ("GET", "/a", None, {"X-Wide": "\u4e16"}),
]


@pytest.mark.parametrize(("method", "path", "body", "headers"), REQUESTS)
def test_requests_and_replies_are_the_same_with_and_without_a_socket(
    method: str, path: str, body: bytes | None, headers: dict[str, str]
) -> None:
    server = RestServer()
    stand_in = Strict(MemoryCloud(CloudTraits()), server)
    seen: list[Any] = []
    for way in (server.networked(), nullcontext()):
        stand_in.heard.clear()
        stand_in.bugs.clear()
        into = io.BytesIO()
        with way:
            try:
                told: object = HttpClient().send(
                    method, stand_in.url + path, body, headers, into=into
                )
            except NoReply as error:
                told = type(error), str(error)
            else:
                kept = {
                    name: value
                    for name, value in told.headers.items()  # type: ignore[attr-defined]
                    if name not in ("server", "date")
                }
                told = told.status, told.reason, kept, told.body  # type: ignore[attr-defined]
        bugs = [str(each) for each in stand_in.bugs]
        seen.append((told, into.getvalue(), list(stand_in.heard), bugs))
    server.close()
    assert seen[0] == seen[1]


def test_only_the_client_without_a_socket_needs_none(
    echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests of the suite open no connection; those of a client that checks its targets do."""
    opened: list[object] = []
    connect = socket.create_connection

    def count(*args: Any, **options: Any) -> socket.socket:
        opened.append(args)
        return connect(*args, **options)

    monkeypatch.setattr(socket, "create_connection", count)
    headers = {"Authorization": f"Bearer {echo.key}"}
    HttpClient().send("GET", echo.url, headers=headers)
    assert opened == []
    HttpClient(targets="127.0.0.0/8").send("GET", echo.url, headers=headers)
    assert len(opened) == 1
