"""The gateway sends requests to fallbacks, and neither keys nor fields pass in either direction."""

import json
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest
from tests.certificates import Authority
from tests.contract.engine_stand_in import EngineStandIn
from tests.contract.gateway_process import GatewayProcess, wait_for
from tests.contract.gateway_suite import of_models
from tests.contract.http_talk import Reply, Talk, ask, write_request
from tests.contract.replica_stand_in import Seen

CHAT = {"model": "org/tiny", "messages": [{"role": "user", "content": "how many words"}]}
JSON = {"host": "localhost", "content_type": "application/json"}
SECRET = "sk-of-the-project"
COOKIE = b"Set-Cookie: sid=1\r\nX-Internal: yes\r\nCavvy-Served-By: nobody\r\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
# answers of an API that are not passed on
REFUSED = {
    "redirect": b"HTTP/1.1 302 F\r\nLocation: http://169.254.169.254/\r\n"
    b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
    "page": b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 1\r\n\r\nx",
    "its key": b"HTTP/1.1 401 U\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    b'"sk-of-t"',
    "rate": b"HTTP/1.1 429 T\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
    "error": b"HTTP/1.1 500 I\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{",
    "coded": HEAD + b"Content-Encoding: br\r\nContent-Length: 1\r\n\r\nx",
    "upgrade": b"HTTP/1.1 101 S\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nx",
    "hints without end": b"HTTP/1.1 103 E\r\nLink: <x>\r\n\r\n" * 50,
    "a long head": HEAD + b"X: " + b"a" * 70_000,
    "nothing": b"",
}


@dataclass
class ApiStandIn(EngineStandIn):
    """An API, or an engine, that may send any bytes."""

    sends: bytes | None = None
    later: bytes | None = None  # what a request without a question for its usage gets

    async def _do_completions(self, request: Seen, _: dict[str, str], reader, writer) -> bool:
        if self.later is not None and b"stream_options" not in request.body:
            writer.write(self.later)
            return False
        if self.sends is None:
            return await super()._do_completions(request, _, reader, writer)
        writer.write(self.sends)
        return False

    def _answer(self, writer, answer: object, status: bytes = b"200 OK") -> bool:
        if self.name != "api":
            return super()._answer(writer, answer, status)
        body = json.dumps(answer).encode()
        head = b"HTTP/1.1 %b\r\nContent-Type: Application/JSON; charset=utf-8\r\n%b" + (
            b"Content-Length: %d\r\n\r\n%b"
        )
        writer.write(head % (status, COOKIE, len(body), body))
        return True


def make_services(api_port: int) -> list[dict[str, Any]]:
    url = f"http://127.0.0.1:{api_port}/base/v1"
    api = {
        "id": "api-1",
        "label": "api.example",
        "url": url,
        "model": "big",
        "prices": [1_000_000, 4_000_000],
    }
    api |= {"credential": "default/API"}
    other = {"id": "other", "label": "backup", "service": "other", "model": "org/other"}
    base = {
        "models": ["org/tiny"],
        "fallback_s": 0.02,
        "concurrency": 1,
        "wait_s": 0.2,
        "response_s": 0.3,
    }
    day = {"id": "day", "sha256": sha256(b"day").hexdigest(), "micros_per_day": 30}
    return [
        {**base, "name": "llm", "prefix": "/default/llm", "fallbacks": [api]},
        {**base, "name": "both", "prefix": "/default/both", "fallbacks": [other, api]},
        {**base, "name": "loop", "prefix": "/default/loop", "fallbacks": [{**api, "id": "l"}]},
        {
            **{**base, "name": "full", "prefix": "/default/full", "fallbacks": [api]},
            **{"queue_max": 1, "fallback_s": 20, "wait_s": 20},
        },
        {**base, "name": "spent", "prefix": "/default/spent", "fallbacks": [api], "keys": [day]},
        {
            **{**base, "name": "theirs", "prefix": "/default/theirs", "fallbacks": [other]},
            **{"project": "theirs"},
        },
        {**base, "name": "eu", "prefix": "/default/eu", "places": ["eu"], "fallbacks": [other]},
        {
            **{"name": "other", "prefix": "/default/other", "models": ["org/other"]},
            **{"concurrency": 1, "queue_max": 1, "wait_s": 0.2, "places": ["eu", "us"]},
        },
    ]


