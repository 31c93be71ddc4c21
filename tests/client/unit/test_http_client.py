"""What other servers may do to the server: each caller whose URL a user chooses obeys one rule."""

import asyncio
import gzip
import itertools
import socket
import ssl
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.certificates import Authority

from cavvy import http_client
from cavvy.api import id_tokens
from cavvy.api.images.registry import ImageRepository, RegistrySilent, parse_image
from cavvy.control.webhooks import post_json
from cavvy.domain.targets import EVERY
from cavvy.http_client import (
    HttpClient,
    HttpReply,
    InvalidRequest,
    NoReply,
    ReplyTooLong,
    TargetDenied,
)
from cavvy.providers.abilities import ReplicaRequest
from cavvy.providers.base import TryAgain
from cavvy.providers.ibm.api import IamTokens
from cavvy.providers.managed.endpoint_provider import EndpointHttp
from cavvy.providers.ray import calls
from cavvy.providers.ray.calls import DashboardAddress, DashboardRefused, RayDashboard
from cavvy.providers.vm import rest
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.rest import RestClient
from cavvy.store.objects.azure import AzureContainer
from cavvy.store.objects.base import ObjectError
from cavvy.store.objects.http import WebPages
from cavvy.store.objects.hub import HubRepository
from cavvy.store.objects.locations import merge_keys, open_place
from cavvy.store.objects.s3 import NoSigner, XmlBucket
from cavvy.store.objects.sftp import SftpServer

ALLOWED, INSIDE = "127.0.0.1", "127.0.0.5"  # an administrator allows the first one only
Call = Callable[[str, str], object]


class Failed(Exception):
    """A caller reports a problem as text."""


def now() -> datetime:
    return datetime(2027, 1, 2, tzinfo=UTC)


def notify(url: str, targets: str) -> None:
    if problem := asyncio.run(post_json(url, b"{}", targets)):
        raise Failed(problem)


def pull(url: str, targets: str) -> object:
    repository = ImageRepository(parse_image("a/b"), None, targets)
    if (reply := repository._send(url, (), "")).status != 200:
        raise Failed(str(reply.status))
    return reply.body


def read_bucket(url: str, targets: str) -> object:
    bucket = XmlBucket("data", NoSigner(), now, endpoint=url)
    bucket.targets = targets
    return bucket.get("x")


def read_container(url: str, targets: str) -> object:
    container = AzureContainer("data", "account", "a2V5", now, endpoint=url)
    container.targets = targets
    return container.get("x")


def read_issuer(url: str, targets: str) -> object:
    """An issuer may name addresses on its own host, which an admin has named."""
    host = targets or "issuer.test"
    return id_tokens._fetch(url, f"{urlsplit(url).scheme}://{host}")


def read_sftp(url: str, targets: str) -> object:
    return SftpServer(urlsplit(url).netloc, {}, targets).head("/x")


# The callers whose URLs users choose, and the callers whose URLs administrators and clouds choose
WEB: dict[str, Call] = {
    "webhook": notify,
    "registry": pull,
    "bucket": read_bucket,
    "container": read_container,
    "web page": lambda url, targets: WebPages(root=url, targets=targets).get("x"),
    "issuer": read_issuer,
}
OWN: dict[str, Call] = {
    "cloud": lambda url, _: asyncio.run(
        RestClient(url, lambda: "", lambda told: ("", "")).send("POST", "/x")
    ),
    "endpoint": lambda url, _: asyncio.run(
        EndpointHttp("x", 10.0).post(url, lambda: "key", ReplicaRequest(body=b"", headers={}))
    ),
    "ray": lambda url, _: asyncio.run(RayDashboard(DashboardAddress(name="r", url=url)).version()),
    "iam": lambda url, _: IamTokens({"iam_endpoint": url, "api_key": "k"}, now)._request("k"),
}
ERRORS = (
    *(Failed, TargetDenied, ObjectError, RegistrySilent, id_tokens.IssuerSilent),
    *(CloudFault, TryAgain, DashboardRefused),
)


