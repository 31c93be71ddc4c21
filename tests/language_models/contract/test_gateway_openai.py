"""What clients of OpenAI's API see through the gateway, by OpenAI's own package."""

import json
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from hashlib import sha256
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from tests.contract.engine_stand_in import EngineStandIn
from tests.contract.gateway_process import GatewayProcess, wait_for
from tests.contract.gateway_suite import KEY, KEYED
from tests.contract.http_talk import Talk, ask, write_request
from tests.waits import PATIENCE_S

from cavvy.capabilities.language_models.response_holders import ResponseHolders

openai = pytest.importorskip("openai", reason="`make setup-dev` installs OpenAI's client")

Connect = Callable[..., Any]
CHAT: list[Any] = [{"role": "user", "content": "how many words are these"}]
SERVICES: list[dict[str, Any]] = [
    {"name": "llm", "prefix": "/default/llm", "models": ["org/tiny"]},
    {
        **{**KEYED, "name": "keyed", "hosts": ["keyed.example"], "models": ["org/private"]},
        "project": "site",
    },
    {
        **{"name": "narrow", "prefix": "/default/narrow", "models": ["narrow"]},
        **{"concurrency": 1, "queue_max": 1, "wait_s": 0.2},
    },
    {"name": "mute", "prefix": "/default/mute", "models": ["mute"], "response_s": 0.2},
    {
        **{"name": "limited", "hosts": ["limited.example"], "models": ["limited"]},
        **{"project": "site", "concurrency": 1},
        "keys": [
            {"id": "few", "sha256": sha256(b"few").hexdigest(), "tokens_per_min": 1000},
            {"id": "far", "sha256": sha256(b"far").hexdigest(), "tokens_per_min": 1000},
            {"id": "day", "sha256": sha256(b"day").hexdigest(), "micros_per_day": 1},
            {"id": "one", "sha256": sha256(b"one").hexdigest()},
            {"id": "two", "sha256": sha256(b"two").hexdigest()},
        ],
    },
    {
        **{"name": "whole", "hosts": ["whole.example"], "prefix": "/a/whole"},
        **{"strip_prefix": False, "project": "site"},
    },
    {"name": "closed", "prefix": "/default/closed", "models": ["closed"], "closed": "spent"},
]


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineStandIn]:
    made = EngineStandIn("e1")
    made.start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def gateway(engine: EngineStandIn) -> Iterator[GatewayProcess]:
    made = GatewayProcess(services=SERVICES)
    set_replicas(made, engine)
    yield made
    made.remove()


def set_replicas(gateway: GatewayProcess, engine: EngineStandIn) -> None:
    for each in SERVICES:
        replicas = [] if each["name"] == "narrow" else [engine]
        gateway.set_replicas(each["name"], replicas, rate_micros=10**12)


@pytest.fixture
def connect(gateway: GatewayProcess) -> Iterator[Connect]:
    """Make clients, which are closed after the test."""
    with ExitStack() as stack:

        def make(path: str = "/v1", **more: Any) -> Any:
            base = f"http://127.0.0.1:{gateway.port}{path}"
            given = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE_S, **more}
            return stack.enter_context(openai.OpenAI(base_url=base, **given))

        yield make


@pytest.fixture
def client(connect: Connect, engine: EngineStandIn) -> Any:
    engine.reset()
    engine.split, engine.pause_s, engine.speaks, engine.mute = 0, 0.0, "vllm", False
    engine.deaths, engine.stream_ends = 0, 0.0
    return connect()


def test_each_route_answers_through_the_client(client: Any, engine: EngineStandIn) -> None:
    assert [each.id for each in client.models.list()] == ["closed", "mute", "narrow", "org/tiny"]
    assert client.models.retrieve("org/tiny").id == "org/tiny"
    chat = client.chat.completions.create(model="org/tiny", messages=CHAT, max_tokens=3)
    assert chat.choices[0].message.content == "word0 word1 word2 "
    assert client.completions.create(model="org/tiny", prompt="a").choices[0].text
    assert client.responses.create(model="org/tiny", input="a b").output_text == "word " * 5
    vectors = client.embeddings.create(model="org/tiny", input="a b", encoding_format="float")
    assert len(vectors.data[0].embedding) == 1000
    speech = client.audio.speech.create(model="org/tiny", voice="x", input="a")
    assert len(speech.read()) == 450_002
    text = client.audio.transcriptions.create(model="org/tiny", file=("a.wav", b"x" * 300_000))
    assert int(text.text.split()[0]) > 300_000
    ranked = client.post("/rerank", body={"model": "org/tiny", "query": "a"}, cast_to=object)
    assert ranked["results"][0]["index"] == 0


