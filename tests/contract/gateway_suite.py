"""What both data planes of serving promise; each plane's test file runs all of it.

`plane` is a running data plane with one service, `svc`, for the host name svc.example; each test
sets its replicas. A plane that lacks an ability says so in `lacks`.
"""

import base64
import hashlib
import re
import socket
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any
from urllib.parse import unquote

import pytest
from tests.contract.gateway_process import OWNER_TOKEN, wait_for
from tests.contract.http_talk import Background, Talk, ask, write_request
from tests.contract.replica_stand_in import ReplicaStandIn

from cavvy.capabilities.serving.gateway.client_keys import SERVICE_KEY

of_models = pytest.mark.skipif(
    find_spec("cavvy.capabilities.language_models") is None, reason="it is what language models add"
)
KEY = "a-random-key-of-a-test"
MADE = f"{SERVICE_KEY}of-the-keyed-service"  # as Cavvy makes its keys
SERVICE = {
    "name": "svc",
    "hosts": ["svc.example"],
    "concurrency": 4,
    "wait_s": 60,
    "places": ["us", "eu", "de", "fr"],
}
KEYED = {
    "name": "keyed",
    "hosts": ["keyed.example"],
    "keys": [
        {"id": "fast", "sha256": hashlib.sha256(KEY.encode()).hexdigest()},
        {"id": "slow", "sha256": hashlib.sha256(b"slow").hexdigest(), "per_s": 0.01, "burst": 2},
        {"id": "made", "sha256": hashlib.sha256(MADE.encode()).hexdigest()},
        {"id": "eu", "sha256": hashlib.sha256(b"eu").hexdigest(), "residency": "eu"},
    ],
}
OPEN = {
    **{"name": "open", "hosts": ["open.example"], "models": ["org/open"]},
    "project": "site",
    "origins": ["https://app.example"],
}
RATED = {
    "name": "rated",
    "hosts": ["rated.example"],
    "rates": [
        {"per_s": 0.01, "burst": 2, "each": "header", "header": "x-user"},
        {"per_s": 0.01, "burst": 2, "each": "address", "prefix": "/by-address"},
    ],
}
SMALL = {
    **{"name": "small", "hosts": ["small.example"]},
    **{"concurrency": 1, "queue_max": 2, "body_max": 100},
}
CANARY = {
    "name": "canary",
    "hosts": ["canary.example"],
    "canary": {"revision": 2, "percent": 20},
}
MODEL = {"name": "model", "prefix": "/p/model", "models": ["org/tiny"]}
KEYED_MODEL = {**KEYED, "name": "keyed-model", "hosts": ["m.example"], "models": ["org/private"]}

WEB_SOCKET = {  # the example of RFC 6455, 1.3
    "connection": "Upgrade",
    "upgrade": "websocket",
    "sec_websocket_key": "dGhlIHNhbXBsZSBub25jZQ==",
    "sec_websocket_version": "13",
}

INVALID_HEADS = {
    "bare LF": b"GET /echo HTTP/1.1\nHost: svc.example\n\n",
    "a folded line": b"GET /echo HTTP/1.1\r\nHost: svc.example\r\nX: a\r\n b\r\n\r\n",
    "two spaces": b"GET  /echo HTTP/1.1\r\nHost: svc.example\r\n\r\n",
    "version 2": b"GET /echo HTTP/2.0\r\nHost: svc.example\r\n\r\n",
    "no host": b"GET /echo HTTP/1.1\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
}

SMUGGLING = {
    "both lengths": b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nX",
    "two lengths": b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "a list of lengths": b"Content-Length: 5, 6\r\n\r\nhello!",
    "a signed length": b"Content-Length: +5\r\n\r\nhello",
    "a negative length": b"Content-Length: -1\r\n\r\n",
    "a length in hex": b"Content-Length: 0x5\r\n\r\nhello",
    "an unknown coding": b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "two codings": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "a space before the colon": b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "a bare CR": b"X: a\rTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "NUL in a value": b"X: a\x00b\r\nContent-Length: 0\r\n\r\n",
    "a chunk size in words": b"Transfer-Encoding: chunked\r\n\r\nxyz\r\nhello\r\n0\r\n\r\n",
    "a chunk size with a sign": b"Transfer-Encoding: chunked\r\n\r\n+5\r\nhello\r\n0\r\n\r\n",
    "a chunk size that wraps": b"Transfer-Encoding: chunked\r\n\r\n10000000000000005\r\nhello\r\n",
    "a chunk longer than its size": b"Transfer-Encoding: chunked\r\n\r\n2\r\nhello\r\n0\r\n\r\n",
    "two hosts": b"Host: other.example\r\nContent-Length: 0\r\n\r\n",
}


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[ReplicaStandIn]]:
    replicas = [ReplicaStandIn(f"r{number}").start() for number in (1, 2, 3)]
    yield replicas
    for each in replicas:
        each.stop()


# what the gateway itself tells a replica
_GIVEN = ("X-Forwarded-For", "X-Forwarded-Proto", "X-Request-Id")
_CLAIMS = (
    *("Forwarded", "X-Real-IP", "X-Forwarded-Prefix", "X-Forwarded-Port", "X-Original-URL"),
    *("X-Client-IP", "True-Client-IP", "CF-Connecting-IP", "Fastly-Client-IP"),
    *("X-Cluster-Client-IP", "X-Remote-User", "Remote-User", "X-Forwarded-User", "X-Rewrite-Url"),
    *("X-Original-Host", "X-SSL-Client-Verify", "X-Client-Cert", "SSL-Client-Cert", "Proxy"),
    *("X-Forwarded-Client-Cert", "X-Auth-Request-Email", "X-WebAuth-User", "Client-IP"),
    *("Proxy-Client-IP", "HTTP-Client-IP", "HTTP-X-Forwarded-For", "HTTP-Remote-User"),
    *("X-Auth-User", "X-Auth-Email", "X-Authelia-User", "Kubeflow-Userid", "SM-User"),
    *("Incap-Client-IP", "EO-Connecting-IP", "X-Custom-IP-Authorization", "X-Token-Subject"),
)

# values of Cavvy's own, as programs and browsers send them
ACCOUNT = "cavvy_" + "aB3-_" * 8 + "xyz"
_CONSOLE = "cavvy-console-8520=the-session"


