"""The store of files and batches of OpenAI's API, and the rules of batches."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.waits import PATIENCE_S

from cavvy.capabilities.language_models import batch_runs, openai_files
from cavvy.capabilities.language_models.batch_runs import (
    BatchRun,
    BatchRuns,
    check_line,
    is_urgent,
    may_repeat,
)
from cavvy.capabilities.language_models.file_store import (
    LINE_MAX,
    BatchState,
    FileStore,
    LongLine,
    StoredBatch,
    StoredFile,
    read_lines,
)
from cavvy.capabilities.language_models.model_route import ModelRoutes, read_model_path
from cavvy.capabilities.language_models.openai_files import OpenAiFiles, UploadRequest
from cavvy.capabilities.language_models.upload_form import FormError, UploadForm
from cavvy.capabilities.serving.gateway.config import (
    ClientKey,
    GatewayLimits,
    RateLimit,
    ReplicaAddress,
    ServiceRoute,
)
from cavvy.capabilities.serving.gateway.exchange import Exchange
from cavvy.capabilities.serving.gateway.heads import HeadMemo
from cavvy.capabilities.serving.gateway.own_answers import AnswerCode, OwnAnswer
from cavvy.capabilities.serving.gateway.service_queue import ServiceQueue
from cavvy.domain.values import replace

CHAT = "/v1/chat/completions"
FORM = (
    b'--b--\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n----b--\r\n'
    b'Content-Type: x\r\ncontent-disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    b"%b\r\n----b----\r\nafter"
)


def make_batch(**more: object) -> StoredBatch:
    usual: dict[str, object] = {
        **{"id": "batch_0a", "owners": ("/default",), "endpoint": CHAT, "input_file_id": "file-1"},
        **{"completion_window": "24h", "created_at": 0, "expires_at": 86_400},
    }
    return StoredBatch(**{**usual, **more})  # type: ignore[arg-type]  # of the test


def write_result(number: int) -> bytes:
    return b'{"id":"batch_req_0a_%x","custom_id":"c","response":null,"error":null}\n' % number


@given(
    content=st.lists(st.sampled_from([b"\r", b"\n", b"-", b"b", b"--b", b"\r\n----", b"x" * 50])),
    cuts=st.lists(st.integers(1, 40)),
)
def test_a_form_is_read_in_any_pieces(content: list[bytes], cuts: list[int]) -> None:
    file = b"".join(content)
    if b"\r\n----b--" in b"\r\n" + file + b"\r\n":
        return  # the boundary would not be one
    data, got = b"--" + FORM % file, []
    form = UploadForm(b"--b--", got.append)
    for size in cuts:
        form.feed(data[:size])
        data = data[size:]
    form.feed(data)
    assert (form.ended, form.filename, b"".join(got)) == (True, "in.jsonl", file)
    assert form.fields == {"purpose": "batch"}


@pytest.mark.parametrize(
    "data",
    [
        b"--b--x",
        b"--bx",
        b"--b\r\n" + b"a" * 70_000,
        b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n' + b"a" * 70_000,
        b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n\r\n' * 2,
        b"a" * 70_000,
        b"".join(
            b'--b\r\nContent-Disposition: form-data; name="%d"\r\n\r\n\r\n' % n for n in range(60)
        ),
    ],
)
def test_what_is_no_form_takes_no_memory(data: bytes) -> None:
    form = UploadForm(b"b", lambda data: None)
    try:
        form.feed(data)
    except FormError:
        return
    assert not form.fields
    assert form.ended or form.filename is None


@pytest.mark.parametrize(
    "tail",
    [
        b"",
        write_result(3)[:-1],
        write_result(3)[:-20] + b"\n",
        b"\0" * 100,
        write_result(1),
        write_result(10),
        b"{}\n" + write_result(4),
    ],
)
def test_results_that_a_kill_has_cut_off_are_removed(tmp_path: Path, tail: bytes) -> None:
    store, batch = FileStore(tmp_path), make_batch(total=10)
    assert store.open()
    whole = write_result(5) + write_result(1)
    (tmp_path / "batch_0a.output").write_bytes(whole + tail)
    (tmp_path / "batch_0a.errors").write_bytes(write_result(2))
    assert [n for n, done in enumerate(store.resume(batch)) if done] == [1, 2, 5]
    assert (batch.completed, batch.failed) == (2, 1)
    assert (tmp_path / "batch_0a.output").read_bytes() == whole


def test_the_end_of_a_batch_may_be_repeated_after_a_kill(tmp_path: Path) -> None:
    store, batch = FileStore(tmp_path), make_batch(total=1)
    store.open()
    (tmp_path / "batch_0a.output").write_bytes(write_result(0))
    (tmp_path / "batch_0a.errors").touch()
    first = store.finish_results(batch, 5, 10)
    assert [(each.id, each.bytes) for each in first] == [("file-0ao", len(write_result(0)))]
    assert store.finish_results(batch, 5, 10) == first
    assert not list(tmp_path.glob("batch_*.*"))


def test_a_gateway_waits_until_the_one_before_it_has_ended(tmp_path: Path) -> None:
    first, second = FileStore(tmp_path), FileStore(tmp_path)
    assert first.open()
    assert not second.open()
    content = first.begin_upload("file-1")
    content.write(b"{}")
    file = StoredFile(
        id="file-1", owners=("/p",), filename="a", purpose="batch", bytes=2, created_at=1
    )
    first.finish_upload(file, content)
    first.write_batch(make_batch())
    first.begin_upload("file-2").close()
    first.close()
    assert second.open()
    assert (second.files, list(second.batches)) == ({"file-1": file}, ["batch_0a"])
    assert not list(tmp_path.glob("file-2*")), "an upload that was not complete"


def test_lines_are_read_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a\n" * 100_000 + b"b")
    with path.open("rb") as file:
        parts = []
        while part := read_lines(file):
            parts.append(part)
    assert len(parts) > 1
    assert b"".join(line for part in parts for line in part) == path.read_bytes()
    with path.open("wb") as file:
        file.truncate(LINE_MAX + 1)
    with path.open("rb") as file, pytest.raises(LongLine):
        read_lines(file)


@given(st.binary() | st.text() | st.lists(st.integers()))
def test_any_line_gets_a_verdict(line: object) -> None:
    data = line if isinstance(line, bytes) else json.dumps(line).encode()
    for each in (data, json.dumps({"custom_id": "a", "method": "POST", "url": CHAT}).encode()):
        problem = check_line(each, CHAT, set())
        assert problem is not None
        assert problem.code
        assert problem.message


def test_what_may_have_another_answer_is_sent_again() -> None:
    lost, removed = OwnAnswer(502, AnswerCode.LOST, ""), OwnAnswer(404, AnswerCode.NO_SERVICE, "")
    assert may_repeat(None, 500, 4)
    assert not may_repeat(None, 500, 5)
    assert may_repeat(None, 429, 19), "a replica that is busy"
    assert not may_repeat(None, 429, 20)
    assert not may_repeat(None, 400, 1)
    assert may_repeat(lost, 502, 1)
    assert may_repeat(removed, 404, 1)
    assert not may_repeat(OwnAnswer(502, AnswerCode.TOO_LARGE, ""), 502, 1)


def test_a_batch_is_urgent_when_its_rate_is_too_low() -> None:
    batch = make_batch(total=1000, completed=100)
    assert not is_urgent(batch, 100, 100, 1000)
    assert not is_urgent(batch, 100, 100, 86_400 - 1801)
    assert is_urgent(batch, 100, 100, 86_400 - 1799)
    assert not is_urgent(batch, 0, 100, 43_000), "nothing has run yet, and half the time is left"
    assert is_urgent(batch, 0, 100, 44_000)


async def test_a_batch_takes_only_idle_slots() -> None:
    queue = ServiceQueue(ServiceRoute(name="chat", concurrency=2), HeadMemo(GatewayLimits()))
    assert queue.count_idle() == 1, "one request wakes a service without replicas"
    head = queue.memo.parse_request(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    waiting = Exchange(None, queue.entry, head, b"", monotonic())  # type: ignore[arg-type]  # not answered
    queue.enter(waiting)
    assert queue.count_idle() == 0
    queue.leave(waiting)
    assert waiting.timer is not None
    waiting.timer.cancel()
    queue.set_replicas([ReplicaAddress(id=each, host="127.0.0.1", port=1) for each in ("a", "b")])
    assert queue.count_idle() == 4
    assert queue.count_idle(may_wait=True) == 4
    closed = ServiceRoute(name="chat", closed="spent")
    assert ServiceQueue(closed, queue.memo).count_idle(may_wait=True) == 0
    queue.close()


def test_a_batch_has_the_services_of_its_owners() -> None:
    memo = HeadMemo(GatewayLimits())
    digest = "0" * 64
    rows = [
        ServiceRoute(name="open", project="a", models=("m", "x")),
        ServiceRoute(name="other", project="b", models=("m",)),
        ServiceRoute(
            name="keyed", project="a", models=("m",), keys=(ClientKey(id="k", sha256=digest),)
        ),
        ServiceRoute(
            name="past",
            project="a",
            models=("old",),
            keys=(ClientKey(id="k", sha256=digest, expires_at=1),),
        ),
    ]
    routes = ModelRoutes(lambda *_: None, memo.limits, lambda *_: None)  # type: ignore[arg-type]  # no request
    routes.set_services([ServiceQueue(each, memo) for each in rows])

    def find(owner: str, model: str) -> tuple[str, str] | None:
        found = routes.find_owned((owner,), model)
        return found and (found[0].route.name, found[1].id if found[1] else "")

    assert find("/a", "m") == ("open", "")
    assert find("/b", "m") == ("other", "")
    assert find("/b", "x") is None
    assert find("keyed/k", "m") == ("keyed", "k")
    assert find("keyed/k", "x") == ("open", ""), "a service without keys, of the same project"
    assert find("keyed/gone", "m") is None, "the key was revoked"
    assert find("past/k", "old") is None
    assert find("keyed/k", "old") is None


@pytest.mark.parametrize(
    ("line", "is_for_models"),
    [
        ("GET /v1/files", True),
        ("POST /p/v1/batches/batch_1/cancel", True),
        ("DELETE /v1/files/a", True),
        ("GET /v1/files/a/content?x=1", True),
        ("PUT /v1/files/a", False),
        ("GET /v1/files/a/b", False),
        ("GET /v1/filesystem", False),
    ],
)
def test_which_paths_are_for_files(line: str, is_for_models: bool) -> None:
    head = HeadMemo(GatewayLimits()).parse_request(f"{line} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    assert (read_model_path(head) is not None) == is_for_models


def test_a_batch_that_failed_is_kept_as_it_is(tmp_path: Path) -> None:
    store, batch = FileStore(tmp_path), make_batch(state=BatchState.FAILED, total=3)
    store.open()
    store.write_batch(batch)
    store.close()
    again = FileStore(tmp_path)
    again.open()
    assert again.batches == {batch.id: batch}


def test_what_is_damaged_in_the_folder_hides_nothing_else(tmp_path: Path) -> None:
    batch = make_batch(id="batch_f")
    store = FileStore(tmp_path)
    store.open()
    store.write_batch(batch)
    store.write_batch(make_batch(id="batch_e"))
    store.close()
    (tmp_path / "batch_0.json").write_bytes(b'{"id":"\xff"}')
    (tmp_path / "batch_1.json").write_bytes(b'{"id":' + b"[" * 100_000)
    (tmp_path / "batch_2.json").mkdir()  # as one without permission to read it
    (tmp_path / "batch_3.json.new").mkdir()
    (tmp_path / "batch_e.json").rename(tmp_path / "batch_4.json")
    (tmp_path / "file-1.json").touch()
    again = FileStore(tmp_path)
    assert again.open()
    assert (again.files, again.batches) == ({}, {batch.id: batch})


def test_wrong_lines_leave_little_in_memory() -> None:
    """A batch keeps what is wrong with its lines for a month, and the IDs until all are read."""
    long, seen = "a" * 100_000, {"b" * 512}
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"model": "m"}}
    for change in ({"custom_id": long}, {"custom_id": "b" * 512}, {"url": long}, {"method": long}):
        problem = check_line(json.dumps({**line, **change}).encode(), CHAT, seen)
        assert problem is not None
        assert len(problem.message) < 400
    assert max(map(len, seen)) == 512


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():
            await asyncio.sleep(0.001)


def make_files(folder: Path, target: object = None) -> OpenAiFiles:
    runs = BatchRuns(FileStore(folder), GatewayLimits(), lambda *_: target)  # type: ignore[arg-type,return-value]  # of the test
    files = OpenAiFiles(runs)
    files.tick(0)
    return files


def put_file(store: FileStore, data: bytes) -> None:
    file = StoredFile(
        id="file-1", owners=("/p",), filename="a", purpose="batch", bytes=2, created_at=1
    )
    content = store.begin_upload(file.id)
    content.write(data)
    store.finish_upload(file, content)
    store.files[file.id] = file


async def test_an_upload_ends_when_the_disk_is_almost_full(tmp_path: Path) -> None:
    """Clients need not say how much they send, and may send several files at the same time."""
    files = make_files(tmp_path)
    left = [True, True]
    files.store.has_room = lambda size: bool(left and left.pop())  # type: ignore[method-assign]
    sink = SimpleNamespace(resume_body=lambda: None)
    request = UploadRequest(files.runs, SimpleNamespace(sink=sink), ("/p",), b"--b--")  # type: ignore[arg-type]  # its sink only
    data = b"--" + FORM % (b"x" * 1000)
    for at in range(0, len(data), 100):
        assert request.feed(data[at : at + 100], at + 100 >= len(data)) is None
    await files.runs.work.finish()
    await files.runs.close()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    assert not files.store.files


async def test_an_owner_may_fill_only_a_part_of_the_disk(tmp_path: Path) -> None:
    """Also with uploads that do not state their length, and with several at once."""
    files = make_files(tmp_path)
    put_file(files.store, b"{}")
    quarter = shutil.disk_usage(tmp_path).total // 4
    files.store.files["file-2"] = replace(files.store.files["file-1"], bytes=quarter - 500)
    sink = SimpleNamespace(resume_body=lambda: None)
    for owner, code in (("/p", AnswerCode.TOO_MANY), ("/q", None)):
        request = UploadRequest(files.runs, SimpleNamespace(sink=sink), (owner,), b"--b--")  # type: ignore[arg-type]  # its sink only
        answer = request.feed(b"--" + FORM % (b"x" * 1000), True)
        assert (answer and answer.code) == code
        request.abort()
    open_ones = [
        UploadRequest(files.runs, SimpleNamespace(sink=sink), ("/p",), b"--b--")  # type: ignore[arg-type]  # its sink only
        for _ in range(2)
    ]
    data = b"--" + FORM % (b"x" * 300)
    for each in open_ones:
        assert each.feed(data[:-20], False) is None
    answers = [each.feed(data[-20:], True) for each in open_ones]
    assert answers[0] is not None
    assert answers[0].code is AnswerCode.TOO_MANY
    for each in open_ones:
        each.abort()
    assert not files.store.uploads
    head = HeadMemo(GatewayLimits()).parse_request(
        b"POST /v1/files HTTP/1.1\r\nHost: a\r\nContent-Length: 4000\r\n"
        b"Content-Type: multipart/form-data; boundary=b\r\n\r\n"
    )
    refused = files.open(SimpleNamespace(head=head), ("/p",))  # type: ignore[arg-type]  # its head only
    assert isinstance(refused, OwnAnswer)
    assert refused.code is AnswerCode.TOO_MANY
    await files.runs.work.finish()
    await files.runs.close()


async def test_a_damaged_input_ends_its_batch_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runs, "_BACKOFF_S", 0.0)
    files = make_files(tmp_path)
    put_file(files.store, b"\xff\n{}\n[1]\n")
    batch = make_batch(owners=("/p",), total=2, state=BatchState.IN_PROGRESS, expires_at=1 << 40)
    files.runs.start(batch)
    await until(lambda: batch.state is BatchState.COMPLETED)
    await files.runs.close()
    assert (batch.completed, batch.failed) == (0, 2)


async def test_only_so_many_ended_batches_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_files, "_ENDED_MAX", 2)
    files = make_files(tmp_path)
    put_file(files.store, b"{}\n")
    other = make_batch(owners=("/other",), state=BatchState.FAILED)
    files.store.batches[other.id] = other
    body = b'{"input_file_id":"file-1","endpoint":"/v1/chat/completions"}'
    for _ in range(5):
        await files._create(("/p",), body)
        newest = list(files.store.batches.values())[-1]
        await until(lambda batch=newest: batch.state is BatchState.FAILED)
    await files.runs.close()
    assert len(files.store.batches) == 3
    assert {other.id, newest.id} <= files.store.batches.keys()


async def test_batches_keep_to_the_limits_of_their_service(tmp_path: Path) -> None:
    route = ServiceRoute(name="s", body_max=5, rates=(RateLimit(per_s=0.001),))
    service = ServiceQueue(route, HeadMemo(GatewayLimits()))
    files = make_files(tmp_path, (service, None))
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"model": "m"}}
    put_file(files.store, json.dumps(line).encode())
    first, second = (
        make_batch(
            **{"id": f"batch_{n}", "owners": ("/p",), "total": 1, "expires_at": 1 << 40},
            state=BatchState.IN_PROGRESS,
        )
        for n in range(2)
    )
    files.runs.start(first)
    await until(lambda: first.state is BatchState.COMPLETED)
    assert first.failed == 1, "the body is too large"
    run = BatchRun(files.runs, second)
    assert run._limit(service, None, monotonic()) > 900, "another batch is not another client"
    await files.runs.close()


async def test_many_new_batches_do_not_hold_up_users(tmp_path: Path) -> None:
    files = make_files(tmp_path)
    put_file(files.store, b"{}\n" * 99)
    opened: list[BinaryIO] = []
    most = []
    read = files.store.open_file

    def open_file(file_id: str) -> BinaryIO:
        opened.append(read(file_id))
        most.append(sum(not each.closed for each in opened))
        return opened[-1]

    files.store.open_file = open_file  # type: ignore[method-assign]
    begun = [make_batch(id=f"batch_{n}", owners=("/p",), expires_at=1 << 40) for n in range(20)]
    for each in begun:
        files.runs.start(each)
    await until(lambda: all(each.state is BatchState.FAILED for each in begun))
    await files.runs.close()
    assert max(most) <= 2


def test_a_request_that_must_wait_uses_up_no_tries(tmp_path: Path) -> None:
    run = BatchRun(BatchRuns(FileStore(tmp_path), GatewayLimits(), lambda *_: None), make_batch())
    line = batch_runs._Line(number=0, custom_id="a", body=b"{}", model="m")
    codes = ("TOO_MANY", "QUEUE_FULL", "TOO_LATE", "BUDGET", "STOPPING")
    for code in codes * 10:
        line.tries += 1
        run._settle(line, OwnAnswer(429, AnswerCode[code], "", 1))
        assert (line.tries, run._again.pop()[2], any(run._new)) == (0, line, False)