@pytest.mark.parametrize("split", [0, 7])
def test_streams_arrive_as_the_engine_sent_them(
    client: Any, engine: EngineStandIn, split: int
) -> None:
    engine.split = split
    create = client.chat.completions.create
    words = [
        each.choices[0].delta.content
        for each in create(model="org/tiny", messages=CHAT, max_tokens=4, stream=True)
    ]
    assert words == [f"word{number} " for number in range(4)]
    options = {"include_usage": True}
    *_, last = create(model="org/tiny", messages=CHAT, stream=True, stream_options=options)
    assert (last.choices, last.usage.completion_tokens) == ([], 5)
    events = [each.type for each in client.responses.create(model="org/tiny", input="a", stream=1)]
    assert events[-1] == "response.completed"


def test_a_client_that_leaves_a_stream_frees_the_replica(
    client: Any, engine: EngineStandIn, gateway: GatewayProcess
) -> None:
    engine.pause_s = 0.01
    aborted = engine.aborted
    with client.chat.completions.create(
        model="org/tiny", messages=CHAT, max_tokens=100_000, stream=True
    ) as stream:
        next(stream)
    wait_for(lambda: engine.aborted > aborted and not gateway.facts("llm")["in_flight"])


def test_each_refusal_raises_the_error_that_clients_expect(
    client: Any, engine: EngineStandIn, connect: Connect
) -> None:
    def refuse(kind: Any, model: str = "org/tiny", to: Any = client, **more: Any) -> Any:
        with pytest.raises(kind) as raised:
            to.chat.completions.create(model=model, messages=CHAT, **more)
        error = raised.value
        assert error.request_id
        assert set(error.body) == {"code", "message", "param", "type", "request_id"}
        return error

    keyed = connect("/site/v1", api_key=KEY)
    assert refuse(openai.NotFoundError, "org/other", keyed).code == "model_not_found"
    unknown = connect(api_key="cavvysvc_" + "x" * 43)
    assert refuse(openai.AuthenticationError, to=unknown).type == "authentication_error"
    assert refuse(openai.APIStatusError, "closed").status_code == 402
    assert refuse(openai.InternalServerError, "narrow").code == "no-replica-in-time"
    engine.mute = True
    assert refuse(openai.InternalServerError, "mute").code == "replica-silent"
    engine.mute = False
    slow = connect("/site/v1", api_key="slow")
    for _ in range(2):
        slow.chat.completions.create(model="org/private", messages=CHAT)
    limited = refuse(openai.RateLimitError, "org/private", slow)
    assert (limited.code, limited.type) == ("rate-exceeded", "rate_limit_error")
    assert 90 <= int(limited.response.headers["retry-after"]) <= 100
    own = connect("/default/llm/v1")
    with pytest.raises(openai.BadRequestError, match="too long"):  # the engine's own error
        own.post("/fails", body={}, cast_to=object)


def test_messages_have_errors_in_anthropics_format(gateway: GatewayProcess) -> None:
    for path, body, status, kind in (
        ("/v1/messages", b"{}", 400, "invalid_request_error"),
        ("/v1/messages", b'{"model": "closed"}', 402, "billing_error"),
        ("/site/v1/messages?beta=true", b'{"model": "no"}', 401, "authentication_error"),
        ("/default/narrow/v1/messages", b"{}", 504, "timeout_error"),
        ("/default/none/v1/messages/count_tokens", b"{}", 404, "not_found_error"),
    ):
        reply = ask(gateway.port, "POST", path, body, host="any.example")
        assert (reply.status, reply.json["type"]) == (status, "error")
        assert reply.json["error"]["type"] == kind
        assert reply.json["request_id"] == reply.headers["x-request-id"]


def test_routes_that_name_no_model_are_explained(gateway: GatewayProcess) -> None:
    for method, path, status in (
        ("GET", "/v1/chat/completions", 405),
        ("PUT", "/site/v1/tokenize", 405),
        ("PUT", "/v1/responses/resp_1", 404),
        ("POST", "/site/v1/assistants", 404),
        ("POST", "/v1/chat/completions/", 404),
    ):
        reply = ask(gateway.port, method, path, b"", host="any.example")
        error = reply.json["error"]
        assert (reply.status, error["type"]) == (status, "invalid_request_error"), path
        assert ("POST" if status == 405 else "/PROJECT/SERVICE/v1") in error["message"]
        assert reply.headers.get("allow") == ("POST, OPTIONS" if status == 405 else None)
    other = ask(gateway.port, "GET", "/nothing", b"", host="any.example").json
    assert other["error"]["message"] == "no service has this host name and path"