def _basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def list_secret_places(secret: str) -> dict[str, tuple[str, list[str]]]:
    """Name of the place -> target and fields of a request that has the secret there."""
    encoded = "".join(f"%{ord(each):02x}" for each in secret)
    coded = "%25" + f"{ord(secret[0]):02X}" + secret[1:]
    fields = {
        **{
            name: f"{name}: {secret}"
            for name in ("X-Api-Key", "Api-Key", "api_key", "X-Goog-Api-Key", "X-Auth-Token")
        },
        "authorization": f"Authorization: Bearer {secret}",
        "another scheme": f"authorization: Token token={secret}",
        "no scheme": f"AUTHORIZATION:{secret}",
        "a password": f"Authorization: {_basic('user', secret)}",
        "a user": f"Authorization: {_basic(secret, '')}",
        "another user": f"Authorization: {_basic('u1', secret)}",
        "a proxy's": f"Proxy-Authorization: Bearer {secret}",
        "any field": f"X-Some-Thing: a={secret}; b=2",
        "base64 in any field": f"X-Some-Thing: {_basic('xy', secret)}",
        "a name": f"{secret}: 1",
        "a cookie": f"Cookie: a=1; token={secret}; b=2",
        "an encoded cookie": f"Cookie: token={encoded}",
        "the page": f"Referer: https://svc.example/x?key={secret}&a=1",
        "a protocol": f"Sec-WebSocket-Protocol: realtime, openai-insecure-api-key.{secret}",
        "a coded protocol": "Sec-WebSocket-Protocol: base64url.bearer.authorization.k8s.io."
        + base64.urlsafe_b64encode(secret.encode()).decode().rstrip("="),
        "the address": f"X-Forwarded-For: {secret}",
        "a user agent": f"User-Agent: program/{secret}",
        "forwarded names": f"X_Api_Key: {secret}",
    }
    targets = {
        "key": f"/echo?key={secret}",
        "api_key": f"/echo?a=1&api_key={secret}&b=2",
        "an encoded parameter": f"/echo?token={encoded}",
        "a twice encoded one": f"/echo?token={coded}",
        "an encoded name": f"/echo?{encoded}=1",
        "base64 in the query": f"/echo?auth={_basic('', secret)[6:].rstrip('=')}",
        "a semicolon": f"/echo?a=1;key={secret};b",
        "the path": f"/echo/{secret}/echo",
        "a sentence": f"/echo?q=hello+{secret}+world&b=%20",
        "a path parameter": f"/echo;key={secret}?a=1",
    }
    return {
        **{f"field {name}": ("/echo", [line]) for name, line in fields.items()},
        **{f"target {name}": (target, []) for name, target in targets.items()},
    }