class Server(ThreadingHTTPServer):
    """Answers each request with `answer`, and notes its path."""

    def __init__(self, host: str, answer: Callable[[BaseHTTPRequestHandler], object]) -> None:
        self.asked: list[str] = []
        self.stopped = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            wbufsize = -1  # the head and the body are one packet

            def do_GET(self) -> None:
                server.asked.append(self.path)
                with suppress(OSError):
                    answer(self)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        super().__init__((host, 0), Handler)

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_port}"


@contextmanager
def serving(
    answer: Callable[[BaseHTTPRequestHandler], object],
    host: str = ALLOWED,
    tls: ssl.SSLContext | None = None,
) -> Iterator[Server]:
    with Server(host, answer) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server
        finally:
            server.stopped.set()
            server.shutdown()


def reply(
    request: BaseHTTPRequestHandler, body: bytes = b"{}", status: int = 200, **headers: str
) -> None:
    request.send_response(status)
    for name, value in {"Content_Length": str(len(body)), **headers}.items():
        request.send_header(name.replace("_", "-"), value)
    request.end_headers()
    request.wfile.write(body)


NAMES = {"both.test": ["8.8.8.8", "10.0.0.1"], "inner.test": ["fd00::1"]}


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names in NAMES, and `rebound.test`, which is another address at each second look."""
    rebound = itertools.chain([ALLOWED], itertools.repeat(INSIDE))
    resolve = socket.getaddrinfo

    def look_up(host: str, *rest: Any, **more: Any) -> Any:
        found = [next(rebound)] if host == "rebound.test" else NAMES.get(host, [host])
        return [each for name in found for each in resolve(name, *rest, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


@pytest.mark.parametrize("proxy", ["", "http://127.0.0.1:9"], ids=["direct", "proxy"])
@pytest.mark.parametrize(
    "host",
    [
        *("169.254.169.254", "[fd00:ec2::254]", "[::ffff:169.254.169.254]", "[::ffff:10.0.0.1]"),
        *("2130706433", "0x7f.1", "10.0.0.1", "localhost", "both.test", "inner.test"),
    ],
)
@pytest.mark.parametrize("call", [*WEB.values(), read_sftp], ids=[*WEB, "sftp"])
def test_users_reach_nothing_inside(
    call: Call, host: str, proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    with pytest.raises(ERRORS, match=r"the server does not call|private_targets does not list it"):
        call(f"https://{host}", "")


@pytest.mark.parametrize("call", WEB.values(), ids=WEB)
def test_the_address_that_is_called_is_checked(call: Call) -> None:
    with serving(reply, INSIDE) as inside:
        scheme = "https" if call is read_issuer else "http"
        with pytest.raises(ERRORS, match=r"rebound\.test is not a public address"):
            call(f"{scheme}://rebound.test:{inside.server_port}", ALLOWED)
        assert inside.asked == []


@pytest.mark.parametrize("call", [*WEB.values(), *OWN.values()], ids=[*WEB, *OWN])
def test_a_redirect_leads_nowhere_else(call: Call) -> None:
    with serving(reply, INSIDE) as inside:
        there = f"//{INSIDE}:{inside.server_port}/"
        for to in (
            inside.url,
            there,
            "http://10.0.0.1:9/",
            "http://[::1]:9/",
            "ftp:" + there,
            "http://[",
        ):
            with serving(lambda request, to=to: reply(request, b"no", 302, Location=to)) as outer:
                if call is OWN["endpoint"]:
                    assert call(outer.url, ALLOWED).status == 302  # type: ignore[attr-defined]
                    continue
                with pytest.raises(ERRORS):
                    call(outer.url, ALLOWED)
        assert inside.asked == []


DEEP = b'{"token": ' + b"[" * 100_000
ENTITIES = "".join(f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in itertools.pairwise("abcdefgh"))
BODIES = (
    *(b"", b"no", b"[1]", b"7", b"\xff", DEEP, b"<a>" * 100_000, b"<a/>" * (3 << 20)),
    f'<!DOCTYPE l [<!ENTITY a "x">{ENTITIES}]><l>&h;</l>'.encode(),
    b'<?xml version="1.0" encoding="utf-999"?><a/>',
    "<L><Contents><Size>²</Size></Contents></L>".encode(),
    b"<L><Contents><Size>%s</Size></Contents></L>" % (b"9" * 5000),
    b"<L><Contents><LastModified>junk</LastModified></Contents></L>",
    b"<L><Blob><Properties><Content-Length>x</Content-Length></Properties></Blob></L>",
    b"<L><Blob><Properties><Content-MD5>a</Content-MD5></Properties></Blob></L>",
    b"<L><Blob><Properties><Last-Modified>a</Last-Modified></Properties></Blob></L>",
)
HEADERS = (
    *({"Last_Modified": each} for each in ("junk", "Mon, 01 Jan 2024 00:00:00 +9999")),
    *({"Content_Length": each} for each in ("²", "9" * 5000)),
    {"Content_MD5": "a"},
)


def test_answers_that_cannot_be_read_are_errors_of_the_caller() -> None:
    """Users choose the storages, registries and web servers."""
    answer: list[Any] = [b"", {}]
    with serving(lambda request: reply(request, answer[0], **answer[1])) as server:
        server.RequestHandlerClass.do_HEAD = server.RequestHandlerClass.do_GET  # type: ignore[attr-defined]
        bucket = XmlBucket("data", NoSigner(), now, endpoint=server.url)
        container = AzureContainer("data", "account", "a2V5", now, endpoint=server.url)
        hub = HubRepository("hf://a/b", endpoint=server.url)
        image = f"{ALLOWED}:{server.server_port}/a"
        repository = ImageRepository(parse_image(image))
        reads: list[Callable[[], object]] = [
            *(lambda: bucket.list(""), lambda: bucket.begin("x"), bucket.region),
            *(lambda: container.list(""), lambda: repository.read_manifest("x")),
            *(lambda: repository._log_in(f'Bearer realm="{server.url}/"'),),
            *(lambda: id_tokens.fetch_keys(server.url), lambda: OWN["iam"](server.url, "")),
            *(lambda: OWN["ray"](server.url, ""), lambda: hub.head("x")),
        ]
        for answer[0] in BODIES:
            repository._left = 9
            for read in reads:
                with suppress(*ERRORS):
                    read()
        answer[0] = b""
        for answer[1] in HEADERS:
            for place in (bucket, container, WebPages(root=server.url), hub):
                with suppress(ObjectError):
                    place.head("x")


AMAZON = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
AZURE = {"AZURE_STORAGE_ACCOUNT": "a", "AZURE_STORAGE_KEY": "a2V5"}
GOOGLE = {"STORAGE_EMULATOR_HOST": "127.0.0.1:9"}


@pytest.mark.parametrize("targets", [EVERY, ALLOWED])
@pytest.mark.parametrize(
    ("url", "keys"),
    [
        *(
            ("s3://b/x", AMAZON | {"AWS_ENDPOINT_URL": each})
            for each in ("a", "file:///", "http://[")
        ),
        *(
            ("s3://b/x", AMAZON | {"AWS_ENDPOINT_URL": f"http://a{each}"})
            for each in ("\0", "\nX: y")
        ),
        ("s3://b/x", AMAZON | {"AWS_REGION": "x y/@10.0.0.1/"}),
        *(("az://b/x", AZURE | {"AZURE_STORAGE_ENDPOINT": each}) for each in ("a", "http://a:x")),
        *(
            ("gs://b/x", GOOGLE | {"GOOGLE_SERVICE_ACCOUNT": each})
            for each in ("[1]", "[" * 100_000)
        ),
        ("gs://b/x", GOOGLE | {"GOOGLE_SERVICE_ACCOUNT": '{"client_email": 1, "private_key": 2}'}),
        *((f"{each}://127.0.0.1:99999/x", {}) for each in ("http", "sftp")),
        *((f"{each}://127.0.0.1:{'9' * 5000}/x", {}) for each in ("http", "sftp")),
        *((f"{each}://[/x", {}) for each in ("http", "sftp")),
        *((f"{each}://a..b/x", {}) for each in ("http", "sftp")),
        ("http://ann:word@127.0.0.1:9/x", {}),
        *(("sftp://127.0.0.1:9/x", {"SFTP_PRIVATE_KEY": each}) for each in ("", "junk")),
        ("sftp://127.0.0.1:9/x", {"SFTP_KNOWN_HOSTS": "junk"}),
        *(
            ("hf://a/b", {"HF_ENDPOINT": each})
            for each in ("a", "file:///", "http://[", "http://a\nX: y", "http://127.0.0.1:9/\0")
        ),
        *(
            ("hf://a/b", {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": each})
            for each in ("a\r\nX: y", "é\u20ac")
        ),
    ],
)
def test_values_of_users_that_mean_nothing_are_their_errors(
    url: str, keys: dict[str, str], targets: str
) -> None:
    def read() -> None:
        found = open_place(url, merge_keys({}, keys, targets), now)
        found.place.head(found.key)

    with pytest.raises(ObjectError):
        read()


def test_redirects_in_a_circle_end() -> None:
    with serving(lambda request: reply(request, b"", 302, Location="/")) as server:
        assert HttpClient(redirects=True).send("GET", server.url).status == 302
        assert len(server.asked) == 11


def test_a_login_does_not_follow_a_redirect_and_a_write_follows_none() -> None:
    def answer(request: BaseHTTPRequestHandler) -> None:
        moved = {"Location": "/b?x=a b"} if request.path == "/a" else {}
        reply(
            request, str(request.headers["Authorization"]).encode(), 307 if moved else 200, **moved
        )

    client, login = HttpClient(redirects=True), {"Authorization": "Bearer 1"}
    with serving(answer) as server:
        assert client.send("GET", f"{server.url}/a", None, login).body == b"None"
        assert client.send("GET", f"{server.url}/b", None, login).body == b"Bearer 1"
        assert client.send("POST", f"{server.url}/a", b"", login).status == 307
        assert server.asked == ["/a", "/b?x=a%20b", "/b", "/a"]


def test_a_redirect_does_not_leave_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*authority.issue())
    client = HttpClient(redirects=True, ca_file=str(authority.ca))

    def answer(request: BaseHTTPRequestHandler) -> None:
        to = {"/out": plain.url, "/": "/beside"}.get(request.path)
        reply(request, b"", 302 if to else 200, **{"Location": to} if to else {})

    with serving(reply) as plain, serving(answer, tls=tls) as secure:
        url = secure.url.replace("http:", "https:")
        with pytest.raises(TargetDenied, match="redirects to an address without https://"):
            client.send("GET", f"{url}/out")
        assert plain.asked == []
        assert client.send("GET", url).status == 200
        with pytest.raises(NoReply, match="certificate"):
            HttpClient().send("GET", url)


def send_without_end(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.end_headers()
    while True:
        request.wfile.write(bytes(1 << 20))


@pytest.mark.parametrize("call", [*WEB.values(), *OWN.values()], ids=[*WEB, *OWN])
def test_a_body_without_end_is_not_kept(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest, "_MOST_BYTES", 1 << 20)
    monkeypatch.setattr(calls, "_MOST_BYTES", 1 << 20)
    with serving(send_without_end) as server:
        if call is notify:
            return call(server.url, ALLOWED)  # the body does not matter
        with pytest.raises(ERRORS, match=r"longer than \d+ MiB"):
            call(server.url, ALLOWED)


@cache
def make_bomb() -> bytes:
    return gzip.compress(bytes(64 << 20))


@pytest.mark.parametrize("call", [*WEB.values(), *OWN.values()], ids=[*WEB, *OWN])
def test_a_compressed_body_is_not_unpacked(call: Call) -> None:
    bomb = make_bomb()
    with serving(lambda request: reply(request, bomb, Content_Encoding="gzip")) as server:
        tracemalloc.start()
        try:
            with suppress(*ERRORS):
                call(server.url, ALLOWED)
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n", b"HT"])
@pytest.mark.parametrize("call", [*WEB.values(), *OWN.values()], ids=[*WEB, *OWN])
def test_a_reply_that_arrives_byte_by_byte_has_a_time_limit(
    call: Call, head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock passes three seconds at each look at it."""

    def drip(request: BaseHTTPRequestHandler) -> None:
        request.connection.sendall(head)
        while not server.stopped.wait(0.001):
            request.connection.sendall(b"x")

    monkeypatch.setattr(http_client, "monotonic", itertools.count(0, 3).__next__)
    with serving(drip) as server:
        if call is notify and head.endswith(b"\r\n\r\n"):
            return call(server.url, ALLOWED)  # the body does not matter
        with pytest.raises(ERRORS, match=r"not complete after|timed out|more than 30 s"):
            call(server.url, ALLOWED)