@pytest.fixture(scope="module")
def parts() -> Iterator[tuple[GatewayProcess, ApiStandIn, ApiStandIn]]:
    api, engine = ApiStandIn("api"), ApiStandIn("e1")
    api.start()
    engine.start()
    gateway = GatewayProcess(services=make_services(api.port))
    yield gateway, api, engine
    gateway.remove()
    api.stop()
    engine.stop()


@pytest.fixture
def gateway(parts: tuple[GatewayProcess, ApiStandIn, ApiStandIn]) -> GatewayProcess:
    gateway, *stand_ins = parts
    for each in stand_ins:
        each.reset()
        each.sends = each.later = None
        each.speaks, each.mute = "vllm", False
    allow(gateway)
    for each in make_services(0):
        gateway.set_replicas(each["name"], [])
    return gateway


@pytest.fixture
def api(parts: tuple[GatewayProcess, ApiStandIn, ApiStandIn]) -> ApiStandIn:
    return parts[1]


@pytest.fixture
def engine(parts: tuple[GatewayProcess, ApiStandIn, ApiStandIn]) -> ApiStandIn:
    return parts[2]


def allow(gateway: GatewayProcess, targets: str = "127.0.0.1", secret: str = SECRET) -> None:
    values = {"default/API": secret} if secret else {}
    given = {"type": "credentials", "values": values, "private_targets": targets}
    assert gateway.control(**given) == {}


def chat(gateway: GatewayProcess, service: str = "llm", **more: Any) -> Reply:
    headers = more.pop("headers", {})
    path = f"/default/{service}/v1/chat/completions?api-version=1"
    body = json.dumps({**CHAT, **more}).encode()
    return ask(gateway.port, "POST", path, body, **JSON, **headers)


@of_models
def test_a_cold_service_is_answered_by_the_api(gateway: GatewayProcess, api: ApiStandIn) -> None:
    private = {"authorization": "Bearer of-the-client", "cookie": "a=b", "x_forwarded_for": "9.9"}
    reply = chat(gateway, headers=private | {"openai_organization": "org-1"})
    assert (reply.status, reply.json["model"]) == (200, "big")
    assert reply.headers["cavvy-served-by"] == "api.example"
    known = {"content-type", "content-length", "cavvy-served-by", "x-request-id"}
    assert reply.headers.keys() == known
    assert reply.headers["content-type"] == "application/json"
    (seen,) = api.seen
    assert (seen.method, seen.path) == ("POST", "/base/v1/chat/completions")
    assert json.loads(seen.body) == {**CHAT, "model": "big"}
    sent = {name.lower(): value for name, value in seen.headers}
    assert sent["authorization"] == f"Bearer {SECRET}"
    assert sent.keys() == {
        *("host", "user-agent", "accept", "accept-encoding", "authorization"),
        *("content-type", "content-length", "cavvy-fallback"),
    }
    assert (gateway.facts("llm")["unserved"], gateway.facts("llm")["shed"]) == (0, 0)
    assert gateway.facts("llm")["fallbacks"]["api-1"] >= 1
    work = gateway.facts("llm")["work"]["api-1"][""]
    assert work["requests"] >= 1
    assert work["tokens"]["big"]["completion"] >= 5, "the model that answered"


@of_models
def test_streams_pass_and_are_counted(gateway: GatewayProcess, api: ApiStandIn) -> None:
    before = read_tokens(gateway)
    reply = chat(gateway, stream=True, max_tokens=40)
    assert reply.status == 200
    assert reply.body.count(b'"delta"') == 40
    assert b'"usage"' not in reply.body
    assert reply.headers["content-type"] == "text/event-stream"
    after = read_tokens(gateway)
    assert after["completion"] - before["completion"] == 40
    assert after["estimated"] == before["estimated"]
    api.speaks = "strict"  # it refuses the question for the usage, and gets the request without it
    reply = chat(gateway, stream=True, max_tokens=40)
    assert reply.body.count(b'"delta"') == 40
    assert [b"stream_options" in each.body for each in api.seen] == [True, True, False]
    assert {json.loads(each.body)["model"] for each in api.seen} == {"big"}


