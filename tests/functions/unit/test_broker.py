"""The broker and its workers, without a server: calls that are cancelled, and wrong answers."""

import asyncio
import io
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import cavvy
from cavvy.capabilities.functions import meeting, spawned
from cavvy.capabilities.functions.app import App
from cavvy.capabilities.functions.calls import AppRun, FunctionCall, dial_broker
from cavvy.capabilities.functions.errors import CallCancelled, CallFailed, WorkerLost
from cavvy.capabilities.functions.frames import CallFrames, Head, pack
from cavvy.capabilities.functions.link import BrokerLink, print_line
from cavvy.capabilities.functions.meeting import dial_here
from cavvy.capabilities.functions.on_node import serve
from cavvy.capabilities.functions.on_node.broker import Broker, Caller, Worker
from cavvy.capabilities.functions.on_node.start import StartedProcess
from cavvy.capabilities.functions.on_node.worker import WorkerProcess
from cavvy.capabilities.functions.payload import PickleCodec

_APP = """
import cavvy

app = cavvy.App("demo")

@app.function(max_replicas=1, batch=2, wait="300ms")
def pairs(xs):
    return [x.upper() for x in xs]

@app.function(max_replicas=1, concurrency=2)
def both(x):
    return x.upper()

@app.function(max_replicas=1, concurrency=2)
def endless():
    while True:
        yield 1

@app.function(max_replicas=1)
def hidden():
    return (x for x in range(3))

@app.function(max_replicas=1)
def add(x):
    return x + 1

@app.function(max_replicas=3, limit=cavvy.Limit(1, key="tenant"))
def hold(tenant, path):
    import pathlib, time
    pathlib.Path(f"{path}.begun").touch()
    while not pathlib.Path(path).exists():
        time.sleep(0.01)
    return tenant
"""
_START_S = 60
_KEY = "1f" * 16


class Served:
    """An app whose functions run in processes of a broker."""

    def __init__(self, app: App, address: str, meet: str) -> None:
        self.app, self.meet = app, meet
        self.end: Callable[[], object] = lambda: None
        self.told: list[dict[str, Any]] = []  # what the broker tells the control plane
        self.link = BrokerLink(lambda: dial_broker(address), None, PickleCodec())
        self.run = AppRun(app)
        self.run._find_link = lambda function: self.link  # type: ignore[method-assign]

    def spawn(self, name: str, *args: Any) -> FunctionCall:
        return self.run.spawn(self.app.functions[name], args, {})


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "demo.py").write_text(_APP)
    space: dict[str, Any] = {"__name__": "demo", "__file__": str(tmp_path / "demo.py")}
    exec(compile(_APP, str(tmp_path / "demo.py"), "exec"), space)
    app = space["app"]
    spec = {
        "app": "demo",
        "module": "demo",
        "file": "demo.py",
        "code": "",
        "python": "",
        "idle_s": 0,
        "alone_s": 0,
        "functions": {
            each.name: {"name": each.name, "class": "", **each.options.to_head(each.name)}
            for each in app.functions.values()
        },
    }
    (tmp_path / "app.json").write_text(json.dumps(spec))
    (tmp_path / "meet").mkdir(mode=0o700)
    meet = f"{tmp_path}/meet/x.sock:{_KEY}"
    (tmp_path / "key").write_text(_KEY)
    address = tmp_path / "address.json"
    found = Served(app, str(address), meet)
    agent = Agent(tmp_path / "agent", found.told)
    env = {k: v for k, v in os.environ.items() if k != "CAVVY_FUNCTIONS"}
    process = subprocess.Popen(
        [sys.executable, str(serve.__file__), "app.json", f"{tmp_path}/meet/x.sock"],
        cwd=tmp_path,
        env={**env, "CAVVY_NOTICE": agent.path, "CAVVY_JOB": "j1"},
    )
    found.end = lambda: (process.terminate(), process.wait(60))
    wait_until(lambda: address.exists() and address.read_text().endswith("}"))
    try:
        yield found
    finally:
        found.link.close()
        found.run.close()
        found.end()
        agent.close()


class Agent:
    """The agent of a node, as far as a broker asks it: it keeps what it is asked."""

    def __init__(self, path: Path, told: list[dict[str, Any]]) -> None:
        self.path, self._told = str(path), told
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.path)
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        with suppress(OSError), self._socket.accept()[0] as made, made.makefile() as lines:
            for line in lines:
                ask = json.loads(line)["ask"]
                assert ask["to"] == "apps/report"
                self._told.append(json.loads(ask["body"]))
                answer = {"id": ask["id"], "status": 200, "body": {}}
                made.sendall(json.dumps({"answer": answer}).encode() + b"\n")