@pytest.fixture
def other(engine: EngineStandIn, gateway: GatewayProcess) -> Iterator[EngineStandIn]:
    """A second replica of `llm` and of `limited`."""
    made = EngineStandIn("e2")
    made.start()
    for name in ("llm", "limited"):
        gateway.set_replicas(name, [engine, made], rate_micros=10**12)
    yield made
    set_replicas(gateway, engine)
    made.stop()


@pytest.mark.parametrize("split", [0, 5])
def test_a_response_is_continued_and_read_where_it_was_made(
    client: Any, engine: EngineStandIn, other: EngineStandIn, split: int
) -> None:
    engine.split = other.split = split
    first = [client.responses.create(model="org/tiny", input="a") for _ in range(4)]
    streams = [
        next(iter(client.responses.create(model="org/tiny", input="a", stream=True))).response
        for _ in range(4)
    ]
    made = [each.id for each in (*first, *streams)]
    assert {"resp_e1", "resp_e2"} == {each.rpartition("-")[0] for each in made}
    for each in made * 2:
        assert client.responses.retrieve(each).id == each
        more = client.responses.create(model="org/tiny", input="b", previous_response_id=each)
        assert more.id.rpartition("-")[0] == each.rpartition("-")[0]
    client.responses.cancel(made[0])
    client.responses.delete(made[-1])
    assert list(client.responses.input_items.list(made[0])) == []


def test_a_response_is_found_by_those_who_may_call_its_service(
    client: Any, connect: Connect, other: EngineStandIn, gateway: GatewayProcess
) -> None:
    with_key = connect("/v1", api_key="one")
    made = [with_key.responses.create(model="limited", input="a").id for _ in range(2)]
    for each in made:
        assert with_key.responses.retrieve(each).id == each
        with pytest.raises(openai.NotFoundError, match="no replica is known to hold"):
            client.responses.retrieve(each)
        with pytest.raises(openai.AuthenticationError):
            connect("/v1", api_key="cavvysvc_wrong").responses.retrieve(each)
    for odd in ("resp_", "..%2f..%2fmetrics", "x" * 4000, "%00", "resp_e2-0/../../files"):
        reply = ask(gateway.port, "GET", f"/v1/responses/{odd}", b"", host="any.example")
        assert (reply.status, reply.json["error"]["type"]) == (404, "invalid_request_error")
    for name in ("compact", "input_tokens"):
        reply = ask(gateway.port, "GET", f"/v1/responses/{name}", b"", host="any.example")
        assert reply.status == 405


def test_a_response_belongs_to_its_key(
    connect: Connect, client: Any, gateway: GatewayProcess, engine: EngineStandIn
) -> None:
    """However its ID is written: engines decode what the gateway must then decode, too."""
    mine, theirs = connect("/v1", api_key="one"), connect("/v1", api_key="two")
    made = mine.responses.create(model="limited", input="a").id
    more = mine.responses.create(model="limited", input="b", previous_response_id=made).id
    others = theirs.responses.create(model="limited", input="a").id
    for act in (theirs.responses.retrieve, theirs.responses.delete, theirs.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="the key has no response"):
            act(more)
    with pytest.raises(openai.NotFoundError, match="the key has no response"):
        theirs.responses.create(model="limited", input="b", previous_response_id=made)
    asked = {"Authorization": "Bearer two", "Content-Type": "application/json"}
    body = f'{{"model": "limited", "input": "b", "top_p": NaN, "previous_response_id": "{made}"}}'
    paths = (f"/v1/%72esponses/{made}", f"//v1/./responses/{made}", f"/v1/responses/%72{made[1:]}")
    for path in paths:
        reply = ask(gateway.port, "GET", path, b"", host="limited.example", **asked)
        assert reply.status == 404, path
    reply = ask(
        gateway.port,
        "POST",
        "/v1/responses",
        body.encode(),
        host="limited.example",
        **asked,
    )
    assert reply.status == 400, reply.json
    assert theirs.responses.retrieve(others).id == others
    assert mine.responses.retrieve(made).id == made