def read_tokens(gateway: GatewayProcess) -> dict[str, int]:
    work = gateway.facts("llm")["work"].get("api-1", {})
    none = {"completion": 0, "estimated": 0}
    return work.get("", {}).get("tokens", {}).get("big", none)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_an_api_must_not_send_is_not_passed_on(
    gateway: GatewayProcess, api: ApiStandIn, kind: str
) -> None:
    api.sends, before = REFUSED[kind], gateway.facts("llm")["unserved"]
    reply = chat(gateway)
    assert reply.status == 504
    assert reply.json["error"]["code"] == "no-replica-in-time"
    assert b"sk-" not in reply.body
    assert gateway.facts("llm")["unserved"] == before + 1
    assert b"169.254" not in reply.body + str(reply.headers).encode()
    assert "cavvy-served-by" not in reply.headers


@of_models
def test_an_error_of_the_request_is_passed_on(gateway: GatewayProcess, api: ApiStandIn) -> None:
    body = b'{"error": {"message": "too long"}}'
    head = b"HTTP/1.1 400 B\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n"
    api.sends = head % (COOKIE, len(body)) + body
    reply = chat(gateway)
    assert (reply.status, reply.body) == (400, body)
    assert "set-cookie" not in reply.headers


@pytest.mark.parametrize("targets", ["", "10.0.0.0/8", "169.254.0.0/16"])
def test_private_targets_bind_apis(gateway: GatewayProcess, api: ApiStandIn, targets: str) -> None:
    allow(gateway, targets)
    assert chat(gateway).status == 504
    assert not api.seen
    allow(gateway)


@pytest.mark.parametrize("secret", ["", "a b", "x\r\nHost: evil", "é"])
def test_an_api_is_not_called_without_its_key(
    gateway: GatewayProcess, api: ApiStandIn, secret: str
) -> None:
    allow(gateway, secret=secret)
    assert chat(gateway).status == 504
    assert not api.seen


def test_requests_that_must_stay_reach_no_api(
    gateway: GatewayProcess, api: ApiStandIn, engine: ApiStandIn
) -> None:
    assert chat(gateway, headers={"cavvy_residency": "eu"}).status == 504
    gateway.set_replicas("other", [engine])
    assert chat(gateway, "eu").status == 504  # the other service may run in the USA
    assert chat(gateway, "theirs").status == 504  # the other service is of another project
    before = gateway.facts("other")["unserved"]
    assert chat(gateway, "both", headers={"cavvy_residency": "asia"}).status == 504
    assert gateway.facts("other")["unserved"] == before, "it cannot stay in Asia there"
    assert chat(gateway, headers={"cavvy_fallback": "1"}).status in (429, 504)  # of a loop
    other = ask(gateway.port, "POST", "/default/llm/v1/files", b"{}", host="localhost")
    assert other.status == 504
    assert not api.seen
    assert not engine.seen


@of_models
def test_another_service_answers_with_its_own_model(
    gateway: GatewayProcess, api: ApiStandIn, engine: ApiStandIn
) -> None:
    gateway.set_replicas("other", [engine])
    reply = chat(gateway, "both")
    assert (reply.status, reply.json["model"]) == (200, "org/other")
    assert reply.headers["cavvy-served-by"] == "backup"
    assert [each.path for each in engine.seen] == ["/v1/chat/completions?api-version=1"]
    assert not api.seen
    (work,) = gateway.facts("other")["work"].values()
    assert work[""]["tokens"].keys() == {"org/other"}
    gateway.set_replicas("other", [])  # then the next fallback answers
    reply = chat(gateway, "both")
    assert (reply.status, reply.headers["cavvy-served-by"]) == (200, "api.example")