def test_a_name_with_many_addresses_has_one_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NAMES, "many.test", [f"127.0.1.{n}" for n in range(200)])
    monkeypatch.setattr(http_client, "monotonic", itertools.count(0, 3).__next__)
    with pytest.raises(NoReply, match=r"no connection to many\.test in time"):
        HttpClient(targets="127.0.0.0/8", limit_s=30).send("GET", "http://many.test:9/")


def test_no_wait_is_longer_than_the_rest_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    set_timeout = socket.socket.settimeout

    def note(sock: socket.socket, seconds: float) -> None:
        waits.append(seconds)
        set_timeout(sock, seconds)

    monkeypatch.setattr(http_client, "monotonic", itertools.count(0, 3).__next__)
    with serving(reply) as server:
        monkeypatch.setattr(socket.socket, "settimeout", note)
        HttpClient(idle_s=100, limit_s=30).send("GET", server.url)
    assert waits[:2] == [27, 24]  # to connect, and for the first bytes


def test_a_cut_body_is_no_body() -> None:
    with (
        serving(lambda request: reply(request, b"12345", Content_Length="10")) as server,
        pytest.raises(NoReply, match="sent only 5 of 10 bytes"),
    ):
        HttpClient().send("GET", server.url)


def test_an_error_is_reported_even_if_its_body_is_cut() -> None:
    with serving(lambda request: reply(request, b"1", 503, Content_Length="10")) as server:
        answer = HttpClient().send("GET", server.url)
        assert (answer.status, answer.body) == (503, b"")


