"""The client of REST APIs, against a real HTTP server: errors, repetitions, pages and tokens."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cavvy.providers.vm import rest
from cavvy.providers.vm.cloud import UNREADABLE, CloudFault
from cavvy.providers.vm.rest import RestClient, next_link


class Api:
    """Answers requests from a list of (status, body); None closes the connection."""

    def __init__(self) -> None:
        self.replies: list[tuple[int, object] | None] = []
        self.requests: list[tuple[str, str, str, object]] = []
        self.retry_after = "0"
        self.headers: list[list[tuple[str, str]]] = []  # of the next replies
        self.drips = False  # send 40 bytes of the body per second
        self.stopped = threading.Event()
        api = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                sent = self.rfile.read(size)
                text = self.headers["Content-Type"].startswith("text/")
                body = (sent.decode() if text else json.loads(sent)) if size else None
                token = self.headers["Authorization"]
                api.requests.append((self.command, self.path, token, body))
                reply = api.replies.pop(0)
                if reply is None:
                    self.close_connection = True
                    return
                status, told = reply
                data = told if isinstance(told, bytes) else json.dumps(told).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Retry-After", api.retry_after)
                self.send_header("Location", "/elsewhere")
                for name, value in api.headers.pop(0) if api.headers else ():
                    self.send_header(name, value)
                self.end_headers()
                for each in [data[n : n + 1] for n in range(len(data))] if api.drips else [data]:
                    self.wfile.write(each)
                    if api.drips and api.stopped.wait(0.025):
                        break

            do_GET = do_POST = do_PATCH = do_DELETE = answer

            def log_message(self, *_: object) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"


@pytest.fixture
def api() -> Iterator[Api]:
    api = Api()
    yield api
    api.stopped.set()
    api.server.shutdown()
    api.server.server_close()


def client(api: Api) -> RestClient:
    return RestClient(
        api.url, lambda: "secret", lambda told: (told["error"]["code"], told["error"]["message"])
    )


def test_a_read_is_repeated_after_429_500_and_a_lost_reply(api: Api) -> None:
    for first in [(429, {}), (500, {}), None]:
        api.replies += [first, (200, {"data": [1]})]
        assert asyncio.run(client(api).get("/things")) == {"data": [1]}
    assert len(api.requests) == 6
    assert api.requests[0] == ("GET", "/v1/things", "Bearer secret", None)


def test_a_read_fails_after_three_attempts_and_at_once_if_it_cannot_succeed(api: Api) -> None:
    api.replies += [(503, {})] * 3
    with pytest.raises(CloudFault) as found:
        asyncio.run(client(api).get("/things"))
    assert (found.value.status, len(api.requests)) == (503, 3)
    api.replies += [(404, {"error": {"code": "gone", "message": "no such thing"}})]
    with pytest.raises(CloudFault, match="gone: no such thing"):
        asyncio.run(client(api).get("/things/1"))
    assert len(api.requests) == 4


def test_an_error_of_another_form_is_a_fault(api: Api) -> None:
    """A proxy in front of the API answers in its own form."""
    reader = RestClient(api.url, lambda: "", lambda told: (told.get("code"), told["a"].strip()))
    for body in ("no", None, [1], 7, {"a": 7}):
        api.replies.append((400, body))
        with pytest.raises(CloudFault, match="HTTP 400"):
            asyncio.run(reader.send("POST", "/things"))


@pytest.mark.parametrize(
    ("reply", "status", "uncertain"),
    [
        (None, 0, True),
        ((500, {}), 500, True),
        ((200, b"<html>"), 0, True),
        ((429, {}), 429, False),
        ((302, {}), 302, False),
        ((400, [1]), 400, False),
        ((400, "no"), 400, False),
        ((400, {"error": "no"}), 400, False),
        ((501, b"Unsupported method"), 501, False),
        ((505, b""), 505, False),
    ],
)
def test_a_change_is_requested_once(
    api: Api, reply: tuple[int, object] | None, status: int, uncertain: bool
) -> None:
    api.replies.append(reply)
    with pytest.raises(CloudFault) as found:
        asyncio.run(client(api).send("POST", "/things", {"name": "x"}))
    assert (found.value.status, found.value.uncertain) == (status, uncertain)
    assert api.requests == [("POST", "/v1/things", "Bearer secret", {"name": "x"})]


def test_all_pages_are_read(api: Api) -> None:
    api.replies += [
        (200, {"items": [1], "next": f"{api.url}/things?page=2"}),
        (200, {"items": [2], "next": None}),
    ]
    pages = asyncio.run(client(api).pages("/things", lambda page: page["next"]))
    assert [page["items"] for page in pages] == [[1], [2]]
    assert [path for _, path, _, _ in api.requests] == ["/v1/things", "/v1/things?page=2"]


def test_text_is_sent_as_text(api: Api) -> None:
    api.replies += [(204, b"")] * 2
    asyncio.run(client(api).send("PATCH", "/things/1/user_data", "#!/bin/sh\n# größer\n"))
    asyncio.run(
        client(api).send("POST", "/things", "a: 1", headers={"Content-Type": "text/x-yaml"})
    )
    assert [(method, body) for method, _, _, body in api.requests] == [
        ("PATCH", "#!/bin/sh\n# größer\n"),
        ("POST", "a: 1"),
    ]


def test_pages_that_only_headers_name_are_read(api: Api) -> None:
    api.replies += [(200, [1]), (200, [2]), (200, [3])]
    first = f'<{api.url}/things?page=1>; rel="first", <{api.url}/things?page=2>; rel="next"'
    second = f"<{api.url}/things?page=3>;title=x;rel='next last'"
    api.headers = [[("LINK", first)], [("Link", second)], [("Link", "<x>; rel=prev")]]
    pages = asyncio.run(client(api).pages_by_header("/things", next_link))
    assert pages == [[1], [2], [3]]
    assert [path for _, path, _, _ in api.requests][1:] == [
        "/v1/things?page=2",
        "/v1/things?page=3",
    ]


def test_numbered_pages_are_read_until_all_items_are_there(api: Api) -> None:
    api.replies += [(200, {"size": 2, "things": [1, 2]}), (200, {"size": 1, "things": [3]})]
    api.headers = [[("X-Total-Count", "3")]] * 2
    pages = asyncio.run(client(api).numbered_pages("/things?page={page}"))
    assert [page["things"] for page in pages] == [[1, 2], [3]]
    assert [path for _, path, _, _ in api.requests] == ["/v1/things?page=1", "/v1/things?page=2"]
    api.replies, api.headers = [(200, [])], [[("X-Total-Count", "0")]]
    assert asyncio.run(client(api).numbered_pages("/things?page={page}")) == [[]]


def test_a_list_without_the_header_of_its_pages_is_no_complete_list(api: Api) -> None:
    api.replies.append((200, [1, 2]))
    with pytest.raises(UNREADABLE):
        asyncio.run(client(api).numbered_pages("/things?page={page}"))


def test_the_address_of_a_page_may_be_written_in_another_way(api: Api) -> None:
    other = api.url.replace("http", "HTTP", 1)
    api.replies += [(200, {"next": f"{other}/things?page=2"}), (200, {"next": None})]
    asyncio.run(client(api).pages("/things", lambda page: page["next"]))
    assert [path for _, path, _, _ in api.requests] == ["/v1/things", "/v1/things?page=2"]


@pytest.mark.parametrize("page", ["https://example.org/v1/2", "//example.org/2", ".example.org/2"])
def test_the_token_is_not_sent_to_the_server_of_another_page(api: Api, page: str) -> None:
    api.replies += [(200, {"next": page})]
    with pytest.raises(CloudFault, match=r"a page (on another server|without a path)"):
        asyncio.run(client(api).pages("/things", lambda told: told["next"]))
    assert len(api.requests) == 1


def test_an_empty_reply_is_none_and_nothing_answers_after_the_server_is_gone(api: Api) -> None:
    api.replies.append((200, b""))
    assert asyncio.run(client(api).send("DELETE", "/things/1")) is None
    gone = RestClient("http://127.0.0.1:1", lambda: "secret", lambda told: ("", ""))
    with pytest.raises(CloudFault, match="no reply"):
        asyncio.run(gone.send("POST", "/things"))


def test_no_read_is_sent_before_the_time_that_a_429_names(api: Api) -> None:
    limited = client(api)
    api.retry_after = "600"
    api.replies += [(429, {}), (202, {})]
    for _ in range(2):
        with pytest.raises(CloudFault) as found:
            asyncio.run(limited.get("/things"))
        assert found.value.status == 429
    assert len(api.requests) == 1
    assert asyncio.run(limited.send("DELETE", "/things/1")) == {}  # deletions are still tried


def test_a_reply_that_arrives_byte_by_byte_has_a_time_limit(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server would need 25 s for its reply, and never pauses for long."""
    monkeypatch.setattr(rest, "_REPLY_S", 0.5)
    api.drips = True
    api.replies.append((200, {"data": "x" * 1000}))
    with pytest.raises(CloudFault) as found:
        asyncio.run(client(api).send("POST", "/things"))
    assert found.value.uncertain


def test_a_token_that_no_header_can_carry_is_not_in_the_error(api: Api) -> None:
    odd = RestClient(api.url, lambda: "secret\nmore", lambda told: ("", ""))
    with pytest.raises(CloudFault, match="no reply") as found:
        asyncio.run(odd.send("POST", "/things"))
    assert "secret" not in str(found.value)