@of_models
@pytest.mark.parametrize(
    "sends", [b"", b"HTTP/1.1 503 S\r\nContent-Length: 0\r\n\r\n", b"SSH-2.0\r\n\r\n"]
)
def test_a_replica_that_fails_before_the_response_is_replaced(
    gateway: GatewayProcess, api: ApiStandIn, engine: ApiStandIn, sends: bytes
) -> None:
    gateway.set_replicas("llm", [engine])
    engine.sends = sends
    reply = chat(gateway)
    assert (reply.status, reply.headers["cavvy-served-by"]) == (200, "api.example")
    assert len(engine.seen) == (1 if sends else 2), "a request without a byte is repeated once"
    facts = gateway.facts("llm")
    assert facts["in_flight"] == facts["backlog"] == 0
    engine.sends = None
    reply = chat(gateway)
    assert (reply.status, reply.json["model"]) == (200, "org/tiny")
    assert "cavvy-served-by" not in reply.headers


@of_models
def test_a_replica_may_fail_after_it_refused_to_state_its_usage(
    gateway: GatewayProcess, api: ApiStandIn, engine: ApiStandIn
) -> None:
    gateway.set_replicas("both", [engine])
    engine.speaks = "strict"
    engine.later = HEAD.replace(b"200 OK", b"503 S") + b"Content-Length: 0\r\n\r\n"
    reply = chat(gateway, "both", stream=True, max_tokens=3)
    assert (reply.status, reply.headers["cavvy-served-by"]) == (200, "api.example")
    assert [b"stream_options" in each.body for each in engine.seen] == [True, False]
    assert reply.body.count(b'"delta"') == 3
    gateway.set_replicas("other", [api])
    assert chat(gateway, "both", stream=True).headers["cavvy-served-by"] == "backup"
    assert chat(gateway, "other", stream=True).status == 200
    asked = [b"stream_options" in each.body for each in api.seen]
    assert asked == [False, False, True]  # its engine has not refused


def test_nothing_is_repeated_after_the_first_byte(
    gateway: GatewayProcess, api: ApiStandIn, engine: ApiStandIn
) -> None:
    gateway.set_replicas("llm", [engine])
    engine.sends = HEAD + b"Content-Length: 9\r\n\r\n{"
    with pytest.raises((EOFError, ConnectionError)):
        chat(gateway)
    engine.sends = HEAD + b"Set-Cookie: a=b\r\nContent-Length: 2\r\n\r\n{}"  # its own service may
    assert "set-cookie" in chat(gateway).headers
    assert not api.seen
    # neither is a request with an effect
    engine.sends = b""
    done = ask(gateway.port, "POST", "/default/both/die", b"{}", host="localhost")
    assert done.status in (502, 504)
    assert not api.seen


@of_models
def test_the_price_counts_in_the_limit_of_the_key(gateway: GatewayProcess, api: ApiStandIn) -> None:
    key = {"authorization": "Bearer day"}
    assert chat(gateway, "spent", max_tokens=10, headers=key).status == 200
    refused = chat(gateway, "spent", headers=key)
    assert (refused.status, len(api.seen)) == (429, 1)
    assert b"<$0.01 a day" in refused.body


@of_models
def test_an_api_that_never_ends_is_bounded(gateway: GatewayProcess, api: ApiStandIn) -> None:
    api.sends = HEAD + b"\r\n" + b" " * (66 << 20)
    with Talk(gateway.port) as talk:
        body = json.dumps(CHAT).encode()
        talk.send(write_request("POST", "/default/llm/v1/chat/completions", body, **JSON))
        size = 0
        with suppress(ConnectionError):
            while data := talk.socket.recv(1 << 20):
                size += len(data)
    assert size < 65 << 20
    api.sends, api.mute = None, True  # nothing at all
    assert chat(gateway).status == 504
    wait_for(lambda: not api.in_flight)
    with Talk(gateway.port) as talk:  # the client leaves
        talk.send(write_request("POST", "/default/llm/v1/chat/completions", body, **JSON))
        wait_for(lambda: api.in_flight)
    wait_for(lambda: not api.in_flight)