def wait_until(holds: Any) -> None:
    until = time.monotonic() + _START_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_control_plane_is_told_what_calls_did(served: Served) -> None:
    assert served.spawn("add", 1).get(timeout=60) == 2
    with pytest.raises(TypeError):
        served.spawn("add", "x").get(timeout=60)
    call = served.spawn("both", "a")
    call.cancel()
    served.end()
    minutes = [each for told in served.told for each in told["minutes"]]
    added = [each for each in minutes if each["function"] == "add"]
    assert (added[-1]["done"], added[-1]["failed"]) == (1, 1)
    failed = next(each for each in added[-1]["recent"] if each["state"] == "failed")
    assert failed["type"] == "TypeError"
    assert "add" in failed["trace"]
    assert 0 < failed["ran_s"] <= failed["took_s"]
    assert served.told[-1]["workers"] == 0, "it has ended"
    assert all(waiting == 0 for waiting, _, _ in served.told[-1]["gauges"].values())


def test_cancelled_calls_leave_their_places_in_a_batch(served: Served) -> None:
    assert served.spawn("pairs", "a").get(timeout=60) == "A"
    for _ in range(2):  # as many as there are places
        call = served.spawn("pairs", "b")
        time.sleep(0.05)  # it waits in the process for the other call of its batch
        call.cancel()
        with pytest.raises(CallCancelled):
            call.get(timeout=60)
        time.sleep(0.4)  # the process has stopped waiting
    assert served.spawn("pairs", "c").get(timeout=60) == "C"


def test_a_limit_holds_calls_of_one_key_back(served: Served, tmp_path: Path) -> None:
    paths = [tmp_path / f"go-{number}" for number in range(4)]
    begun = [tmp_path / f"go-{number}.begun" for number in range(4)]
    calls = [
        served.spawn("hold", tenant, str(path)) for tenant, path in zip("aaba", paths, strict=True)
    ]
    wait_until(lambda: begun[0].exists() and begun[2].exists())
    calls[1].cancel()
    paths[0].touch()
    wait_until(lambda: begun[3].exists())
    assert not begun[1].exists()
    for path in paths:
        path.touch()
    assert [calls[at].get(timeout=60) for at in (0, 2, 3)] == ["a", "b", "a"]
    lost = served.spawn("hold", "a", str(tmp_path / "never"))
    wait_until((tmp_path / "never.begun").exists)
    lost.cancel()  # its process is killed, and its place is free again
    assert served.spawn("hold", "a", str(paths[0])).get(timeout=60) == "a"