def send_raw(sent: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    return lambda request: request.connection.sendall(sent)


HINTS = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
STORED = b"HTTP/1.1 500 Full\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize("interim", [HINTS, b"HTTP/1.1 102 Processing\r\n\r\n", HINTS * 10])
def test_an_interim_reply_is_not_the_reply(interim: bytes) -> None:
    """A status below 200 would otherwise count as a success of an upload."""
    with serving(send_raw(interim + STORED)) as server:
        assert HttpClient().send("GET", server.url).status == 500


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (HINTS * 11 + STORED, "HTTP/1.1 103 Early Hints"),  # a server can send them without end
        (b"HTTP/1.1 101 Switching\r\n\r\n" + STORED, "HTTP/1.1 101 Switching"),
        (b"SSH-2.0-x\r\n", "SSH-2.0-x"),
        (b"\x1b]0;x\x07" + b"y" * 9999 + b"\r\n\r\n", "]0;x".ljust(200, "y")),
        (b"\0\x01\r\n\r\n", "the reply is not HTTP"),
        (b"HTTP/2.0 200 OK\r\n\r\n", "HTTP/2.0"),
    ],
)
def test_a_reply_that_is_not_http_is_quoted_in_part(sent: bytes, told: str) -> None:
    with serving(send_raw(sent)) as server, pytest.raises(NoReply) as raised:
        HttpClient().send("GET", server.url)
    assert str(raised.value).strip() == told


