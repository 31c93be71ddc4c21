"""Files and batches of OpenAI's API through the gateway, by OpenAI's own package."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import pytest
from tests.contract.engine_stand_in import EngineStandIn
from tests.contract.gateway_process import GatewayProcess, wait_for
from tests.contract.http_talk import ask
from tests.contract.replica_stand_in import Seen
from tests.waits import PATIENCE_S

openai = pytest.importorskip("openai", reason="`make setup-dev` installs OpenAI's client")

Connect = Callable[..., Any]
HOST = "any.example"
CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
LIMITS: dict[str, dict[str, Any]] = {
    **{"few": {"tokens_per_min": 1000}, "day": {"micros_per_day": 1}, "slow": {"per_s": 0.001}},
    **{"eu": {"residency": "eu"}, "asia": {"residency": "asia"}},
}
SERVICES: list[dict[str, Any]] = [
    {"name": "llm", "prefix": "/default/llm", "models": ["tiny"], "concurrency": 4},
    {
        **{"name": "keyed", "hosts": ["keyed.example"], "models": ["private"], "project": "site"},
        "keys": [{"id": each, "sha256": sha256(each.encode()).hexdigest()} for each in ("a", "b")],
    },
    {
        **{"name": "limited", "hosts": ["limited.example"], "models": ["limited"]},
        **{"project": "site", "concurrency": 1, "places": ["eu", "us"]},
        "keys": [
            {"id": each, "sha256": sha256(each.encode()).hexdigest(), **limits}
            for each, limits in LIMITS.items()
        ],
    },
]


@dataclass
class OddEngine(EngineStandIn):
    """Answers by the field `user` of a request."""

    tries: Counter[str] = field(default_factory=Counter)

    async def _do_completions(self, request: Seen, asked: dict[str, str], reader, writer) -> bool:
        user = json.loads(request.body).get("user", "")
        self.tries[request.get("idempotency-key") or ""] += 1
        if user == "hold":
            return await self._do_hold(request, asked, reader, writer)
        if user == "wrong":
            error = {"message": "too long", "type": "invalid_request_error"}
            return self._answer(writer, {"error": error}, b"400 Bad Request")
        if user == "once" and self.tries[request.get("idempotency-key") or ""] == 1:
            return self._answer(writer, {"error": "busy"}, b"503 Service Unavailable")
        if user == "lines":
            return self._write(writer, b"application/json", b'{\r\n  "a": 18446744073709551616\n}')
        if user == "text":
            return self._write(writer, b"text/plain", b'two "words"\n')
        return await super()._do_completions(request, asked, reader, writer)


@pytest.fixture(scope="module")
def engines() -> Iterator[Sequence[OddEngine]]:
    made = [OddEngine("e1"), OddEngine("e2")]
    for each in made:
        each.start()
    yield made
    for each in made:
        each.stop()


@pytest.fixture(scope="module")
def gateway(engines: Sequence[OddEngine]) -> Iterator[GatewayProcess]:
    made = GatewayProcess(services=SERVICES)
    yield made
    made.remove()


@pytest.fixture
def connect(gateway: GatewayProcess, engines: Sequence[OddEngine]) -> Iterator[Connect]:
    for each in engines:
        each.reset()
        each.tries.clear()
    set_replicas(gateway, engines)
    with ExitStack() as stack:

        def make(key: str = "none", path: str = "/v1") -> Any:
            base = f"http://127.0.0.1:{gateway.port}{path}"
            return stack.enter_context(
                openai.OpenAI(base_url=base, api_key=key, max_retries=0, timeout=PATIENCE_S)
            )

        yield make


@pytest.fixture
def client(connect: Connect) -> Any:
    return connect()


def set_replicas(gateway: GatewayProcess, engines: Sequence[OddEngine]) -> None:
    for each in SERVICES:
        gateway.set_replicas(each["name"], engines)


def write_line(name: str, model: str = "tiny", url: str = CHAT, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"say {name}"}]
    asked = {"model": model, "messages": messages, "max_tokens": 2, **body}
    return {"custom_id": name, "method": "POST", "url": url, "body": asked}


def upload(client: Any, lines: Sequence[Any]) -> Any:
    text = "".join(each if isinstance(each, str) else json.dumps(each) + "\n" for each in lines)
    return client.files.create(file=("in.jsonl", text.encode()), purpose="batch")


def begin(client: Any, lines: Sequence[Any], **more: Any) -> Any:
    given = {"endpoint": CHAT, "completion_window": "24h", **more}
    return client.batches.create(input_file_id=upload(client, lines).id, **given)


def end(client: Any, batch: Any, *states: str) -> Any:
    """The batch when it is in one of the states."""

    def look() -> Any:
        found = client.batches.retrieve(batch.id)
        return found if found.status in (states or ENDED) else None

    return wait_for(look)


def read(client: Any, file_id: str | None) -> dict[str, Any]:
    """The results in a file, by their `custom_id`."""
    if file_id is None:
        return {}
    rows = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    found = {row["custom_id"]: row for row in rows}
    assert len(found) == len(rows), "a request has two results"
    return found


def kill(gateway: GatewayProcess) -> None:
    gateway.process.kill()
    gateway.process.wait()


def test_a_batch_lives_as_clients_expect(client: Any, engines: Sequence[OddEngine]) -> None:
    users = {"one": "", "two": "wrong", "three": "once", "four": "lines", "five": "text"}
    lines = [write_line(name, user=user) for name, user in users.items()]
    batch = begin(client, [*lines[:2], "\r\n", *lines[2:]], metadata={"for": "tests"})
    assert (batch.object, batch.status, batch.endpoint) == ("batch", "validating", CHAT)
    ended = end(client, batch)
    assert ended.status == "completed", ended
    assert ended.metadata == {"for": "tests"}
    counts = ended.request_counts
    assert (counts.total, counts.completed, counts.failed) == (5, 4, 1)
    assert ended.created_at <= ended.in_progress_at <= ended.completed_at <= ended.expires_at
    output, errors = read(client, ended.output_file_id), read(client, ended.error_file_id)
    assert (set(output), set(errors)) == (set(users) - {"two"}, {"two"})
    first = output["one"]
    assert (first["error"], first["response"]["status_code"]) == (None, 200)
    assert first["response"]["body"]["choices"][0]["message"]["content"] == "word0 word1 "
    assert first["id"] == first["response"]["request_id"]
    assert output["four"]["response"]["body"] == {"a": 1 << 64}
    assert output["five"]["response"]["body"] == 'two "words"\n'
    assert errors["two"]["response"]["status_code"] == 400
    assert errors["two"]["response"]["body"]["error"]["message"] == "too long"
    assert {tries for each in engines for tries in each.tries.values()} <= {1, 2}
    assert client.files.retrieve(ended.output_file_id).purpose == "batch_output"
    newest = client.batches.list(limit=1)
    assert [each.id for each in newest.data] == [batch.id]


def test_files_are_listed_read_and_deleted(client: Any) -> None:
    text = b'\r\n--x\r\n\xff\x00{"a": 1}\r\n--' * 40_000
    made = [client.files.create(file=(f"{n}.bin", text[n:]), purpose="batch") for n in range(3)]
    assert [each.bytes for each in made] == [len(text), len(text) - 1, len(text) - 2]
    assert client.files.content(made[1].id).read() == text[1:]
    empty = client.files.create(file=("empty", b""), purpose="batch")
    assert client.files.content(empty.id).read() == b""
    found = {each.id: each.filename for each in client.files.list(purpose="batch", limit=2)}
    assert {each.id: each.filename for each in made}.items() <= found.items(), "in several pages"
    assert client.files.delete(made[0].id).deleted
    for use in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="No such File object"):
            use(made[0].id)


BAD_LINES = {
    "empty_file": [],
    "invalid_json_line": ["{not JSON\n"],
    "invalid_request": ["[1]\n", {**write_line("a"), "body": []}, {**write_line("b"), "body": {}}],
    "missing_required_parameter": [{"custom_id": "a", "method": "POST", "url": CHAT}],
    "invalid_method": [{**write_line("a"), "method": "GET"}],
    "invalid_url": [write_line("a", url="/v1/embeddings")],
    "invalid_custom_id": [write_line("")],
    "duplicate_custom_id": [write_line("a"), write_line("a")],
}


def test_a_file_with_wrong_lines_fails_with_their_numbers(client: Any) -> None:
    begun = {code: begin(client, lines) for code, lines in BAD_LINES.items()}
    deep = begin(client, ["[" * 100_000 + "\n", write_line("a", stream=True)])
    for code, batch in begun.items():
        ended = end(client, batch)
        assert ended.status == "failed"
        assert {each.code for each in ended.errors.data} == {code}
        assert (ended.output_file_id, ended.error_file_id) == (None, None)
    found = end(client, deep).errors.data
    assert [(each.line, each.code) for each in found] == [
        (1, "invalid_json_line"),
        (2, "invalid_request"),
    ]
    assert end(client, begun["duplicate_custom_id"]).errors.data[0].line == 2


def test_wrong_requests_are_refused_in_openais_format(client: Any, gateway: GatewayProcess) -> None:
    file = upload(client, [write_line("a")])
    good = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    for wrong in (
        {"input_file_id": "file-none"},
        {"endpoint": "/v1/files"},
        {"completion_window": "1d"},
        {"metadata": {"a": "b" * 513}},
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.batches.create(**{**good, **wrong})
        assert refused.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("a", b"a"), purpose="assistants")
    with pytest.raises(openai.NotFoundError, match="No batch found"):
        client.batches.cancel("batch_none")
    form = "multipart/form-data; boundary=x"
    for body, kind in (
        (b"{}", "application/json"),
        (b"", form),
        (b"--x\r\n", form),
        (b"--x--\r\n", form),
        (b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--', form),
        (b"--x\r\n" + b"a" * 100_000, form),
    ):
        reply = ask(gateway.port, "POST", "/v1/files", body, host=HOST, content_type=kind)
        assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
    assert ask(gateway.port, "PUT", "/v1/files/a", b"", host=HOST).status == 404
    for limit in ("0", "9" * 5000):
        assert ask(gateway.port, "GET", f"/v1/files?limit={limit}", host=HOST).status == 400
    page = {"origin": "https://page.example"}
    assert ask(gateway.port, "GET", "/v1/files", host=HOST, **page).status == 403


def test_a_batch_that_cannot_be_stored_does_not_count(client: Any, gateway: GatewayProcess) -> None:
    file = upload(client, [write_line("a")])
    folder = gateway.folder / "state" / "openai"
    before = len(client.batches.list(limit=100).data)
    moved = folder.rename(folder.with_name("away"))
    try:
        with pytest.raises(openai.InternalServerError):
            client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    finally:
        moved.rename(folder)
    assert len(client.batches.list(limit=100).data) == before
    assert client.files.delete(file.id).deleted, "no batch needs it"


def test_files_and_batches_belong_to_their_key(connect: Connect) -> None:
    mine, other, none = connect("a"), connect("b"), connect("none", "/site/v1")
    batch = begin(mine, [write_line("x", model="private"), write_line("y", model="missing")])
    assert batch.id in [each.id for each in connect("a", "/site/v1").batches.list()]
    for reader in (other, connect()):
        assert batch.id not in [each.id for each in reader.batches.list()]
        for use in (
            lambda reader=reader: reader.batches.retrieve(batch.id),
            lambda reader=reader: reader.batches.cancel(batch.id),
            lambda reader=reader: reader.files.content(batch.input_file_id),
            lambda reader=reader: reader.files.delete(batch.input_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                use()
        given = {"endpoint": CHAT, "completion_window": "24h"}
        with pytest.raises(openai.BadRequestError, match="No such File object"):
            reader.batches.create(input_file_id=batch.input_file_id, **given)
        assert batch.input_file_id not in [each.id for each in reader.files.list()]
    with pytest.raises(openai.AuthenticationError):
        none.files.list()
    end(mine, batch, "in_progress")
    mine.batches.cancel(batch.id)
    ended = end(mine, batch)
    assert ended.status == "cancelled"
    assert "y" in read(mine, ended.error_file_id)


def test_batches_keep_to_the_limits_of_their_keys(
    connect: Connect, gateway: GatewayProcess, engines: Sequence[OddEngine]
) -> None:
    places = {engines[0].name: ["us"], engines[1].name: ["eu"]}
    gateway.set_replicas("limited", engines, rate_micros=10**12, places=places)
    clients = {name: connect(name) for name in LIMITS}
    lines = [write_line(f"n{number}", "limited", max_tokens=900) for number in range(30)]
    begun = {name: begin(client, lines) for name, client in clients.items()}
    for name in ("eu", "asia"):  # the others had as many turns
        begun[name] = end(clients[name], begun[name])
    for name in ("few", "day", "slow"):
        assert end(clients[name], begun[name], "in_progress", *ENDED).status == "in_progress"
        clients[name].batches.cancel(begun[name].id)
        begun[name] = end(clients[name], begun[name])
    done = {name: batch.request_counts.completed for name, batch in begun.items()}
    assert (done["eu"], done["asia"], done["few"], done["slow"]) == (30, 0, 1, 1)
    assert 1 <= done["day"] <= 4, "the requests that ran when the first one had its price"
    refused = read(clients["asia"], begun["asia"].error_file_id)
    assert "asia" in refused["n0"]["error"]["message"]
    assert not any(begun["eu"].id[6:] in each for each in engines[0].tries), "it left its place"
    work = json.dumps(gateway.facts("limited")["work"])
    assert '"eu"' in work
    assert '"completion": 27000' in work


def test_each_request_has_one_result_after_kills(
    client: Any, gateway: GatewayProcess, engines: Sequence[OddEngine]
) -> None:
    names = [f"n{number}" for number in range(3000)]
    batch = begin(client, [write_line(name) for name in names])
    for least, replicas in ((200, engines[:1]), (900, engines[1:])):

        def has(least: int = least) -> bool:
            counts = client.batches.retrieve(batch.id).request_counts
            return counts.completed >= least

        wait_for(has)
        gateway.set_replicas("llm", replicas)  # the other one is preempted
        kill(gateway)
        output = gateway.folder / "state" / "openai" / f"{batch.id}.output"
        with output.open("ab") as file:  # as if the kill had cut off the last result
            file.write(output.read_bytes()[:70])
        gateway.config["port"] = gateway.port
        gateway.start()
        set_replicas(gateway, replicas)
    ended = end(client, batch)
    assert ended.status == "completed"
    assert set(read(client, ended.output_file_id)) == set(names)
    assert ended.request_counts.completed == len(names)
    tries = sum((each.tries for each in engines), Counter())
    assert tries.total() - len(names) <= 2 * 1024, "only what was in flight is sent again"


def test_a_batch_wakes_its_service_and_lets_others_pass(
    client: Any, gateway: GatewayProcess, engines: Sequence[OddEngine]
) -> None:
    gateway.set_replicas("llm", [])
    batch = begin(client, [write_line(f"n{number}", user="hold") for number in range(9)])
    wait_for(lambda: gateway.facts("llm")["backlog"])
    assert gateway.facts("llm")["backlog"] == 1
    gateway.set_replicas("llm", engines[:1])
    wait_for(lambda: engines[0].in_flight == 4)
    with ThreadPoolExecutor(1) as pool:
        body = write_line("user")["body"]
        waits = pool.submit(client.chat.completions.create, **body)
        wait_for(lambda: gateway.facts("llm")["backlog"])
        gateway.set_replicas("llm", engines)  # idle slots, of which the user gets the first
        assert waits.result(PATIENCE_S).choices
        for each in engines:
            each.release.set()
    assert end(client, batch).request_counts.completed == 9


def test_a_batch_whose_service_has_no_replica_can_be_cancelled(
    client: Any, gateway: GatewayProcess
) -> None:
    gateway.set_replicas("llm", [])
    batch = begin(client, [write_line(f"n{number}") for number in range(3)])
    wait_for(lambda: gateway.facts("llm")["backlog"] == 1)
    client.batches.cancel(batch.id)
    ended = end(client, batch)
    assert (ended.status, ended.request_counts.failed) == ("cancelled", 3)
    assert set(read(client, ended.error_file_id)) == {"n0", "n1", "n2"}
    assert gateway.facts("llm")["backlog"] == 0


def test_a_batch_ends_early_by_cancel_and_by_its_deadline(
    client: Any, gateway: GatewayProcess, engines: Sequence[OddEngine]
) -> None:
    """The requests that replicas have are finished; the others get an error as their result."""
    lines = [write_line(f"n{number}", user="hold") for number in range(2000)]
    for cause in ("cancelled", "expired"):
        for each in engines:
            each.reset()
        batch = begin(client, lines)
        wait_for(lambda: sum(each.in_flight for each in engines) == 8)
        assert [each.most_in_flight for each in engines] == [4, 4], "only idle slots are used"
        if cause == "cancelled":
            assert client.batches.cancel(batch.id).status == "cancelling"
            for each in engines:
                each.release.set()
            kept = 8
        else:
            kill(gateway)
            path = gateway.folder / "state" / "openai" / f"{batch.id}.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), "expires_at": 1}))
            gateway.config["port"] = gateway.port
            gateway.start()
            set_replicas(gateway, engines)
            kept = 0
        ended = end(client, batch)
        assert ended.status == cause
        errors = read(client, ended.error_file_id)
        assert {each["error"]["code"] for each in errors.values()} == {f"batch_{cause}"}
        assert len(errors) == ended.request_counts.failed == len(lines) - kept
        assert len(read(client, ended.output_file_id)) == kept
    with pytest.raises(openai.ConflictError, match="Cannot cancel"):
        client.batches.cancel(batch.id)