_PLACES = tuple(list_secret_places(MADE))
# Cookie lines -> what a program gets
COOKIES = {
    f"Cookie: {_CONSOLE}": None,
    f"cookie:{_CONSOLE}": None,
    f"Cookie: a=1; {_CONSOLE}; b=2": "a=1; b=2",
    f"Cookie: a=1;{_CONSOLE};b=2": "a=1;b=2",
    f'Cookie: __Host-{_CONSOLE}; a="x y"': 'a="x y"',
    f"Cookie: __Secure-{_CONSOLE}": None,
    f"Cookie: a=1;\t {_CONSOLE.replace('=', ' = ')}": "a=1",
    f"Cookie: {_CONSOLE.upper()}; a=%20": "a=%20",
    'Cookie: cavvy-console-8520="the-session"; a=1': "a=1",
    'Cookie: "cavvy-console-8520"=the-session; a=1': "a=1",
    f"Cookie: a=1, {_CONSOLE}": "a=1",
    "Cookie: cavvy-console-default=the-session": None,
    f"Cookie: a=1\r\nCookie: {_CONSOLE}\r\nCookie: b=2": "a=1|b=2",
    "Cookie: a=cavvy-console; cavvy_theme=dark; b=cavvy.example": (
        "a=cavvy-console; cavvy_theme=dark; b=cavvy.example"
    ),
}
# fields of browsers -> whether a service without keys accepts the request
_PAGES = [
    ("POST", {"origin": "http://evil.example"}, False),
    ("POST", {"origin": "null"}, False),
    ("GET", {"origin": "http://evil.example"}, False),
    ("OPTIONS", {"origin": "http://evil.example", "access_control_request_method": "PUT"}, False),
    ("POST", {"origin": "http://svc.example:3000"}, False),
    ("POST", {"origin": "http://svc.example.evil.example"}, False),
    ("POST", {"origin": "http://svc.example", "sec_fetch_site": "cross-site"}, False),
    ("POST", {"origin": "http://127.0.0.1", "host": "127.0.0.1:8080"}, False),
    ("POST", {"origin": "http://any.example", "host": "any.example:8080"}, False),
    ("POST", {"origin": "https://any.example", "host": "127.0.0.1:8080"}, True),
    ("POST", {"origin": "https://any.example:8443", "host": "any.example:8443"}, True),
    ("POST", {"sec_fetch_site": "cross-site"}, False),
    ("POST", {"sec_fetch_site": "same-site", "origin": "http://svc.example:3000"}, False),
    ("GET", {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors"}, False),
    ("GET", {"sec_fetch_site": "same-site", "sec_fetch_dest": "iframe"}, False),
    ("POST", {"sec_fetch_site": "Cross-Site", "sec_fetch_mode": "navigate"}, False),
    (
        *("GET", {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}),
        False,
    ),
    (
        "GET",
        {
            "sec_fetch_site": "cross-site",
            "sec_fetch_mode": "navigate",
            "sec_fetch_dest": "document",
        },
        True,
    ),
    (
        "GET",
        {
            "sec_fetch_site": "cross-site",
            "sec_fetch_mode": "navigate",
            "sec_fetch_dest": "document",
            "sec_purpose": "prefetch",
        },
        False,
    ),
    ("POST", {}, True),
    ("POST", {"origin": "http://svc.example"}, True),
    ("POST", {"origin": "https://svc.example:443", "sec_fetch_site": "same-origin"}, True),
    ("GET", {"sec_fetch_site": "none"}, True),
]


def holds_secret(text: str, secret: str) -> bool:
    """Whether a program could read the secret in a text."""
    for _ in range(3):
        runs = re.findall(r"[A-Za-z0-9+/_-]{12,}", text)
        parts = [each[at:] for each in runs for at in range(4)]
        decoded = "".join(
            base64.b64decode(part[: len(part) // 4 * 4].replace("-", "+").replace("_", "/")).decode(
                "latin-1"
            )
            for part in parts
        )
        if secret[:20] in text or secret[:20] in decoded:
            return True
        text = unquote(text)
    return False


class GatewaySuite:
    def test_a_canary_gets_its_share_and_is_counted_apart(
        self, plane: Any, replicas: list[ReplicaStandIn]
    ) -> None:
        for each in replicas:
            each.reset()
        plane.set_replicas("canary", replicas, canaries={"r3"})
        for _ in range(200):
            assert ask(plane.port, "GET", "/echo", host="canary.example").status == 200
        assert len(replicas[2].seen) == 40, "exactly the share, in each hundred"
        facts = plane.facts("canary")["canary"]
        assert facts["revision"] == 2
        assert [facts[name]["requests"] for name in ("old", "new")] == [160, 40]
        assert [facts[name]["timed"] for name in ("old", "new")] == [160, 40]
        assert facts["new"]["squares"] > 0

    @pytest.fixture
    def one(self, plane: Any, replicas: list[ReplicaStandIn]) -> Iterator[ReplicaStandIn]:
        replicas[0].reset()
        plane.set_replicas("svc", replicas[:1])
        yield replicas[0]
        replicas[0].release.set()
        wait_for(lambda: replicas[0].in_flight == 0)

    @pytest.mark.parametrize(
        "method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "QUERY"]
    )
    def test_any_method_passes(self, plane: Any, one: ReplicaStandIn, method: str) -> None:
        body = b"" if method in ("GET", "OPTIONS", "DELETE") else b"hello"
        reply = ask(plane.port, method, "/echo?a=b%20c", body)
        said = reply.json
        assert (reply.status, said["method"], said["path"]) == (200, method, "/echo?a=b%20c")
        assert said["size"] == len(body)

    def test_fields_of_one_connection_end_at_the_gateway(
        self, plane: Any, one: ReplicaStandIn
    ) -> None:
        reply = ask(
            plane.port,
            "GET",
            "/echo",
            connection="close, x-private",
            x_private="1",
            keep_alive="timeout=5",
            te="trailers",
            x_forwarded_proto="https",
            x_custom="stays",
        )
        seen = one.seen[-1]
        assert reply.headers["x-request-id"] == seen.get("x-request-id")
        assert seen.get("host") == "svc.example"
        assert seen.get("x-custom") == "stays"
        assert seen.get("x-forwarded-for") == "127.0.0.1"
        assert seen.get("x-forwarded-proto") == "http"
        assert [seen.get(name) for name in ("keep-alive", "te")] == [None, None]
        assert "x-private" in plane.lacks or seen.get("x-private") is None

    @pytest.mark.parametrize("between", ["-", "_"])
    @pytest.mark.parametrize("name", [*_CLAIMS, *_GIVEN])
    def test_fields_that_only_a_proxy_may_set_do_not_pass(
        self, plane: Any, one: ReplicaStandIn, name: str, between: str
    ) -> None:
        """Some servers read `_` in a name as `-`."""
        sent = name.replace("-", between)
        with Talk(plane.port) as talk:
            talk.send(
                f"GET /echo HTTP/1.1\r\nHost: svc.example\r\n{sent}: 1.2.3.4\r\n\r\n".encode()
            )
            assert talk.read().status == 200
        found = [
            value
            for key, value in one.seen[-1].headers
            if key.lower().replace("_", "-") == name.lower()
        ]
        assert "1.2.3.4" not in found
        assert len(found) == (name in _GIVEN)

    @pytest.mark.parametrize("upgrade", [False, True], ids=["plain", "upgrade"])
    @pytest.mark.parametrize("place", _PLACES)
    @pytest.mark.parametrize(
        "secret", [MADE, ACCOUNT, OWNER_TOKEN], ids=["key", "account", "owner"]
    )
    def test_no_program_gets_a_key_or_token_of_cavvy(
        self, plane: Any, one: ReplicaStandIn, secret: str, place: str, upgrade: bool
    ) -> None:
        target, lines = list_secret_places(secret)[place]
        lines = [*lines, "X-Custom: stays", "Authorization2: Basic dXNlcjpwYXNzd29yZA=="]
        if upgrade:
            lines += [f"{k.replace('_', '-')}: {v}" for k, v in WEB_SOCKET.items()]
        head = "\r\n".join([f"GET {target} HTTP/1.1", "Host: svc.example", *lines, "", ""])
        one.seen.clear()
        with Talk(plane.port) as talk:
            talk.send(head.encode())
            talk.read()
        [seen] = one.seen
        for text in (seen.path, *(part for line in seen.headers for part in line)):
            assert not holds_secret(text, secret), text
        assert seen.get("x-custom") == "stays"
        assert seen.get("authorization2") == "Basic dXNlcjpwYXNzd29yZA=="
        if place == "target api_key":
            assert seen.path == "/echo?a=1&b=2"
        if place == "field a cookie":
            assert seen.get("cookie") == "a=1; b=2"
        if place == "field the page":
            assert seen.get("referer") == "https://svc.example/x?a=1"
        if place == "target a sentence":
            assert seen.path == "/echo?q=hello++world&b=%20"
        if place == "target a path parameter":
            assert seen.path == "/echo;key=?a=1"
        if place == "field a protocol":
            assert seen.get("sec-websocket-protocol") == "realtime"

    @pytest.mark.parametrize("sent", COOKIES)
    def test_no_program_gets_the_cookie_of_the_console(
        self, plane: Any, one: ReplicaStandIn, sent: str
    ) -> None:
        with Talk(plane.port) as talk:
            talk.send(f"GET /echo HTTP/1.1\r\nHost: svc.example\r\n{sent}\r\n\r\n".encode())
            assert talk.read().status == 200
        cookies = [value for name, value in one.seen[-1].headers if name.lower() == "cookie"]
        assert ("|".join(cookies) or None) == COOKIES[sent]

    def test_values_of_programs_pass_as_they_are(self, plane: Any, one: ReplicaStandIn) -> None:
        sent = {
            "authorization": "Bearer sk-" + "a1" * 20,
            "x_api_key": "mycavvy_key",
            "cookie": "a=%63avvy; b=cavvy",
            "x_cavvy": "Y2F2dnk=",
            "referer": "https://cavvy.example/?a=%41",
        }
        assert ask(plane.port, "GET", "/echo?a=%63avvy&&b=;c#".rstrip("#"), **sent).status == 200
        seen = one.seen[-1]
        assert seen.path == "/echo?a=%63avvy&&b=;c"
        assert {name: seen.get(name.replace("_", "-")) for name in sent} == sent

    @pytest.mark.parametrize(
        ("target", "field"),
        [
            ("/echo", f"Api-Key: {MADE}"),
            ("/echo", f"X-Goog-Api-Key: {MADE}"),
            ("/echo", f"Authorization: {_basic('user', MADE)}"),
            ("/echo", f"Sec-WebSocket-Protocol: openai-insecure-api-key.{MADE}"),
            (f"/echo?key={MADE}", "X-A: b"),
        ],
    )
    def test_a_key_of_cavvy_is_found_where_programs_expect_theirs(
        self, plane: Any, replicas: list[ReplicaStandIn], target: str, field: str
    ) -> None:
        replicas[0].reset()
        plane.set_replicas("keyed", replicas[:1])
        with Talk(plane.port) as talk:
            talk.send(f"GET {target} HTTP/1.1\r\nHost: keyed.example\r\n{field}\r\n\r\n".encode())
            assert talk.read().status == 200
        assert MADE not in str(replicas[0].seen)

    @of_models
    def test_nothing_of_cavvy_passes_by_the_route_for_models_or_with_a_deferred_call(
        self, plane: Any, replicas: list[ReplicaStandIn]
    ) -> None:
        replicas[0].reset()
        for name in ("model", "svc"):
            plane.set_replicas(name, replicas[:1])
        sent = {"cookie": f"{_CONSOLE}; a=1", "authorization": f"Bearer {OWNER_TOKEN}"}
        body, model = b'{"model": "org/tiny"}', {"host": "any.example"}
        path = f"/v1/completions?token={ACCOUNT}"
        assert ask(plane.port, "POST", path, body, **model, **sent).status == 200
        assert ask(plane.port, "POST", "/echo", b"x", prefer="respond-async", **sent).status == 202
        wait_for(lambda: len(replicas[0].seen) == 2)
        for seen in replicas[0].seen:
            assert (seen.get("cookie"), seen.get("authorization")) == ("a=1", None)
            assert seen.path in ("/v1/completions", "/echo")
        for origin in ("https://evil.example", "null"):
            reply = ask(plane.port, "POST", "/v1/completions", body, origin=origin, **model)
            assert (reply.status, reply.json["error"]["code"]) == (403, "origin-refused")
        assert len(replicas[0].seen) == 2

    def test_a_key_that_a_browser_sends_by_itself_permits_nothing(self, plane: Any) -> None:
        """A page of another site could use it."""
        for field in ({"cookie": f"key={MADE}"}, {"referer": f"https://a.example/?key={MADE}"}):
            assert ask(plane.port, "GET", "/echo", host="keyed.example", **field).status == 401

    @pytest.mark.parametrize(("method", "fields", "passes"), _PAGES)
    def test_pages_of_other_sites_do_not_reach_a_service_without_keys(
        self,
        plane: Any,
        one: ReplicaStandIn,
        method: str,
        fields: dict[str, str],
        passes: bool,
    ) -> None:
        one.seen.clear()
        plane.set_replicas("model", [one])  # which has no host name
        path = "/p/model/echo" if "host" in fields else "/echo"
        reply = ask(plane.port, method, path, **fields)
        assert (reply.status, len(one.seen)) == ((200, 1) if passes else (403, 0))
        if not passes:
            assert reply.json["error"]["code"] == "origin-refused"
            assert "origins" in reply.json["error"]["message"]
            assert "access-control-allow-origin" not in reply.headers

    @pytest.mark.parametrize("origin", ["http://evil.example", "null"])
    def test_a_page_of_another_site_opens_no_web_socket(
        self, plane: Any, one: ReplicaStandIn, origin: str
    ) -> None:
        one.seen.clear()
        assert ask(plane.port, "GET", "/socket", origin=origin, **WEB_SOCKET).status == 403
        assert one.seen == []

    @of_models
    @pytest.mark.parametrize(
        ("host", "passes"),
        [
            *(
                ("127.0.0.1", True),
                ("localhost:80", True),
                ("[::1]:1", True),
                ("a.localhost", True),
            ),
            *(("any.example", True), ("ANY.example.:1", True), ("127.0.0.9", True)),
            *(("evil.example", False), ("10.0.0.1", False), ("0.0.0.0", False)),
            *(("localhost.evil.example", False), ("127.0.0.1.nip.io", False)),
        ],
    )
    def test_a_local_gateway_answers_only_to_its_own_names(
        self, plane: Any, replicas: list[ReplicaStandIn], host: str, passes: bool
    ) -> None:
        """A web site can let its own name point to this machine."""
        replicas[0].reset()
        plane.set_replicas("model", replicas[:1])
        body = b'{"model": "org/tiny"}'
        for method, path in (("GET", "/p/model/echo"), ("POST", "/v1/completions")):
            reply = ask(plane.port, method, path, body if method == "POST" else b"", host=host)
            assert reply.status == (200 if passes else 421)
            if not passes:
                assert reply.json["error"]["code"] == "host-unknown"
                assert "services.name" in reply.json["error"]["message"]
        assert len(replicas[0].seen) == (2 if passes else 0)

    def test_pages_of_named_origins_may_call_a_service_without_keys(
        self, plane: Any, replicas: list[ReplicaStandIn]
    ) -> None:
        replicas[0].reset()
        plane.set_replicas("open", replicas[:1])
        page = {"host": "open.example", "origin": "https://app.example"}
        other = {**page, "origin": "https://app.example.evil.example"}
        asked = {"access_control_request_method": "POST"}
        site = {"sec_fetch_site": "cross-site"}
        assert ask(plane.port, "OPTIONS", "/echo", **page, **asked).status == 204
        assert ask(plane.port, "OPTIONS", "/echo", **other, **asked).status == 403
        assert replicas[0].seen == []
        reply = ask(plane.port, "POST", "/echo", b"x", **page, **site)
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, "*")
        assert ask(plane.port, "POST", "/echo", b"x", **other, **site).status == 403
        image = {"host": "open.example", "referer": "https://app.example/page", **site}
        assert ask(plane.port, "GET", "/echo", **image).status == 200
        image["referer"] = "https://evil.example/https://app.example/"
        assert ask(plane.port, "GET", "/echo", **image).status == 403

    @of_models
    def test_pages_of_named_origins_may_call_models(
        self, plane: Any, replicas: list[ReplicaStandIn]
    ) -> None:
        replicas[0].reset()
        plane.set_replicas("open", replicas[:1])
        path, body = "/site/v1/chat/completions", b'{"model": "org/open"}'
        page = {"host": "any.example", "origin": "https://app.example"}
        other = {"host": "any.example", "origin": "https://evil.example"}
        asked = {"access_control_request_method": "POST"}
        assert ask(plane.port, "OPTIONS", path, **page, **asked).status == 204
        assert ask(plane.port, "OPTIONS", path, **other, **asked).status == 404
        reply = ask(plane.port, "POST", path, body, **page)
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, "*")
        assert ask(plane.port, "POST", path, body, **other).status == 403
        assert len(replicas[0].seen) == 1

    def test_a_replica_learns_which_part_of_the_path_was_removed(
        self, plane: Any, replicas: list[ReplicaStandIn]
    ) -> None:
        plane.set_replicas("model", replicas[:1])
        fields = {"host": "any.example", "x_forwarded_prefix": "/other"}
        assert ask(plane.port, "GET", "/p/model/echo", **fields).json["path"] == "/echo"
        assert replicas[0].seen[-1].get("x-forwarded-prefix") == "/p/model"

    def test_a_chunked_body_arrives_whole(self, plane: Any, one: ReplicaStandIn) -> None:
        with Talk(plane.port) as talk:
            talk.send(write_request("POST", "/echo", transfer_encoding="chunked"))
            for piece in (b"5\r\nhel", b"lo\r\n1", b"0;x=y\r\n" + b"a" * 16, b"\r\n0\r\n\r", b"\n"):
                talk.send(piece)
            reply = talk.read()
            assert reply.json["size"] == 21
            assert reply.json["sha256"] == hashlib.sha256(b"hello" + b"a" * 16).hexdigest()
            assert talk.ask("GET", "/echo").status == 200

    def test_large_bodies_pass_both_ways(self, plane: Any, one: ReplicaStandIn) -> None:
        body = bytes(range(256)) * 4096 * 3
        reply = ask(plane.port, "POST", "/echo", body)
        assert reply.json["sha256"] == hashlib.sha256(body).hexdigest()
        assert ask(plane.port, "GET", "/large?n=3000001").body == b"x" * 3000001

    def test_a_client_that_reads_nothing_stops_the_replica(
        self, plane: Any, one: ReplicaStandIn
    ) -> None:
        size = 256 << 20
        with Talk(plane.port) as talk:
            talk.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            one.written = 0
            talk.send(write_request("GET", f"/large?n={size}"))
            written = -1
            while written != one.written:
                written = one.written
                threading.Event().wait(0.2)
            assert 0 < written < 64 << 20
        wait_for(lambda: one.in_flight == 0)

    def test_requests_share_a_connection_in_order(self, plane: Any, one: ReplicaStandIn) -> None:
        with Talk(plane.port) as talk:
            for number in range(5):
                assert talk.ask("GET", f"/echo?{number}").json["path"] == f"/echo?{number}"
            talk.send(b"".join(write_request("GET", f"/echo?{n}") for n in range(5)))
            paths = [talk.read().json["path"] for _ in range(5)]
            assert paths == [f"/echo?{n}" for n in range(5)]

    def test_responses_without_a_body(self, plane: Any, one: ReplicaStandIn) -> None:
        with Talk(plane.port) as talk:
            reply = talk.ask("HEAD", "/echo")
            assert reply.status == 200
            assert int(reply.headers["content-length"]) > 100
            assert talk.ask("GET", "/status?code=204").status == 204
            assert talk.ask("GET", "/status?code=304").status == 304
            assert talk.ask("GET", "/echo").status == 200

    def test_a_body_that_ends_with_its_connection(self, plane: Any, one: ReplicaStandIn) -> None:
        assert ask(plane.port, "GET", "/close").body == b"until the end"

    def test_a_connection_that_ends_with_a_response_gets_no_other_request(
        self, plane: Any, one: ReplicaStandIn
    ) -> None:
        calls = [Background(ask, plane.port, "POST", "/old", b"x") for _ in range(12)]
        assert {call.result().status for call in calls} == {200}

    @pytest.mark.parametrize("form", ["", "&plain=1"], ids=["with extensions", "plain"])
    def test_events_pass_one_by_one(self, plane: Any, one: ReplicaStandIn, form: str) -> None:
        with Talk(plane.port) as talk:
            talk.send(write_request("GET", f"/chunks?n=3&paced=1{form}"))
            assert talk.read_until_head()[0] == 200
            for number in range(3):  # the replica writes the next one only when this one has come
                assert talk.read_chunk() == b"data: %d\n\n" % number
                one.release.set()
            assert talk.read_chunk() == b""
            assert talk.ask("GET", "/echo").status == 200

    def test_a_web_socket_is_a_tunnel(self, plane: Any, one: ReplicaStandIn) -> None:
        with Talk(plane.port) as talk:
            talk.send(write_request("GET", "/socket", **WEB_SOCKET))
            status, headers = talk.read_until_head()
            assert (status, headers["upgrade"]) == (101, "websocket")
            for data in (b"\x00\x01first", b"\r\n\r\nGET / HTTP/1.1\r\n", b"z" * 300_000):
                sender = Background(talk.send, data)
                assert talk.exactly(len(data)) == data
                sender.result()
        wait_for(lambda: one.in_flight == 0)

    def test_a_client_that_leaves_frees_its_replica(self, plane: Any, one: ReplicaStandIn) -> None:
        talks = [Talk(plane.port) for _ in range(4)]
        for talk in talks:
            talk.send(write_request("GET", "/hold"))
        wait_for(lambda: one.in_flight == 4)
        for talk in talks:
            talk.socket.close()
        wait_for(lambda: one.in_flight == 0)
        assert one.aborted == 4
        assert ask(plane.port, "GET", "/echo").status == 200

    def test_a_half_closed_client_gets_its_answer(self, plane: Any, one: ReplicaStandIn) -> None:
        if "half-closed" in plane.lacks:
            pytest.skip(plane.lacks["half-closed"])
        with Talk(plane.port) as talk:
            talk.send(write_request("GET", "/hold"))
            talk.socket.shutdown(socket.SHUT_WR)
            wait_for(lambda: one.in_flight == 1)
            one.release.set()
            assert talk.read().json["path"] == "/hold"
            assert talk.is_closed()

    def test_a_client_may_wait_for_100_continue(self, plane: Any, one: ReplicaStandIn) -> None:
        with Talk(plane.port) as talk:
            talk.send(write_request("POST", "/echo", expect="100-continue", content_length="5"))
            assert talk.read_until_head()[0] == 100
            talk.send(b"hello")
            assert talk.read().json["size"] == 5

    def test_interim_responses_pass(self, plane: Any, one: ReplicaStandIn) -> None:
        with Talk(plane.port) as talk:
            reply = talk.ask("GET", "/hints")
            assert (reply.interim, reply.status) == ([103], 200)

    # while cold

    def test_requests_wait_for_the_first_replica(
        self, plane: Any, replicas: list[ReplicaStandIn]
    ) -> None:
        plane.set_replicas("svc", [])
        calls = [Background(ask, plane.port, "POST", f"/echo?{n}", b"x" * n) for n in range(50)]
        wait_for(lambda: plane.count_waiting("svc") == 50)
        plane.set_replicas("svc", replicas[:1])
        assert [call.result().status for call in calls] == [200] * 50
        assert {call.result().json["path"] for call in calls} == {f"/echo?{n}" for n in range(50)}

    def test_the_client_s_own_deadline_ends_the_wait(self, plane: Any) -> None:
        plane.set_replicas("svc", [])
        reply = ask(plane.port, "GET", "/echo", prefer="wait=1")
        assert reply.status == 504
        assert reply.json["error"]["code"] == "no-replica-in-time"

    def test_an_asynchronous_call_leaves_its_result(
        self, plane: Any, replicas: list[ReplicaStandIn]
    ) -> None:
        plane.set_replicas("svc", [])
        reply = ask(plane.port, "POST", "/echo", b"later", prefer="respond-async")
        assert reply.status == 202
        where = reply.headers["location"]
        assert ask(plane.port, "GET", where).status == 202
        plane.set_replicas("svc", replicas[:1])
        result = wait_for(lambda: (r := ask(plane.port, "GET", where)).status == 200 and r)
        assert (result.json["method"], result.json["size"]) == ("POST", 5)
        assert result.headers["x-request-id"] != reply.headers["x-request-id"]
        sent = {name.lower(): value for name, value in result.json["headers"]}
        assert (sent["x-forwarded-proto"], sent["x-forwarded-for"][-9:]) == ("http", "127.0.0.1")
        assert ask(plane.port, "GET", where + "0").status == 404
        with Talk(plane.port) as talk:  # a body after a response to HEAD would be the next response
            head = talk.ask("HEAD", "/echo", prefer="respond-async")
            assert (head.status, talk.ask("GET", "/echo").status) == (202, 200)

    # replicas that fail

    def test_a_replica_that_is_gone_is_passed_over(
        self, plane: Any, replicas: list[ReplicaStandIn]
    ) -> None:
        gone = ReplicaStandIn("gone").start()
        gone.stop()
        plane.set_replicas("svc", [gone, replicas[0]])
        assert {ask(plane.port, "POST", "/echo", b"x").status for _ in range(6)} == {200}

    def test_an_idempotent_request_is_tried_once_more(
        self, plane: Any, replicas: list[ReplicaStandIn]
    ) -> None:
        for each in replicas:
            each.reset()
        plane.set_replicas("svc", replicas[:2])
        reply = ask(plane.port, "GET", "/die")
        assert reply.status == 502
        assert sorted(len(each.seen) for each in replicas[:2]) == [1, 1]
        assert len(reply.json["error"]["request_id"]) > 4

    def test_other_requests_are_not_repeated(
        self, plane: Any, replicas: list[ReplicaStandIn]
    ) -> None:
        for each in replicas:
            each.reset()
        plane.set_replicas("svc", replicas[:2])
        reply = ask(plane.port, "POST", "/die", b"x")
        assert reply.status == 502
        assert reply.headers["x-request-id"] == reply.json["error"]["request_id"]
        assert sum(len(each.seen) for each in replicas) == 1
        assert ask(plane.port, "POST", "/die", b"x", idempotency_key="1").status == 502
        assert sum(len(each.seen) for each in replicas) == 3

    @pytest.mark.parametrize("path", ["/garbage", "/both"])
    def test_an_invalid_response_is_a_502(self, plane: Any, one: ReplicaStandIn, path: str) -> None:
        if path[1:] in plane.lacks:
            pytest.skip(plane.lacks[path[1:]])
        assert ask(plane.port, "POST", path).status == 502
        assert ask(plane.port, "GET", "/echo").status == 200

    def test_a_response_that_breaks_off_is_seen_as_broken(
        self, plane: Any, one: ReplicaStandIn
    ) -> None:
        with Talk(plane.port) as talk, pytest.raises((EOFError, ConnectionError)):
            talk.ask("GET", "/partial")

    # balance and change

    def test_a_replica_has_no_more_requests_than_it_may(
        self, plane: Any, replicas: list[ReplicaStandIn]
    ) -> None:
        for each in replicas:
            each.reset()
        plane.set_replicas("svc", replicas[:2])
        calls = [Background(ask, plane.port, "GET", "/hold") for _ in range(12)]
        wait_for(lambda: [each.in_flight for each in replicas[:2]] == [4, 4])
        for each in replicas:
            each.release.set()
        assert {call.result().status for call in calls} == {200}
        assert [each.most_in_flight for each in replicas[:2]] == [4, 4]

    def test_replicas_change_without_a_lost_request(
        self, plane: Any, replicas: list[ReplicaStandIn]
    ) -> None:
        for each in replicas:
            each.reset()
        plane.set_replicas("svc", replicas[:1])
        stop = threading.Event()

        def call() -> list[int]:
            statuses = []
            with Talk(plane.port) as talk:
                while not stop.is_set():
                    statuses.append(talk.ask("POST", "/echo", b"x").status)
            return statuses

        callers = [Background(call) for _ in range(4)]
        for chosen in ([0, 1], [1], [1, 2], [2], [], [0], [0, 1, 2], [2]) * 2:
            before = sum(len(each.seen) for each in replicas)
            plane.set_replicas("svc", [replicas[n] for n in chosen])
            if chosen:
                wait_for(lambda before=before: sum(len(x.seen) for x in replicas) > before + 8)
        stop.set()
        statuses = [status for caller in callers for status in caller.result()]
        assert set(statuses) == {200}
        assert len(statuses) > 100

    # distance and residency

    def test_the_nearest_replicas_with_room_get_the_requests(
        self, plane: Any, replicas: list[ReplicaStandIn]
    ) -> None:
        for each in replicas:
            each.reset()
        plane.set_replicas("svc", replicas, tiers={"r1": 1, "r2": 0, "r3": 2})
        for _ in range(6):
            assert ask(plane.port, "GET", "/echo").status == 200
        assert [len(each.seen) for each in replicas] == [0, 6, 0], "the nearest one has room"
        calls = []
        for expected in ([0, 4, 0], [4, 4, 0], [4, 4, 4]):
            calls += [Background(ask, plane.port, "GET", "/hold") for _ in range(4)]
            wait_for(lambda expected=expected: [x.in_flight for x in replicas] == expected)
        for each in replicas:
            each.release.set()
        assert {call.result().status for call in calls} == {200}
        wait_for(lambda: not any(each.in_flight for each in replicas))
        assert ask(plane.port, "GET", "/echo").status == 200
        assert [len(each.seen) for each in replicas] == [4, 11, 4], "requests return to the nearest"
        plane.set_replicas("svc", replicas, tiers={"r1": 0, "r2": 1, "r3": 1})
        assert ask(plane.port, "GET", "/echo").status == 200
        assert len(replicas[0].seen) == 5, "another one is the nearest now"
        gone = ReplicaStandIn("gone").start()
        gone.stop()
        plane.set_replicas("svc", [gone, replicas[1]], tiers={"r2": 3})
        assert {ask(plane.port, "GET", "/echo").status for _ in range(3)} == {200}, "farther ones"

    def test_a_request_stays_in_its_place(self, plane: Any, replicas: list[ReplicaStandIn]) -> None:
        for each in replicas:
            each.reset()
        places = {"r1": ("us", "us-east-1"), "r2": ("eu", "de"), "r3": ("eu", "fr")}
        plane.set_replicas("svc", replicas, places=places)
        for where in ("de", "EU, de", "de"):
            assert ask(plane.port, "GET", "/echo", cavvy_residency=where).status == 200
        assert [len(each.seen) for each in replicas] == [0, 3, 0]
        assert ask(plane.port, "GET", "/die", cavvy_residency="de").status == 502
        assert [len(each.seen) for each in replicas] == [0, 5, 0], "it is repeated there alone"
        for _ in range(4):
            assert ask(plane.port, "GET", "/echo", cavvy_residency="eu").status == 200
        seen = [len(each.seen) for each in replicas]
        assert (seen[0], sum(seen)) == (0, 9)
        assert seen[2] > 0, "both replicas in the area get them"
        never = ask(plane.port, "GET", "/echo", cavvy_residency="jp")
        assert (never.status, never.json["error"]["code"]) == (403, "residency-unmet")
        assert "no replicas in jp" in never.json["error"]["message"]
        assert ask(plane.port, "GET", "/echo", cavvy_residency="?").status == 400

    def test_a_request_waits_for_a_replica_in_its_place(
        self, plane: Any, replicas: list[ReplicaStandIn]
    ) -> None:
        for each in replicas:
            each.reset()
        plane.set_replicas("svc", replicas[:1], places={"r1": ("us",)})
        late = ask(plane.port, "GET", "/echo", cavvy_residency="eu", prefer="wait=0")
        assert (late.status, late.json["error"]["code"]) == (504, "no-replica-in-time")
        waiting = [
            Background(ask, plane.port, "GET", "/echo", cavvy_residency="eu") for _ in range(3)
        ]
        later = ask(plane.port, "GET", "/echo", cavvy_residency="eu", prefer="respond-async")
        assert later.status == 202
        wait_for(lambda: plane.count_waiting("svc") == 4)
        for _ in range(8):
            assert ask(plane.port, "GET", "/echo").status == 200, "others do not wait for them"
        assert (len(replicas[0].seen), plane.count_waiting("svc")) == (8, 4)
        both = {"r1": ("us",), "r2": ("eu", "de")}
        plane.set_replicas("svc", replicas[:2], places=both, tiers={"r2": 3})
        assert {call.result().status for call in waiting} == {200}
        wait_for(lambda: len(replicas[1].seen) == 4)
        assert len(replicas[0].seen) == 8

    def test_the_requests_of_a_key_stay_in_its_place(
        self, plane: Any, replicas: list[ReplicaStandIn]
    ) -> None:
        for each in replicas:
            each.reset()
        plane.set_replicas("keyed", replicas[:2], places={"r1": ("us",), "r2": ("eu",)})
        client = {"host": "keyed.example", "x_api_key": "eu"}
        for _ in range(4):
            assert ask(plane.port, "GET", "/echo", **client).status == 200
        assert ask(plane.port, "GET", "/echo", **client, prefer="respond-async").status == 202
        wait_for(lambda: len(replicas[1].seen) == 5)
        both = ask(plane.port, "GET", "/echo", **client, cavvy_residency="us", prefer="wait=0")
        assert (both.status, len(replicas[0].seen)) == (504, 0), "no replica is in both"

    # what is refused

    @pytest.mark.parametrize("what", SMUGGLING)
    def test_an_ambiguous_request_is_refused(
        self, plane: Any, one: ReplicaStandIn, what: str
    ) -> None:
        if what in plane.lacks:
            pytest.skip(plane.lacks[what])
        with Talk(plane.port) as talk:
            talk.send(b"POST /echo?smuggled HTTP/1.1\r\nHost: svc.example\r\n" + SMUGGLING[what])
            assert talk.read().status in (400, 501)
            assert talk.is_closed()
        assert ask(plane.port, "GET", "/echo?next").json["path"] == "/echo?next"
        assert [seen.path for seen in one.seen] == ["/echo?next"]

    @pytest.mark.parametrize("what", INVALID_HEADS)
    def test_a_head_that_is_not_valid_is_refused(
        self, plane: Any, one: ReplicaStandIn, what: str
    ) -> None:
        if what in plane.lacks:
            pytest.skip(plane.lacks[what])
        with Talk(plane.port) as talk:
            talk.send(INVALID_HEADS[what])
            assert talk.read().status in (400, 505)
        assert one.seen == []

    @pytest.mark.parametrize("fields", [b"X: y\r\n" * 6000, b"X: %b\r\n\r\n" % (b"y" * 16_384)])
    def test_a_large_head_is_refused(self, plane: Any, one: ReplicaStandIn, fields: bytes) -> None:
        with Talk(plane.port) as talk:
            talk.send(b"GET /echo HTTP/1.1\r\nHost: svc.example\r\n" + fields)
            assert talk.rest().startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))
        assert one.seen == []

    def test_a_body_larger_than_the_service_takes_is_refused(
        self, plane: Any, replicas: list[ReplicaStandIn]
    ) -> None:
        replicas[0].reset()
        plane.set_replicas("small", replicas[:1])
        host = "small.example"
        assert ask(plane.port, "POST", "/echo", b"x" * 100, host=host).json["size"] == 100
        refused = ask(plane.port, "POST", "/echo", b"x" * 101, host=host)
        assert (refused.status, refused.json["error"]["code"]) == (413, "body-too-large")
        for pieces, status in ((1, 200), (2, 413)):
            with Talk(plane.port) as talk:
                talk.send(write_request("POST", "/echo", host=host, transfer_encoding="chunked"))
                talk.send(b"60\r\n%b\r\n" % (b"x" * 96) * pieces + b"0\r\n\r\n")
                assert talk.read().status == status
        wait_for(lambda: replicas[0].in_flight == 0)
        assert [len(each.body) for each in replicas[0].seen] == [100, 96]

    def test_more_requests_than_may_wait_are_refused(
        self, plane: Any, replicas: list[ReplicaStandIn]
    ) -> None:
        replicas[0].reset()
        plane.set_replicas("small", replicas[:1])
        host = "small.example"
        calls = [Background(ask, plane.port, "GET", "/hold", host=host)]
        wait_for(lambda: replicas[0].in_flight == 1)
        calls += [Background(ask, plane.port, "GET", "/hold", host=host) for _ in range(2)]
        wait_for(lambda: plane.count_waiting("small") == 2)
        refused = ask(plane.port, "GET", "/hold", host=host)
        assert (refused.status, refused.json["error"]["code"]) == (429, "queue-full")
        assert refused.headers["x-request-id"] == refused.json["error"]["request_id"]
        replicas[0].release.set()
        assert {call.result().status for call in calls} == {200}

    def test_unknown_services_are_told(self, plane: Any) -> None:
        reply = ask(plane.port, "GET", "/echo", host="unknown.example")
        assert (reply.status, reply.json["error"]["code"]) == (404, "no-such-service")

    def test_a_service_with_keys_lets_only_them_in(
        self, plane: Any, replicas: list[ReplicaStandIn]
    ) -> None:
        replicas[0].reset()
        plane.set_replicas("keyed", replicas[:1])
        host = "keyed.example"
        assert ask(plane.port, "GET", "/echo", host=host).status == 401
        assert ask(plane.port, "GET", "/echo", host=host, authorization="Bearer no").status == 401
        assert replicas[0].seen == []
        for fields in ({"authorization": f"Bearer {KEY}"}, {"x_api_key": KEY}):
            assert ask(plane.port, "GET", "/echo", host=host, **fields).status == 200
            assert replicas[0].seen[-1].get("authorization") is None
            assert replicas[0].seen[-1].get("x-api-key") is None
        statuses = [
            ask(plane.port, "GET", "/echo", host=host, x_api_key="slow").status for _ in range(3)
        ]
        assert statuses == [200, 200, 429]

    @pytest.mark.parametrize("service", ["svc", "keyed"])
    def test_no_program_gets_a_key_of_a_service(
        self, plane: Any, replicas: list[ReplicaStandIn], service: str
    ) -> None:
        plane.set_replicas(service, replicas[:1])
        mistaken = "cavvysvc_of-another-service"
        for name, value in (
            ("Authorization", f"Bearer {mistaken}"),
            ("authorization", f"Basic {mistaken}"),
            ("X-API-Key", mistaken),
            ("x_Api_key", mistaken),
        ):
            replicas[0].reset()
            head = f"GET /echo HTTP/1.1\r\nHost: {service}.example\r\n{name}: {value}\r\n\r\n"
            with Talk(plane.port) as talk:
                talk.send(head.encode())
                assert talk.read().status == (200 if service == "svc" else 401)
            assert mistaken not in str(replicas[0].seen)
        replicas[0].reset()
        own = {"authorization": "Bearer own", "x_api_key": "own"}
        if service == "svc":
            assert ask(plane.port, "GET", "/echo", host="svc.example", **own).status == 200
            assert replicas[0].seen[-1].get("authorization") == "Bearer own"
            assert replicas[0].seen[-1].get("x-api-key") == "own"

    def test_a_rate_holds_for_each_client_and_says_when_to_come_back(
        self, plane: Any, replicas: list[ReplicaStandIn]
    ) -> None:
        replicas[0].reset()
        plane.set_replicas("rated", replicas[:1])
        host = "rated.example"

        def call(**fields: str) -> Any:
            return ask(plane.port, "GET", "/echo", host=host, **fields)

        assert [call(x_user="ada").status for _ in range(3)] == [200, 200, 429]
        refused = call(x_user="ada")
        assert refused.headers["retry-after"] == "100"  # a hundredth of a request a second
        assert "requests with the same x-user may be 0.01" in refused.json["error"]["message"]
        assert call(x_user="bob").status == 200, "others are counted apart"
        assert len(replicas[0].seen) == 3

    def test_a_rate_holds_for_each_address_of_a_client(
        self, plane: Any, replicas: list[ReplicaStandIn]
    ) -> None:
        plane.set_replicas("rated", replicas[:1])
        statuses = []
        for number in range(6):
            with Talk(plane.port, source=f"127.0.0.{2 + number % 2}") as talk:
                fields = {"host": "rated.example", "x_user": f"user-{number}"}
                statuses.append(talk.ask("GET", "/by-address/echo", **fields).status)
        assert statuses == [200, 200, 200, 200, 429, 429]

    @pytest.mark.parametrize("service", ["svc", "keyed"])
    def test_a_request_has_one_id_and_the_address_of_its_client(
        self, plane: Any, replicas: list[ReplicaStandIn], service: str
    ) -> None:
        replicas[0].reset()
        plane.set_replicas(service, replicas[:1])
        host = f"{service}.example"
        reply = ask(plane.port, "GET", "/echo", host=host, x_api_key=KEY)
        assert reply.headers["x-request-id"] == replicas[0].seen[-1].get("x-request-id")
        assert replicas[0].seen[-1].get("x-forwarded-for") == "127.0.0.1"
        refused = ask(plane.port, "GET", "/echo", host="keyed.example")
        assert refused.headers["x-request-id"] == refused.json["error"]["request_id"]
