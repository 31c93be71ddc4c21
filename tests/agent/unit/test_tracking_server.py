"""The tracking API of MLflow that jobs find at $MLFLOW_TRACKING_URI, by HTTP and with MLflow's own
client.
"""

import json
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from math import isnan
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from cavvy.agent.loop import EventLoop
from cavvy.agent.tracking_door import TOKEN, URI, TrackingDoor
from cavvy.agent.work import tracking_server
from cavvy.agent.work.tracking_server import (
    Refusal,
    TrackingStore,
    _fits,
    _TrackedRun,
    read_filter,
)


class Job:
    """A job's door, and what has come through it."""

    def __init__(self, folder: Path) -> None:
        self.values: list[tuple[float | None, dict[str, float]]] = []
        self.ages: list[float] = []
        self.params: dict[str, str] = {}
        self.loop = EventLoop()
        self.door = TrackingDoor(self.loop, str(folder), self._take, self.params.update)
        self.variables = self.door.open({})
        self._thread = threading.Thread(target=self.loop.run)
        self._thread.start()

    def _take(self, values: dict[str, float], step: float | None, age_s: float) -> None:
        self.values.append((step, values))
        self.ages.append(age_s)

    def call(self, method: str, path: str, token: str | None = None, **fields: Any) -> Any:
        url = f"{self.variables[URI]}/api/2.0/mlflow/{path}"
        body = None if method == "GET" else json.dumps(fields).encode()
        if method == "GET" and fields:
            url += f"?{urlencode(fields)}"
        said = {"Authorization": f"Bearer {self.variables[TOKEN] if token is None else token}"}
        request = urllib.request.Request(url, body, said, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def stop(self) -> None:
        self.loop.after(0, self.loop.stop)
        with socket.create_connection(self.address):  # wakes the loop
            self._thread.join()
        self.door.close()

    @property
    def sign_in(self) -> str:
        """The token as a line of a head, with the ends of the lines around it."""
        return f"\r\nAuthorization: Bearer {self.variables[TOKEN]}\r\n"

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.variables[URI].rpartition("/")[2].partition(":")
        return host, int(port)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.stop()


def start(job: Job, name: str = "fit") -> str:
    made = job.call("POST", "runs/create", experiment_id="0", run_name=name)
    return str(made["run"]["info"]["run_id"])


def test_metrics_and_parameters_of_a_run_become_curves_and_settings(job: Job) -> None:
    run = start(job)
    now = int(time.time() * 1000)
    job.call("POST", "runs/log-metric", run_id=run, key="loss", value=0.5, step=3, timestamp=now)
    metrics = [
        {"key": "loss", "value": 0.25, "step": 4, "timestamp": now - 60_000},
        {"key": "acc", "value": "NaN", "step": 4, "timestamp": now - 60_000},
    ]
    job.call(
        "POST",
        "runs/log-batch",
        run_id=run,
        metrics=metrics,
        params=[{"key": "lr", "value": "0.1"}],
        tags=[{"key": "who", "value": "me"}],
    )
    assert job.values[0] == (3, {"loss": 0.5})
    step, values = job.values[1]
    assert (step, values["loss"]) == (4, 0.25)
    assert isnan(values["acc"])
    assert 59 < job.ages[1] < 120
    assert job.params == {"lr": "0.1"}
    found = job.call("GET", "runs/get", run_id=run)["run"]["data"]
    assert {each["key"]: each["value"] for each in found["metrics"]} == {"loss": 0.25, "acc": "NaN"}
    assert {"key": "who", "value": "me"} in found["tags"]
    history = job.call("GET", "metrics/get-history", run_id=run, metric_key="loss")["metrics"]
    assert [each["step"] for each in history] == [3, 4]


def test_values_without_a_step_are_counted(job: Job) -> None:
    """MLflow sends the step 0 for each of them."""
    run = start(job)
    for value in (1, 2, 3):
        job.call("POST", "runs/log-metric", run_id=run, key="x", value=value)
    assert [step for step, _ in job.values] == [0, None, None]


def test_other_runs_have_their_name_before_their_curves(job: Job) -> None:
    for name in ("one", "two", "two"):
        job.call("POST", "runs/log-metric", run_id=start(job, name), key="x", value=1, step=1)
    names = [next(iter(values)) for _, values in job.values]
    assert names[:2] == ["x", "two/x"]
    assert names[2].startswith("two-")


def test_runs_are_searched(job: Job) -> None:
    runs = [start(job, name) for name in ("one", "two")]
    job.call("POST", "runs/log-parameter", run_id=runs[0], key="lr", value="0.1")
    job.call("POST", "runs/log-metric", run_id=runs[0], key="loss", value=0.5, step=1)

    def search(text: str) -> list[str]:
        found = job.call("POST", "runs/search", experiment_ids=["0"], filter=text)["runs"]
        return [each["info"]["run_name"] for each in found]

    assert search("") == ["two", "one"]
    assert search("attributes.run_name = 'one'") == ["one"]
    assert search("params.lr = '0.1' and metrics.loss < 0.6") == ["one"]
    assert search("metrics.loss > 0.6") == []
    assert search("tags.`mlflow.runName` LIKE 't%'") == ["two"]
    status, said = job.call("POST", "runs/search", filter="lr is good")
    assert (status, said["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    job.call("POST", "runs/delete", run_id=runs[0])
    assert search("") == ["two"]


@pytest.mark.parametrize(
    ("method", "path", "fields", "status", "code"),
    [
        ("GET", "runs/get", {"run_id": "no"}, 404, "RESOURCE_DOES_NOT_EXIST"),
        (
            "GET",
            "experiments/get-by-name",
            {"experiment_name": "no"},
            404,
            "RESOURCE_DOES_NOT_EXIST",
        ),
        ("POST", "experiments/create", {"name": "Default"}, 400, "RESOURCE_ALREADY_EXISTS"),
        ("POST", "registered-models/create", {"name": "m"}, 404, "ENDPOINT_NOT_FOUND"),
        ("POST", "runs/create", {"tags": "text"}, 400, "INVALID_PARAMETER_VALUE"),
    ],
)
def test_what_cannot_be_answered_has_the_code_that_clients_know(
    job: Job, method: str, path: str, fields: dict[str, Any], status: int, code: str
) -> None:
    found, said = job.call(method, path, **fields)
    assert (found, said["error_code"]) == (status, code)


def test_a_parameter_does_not_change(job: Job) -> None:
    run = start(job)
    job.call("POST", "runs/log-parameter", run_id=run, key="lr", value="0.1")
    status, said = job.call("POST", "runs/log-parameter", run_id=run, key="lr", value="0.2")
    assert status == 400
    assert "'0.1' already" in said["message"]


def test_only_the_task_is_answered(job: Job) -> None:
    for token in ("", "wrong"):
        status, said = job.call("GET", "experiments/search", token=token)
        assert (status, said["error_code"]) == (401, "UNAUTHENTICATED")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01 no http\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET //[ HTTP/1.1\r\n\r\n",
        b"x" * (tracking_server.LONGEST_HEAD + 1000),
        b"POST /api/2.0/mlflow/runs/create HTTP/1.1\r\nContent-Length: 9\r\n\r\n[[[[[[[[[",
    ],
)
@pytest.mark.parametrize("knows", [False, True])
def test_hostile_requests_end_only_their_connection(job: Job, sent: bytes, knows: bool) -> None:
    if knows:
        sent = sent.replace(b"\r\n", job.sign_in.encode(), 1)
    with socket.create_connection(job.address) as line:
        line.settimeout(30)
        try:
            line.sendall(sent)
            line.shutdown(socket.SHUT_WR)
            while line.recv(4096):
                pass
        except ConnectionError:
            pass
    job.call("POST", "runs/log-metric", run_id=start(job), key="loss", value=0.5, step=3)
    assert job.values == [(3, {"loss": 0.5})]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("runs/create", {"start_time": float("inf")}),
        ("runs/log-metric", {"key": "x", "value": 1, "step": float("inf")}),
        ("runs/log-metric", {"key": "x", "value": 1, "step": 10**400}),
        ("runs/log-metric", {"key": "x", "value": 10**400}),
        ("runs/log-metric", {"key": "x", "value": 1, "timestamp": 10**400}),
        ("runs/search", {"max_results": float("inf")}),
    ],
)
def test_numbers_without_bounds_are_refused(job: Job, path: str, fields: dict[str, Any]) -> None:
    run = start(job)
    status, said = job.call("POST", path, run_id=run, **fields)
    assert (status, said["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert job.call("GET", "runs/get", run_id=run)["run"]["data"]["metrics"] == []
    job.call("POST", "runs/log-metric", run_id=run, key="x", value=1, step=3)
    assert job.values == [(3, {"x": 1})]


def test_a_client_that_goes_before_its_answer_ends_only_its_connection(job: Job) -> None:
    for _ in range(2):
        job.call("POST", "experiments/create", name=f"{_}" + "x" * 4_000_000)
    with socket.create_connection(job.address) as line:
        line.sendall(f"GET /api/2.0/mlflow/experiments/search HTTP/1.1{job.sign_in}\r\n".encode())
        line.recv(1)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # resets it
    job.call("POST", "runs/log-metric", run_id=start(job), key="loss", value=0.5, step=3)
    assert job.values == [(3, {"loss": 0.5})]


def test_a_body_without_the_token_is_not_awaited(job: Job) -> None:
    with socket.create_connection(job.address) as line:
        line.settimeout(30)
        line.sendall(b"POST / HTTP/1.1\r\nContent-Length: 8000000\r\n\r\n")
        assert line.recv(4096).startswith(b"HTTP/1.1 401")


def test_requests_wait_until_answers_are_taken(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a client that reads nothing costs no more memory than one answer."""
    job.call("POST", "experiments/create", name="x" * 8_000_000)
    answered: list[int] = []
    search = TrackingStore.answer

    def answer(store: TrackingStore, method: str, path: str, fields: Any) -> Any:
        if path == "experiments/search":
            answered.append(1)
        return search(store, method, path, fields)

    monkeypatch.setattr(TrackingStore, "answer", answer)
    request = f"GET /api/2.0/mlflow/experiments/search HTTP/1.1{job.sign_in}\r\n".encode()
    with socket.create_connection(job.address) as line:
        line.settimeout(30)
        line.sendall(request * 3)
        line.recv(1)
        job.call("GET", "experiments/get", experiment_id="0")
        assert len(answered) == 1
        found = 0
        while found < 3 * 8_000_000:
            found += len(line.recv(1 << 20))
    assert len(answered) == 3


def test_silent_connections_do_not_keep_the_task_out(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking_server, "MOST_CONNECTIONS", 3)
    lines = [socket.create_connection(job.address) for _ in range(6)]
    job.call("POST", "runs/log-metric", run_id=start(job), key="loss", value=0.5, step=3)
    assert job.values == [(3, {"loss": 0.5})]
    for each in lines:
        each.close()


def test_a_head_must_come_in_time(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking_server, "HEAD_S", 0.05)
    request = f"GET /api/2.0/mlflow/experiments/search HTTP/1.1{job.sign_in}\r\n".encode()
    with (
        socket.create_connection(job.address) as silent,
        socket.create_connection(job.address) as known,
    ):
        known.settimeout(30)
        silent.settimeout(30)
        known.sendall(request)
        assert known.recv(4096).startswith(b"HTTP/1.1 200")
        assert silent.recv(1) == b""
        known.sendall(request)
        assert known.recv(4096).startswith(b"HTTP/1.1 200"), "the task may be silent"


def test_requests_may_come_in_pieces_and_together(job: Job) -> None:
    body = b'{"name": "x"}'
    head = (
        f"POST /api/2.0/mlflow/experiments/create HTTP/1.1\r\nAuthorization: Bearer "
        f"{job.variables[TOKEN]}\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    with socket.create_connection(job.address) as line:
        line.settimeout(30)
        for at in range(0, len(head + body), 40):
            line.sendall((head + body)[at : at + 40])
            time.sleep(0.001)
        line.sendall((head + body) * 2)
        answers = b""
        while answers.count(b"HTTP/1.1") < 3 or not answers.endswith(b"}"):
            answers += line.recv(4096)
    assert answers.count(b"RESOURCE_ALREADY_EXISTS") == 2


def test_a_task_that_says_where_its_runs_go_keeps_it(tmp_path: Path) -> None:
    door = TrackingDoor(EventLoop(), str(tmp_path), lambda *_: None, lambda _: None)
    assert door.open({URI: "https://mlflow.example"}) == {}
    found = door.open({"HTTP_PROXY": "http://proxy", "no_proxy": "a.example"})
    assert found["no_proxy"] == "a.example,127.0.0.1"
    door.close()


def test_what_is_kept_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking_server, "MOST_RUNS", 2)
    monkeypatch.setattr(tracking_server, "MOST_HISTORY", 3)
    store = TrackingStore(str(tmp_path), lambda *_: None, lambda _: None)
    run = store.answer("POST", "runs/create", {})["run"]["info"]["run_id"]
    store.answer("POST", "runs/create", {})
    with pytest.raises(Refusal, match="at most 2 runs"):
        store.answer("POST", "runs/create", {})
    for value in range(9):
        store.answer("POST", "runs/log-metric", {"run_id": run, "key": "x", "value": value})
    found = store.answer("GET", "metrics/get-history", {"run_id": run, "metric_key": "x"})
    assert [each["value"] for each in found["metrics"]] == [6, 7, 8]


def test_the_histories_of_all_runs_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest value of each metric and the histories of the newest runs are kept."""
    monkeypatch.setattr(tracking_server, "MOST_VALUES", 40)
    told: list[dict[str, float]] = []
    store = TrackingStore(str(tmp_path), lambda values, *_: told.append(values), lambda _: None)
    runs = []
    for _ in range(5):
        runs.append(store.answer("POST", "runs/create", {})["run"]["info"]["run_id"])
        for value in range(10):
            fields = {"run_id": runs[-1], "key": "x", "value": value}
            store.answer("POST", "runs/log-metric", fields)

    def histories() -> list[list[float]]:
        asked = [{"run_id": run, "metric_key": "x"} for run in runs]
        found = [store.answer("GET", "metrics/get-history", each)["metrics"] for each in asked]
        return [[each["value"] for each in history] for history in found]

    assert histories() == [[9], [9], [9], [*range(10)], [*range(10)]]
    assert len(told) == 50, "curves have all of them"
    for number in range(100):
        fields = {"run_id": runs[0], "key": f"k{number}", "value": 1}
        store.answer("POST", "runs/log-metric", fields)
    assert sum(len(run.history) for run in store._runs.values()) == 20
    assert store._kept == sum(
        len(history) for run in store._runs.values() for history in run.history.values()
    )


@pytest.mark.parametrize(
    ("text", "pattern", "fits"),
    [
        ("one", "one", True),
        ("one", "on", False),
        ("one", "%", True),
        ("", "%", True),
        ("one", "o%e", True),
        ("aba", "ab%ba", False),
        ("abba", "ab%ba", True),
        ("one two three", "%two%", True),
        ("one two three", "one%t%ee", True),
        ("one two three", "%three%two%", False),
        ("a.b", "a%.%b", True),
        ("axb", "a.b", False),
        ("One", "o%", False),
        ("two\nlines", "two%", True),
    ],
)
def test_a_pattern_fits(text: str, pattern: str, fits: bool) -> None:
    run = _TrackedRun({"run_name": text})
    assert _fits(run, "att", "run_name", "LIKE", pattern) is fits


def test_a_pattern_fits_whatever_the_case_if_asked_for() -> None:
    assert _fits(_TrackedRun({"run_name": "ONE two"}), "att", "run_name", "ILIKE", "one%T%")


def test_no_filter_takes_the_agent_long() -> None:
    """A pattern that an expression would try in all ways, and one with a long space."""
    run = _TrackedRun({"run_name": "a" * 100_000})
    assert not _fits(run, "att", "run_name", "LIKE", "%a" * 50 + "%b")
    with pytest.raises(Refusal, match="at most 4000 characters"):
        read_filter("params.a" + " " * 10_000_000 + "= 'x'")


def test_a_filter_is_read() -> None:
    assert read_filter("params.a = 'x' AND metrics.`b c` >= 1e-3") == [
        ("par", "a", "=", "x"),
        ("met", "b c", ">=", "1e-3"),
    ]


def test_the_client_of_mlflow(job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mlflow: Any = pytest.importorskip("mlflow", reason="pip install mlflow-skinny")
    for name, value in job.variables.items():
        monkeypatch.setenv(name, value)
    mlflow.set_experiment("mine")
    with mlflow.start_run(run_name="first") as run:
        mlflow.log_params({"lr": 0.1, "opt": "adam"})
        mlflow.log_metrics({"loss": 0.5, "acc": 0.25}, step=3)
        mlflow.log_metric("bad", float("nan"), step=4)
        (tmp_path / "notes.txt").write_text("x")
        mlflow.log_artifact(str(tmp_path / "notes.txt"))
    client = mlflow.MlflowClient()
    found = client.get_run(run.info.run_id)
    assert (found.info.status, found.data.metrics["loss"]) == ("FINISHED", 0.5)
    assert [each.path for each in client.list_artifacts(run.info.run_id)] == ["notes.txt"]
    assert found.info.artifact_uri.startswith(str(tmp_path))
    assert job.values[0] == (3, {"loss": 0.5, "acc": 0.25})
    assert job.params == {"lr": "0.1", "opt": "adam"}
    assert len(mlflow.search_runs(["1"], "params.lr = '0.1'", output_format="list")) == 1