def test_a_gateway_that_starts_again_knows_whose_the_responses_are(tmp_path: Path) -> None:
    holders = ResponseHolders(tmp_path, "s")
    holders.add("resp_1", "r", "one")
    holders.add("resp_2", "r")
    holders.add("resp_1", "other", "two")  # a replica that states the ID of another's response
    for known in (holders, ResponseHolders(tmp_path, "s")):
        owned = [known.owns(key, "resp_1") for key in ("one", "two", "")]
        assert (owned, known.find("resp_1")) == ([True, False, False], "other")
        assert (known.owns("", "resp_2"), known.owns("one", "resp_2")) == (True, False)
        assert known.owns("one", "resp_3") is None


def test_a_response_whose_replica_has_ended_is_unknown_to_the_others(
    client: Any, engine: EngineStandIn, other: EngineStandIn, gateway: GatewayProcess
) -> None:
    made = [client.responses.create(model="org/tiny", input="a").id for _ in range(4)]
    lost = next(each for each in made if each.startswith("resp_e2"))
    gateway.set_replicas("llm", [engine], rate_micros=10**12)
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.create(model="org/tiny", input="b", previous_response_id=lost)
    for odd in (None, 5, [lost], "x" * 10_000, {"id": lost}):
        body = {"model": "org/tiny", "input": "b", "previous_response_id": odd}
        reply = ask(
            gateway.port, "POST", "/v1/responses", json.dumps(body).encode(), host="any.example"
        )
        assert reply.status in (200, 404, 502)
    assert gateway.process.poll() is None


def test_a_gateway_that_starts_again_knows_the_responses_it_has_passed_on(
    engine: EngineStandIn, other: EngineStandIn
) -> None:
    gateway = GatewayProcess(services=SERVICES[:1])
    gateway.config["port"] = gateway.port
    base = f"http://127.0.0.1:{gateway.port}/v1"
    with openai.OpenAI(base_url=base, api_key="none", timeout=PATIENCE_S) as client:
        gateway.set_replicas("llm", [engine, other])
        made = [client.responses.create(model="org/tiny", input="a").id for _ in range(6)]
        assert {"resp_e1", "resp_e2"} == {each.rpartition("-")[0] for each in made}
        [file] = (gateway.folder / "state").glob("responses-*")
        assert file.stat().st_mode & 0o777 == 0o600
        with file.open("a") as lines:
            lines.write("resp_odd \nresp_x y z\nresp_e1-99 cut-off-by-a-kill")
        gateway.process.kill()
        gateway.process.wait()
        gateway.start()
        gateway.set_replicas("llm", [engine, other])
        for each in made * 2:
            assert client.responses.retrieve(each).id == each  # writes nothing
        more = [client.responses.create(model="org/tiny", input="a").id for _ in range(2)]
        assert [line.split()[0] for line in file.read_text().splitlines()] == [*made, *more]
        gateway.set_services()
        assert not file.exists()
    gateway.remove()


def test_a_response_that_another_gateway_has_passed_on_is_found(
    engine: EngineStandIn, other: EngineStandIn
) -> None:
    gateways = [GatewayProcess(services=SERVICES[:1]) for _ in range(2)]
    with ExitStack() as stack:
        clients = []
        for each in gateways:
            stack.callback(each.remove)
            each.set_replicas("llm", [engine, other])
            base = f"http://127.0.0.1:{each.port}/v1"
            one = openai.OpenAI(base_url=base, api_key="none", timeout=PATIENCE_S)
            clients.append(stack.enter_context(one))
        first, second = clients
        made = [first.responses.create(model="org/tiny", input="a").id for _ in range(6)]
        assert {"resp_e1", "resp_e2"} == {each.rpartition("-")[0] for each in made}
        for each in made[:3]:
            assert second.responses.retrieve(each).id == each
        for each in reversed(made):
            more = second.responses.create(model="org/tiny", input="b", previous_response_id=each)
            assert more.id.rpartition("-")[0] == each.rpartition("-")[0]
            assert first.responses.retrieve(more.id).id == more.id
        for odd in ("resp_none", "resp_a\r\nX: y", "r" * 5000, f"{made[0]}/../../files"):
            with pytest.raises(openai.NotFoundError):
                second.responses.create(model="org/tiny", input="b", previous_response_id=odd)
        assert all(each.get("X") is None for each in (*engine.seen, *other.seen))


def test_a_file_of_responses_that_cannot_be_used_is_done_without(tmp_path: Path) -> None:
    holders = ResponseHolders(tmp_path, "s")
    for number in range(3):
        holders.add(f"resp_{number}", "r")
    [file] = tmp_path.iterdir()
    file.unlink()
    file.symlink_to("/dev/zero")
    for folder in (tmp_path, tmp_path / "missing"):
        holders = ResponseHolders(folder, "s")
        holders.add("resp_7", "r")
        assert (holders.find("resp_0"), holders.find("resp_7")) == (None, "r")
        holders.remove()
    assert file.is_symlink()