@of_models
def test_a_full_queue_sends_requests_to_fallbacks(
    gateway: GatewayProcess, api: ApiStandIn, engine: ApiStandIn
) -> None:
    gateway.set_replicas("full", [engine])
    engine.mute = True
    path, body = "/default/full/v1/chat/completions", json.dumps(CHAT).encode()
    with Talk(gateway.port) as first, Talk(gateway.port) as second:
        first.send(write_request("POST", path, body, **JSON))
        wait_for(lambda: engine.in_flight)
        second.send(write_request("POST", path, body, **JSON))
        wait_for(lambda: gateway.facts("full")["backlog"])
        facts = gateway.facts("full")
        assert facts["backlog_size"] == len(body) // 4, "a token for each four bytes"
        assert facts["prompts"]["arrived"] >= 2 * facts["backlog_size"]
        reply = chat(gateway, "full")
        assert (reply.status, reply.headers["cavvy-served-by"]) == (200, "api.example")


def respond(gateway: GatewayProcess, service: str, last: str | None = None) -> Reply:
    body = json.dumps({"model": "org/tiny", "input": "a", "previous_response_id": last}).encode()
    return ask(gateway.port, "POST", f"/default/{service}/v1/responses", body, **JSON)


@of_models
def test_a_response_is_continued_only_where_it_was_made(
    gateway: GatewayProcess, api: ApiStandIn, engine: ApiStandIn
) -> None:
    gateway.set_replicas("both", [engine])
    gateway.set_replicas("other", [api])
    made = respond(gateway, "both").json["id"]
    engine.mute = True
    with Talk(gateway.port) as talk:
        body = json.dumps(CHAT).encode()
        talk.send(write_request("POST", "/default/both/v1/chat/completions", body, **JSON))
        wait_for(lambda: engine.in_flight)
        # other services and APIs would say that there is no such response
        assert respond(gateway, "both", made).status == 504
        for method in ("GET", "DELETE"):
            path = f"/default/both/v1/responses/{made}"
            assert ask(gateway.port, method, path, b"", **JSON).status == 504
    assert not api.seen
    wait_for(lambda: not engine.in_flight)
    assert respond(gateway, "both", made).status == 200
    for service, others in (("both", [api]), ("llm", [])):  # by a service, and by an API
        gateway.set_replicas("other", others)
        gateway.set_replicas(service, [])
        made = respond(gateway, service).json["id"]
        assert made in api.made
        reply = respond(gateway, service, made)
        assert (reply.status, reply.json["id"] in api.made) == (200, True)
        assert "cavvy-served-by" in reply.headers


class TlsApi(BaseHTTPRequestHandler):
    """An API with TLS, which counts requests in `seen`."""

    seen: ClassVar[list[str]] = []

    def log_message(self, *_: object) -> None: ...

    def do_POST(self) -> None:
        self.seen.append(self.path)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")


@of_models
def test_an_api_needs_a_certificate_for_its_name_that_the_system_trusts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted, stranger = tmp_path / "trusted", tmp_path / "stranger"
    trusted.mkdir()
    stranger.mkdir()
    own, foreign = Authority(trusted), Authority(stranger)
    monkeypatch.setenv("SSL_CERT_FILE", str(own.ca))
    with ExitStack() as stack:
        ports = [
            stack.enter_context(serving_tls(*files))
            for files in (own.issue(), own.issue("b", host="b.example"), foreign.issue())
        ]
        services = []
        for number, port in enumerate(ports):
            api = {"id": f"api-{number}", "label": "api", "model": "m"}
            api["url"] = f"https://127.0.0.1:{port}/v1"
            base = {"name": f"s{number}", "prefix": f"/default/s{number}", "models": ["org/tiny"]}
            services.append({**base, "fallback_s": 0.01, "wait_s": 0.1, "fallbacks": [api]})
        gateway = GatewayProcess(services=services)
        stack.callback(gateway.remove)
        allow(gateway)
        assert [chat(gateway, f"s{number}").status for number in range(3)] == [200, 504, 504]
        assert TlsApi.seen == ["/v1/chat/completions"]


@contextmanager
def serving_tls(certificate: Path, key: Path) -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), TlsApi)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(
        server.socket, server_side=True, do_handshake_on_connect=False
    )
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