def test_the_end_of_a_spawned_call_is_known(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[tuple[str, str]] = []
    monkeypatch.setattr(spawned, "end", lambda name, kind, text: ended.append((name, kind)))
    call = served.spawn("add", 1)
    assert call.get(timeout=60) == 2
    with pytest.raises(TypeError):
        served.spawn("add", "x").get(timeout=60)
    assert served.run.call(served.app.functions["add"], (2,), {}) == 3  # it is waited for
    assert ended == [("add", ""), ("add", "error")]
    head, _ = call._answer.result()
    assert 0 < head["share_s"] <= head["ran_s"] + 1e-4
    assert FunctionCall(call._link, call._request, call._answer, round).cost() == 0


async def test_calls_have_methods_for_await(served: Served) -> None:
    one, other = served.spawn("add", 1), served.spawn("add", 2)
    assert await FunctionCall.gather.aio(one, other) == FunctionCall.gather(one, other) == [2, 3]
    assert await one.done.aio()
    priced = FunctionCall(one._link, one._request, one._answer, round)
    assert await priced.cost.aio() == 0
    held = served.spawn("add", 3)
    await held.cancel.aio()
    assert await other.get.aio(timeout=60) == 3


def test_a_worker_answers_calls_that_were_cancelled_before_they_began() -> None:
    """The broker gives a process no more calls than it has places until each is answered."""
    for options in ({"concurrency": 1, "batch": 2}, {"concurrency": 2, "batch": None}):
        ours, theirs = socket.socketpair()
        ours.settimeout(_START_S)
        app = App("answers")
        app.function(lambda xs: xs, name="echo")
        head = {"name": "echo", "class": "", "wait_s": 0.01, **options}
        worker = make_worker(app, {"app": "answers", "functions": {"echo": head}}, theirs)
        call = {"op": "call", "fn": "echo", "enc": "json", "reply": "json"}
        cancels = b"".join(pack({"op": "cancel", "id": number}) for number in (1, 2))
        calls = b"".join(pack({**call, "id": number}, b'{"args": ["x"]}') for number in (1, 2, 3))
        ours.sendall(cancels + calls + pack({"op": "leave", "id": 0}))
        running = threading.Thread(target=worker, daemon=True)
        running.start()
        frames, told = CallFrames(), {}
        while len(told) < 3:
            data = ours.recv(65536)
            assert data, told
            told |= {each["id"]: each.get("kind", each["op"]) for each, _ in frames.feed(data)}
        running.join(_START_S)
        assert not running.is_alive()
        ours.close()
        theirs.close()
        assert told == {1: "CallCancelled", 2: "CallCancelled", 3: "done"}


class SaysNothing(Exception):
    """An error whose text cannot be read."""

    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("error", "text"),
    [(OSError("no file a\udcff"), "no file a?"), (SaysNothing(), "(its text cannot be read)")],
)
def test_texts_of_errors_can_be_written(error: Exception, text: str) -> None:
    """The name of a file may be no UTF-8, and the server takes no other text."""
    ours, theirs = socket.socketpair()
    app = App("errs")
    head = {"name": "echo", "class": "", "concurrency": 1, "batch": None, "wait_s": 0.01}
    worker = WorkerProcess({"app": "errs", "functions": {"echo": head}}, theirs, "echo")
    worker.app = app

    def echo(x: object) -> None:
        raise error

    app.function(echo, name="echo")
    with ours, theirs:
        worker._run_call({"op": "call", "fn": "echo", "enc": "json", "id": 1}, b'{"args": ["x"]}')
        ours.settimeout(_START_S)
        frames, found = CallFrames(), list[tuple[Head, bytes]]()
        while not found:
            found = frames.feed(ours.recv(65536))
    ((answer, _),) = found
    assert (answer["op"], answer["type"], answer["text"]) == ("failed", type(error).__name__, text)
    assert json.dumps(answer, ensure_ascii=False).encode()


def make_worker(app: App, spec: dict[str, Any], connection: socket.socket) -> Any:
    """Return what runs the calls of a worker process, here in a thread."""
    worker = WorkerProcess(spec, connection, "echo")
    worker.app = app
    threading.Thread(target=worker._send_held, daemon=True).start()
    return worker._run_one_by_one if worker.batch else worker._run_together


def test_a_cancelled_generator_leaves_its_place(served: Served) -> None:
    function = served.app.functions["endless"]
    for _ in range(3):  # one more than there are places
        values = iter(served.run.stream(function, (), {}))
        assert next(values) == 1
        values.close()  # type: ignore[attr-defined]  # it is a generator
    assert next(iter(served.run.stream(function, (), {}))) == 1