def test_odd_bodies_get_a_clear_answer(gateway: GatewayProcess) -> None:
    deep = b"[" * 200_000
    for body in (
        b'{"messages": ' + deep + b"]" * 200_000 + b', "model": "org/tiny"}',
        b'{"model": "org/tiny", "messages": ' + deep,
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b'{"model": ["org/tiny"]}',
        b"\x00" * 1000,
    ):
        for path in ("/v1/chat/completions", "/v1/embeddings"):
            reply = ask(gateway.port, "POST", path, body, host="any.example")
            assert (reply.status, reply.json["error"]["code"]) == (400, "bad-request")
            assert "`model`" in reply.json["error"]["message"]
    assert gateway.process.poll() is None


def count(gateway: GatewayProcess, service: str = "llm") -> Counter[str]:
    """The tokens that the gateway has counted for a service."""
    found: Counter[str] = Counter()
    for counts in gateway.facts(service)["work"].values():
        for each in counts.values():
            for use in each["tokens"].values():
                found.update(use)
    return found


def count_more(gateway: GatewayProcess, before: Counter[str]) -> dict[str, int]:
    return {name: n - before[name] for name, n in count(gateway).items() if n != before[name]}


@pytest.mark.parametrize(("speaks", "split"), [("vllm", 0), ("openai-null", 1), ("llama", 13)])
def test_the_gateway_counts_what_the_engine_counts(
    client: Any, engine: EngineStandIn, gateway: GatewayProcess, speaks: str, split: int
) -> None:
    engine.speaks, engine.split = speaks, split
    before, _ = count(gateway), engine.tokens.clear()
    times = gateway.facts("llm")["tokens"]
    create, terms = client.chat.completions.create, {"model": "org/tiny", "messages": CHAT}
    create(**terms)
    for more in ({}, {"stream_options": {"include_usage": True}}):
        events = list(create(**terms, max_tokens=7, stream=True, **more))
        assert sum(not each.choices for each in events) == len(more)
        assert [each.usage for each in events[:7]] == [None] * 7
    list(client.completions.create(model="org/tiny", prompt="a", stream=True))
    client.responses.create(model="org/tiny", input="a b")
    list(client.responses.create(model="org/tiny", input="a b", stream=True))
    client.embeddings.create(model="org/tiny", input="a b c", encoding_format="float")
    client.post("/rerank", body={"model": "org/tiny", "query": "a"}, cast_to=object)
    client.audio.transcriptions.create(model="org/tiny", file=("a.wav", b"x"))
    client.audio.speech.create(model="org/tiny", voice="x", input="a")
    for stream in (False, True):
        body = {"model": "org/tiny", "messages": CHAT, "stream": stream}
        client.post("/messages", body=body, cast_to=object)
    assert count_more(gateway, before) == dict(engine.tokens)
    measured = {name: n - times[name] for name, n in gateway.facts("llm")["tokens"].items()}
    assert measured["answers"] == 5, "the streams"
    assert measured["completion"] == 7 + 7 + 5 + 5 + 5 == measured["gaps"] + 5
    assert measured["first_s"] > 0
    assert measured["gap_s"] > 0
    sent = [json.loads(each.body) for each in engine.seen if each.path == "/v1/chat/completions"]
    assert [each.pop("stream_options", None) for each in sent] == [None] + [
        {"include_usage": True}
    ] * 2
    codings = {each.get("accept-encoding") for each in engine.seen if "speech" not in each.path}
    assert codings == {"identity"}


def test_an_answer_counts_if_its_client_leaves_before_the_engine_has_ended_it(
    engine: EngineStandIn, gateway: GatewayProcess
) -> None:
    before = gateway.facts("llm")["tokens"]["answers"]
    engine.speaks, engine.split, engine.pause_s = "vllm", 0, 0.3
    body = json.dumps({"model": "org/tiny", "messages": CHAT, "max_tokens": 2, "stream": True})
    connection = HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE_S)
    connection.request("POST", "/v1/chat/completions", body, {"Host": "any.example"})
    reset = struct.pack("ii", 1, 0)  # what a client sends that leaves bytes unread
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    answer = connection.getresponse()
    while b"[DONE]" not in answer.readline():
        pass
    answer.close()
    connection.close()
    engine.pause_s = 0.0
    wait_for(lambda: gateway.facts("llm")["tokens"]["answers"] == before + 1)