@pytest.mark.parametrize("login", ["ann@", "ann:word@", "@", ":word@"])
def test_an_address_with_a_login_is_not_called(login: str) -> None:
    """It was looked up as a host, which seemed to be unknown."""
    with serving(reply) as server, pytest.raises(InvalidRequest, match="user name"):
        HttpClient().send("GET", server.url.replace("://", f"://{login}"))


def test_a_reason_does_not_control_a_terminal() -> None:
    sent = b"HTTP/1.1 404 \x1b]0;Gone\x07" + b"!" * 9999 + b"\r\nContent-Length: 0\r\n\r\n"
    with serving(send_raw(sent)) as server:
        assert HttpClient().send("GET", server.url).reason == "]0;Gone".ljust(200, "!")


@pytest.mark.parametrize("size", [b"-5", b"zz", b"f" * 5000, b"5", b""])
def test_a_chunk_of_bad_size_is_a_fault_of_the_reply(size: bytes) -> None:
    sent = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + size + b"\r\nhi"
    with serving(send_raw(sent)) as server, pytest.raises(NoReply) as raised:
        HttpClient().send("GET", server.url)
    assert not isinstance(raised.value, InvalidRequest)


def test_a_body_of_the_largest_size_is_read() -> None:
    with serving(lambda request: reply(request, bytes(1 << 20))) as server:
        assert len(HttpClient(most_bytes=1 << 20).send("GET", server.url).body) == 1 << 20
        with pytest.raises(ReplyTooLong):
            HttpClient(most_bytes=(1 << 20) - 1).send("GET", server.url)