async def test_a_late_cancel_reaches_no_later_call(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a process hears of a call may arrive after the call's end: no other has its number."""
    monkeypatch.chdir(tmp_path)
    broker = Broker(str(tmp_path / "app.json"), "", None)
    functions = broker.functions["add"]
    heard: list[Head] = []
    worker = Worker(broker, functions, 0, StartedProcess("add", None, None))  # type: ignore[arg-type]
    worker.ready = True
    worker.send = lambda head, body=b"": heard.append(head)  # type: ignore[method-assign]
    functions.workers.append(worker)
    caller = Caller(broker, here=False)
    for number in range(100):
        caller._take(number, {"op": "call", "fn": "add", "id": number}, b"")
        functions.pump()
        worker.hear({"op": "done", "id": heard[-1]["id"]}, b"")
    assert len({each["id"] for each in heard}) == 100


@pytest.mark.parametrize(("kept", "ready", "begun"), [(1, True, 1), (1, False, 0), (0, True, 0)])
async def test_a_kept_process_that_is_lost_is_replaced_before_the_next_call(
    kept: int,
    ready: bool,
    begun: int,
    served: Served,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    broker = Broker(str(tmp_path / "app.json"), "", None)
    functions = broker.functions["add"]
    functions.spec["min_replicas"] = kept
    ended = subprocess.Popen(["true"])
    ended.wait()
    worker = Worker(broker, functions, 0, StartedProcess("add", ended, None))  # type: ignore[arg-type]
    worker.ready = ready
    functions.workers.append(worker)
    started: list[str] = []
    functions.start = lambda: started.append("add")  # type: ignore[method-assign]
    worker.connection_lost(None)
    assert len(started) == begun


async def test_calls_of_the_control_plane_outlive_its_connection(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that comes back sends them again: they run once, and keep their results until these
    are confirmed."""
    monkeypatch.chdir(tmp_path)
    broker = Broker(str(tmp_path / "app.json"), "", None)
    functions = broker.functions["add"]
    given: list[Head] = []
    worker = Worker(broker, functions, 0, StartedProcess("add", None, None))  # type: ignore[arg-type]
    worker.ready = True
    worker.send = lambda head, body=b"": given.append(head)  # type: ignore[method-assign]
    functions.workers.append(worker)
    told: list[list[tuple[Head, bytes]]] = []

    def connect() -> Caller:
        caller = Caller(broker, here=False)
        sink = Sink()
        caller.connection_made(sink)
        told.append([])
        mine = told[-1]
        caller.send = lambda head, body=b"": mine.append((head, body))  # type: ignore[method-assign]
        return caller

    call = {"op": "call", "fn": "add", "key": "c1"}
    first = connect()
    first._take(1, {**call, "id": 1}, b"")
    functions.pump()
    first.connection_lost(None)
    second = connect()
    second._take(7, {**call, "id": 7}, b"")
    functions.pump()
    assert len(given) == 1
    second.transport.close()  # type: ignore[union-attr]
    second.connection_lost(None)
    worker.hear({"op": "done", "id": given[0]["id"]}, b"result")  # while nobody is connected
    third = connect()
    third._take(9, {**call, "id": 9}, b"")
    functions.pump()
    assert len(given) == 1
    ((head, body),) = told[2]
    assert (head["op"], head["id"], body) == ("done", 9, b"result")
    third._obey("confirm", 9, {}, b"")
    assert broker.keyed == {}
    third._take(10, {**call, "id": 10}, b"")  # a call that is confirmed is another one
    functions.pump()
    assert len(given) == 2


async def test_a_server_that_comes_back_learns_which_calls_wait_for_limits(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would send no other calls: those of before would fill its window."""
    monkeypatch.chdir(tmp_path)
    broker = Broker(str(tmp_path / "app.json"), "", None)
    broker.functions["hold"].most = 0  # no process is started
    told: list[list[Head]] = []
    for number in range(2):
        caller = Caller(broker, here=False)
        caller.connection_made(Sink())
        told.append([])
        caller.send = lambda head, body=b"", mine=told[-1]: mine.append(head)  # type: ignore
        for at in range(3):
            call = {"op": "call", "fn": "hold", "key": f"c{at}", "limits": ["a"], "id": at + 1}
            caller._take(at + 1, call, b"")
        if not number:
            caller.connection_lost(None)
    assert [[head["id"] for head in each if head["op"] == "waits"] for each in told] == [[2, 3]] * 2


async def test_changed_files_stay_in_the_working_folder(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    spec = json.loads((tmp_path / "app.json").read_text())
    (work / "app.json").write_text(json.dumps({**spec, "alone_s": 60}))
    (work / "out").symlink_to(tmp_path)
    monkeypatch.chdir(work)
    broker = Broker(str(work / "app.json"), "", None)
    for path in ("../x.py", "/tmp/x.py", "out/x.py", "."):
        with pytest.raises(ValueError, match="not in the working folder"):
            broker.reload([(path, 1)], b"x")
    (work / "old.py").touch()
    less = {**spec, "alone_s": 60, "functions": {"add": spec["functions"]["add"]}}
    described = json.dumps(less).encode()
    kept = work / "a" / "__pycache__" / "b.cpython-311.pyc"
    kept.parent.mkdir(parents=True)
    kept.touch()
    files = [("a/b.py", 3), ("old.py", -1), ("app.json", len(described))]
    broker.reload(files, b"x=1" + described)
    assert (work / "a" / "b.py").read_text() == "x=1"
    assert not (work / "old.py").exists()
    assert not kept.exists()
    assert list(broker.functions) == ["add"]
    broker.spec["alone_s"] = 0
    with pytest.raises(ValueError, match="deployed app"):
        broker.reload([], b"")


class Sink(asyncio.Transport):
    """Where frames go that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self._closed = False

    def write(self, data: object) -> None:
        pass

    def close(self) -> None:
        self._closed = True

    def is_closing(self) -> bool:
        return self._closed


def test_a_generator_of_another_function(served: Served) -> None:
    with pytest.raises(TypeError, match="hidden returned a generator"):
        served.spawn("hidden").get(timeout=60)
    assert served.spawn("add", 1).get(timeout=60) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        pack({"op": "piece", "id": 77, "more": False}),
        pack({"id": 1}),
        pack({"op": "part", "id": "x", "fn": []}) + pack({"op": "done", "id": []}),
        b"\0\0\0\1\0\0\0\0x",
    ],
)
def test_wrong_frames_end_the_connection_not_the_program(wrong: bytes) -> None:
    """The calls are sent again over other connections, and fail when these are as bad."""
    dialled = []

    def dial() -> socket.socket:
        ours, theirs = socket.socketpair()
        dialled.append(theirs)
        theirs.sendall(wrong)
        return ours

    link = BrokerLink(dial, None, PickleCodec())
    run = AppRun(App("wrong"))
    run._find_link = lambda function: link  # type: ignore[method-assign]
    call = run.spawn(cavvy.App("other").function(lambda: 1, name="f"), (), {})
    with pytest.raises(WorkerLost, match="lost 6 times"):
        call.get(timeout=60)
    assert len(dialled) == 6
    for each in dialled:
        each.close()


def test_values_for_a_call_that_waits_for_one_result() -> None:
    ours, theirs = socket.socketpair()
    link = BrokerLink(lambda: ours, None, PickleCodec())
    run = AppRun(App("parts"))
    run._find_link = lambda function: link  # type: ignore[method-assign]
    function = cavvy.App("other").function(lambda: 1, name="f")
    first = run.spawn(function, (), {})
    theirs.sendall(pack({"op": "part", "id": 1}, b"") + pack({"op": "done", "id": 1}, b""))
    with pytest.raises(CallFailed, match="f yields values"):
        first.get(timeout=60)
    second = run.spawn(function, (), {})
    theirs.sendall(pack({"op": "failed", "id": 2, "kind": "CallCancelled", "text": "x"}))
    with pytest.raises(CallCancelled):
        second.get(timeout=60)
    link.close()
    theirs.close()


def test_callers_and_the_broker_prove_that_they_know_the_key(served: Served) -> None:
    path = served.meet.rpartition(":")[0]
    made = dial_here(served.meet)
    link = BrokerLink(lambda: made, None, PickleCodec())
    served.run._find_link = lambda function: link  # type: ignore[method-assign]
    assert served.spawn("add", 1).get(timeout=60) == 2
    link.close()
    for wrong in ("2e" * 16, ""):
        with pytest.raises(ConnectionRefusedError):
            dial_here(f"{path}:{wrong}")
    call = pack({"op": "call", "id": 1, "fn": "add"}, b"")
    hello = pack({"op": "hello", "id": 0, "nonce": "n"})
    for said in (
        call,
        hello + call,
        hello + pack({"op": "hello", "id": 0, "proof": "00"}) + call,
        hello + pack({"op": "hello", "id": 0, "key": _KEY}) + call,
        pack({"op": "hello", "id": 0}) + call,
    ):
        told = list_answers(path, said)
        assert [each for each in told if each != "challenge"] == [], said


def list_answers(path: str, said: bytes) -> list[str]:
    """Return what a broker answers until it closes the connection."""
    with socket.socket(socket.AF_UNIX) as made:
        made.settimeout(_START_S)
        made.connect(path)
        made.sendall(said)
        frames, told = CallFrames(), list[str]()
        with suppress(ConnectionResetError):
            while data := made.recv(65536):
                told += [head["op"] for head, _ in frames.feed(data)]
        return told


@pytest.mark.parametrize(
    "answer",
    [
        {"op": "welcome", "id": 0},
        {"op": "challenge", "id": 0, "nonce": "n", "proof": "00"},
        {"op": "done", "id": 1},
        None,
    ],
)
def test_a_socket_of_others_is_told_nothing(answer: Head | None, tmp_path: Path) -> None:
    """A job of this user can take the place of a socket."""
    heard = bytearray()
    with socket.socket(socket.AF_UNIX) as there:
        there.bind(str(tmp_path / "x.sock"))
        there.listen()

        def serve_one() -> None:
            made, _ = there.accept()
            with made:
                made.settimeout(_START_S)
                heard.extend(made.recv(65536))
                if answer is None:
                    return
                made.sendall(pack(answer))
                with suppress(ConnectionResetError):
                    heard.extend(made.recv(65536))

        running = threading.Thread(target=serve_one, daemon=True)
        tmp_path.chmod(0o700)
        running.start()
        with pytest.raises(OSError, match=r"its key|does not say"):
            dial_here(f"{tmp_path}/x.sock:{_KEY}")
        running.join(_START_S)
    assert [head["op"] for head, _ in CallFrames().feed(bytes(heard))] == ["hello"]
    assert _KEY.encode() not in heard


@pytest.mark.parametrize("pause_s", [0.05, 0.0])
def test_who_listens_cannot_keep_a_caller_waiting(
    pause_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends a head that has no end, some bytes at a time, or many."""
    monkeypatch.setattr(meeting, "_GREET_S", 0.3 if pause_s else _START_S)
    tmp_path.chmod(0o700)
    path, over = str(tmp_path / "x.sock"), threading.Event()

    def listen(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, suppress(OSError):
            connection.sendall(struct.pack(">II", 100_000, 0))
            for _ in range(200):
                connection.sendall(bytes(1 if pause_s else 100))
                over.wait(pause_s)
            over.wait(_START_S if not pause_s else 0)

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        thread = threading.Thread(target=listen, args=(server,), daemon=True)
        thread.start()
        with pytest.raises(TimeoutError if pause_s else ConnectionRefusedError):
            dial_here(f"{path}:{_KEY}")
        over.set()
        thread.join(_START_S)


def test_a_folder_of_others_is_not_entered(tmp_path: Path) -> None:
    own, link = tmp_path / "own", tmp_path / "link"
    own.mkdir(mode=0o700)
    link.symlink_to(own)
    with socket.socket(socket.AF_UNIX) as there:
        there.bind(str(own / "x.sock"))
        there.listen()
        there.setblocking(False)
        with pytest.raises(ConnectionRefusedError, match="no folder of this user alone"):
            dial_here(f"{link}/x.sock:{_KEY}")
        own.chmod(0o755)
        with pytest.raises(ConnectionRefusedError, match="no folder of this user alone"):
            dial_here(f"{own}/x.sock:{_KEY}")
        if os.geteuid() == 0:
            own.chmod(0o700)
            os.chown(own, 1234, 1234)
            with pytest.raises(ConnectionRefusedError, match="no folder of this user alone"):
                dial_here(f"{own}/x.sock:{_KEY}")
        with pytest.raises(BlockingIOError):
            there.accept()


async def test_arguments_in_files_go_with_their_calls(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    broker = Broker(str(tmp_path / "app.json"), "", None)
    functions = broker.functions["add"]
    functions.workers.append(Worker(broker, functions, 0, StartedProcess("add", None, None)))  # type: ignore[arg-type]
    caller, other = Caller(broker, here=False), tmp_path / "other"
    other.touch()
    for number in (1, 2):
        caller._obey("put", number, {}, b"x")
        caller._take(number, {"op": "call", "fn": "add", "id": number, "file": str(other)}, b"")
    caller._take(3, {"op": "call", "fn": "add", "id": 3, "file": str(other)}, b"")
    assert len(os.listdir(broker.spool)) == 2
    caller._cancel(1)
    assert len(os.listdir(broker.spool)) == 1
    functions.fail_all({"op": "failed", "kind": "AppBroken", "text": "x"})
    assert os.listdir(broker.spool) == []
    assert other.exists(), "a caller names no files"


def test_a_wait_for_calls_does_not_end_the_sending_of_a_result() -> None:
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    head = {"name": "echo", "class": "", "concurrency": 1, "batch": 2, "wait_s": 0.1}
    worker = WorkerProcess({"app": "a", "functions": {"echo": head}}, theirs, "echo")
    with ours, theirs:
        waiting = threading.Thread(target=worker._receive, args=(0.2,))
        waiting.start()
        time.sleep(0.05)
        body = bytes(100_000)
        sending = threading.Thread(target=worker.send, args=({"op": "done", "id": 1}, body))
        sending.start()
        waiting.join(_START_S)
        time.sleep(0.3)
        frames, found = CallFrames(), list[tuple[Head, bytes]]()
        ours.settimeout(_START_S)
        while not found:
            found = frames.feed(ours.recv(4096))
        sending.join(_START_S)
    assert found == [({"op": "done", "id": 1}, body)]


def test_a_terminal_gets_no_escape_sequences_of_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "f | \x1b]0;title\x07\x1b[31mred\x1b[0m\x1b[2J"
    for terminal, shown in ((True, "f | \x1b[31mred\x1b[0m\n"), (False, f"{said}\n")):
        written = io.StringIO()
        monkeypatch.setattr(written, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setattr(sys, "stderr", written)
        print_line(said)
        assert written.getvalue() == shown