def test_the_times_of_an_answer_count_if_its_bytes_arrive_one_by_one(
    client: Any, engine: EngineStandIn, gateway: GatewayProcess
) -> None:
    before = gateway.facts("llm")["tokens"]
    engine.speaks, engine.split, engine.pause_s = "vllm", 1, 0.001
    list(client.chat.completions.create(model="org/tiny", messages=CHAT, max_tokens=2, stream=True))
    engine.pause_s = 0.0

    def count_more(name: str) -> float:
        return float(gateway.facts("llm")["tokens"][name] - before[name])

    wait_for(lambda: count_more("answers") == 1)
    assert (count_more("completion"), count_more("gaps")) == (2, 1)


def test_tokens_of_a_deferred_call_count_below_a_prefix_that_stays(
    client: Any, engine: EngineStandIn, gateway: GatewayProcess
) -> None:
    engine.tokens.clear()
    body = json.dumps({"model": "x", "messages": CHAT}).encode()
    sent = {"host": "whole.example", "content_type": "application/json", "prefer": "respond-async"}
    assert ask(gateway.port, "POST", "/a/whole/v1/chat/completions", body, **sent).status == 202
    wait_for(lambda: count(gateway, "whole")["completion"] == engine.tokens["completion"] > 0)


@pytest.mark.parametrize("speaks", ["vllm", "sized", "coded"])
def test_a_request_that_is_asked_for_its_usage_ends_where_the_next_begins(
    client: Any, engine: EngineStandIn, gateway: GatewayProcess, speaks: str
) -> None:
    """Of answers that cannot be changed, nothing is removed."""
    engine.speaks = speaks
    body = json.dumps({"model": "org/tiny", "messages": CHAT, "stream": True}).encode()
    path, sent = "/v1/chat/completions", {"host": "any.example", "content_type": "application/json"}
    chunked = write_request("POST", path, **sent, transfer_encoding="chunked")
    chunked += b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (9, body[:9], len(body) - 9, body[9:])
    with Talk(gateway.port) as talk:
        talk.send(chunked + write_request("POST", path, body, **sent) + chunked)
        replies = [talk.read("POST") for _ in range(3)]
    assert [each.status for each in replies] == [200] * 3
    assert all(each.body.endswith(b"data: [DONE]\n\n") for each in replies)
    assert [b'"usage"' in each.body for each in replies] == [speaks != "vllm"] * 3
    wanted = {**json.loads(body), "stream_options": {"include_usage": True}}
    assert [json.loads(each.body) for each in engine.seen] == [wanted] * 3


def test_an_engine_that_refuses_the_question_gets_the_request_as_it_was(
    client: Any, engine: EngineStandIn, gateway: GatewayProcess
) -> None:
    gateway.set_services(*SERVICES[1:], {**SERVICES[0], "cold_start_s": 9})
    engine.speaks = "strict"
    before, _ = count(gateway), engine.tokens.clear()
    for number in range(2):
        stream = client.chat.completions.create(model="org/tiny", messages=CHAT, stream=True)
        assert len(list(stream)) == 5
        assert len(engine.seen) == number + 2, "it is asked once"
    assert b"stream_options" not in engine.seen[-1].body
    more = count_more(gateway, before)
    assert more["completion"] == engine.tokens["completion"], "an event is a token"
    assert more["estimated"] == more["completion"] + more["prompt"]
    engine.speaks = "vllm"
    gateway.set_services(*SERVICES)


def test_the_delivered_part_of_a_stream_that_a_client_leaves_counts(
    client: Any, engine: EngineStandIn, gateway: GatewayProcess
) -> None:
    engine.pause_s, before = 0.01, count(gateway)
    terms = {"model": "org/tiny", "messages": CHAT, "max_tokens": 100_000}
    with client.chat.completions.create(**terms, stream=True) as stream:
        for _ in range(5):
            next(stream)
    more = wait_for(lambda: count_more(gateway, before))
    assert 5 <= more["completion"] < 1000
    assert more["estimated"] == more["completion"] + more["prompt"]