@pytest.mark.parametrize(
    ("url", "headers"),
    [
        *(
            (each, {})
            for each in ("", "file:///etc/passwd", "http:///x", "http://a b/", "http://[")
        ),
        *((each, {}) for each in ("http://ann:s3cret@127.0.0.1/", "http://a.test:s3cret/")),
        ("http://127.0.0.1:9/", {"Authorization": "Bearer s3cret\nX: y"}),
    ],
)
def test_a_request_that_cannot_be_sent_is_not_quoted(url: str, headers: dict[str, str]) -> None:
    with pytest.raises((InvalidRequest, NoReply)) as caught:
        HttpClient().send("GET", url, None, headers)
    assert "s3cret" not in str(caught.value)


def test_the_environment_names_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(reply) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.setenv("NO_PROXY", "beside.test")
        HttpClient(targets="").send("GET", "http://outside.test/x")
        assert proxy.asked == ["http://outside.test/x"]
        with pytest.raises(NoReply):
            HttpClient(targets="").send("GET", "http://beside.test/x")
        assert len(proxy.asked) == 1
        proxy.RequestHandlerClass.do_CONNECT = proxy.RequestHandlerClass.do_GET  # type: ignore[attr-defined]
        monkeypatch.setenv("HTTPS_PROXY", f"http://ann:word@{proxy.url.removeprefix('http://')}")
        with pytest.raises(NoReply):  # the proxy's program does not go on in TLS
            HttpClient(targets="").send("GET", "https://outside.test/x")
        assert proxy.asked[1:] == ["outside.test:443"]


def test_some_errors_pass() -> None:
    statuses = (200, 302, 400, 404, 408, 425, 429, 500, 501, 503, 505, 599)
    passing = [each for each in statuses if HttpReply(status=each).is_passing]
    assert passing == [408, 425, 429, 500, 503, 599]