def test_a_killed_gateway_has_counted_each_answer_that_it_forwarded(
    client: Any, engine: EngineStandIn, connect: Connect, gateway: GatewayProcess
) -> None:
    before, _ = count(gateway), engine.tokens.clear()
    forwarded: Counter[str] = Counter()
    for number in range(5):
        with suppress(openai.APIError):
            for words in range(3 + number):
                stream = connect().chat.completions.create(
                    model="org/tiny", messages=CHAT, max_tokens=9 + words, stream=True
                )
                forwarded.update(completion=len(list(stream)))
        gateway.process.kill()
        gateway.process.wait(PATIENCE_S)
        gateway.start()
        set_replicas(gateway, engine)
    more = count_more(gateway, before)
    assert more == dict(engine.tokens)
    assert more["completion"] == forwarded["completion"]


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
def test_a_request_of_a_lost_replica_is_repeated_once(
    client: Any, engine: EngineStandIn, gateway: GatewayProcess, path: str
) -> None:
    body = json.dumps({"model": "org/tiny", "messages": CHAT, "input": "a", "prompt": "a"})
    for deaths, status in ((1, 200), (2, 502)):
        engine.seen.clear()
        engine.deaths = deaths
        sent = {"content_type": "application/json", "host": "localhost"}
        reply = ask(gateway.port, "POST", f"/v1/{path}", body.encode(), **sent)
        assert (reply.status, len(engine.seen)) == (status, 2), reply.body


def test_a_request_with_effects_is_not_repeated(
    client: Any, engine: EngineStandIn, gateway: GatewayProcess
) -> None:
    engine.deaths = 1
    sent = {"content_type": "application/json", "host": "localhost"}
    reply = ask(gateway.port, "POST", "/default/llm/orders", b"{}", **sent)
    assert (reply.status, len(engine.seen)) == (502, 1)


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("at", [2.0, 2.5])
@pytest.mark.parametrize("split", [0, 300])
@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
def test_a_stream_of_a_lost_replica_ends_with_an_error(
    client: Any,
    engine: EngineStandIn,
    gateway: GatewayProcess,
    path: str,
    split: int,
    at: float,
    asks: bool,
) -> None:
    engine.stream_ends, engine.split = at, split
    asked = {"model": "org/tiny", "messages": CHAT, "input": "a", "prompt": "a", "stream": True}
    if asks:
        asked |= {"stream_options": {"include_usage": True}}
    sent = {"content_type": "application/json", "host": "localhost"}
    reply = ask(gateway.port, "POST", f"/v1/{path}", json.dumps(asked).encode(), **sent)
    assert reply.status == 200
    *events, last, rest = reply.body.decode().split("\n\n")
    assert rest == ""
    name, data = last.strip().split("\n")
    assert name == "event: error"
    found = json.loads(data.removeprefix("data: "))
    assert found["error"]["code"] == "replica-lost"
    assert found["error"]["type"] == ("api_error" if path == "messages" else "server_error")
    assert ("type" in found) == (path in ("messages", "responses"))
    for each in events:
        for line in each.strip().split("\n"):
            if line.startswith("data: "):
                json.loads(line.removeprefix("data: "))


def test_the_client_of_a_lost_replica_raises_the_error_of_its_stream(
    client: Any, engine: EngineStandIn
) -> None:
    engine.stream_ends = 2
    stream = client.chat.completions.create(model="org/tiny", messages=CHAT, stream=True)
    assert len([next(stream), next(stream)]) == 2
    with pytest.raises(openai.APIError, match="before its answer was complete"):
        list(stream)
    with pytest.raises(openai.APIError, match="before its answer was complete"):
        list(client.responses.create(model="org/tiny", input="a", stream=True))


def test_a_key_is_limited_to_its_tokens_a_minute(client: Any, connect: Connect) -> None:
    few = connect("/site/v1", api_key="few").chat.completions.with_raw_response
    terms = {"model": "limited", "messages": CHAT}
    answer = few.create(**terms, max_tokens=5)
    assert answer.headers["x-ratelimit-limit-tokens"] == "1000"
    words = answer.parse().usage.total_tokens
    left = int(few.create(**terms).headers["x-ratelimit-remaining-tokens"])
    assert 1000 - 100 < left < 1000, "the estimate of the first request was corrected"
    assert words < 20
    with pytest.raises(openai.RateLimitError) as refused:
        few.create(**terms, max_tokens=5000)
    assert "1,000 tokens a minute" in refused.value.message
    headers = refused.value.response.headers
    assert 0 < int(headers["retry-after"]) <= 60
    assert int(headers["x-ratelimit-remaining-tokens"]) <= left + 50
    assert headers["x-ratelimit-reset-tokens"].endswith("s")
    assert few.create(**terms, max_tokens=500).headers["x-ratelimit-remaining-tokens"]


def test_what_a_key_uses_at_other_gateways_counts(
    connect: Connect, gateway: GatewayProcess
) -> None:
    few = connect("/site/v1", api_key="far").chat.completions.with_raw_response
    terms = {"model": "limited", "messages": CHAT}
    before = int(few.create(**terms).headers["x-ratelimit-remaining-tokens"])
    used = {"far": [before - 200, 5], "unknown": [1, 1]}
    for name in ("limited", "unknown"):
        gateway.control(type="elsewhere", service=name, used=used)
    assert int(few.create(**terms).headers["x-ratelimit-remaining-tokens"]) < 300
    gateway.control(type="elsewhere", service="limited", used={"far": [5000, 0]})
    with pytest.raises(openai.RateLimitError, match="1,000 tokens a minute"):
        few.create(**terms)


def test_no_way_around_the_tokens_of_a_key(
    client: Any, connect: Connect, gateway: GatewayProcess
) -> None:
    few = connect("/site/v1", api_key="few").chat.completions
    with suppress(openai.RateLimitError):  # the limit may be used already
        few.create(model="limited", messages=CHAT, max_tokens=900)
    chat = (
        b'{"model": "limited", "messages": [{"role": "user", "content": "a"}], "max_tokens": 900}'
    )
    large = chat.replace(b'"a"', b'"%b"' % (b"a " * 200_000))
    for path, body, media in (
        ("/v1/chat/completions", chat, "application/json"),
        ("/v1/chat/%63ompletions", chat, "application/json"),
        ("/v1/./chat//completions?x", chat, "application/json"),
        ("/invocations", chat, "application/json"),
        ("/v1/chat/completions", large, "application/json"),
        ("/v1/chat/completions", large, "text/plain"),
    ):
        sent = {"host": "limited.example", "authorization": "Bearer few", "content_type": media}
        assert ask(gateway.port, "POST", path, body, **sent).status == 429, (path, media)


def test_answers_that_state_no_tokens_count_in_the_limit_of_a_key(
    client: Any, gateway: GatewayProcess
) -> None:
    body = json.dumps({"model": "limited", "prompt": "a " * 800}).encode()
    sent = {"host": "limited.example", "authorization": "Bearer few"}
    sent |= {"content_type": "application/json"}
    replies = [ask(gateway.port, "POST", "/invocations", body, **sent).status for _ in range(4)]
    assert replies[-1] == 429


def test_the_prompt_of_a_request_that_its_client_leaves_counts(
    client: Any, engine: EngineStandIn, gateway: GatewayProcess
) -> None:
    engine.mute, before = True, count(gateway, "mute")
    with pytest.raises(openai.InternalServerError):  # after `response_s`, as if the client left
        client.chat.completions.create(model="mute", messages=CHAT)
    used = count(gateway, "mute") - before
    assert used["prompt"] == used["estimated"] > 0 == used["completion"]


def test_a_key_is_limited_to_its_dollars_a_day(
    client: Any, connect: Connect, gateway: GatewayProcess, engine: EngineStandIn
) -> None:
    day = connect("/site/v1", api_key="day")
    terms = {"model": "limited", "messages": CHAT}
    day.chat.completions.create(**terms)
    for _ in range(2):
        with pytest.raises(openai.RateLimitError, match="a day") as refused:
            day.chat.completions.create(**terms)
        headers = refused.value.response.headers
        assert 0 < int(headers["retry-after"]) <= 86_400
        gateway.process.kill()
        gateway.process.wait(PATIENCE_S)
        gateway.start()  # what was spent is known to the next gateway, at its address
        day = connect("/site/v1", api_key="day")
    set_replicas(gateway, engine)


def test_waiting_keys_are_served_in_turn(
    client: Any, connect: Connect, gateway: GatewayProcess, engine: EngineStandIn
) -> None:
    """A key with many waiting requests does not delay the one of another key behind them all."""
    engine.mute = True
    many, one = connect("/site/v1", api_key="one"), connect("/site/v1", api_key="two")

    def ask(who: Any, user: str) -> None:
        who.chat.completions.create(model="limited", messages=CHAT, user=user)

    with ThreadPoolExecutor(8) as pool:
        for number in range(6):
            pool.submit(ask, many, "one")
            wait_for(lambda n=number: len(engine.seen) + gateway.facts("limited")["backlog"] > n)
        pool.submit(ask, one, "two")
        wait_for(lambda: gateway.facts("limited")["backlog"] == 6)
        engine.mute = False
        engine.release.set()
    users = [json.loads(each.body)["user"] for each in engine.seen]
    assert sorted(users) == ["one"] * 6 + ["two"]
    assert users.index("two") < 4
