"""Answers the tracking REST API of MLflow, so that programs with `mlflow.autolog()` or
`mlflow.log_metric` have curves without an account. Metrics and parameters go to the control plane;
runs, tags and the newest values are kept in memory while the attempt lasts, for clients that read
them back. Artifacts are files in the working folder, which clients write themselves.

The API: https://mlflow.org/docs/latest/api_reference/rest-api.html
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from hmac import compare_digest
from urllib.parse import parse_qs, unquote, urlsplit

from ..loop import READ, WRITE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..loop import EventLoop, LoopTimer

    Fields = dict[str, Any]
    TakeValues = Callable[[dict[str, float], float | None, float], object]
    TakeParams = Callable[[dict[str, str]], object]

PREFIX = re.compile(r"/(?:ajax-)?api/[23]\.0/mlflow/")
LARGEST = 8 << 20  # bytes of a request; MLflow sends batches of up to 1 MB
LONGEST_HEAD = 64 << 10
MOST_CONNECTIONS = 128
HEAD_S = 10.0  # in which a client must have sent the head of its first request
LINGER_S = 1.0  # in which a client that is refused can send the rest of its request
MOST_RUNS, MOST_KEYS, MOST_HISTORY, MOST_MODELS = 2000, 2000, 1000, 1000
MOST_VALUES = 200_000  # of all runs, in the histories of their metrics; about 60 MB
LONGEST_FILTER = 4000  # characters
ARTIFACTS = "mlartifacts"  # the folder of artifacts in the working folder
_PIECE = 256 << 10
_CLAUSE = re.compile(
    r"""\s*(?P<kind>attributes?|attr|run|tags?|params?|parameters?|metrics?)?\.?
    (?P<key>[`"][^`"]+[`"]|[\w./-]+)\s*(?P<by>=|!=|>=|<=|>|<|LIKE|ILIKE)\s*
    (?P<value>'[^']*'|"[^"]*"|[-+.\deE]+)\s*""",
    re.IGNORECASE | re.VERBOSE,
)


class Refusal(Exception):
    """Raised for a request that cannot be answered: `status`, MLflow's code, and the reason."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def _missing(what: str) -> Refusal:
    return Refusal(404, "RESOURCE_DOES_NOT_EXIST", f"there is no {what} in this job")


def _invalid(message: str) -> Refusal:
    return Refusal(400, "INVALID_PARAMETER_VALUE", message)


class TrackingServer:
    """The connections of clients, and what they have told."""

    def __init__(
        self, loop: EventLoop, token: str, folder: str, values: TakeValues, params: TakeParams
    ) -> None:
        self._loop, self._token = loop, token
        self._connections: dict[int, _ClientConnection] = {}
        self.store = TrackingStore(folder, values, params)

    def add(self, connection: socket.socket) -> None:
        if len(self._connections) >= MOST_CONNECTIONS:
            # other users of the machine reach the port, too: they cannot keep the task out
            unknown = next((e for e in self._connections.values() if not e.is_known), None)
            if unknown is None:
                connection.close()
                return
            unknown.close()
        number = connection.fileno()
        self._connections[number] = _ClientConnection(
            self._loop,
            connection,
            self._knows,
            self._answer,
            lambda: self._connections.pop(number, None),
        )

    def close(self) -> None:
        for each in [*self._connections.values()]:
            each.close()

    def _knows(self, token: str) -> bool:
        return compare_digest(token.encode(), f"Bearer {self._token}".encode())

    def _answer(self, method: str, target: str, body: bytes) -> tuple[int, object]:
        try:
            fields = json.loads(body) if body else {}
        except (ValueError, RecursionError):
            return 400, _describe("BAD_REQUEST", "the body is no JSON")
        if not isinstance(fields, dict):
            return 400, _describe("BAD_REQUEST", "the body is no JSON object")
        try:
            parts = urlsplit(target)
            asked = parse_qs(parts.query)
        except ValueError as error:
            return 400, _describe("BAD_REQUEST", f"the address is none: {error}")
        for name, found in asked.items():
            fields.setdefault(name, found[0])
        if parts.path in ("/health", "/version"):
            return 200, {}
        prefix = PREFIX.match(parts.path)
        try:
            if prefix is None:
                raise Refusal(404, "ENDPOINT_NOT_FOUND", f"there is no {parts.path}")
            return 200, self.store.answer(method, unquote(parts.path[prefix.end() :]), fields)
        except Refusal as refusal:
            return refusal.status, _describe(refusal.code, str(refusal))
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            return 400, _describe("INVALID_PARAMETER_VALUE", f"{type(error).__name__}: {error}")


def _describe(code: str, message: str) -> object:
    return {"error_code": code, "message": message}


class _ClientConnection:
    """A connection of a client, which sends requests one after the other (HTTP/1.1). Before the
    head of a request has shown the token, no more than the head is kept.
    """

    def __init__(
        self,
        loop: EventLoop,
        connection: socket.socket,
        knows: Callable[[str], bool],
        answer: Callable[[str, str, bytes], tuple[int, object]],
        gone: Callable[[], object],
    ) -> None:
        self._loop, self._knows, self._answer, self._gone = loop, knows, answer, gone
        self._socket: socket.socket | None = connection
        self._in = bytearray()
        self._out = b""
        self._last = False  # whether the connection ends with the answer
        self._refused = False  # whether what still comes is dropped
        self.is_known = False  # whether the client has shown the token
        connection.setblocking(False)
        self._timer: LoopTimer | None = loop.after(HEAD_S, self.close)
        loop.watch(connection.fileno(), READ, self._ready)

    def close(self) -> None:
        self._loop.cancel(self._timer)
        if self._socket is not None:
            self._loop.unwatch(self._socket.fileno())
            self._socket.close()
            self._socket = None
            self._gone()

    def _ready(self, events: int) -> None:
        """Read and write what can be. Nothing that a client sends ends more than its connection."""
        try:
            self._move(events)
        except BlockingIOError:
            return
        except Exception:  # noqa: BLE001 - one client must not end the agent
            self.close()

    def _move(self, events: int) -> None:
        if self._out:
            self._flush()
            self._read_requests()  # those that have waited for the answer to be sent
        if self._socket is None or self._out or not events & ~WRITE:
            return
        data = self._socket.recv(_PIECE)
        if not data:
            self.close()
        elif not self._refused:
            self._in += data
            self._read_requests()

    def _read_requests(self) -> None:
        while self._socket is not None and not self._last and not self._out:
            end = self._in.find(b"\r\n\r\n")
            if end < 0:
                if len(self._in) > LONGEST_HEAD:
                    self.close()
                return
            lines = bytes(self._in[:end]).decode("latin-1").split("\r\n")
            headers = {
                name.strip().lower(): value.strip()
                for name, _, value in (line.partition(":") for line in lines[1:])
            }
            if not self._knows(headers.get("authorization", "")):
                self._refuse(401, "UNAUTHENTICATED", "MLFLOW_TRACKING_TOKEN is not this job's")
                return
            self._loop.cancel(self._timer)
            self.is_known = True
            size = headers.get("content-length", "0")
            # a number of thousands of digits is an error for Python
            length = int(size) if size.isdecimal() and len(size) < 10 else LARGEST + 1
            if length > LARGEST or "transfer-encoding" in headers:
                self._refuse(413, "BAD_REQUEST", "the request is too large")
                return
            whole = end + 4 + length
            if len(self._in) < whole:
                return
            body = bytes(self._in[end + 4 : whole])
            del self._in[:whole]
            method, _, rest = lines[0].partition(" ")
            status, found = self._answer(method, rest.rpartition(" ")[0], body)
            self._send(status, found, last=headers.get("connection", "").lower() == "close")

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer before the request was read. What comes of it is dropped, since a connection that
        is closed before would take the answer with it."""
        self._refused = True
        self._in.clear()
        self._loop.cancel(self._timer)
        self._timer = self._loop.after(LINGER_S, self.close)
        self._send(status, _describe(code, message), last=True)

    def _send(self, status: int, found: object, *, last: bool) -> None:
        body = json.dumps(found).encode()
        self._last = last
        end = "close" if last else "keep-alive"
        head = (
            f"HTTP/1.1 {status} {'OK' if status == 200 else 'Error'}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            f"Connection: {end}\r\n\r\n"
        )
        self._out += head.encode() + body
        self._flush()

    def _flush(self) -> None:
        """Send what waits. While some of it waits, nothing is read."""
        assert self._socket is not None
        try:
            while self._out:
                self._out = self._out[self._socket.send(self._out) :]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        if self._last and not self._out:
            if not self._refused:
                self.close()
                return
            self._socket.shutdown(socket.SHUT_WR)
        self._loop.watch(self._socket.fileno(), WRITE if self._out else READ, self._ready)


class _TrackedRun:
    """A run of a client."""

    def __init__(self, info: Fields) -> None:
        self.info = info
        self.tags: dict[str, str] = {}
        self.params: dict[str, str] = {}
        self.history: dict[str, list[Fields]] = {}

    def describe(self) -> Fields:
        return {
            "info": self.info,
            "data": {
                "metrics": [each[-1] for each in self.history.values()],
                "params": _pairs(self.params),
                "tags": _pairs(self.tags),
            },
            "inputs": {},
        }


def _pairs(found: dict[str, str]) -> list[Fields]:
    return [{"key": key, "value": value} for key, value in found.items()]


class TrackingStore:
    """Runs and experiments. The names of curves of the first run are its metrics; those of others
    have the run's name before them.
    """

    def __init__(
        self,
        folder: str,
        values: TakeValues,
        params: TakeParams,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder, self._values, self._params = folder, values, params
        self._clock = clock
        self._runs: dict[str, _TrackedRun] = {}
        self._names: dict[str, str] = {}  # of runs, before their curves
        self._experiments: dict[str, Fields] = {}
        self._models: dict[str, Fields] = {}
        self._kept = self._kept_keys = 0  # values and metrics in the histories of all runs
        self._add_experiment("Default")

    def answer(self, method: str, path: str, fields: Fields) -> Fields:
        """Return the answer to a request. Raises Refusal."""
        known = _ROUTES.get((method, path))
        if known is not None:
            return known(self, fields)
        if path.startswith("logged-models"):
            return self._answer_of_models(method, path[len("logged-models") :].strip("/"), fields)
        raise Refusal(
            404,
            "ENDPOINT_NOT_FOUND",
            f"{method} {path} is no part of the tracking API that a job of Cavvy answers",
        )

    # Experiments

    def _add_experiment(self, name: str, tags: object = ()) -> Fields:
        number = str(len(self._experiments))
        made = {
            "experiment_id": number,
            "name": name,
            "artifact_location": self._place(number),
            "lifecycle_stage": "active",
            "creation_time": self._now(),
            "last_update_time": self._now(),
            "tags": tags or [],
        }
        self._experiments[number] = made
        return made

    def _create_experiment(self, fields: Fields) -> Fields:
        name = str(fields.get("name", ""))
        if not name:
            raise _invalid("an experiment needs a name")
        if any(each["name"] == name for each in self._experiments.values()):
            raise Refusal(400, "RESOURCE_ALREADY_EXISTS", f"the experiment {name} exists")
        if len(self._experiments) >= MOST_RUNS:
            raise _invalid(f"a job has at most {MOST_RUNS} experiments")
        return {"experiment_id": self._add_experiment(name, fields.get("tags"))["experiment_id"]}

    def _get_experiment(self, fields: Fields) -> Fields:
        number = str(fields.get("experiment_id", ""))
        if number not in self._experiments:
            raise _missing(f"experiment {number}")
        return {"experiment": self._experiments[number]}

    def _get_by_name(self, fields: Fields) -> Fields:
        name = fields.get("experiment_name")
        for each in self._experiments.values():
            if each["name"] == name:
                return {"experiment": each}
        raise _missing(f"experiment {name}")

    def _search_experiments(self, fields: Fields) -> Fields:
        return {"experiments": [*self._experiments.values()]}

    # Runs

    def _create_run(self, fields: Fields) -> Fields:
        if len(self._runs) >= MOST_RUNS:
            raise _invalid(f"a job has at most {MOST_RUNS} runs")
        experiment = str(fields.get("experiment_id") or "0")
        self._get_experiment({"experiment_id": experiment})
        number = os.urandom(16).hex()
        tags = {str(each["key"]): str(each["value"]) for each in fields.get("tags") or ()}
        name = str(fields.get("run_name") or tags.get("mlflow.runName") or f"run-{number[:8]}")
        info = {
            "run_id": number,
            "run_uuid": number,
            "run_name": name,
            "experiment_id": experiment,
            "user_id": str(fields.get("user_id") or ""),
            "status": "RUNNING",
            "start_time": int(fields.get("start_time") or self._now()),
            "artifact_uri": self._place(experiment, number, "artifacts"),
            "lifecycle_stage": "active",
        }
        run = self._runs[number] = _TrackedRun(info)
        run.tags = {**tags, "mlflow.runName": name}
        prefix = f"{name}/" if self._names else ""
        if prefix in self._names.values():
            prefix = f"{name}-{number[:4]}/"
        self._names[number] = prefix
        return {"run": run.describe()}

    def _find(self, fields: Fields) -> _TrackedRun:
        number = str(fields.get("run_id") or fields.get("run_uuid") or "")
        if number not in self._runs:
            raise _missing(f"run {number}")
        return self._runs[number]

    def _get_run(self, fields: Fields) -> Fields:
        return {"run": self._find(fields).describe()}

    def _update_run(self, fields: Fields) -> Fields:
        run = self._find(fields)
        run.info.update(
            {name: fields[name] for name in ("status", "end_time", "run_name") if name in fields}
        )
        if "run_name" in fields:
            run.tags["mlflow.runName"] = str(fields["run_name"])
        return {"run_info": run.info}

    def _delete_run(self, fields: Fields) -> Fields:
        self._find(fields).info["lifecycle_stage"] = "deleted"
        return {}

    def _restore_run(self, fields: Fields) -> Fields:
        self._find(fields).info["lifecycle_stage"] = "active"
        return {}

    def _search_runs(self, fields: Fields) -> Fields:
        wanted = {str(each) for each in fields.get("experiment_ids") or ()}
        stage = fields.get("run_view_type", "ACTIVE_ONLY")
        tests = read_filter(str(fields.get("filter") or ""))
        found = [
            run
            for run in self._runs.values()
            if (not wanted or run.info["experiment_id"] in wanted)
            and (
                stage == "ALL"
                or run.info["lifecycle_stage"]
                == ("deleted" if stage == "DELETED_ONLY" else "active")
            )
            and all(_fits(run, *test) for test in tests)
        ]
        found.reverse()  # the newest first
        return {
            "runs": [each.describe() for each in found[: int(fields.get("max_results") or 1000)]]
        }

    # Metrics, parameters and tags

    def _log_metric(self, fields: Fields) -> Fields:
        self._add_metrics(self._find(fields), [fields])
        return {}

    def _log_param(self, fields: Fields) -> Fields:
        self._add_params(self._find(fields), [fields])
        return {}

    def _set_tag(self, fields: Fields) -> Fields:
        self._add_tags(self._find(fields), [fields])
        return {}

    def _delete_tag(self, fields: Fields) -> Fields:
        self._find(fields).tags.pop(str(fields.get("key")), None)
        return {}

    def _log_batch(self, fields: Fields) -> Fields:
        run = self._find(fields)
        self._add_params(run, fields.get("params") or [])
        self._add_tags(run, fields.get("tags") or [])
        self._add_metrics(run, fields.get("metrics") or [])
        return {}

    def _add_metrics(self, run: _TrackedRun, metrics: list[Fields]) -> None:
        now = self._clock()
        together: dict[tuple[float | None, float], dict[str, float]] = {}
        for each in metrics:
            key, value = str(each["key"]), float(each["value"])
            step, at = int(each.get("step") or 0), int(each.get("timestamp") or now * 1000)
            history = run.history.get(key, [])
            # without a step, MLflow says 0 each time: such values are counted
            counted = step == 0 and bool(history)
            row = (None if counted else float(step), float(at))
            if not history:
                if len(run.history) >= MOST_KEYS or self._kept_keys >= MOST_VALUES // 2:
                    continue
                run.history[key] = history
                self._kept_keys += 1
            history.append({"key": key, "value": _show(value), "timestamp": at, "step": step})
            self._kept += 1
            self._shorten(history, MOST_HISTORY)
            if self._kept > MOST_VALUES:
                self._forget()
            name = self._names[run.info["run_id"]] + key
            if name in together.get(row, ()):
                self._values({name: value}, row[0], max(0.0, now - row[1] / 1000))
            else:
                together.setdefault(row, {})[name] = value
        for (named, sent_at), values in together.items():
            self._values(values, named, max(0.0, now - sent_at / 1000))

    def _shorten(self, history: list[Fields], most: int) -> None:
        self._kept -= max(0, len(history) - most)
        del history[:-most]

    def _forget(self) -> None:
        """Keep only the newest value of each metric, of the oldest runs first, until half of the
        space is free."""
        for run in self._runs.values():
            for history in run.history.values():
                self._shorten(history, 1)
            if self._kept <= MOST_VALUES // 2:
                return

    def _add_params(self, run: _TrackedRun, params: list[Fields]) -> None:
        for each in params:
            key, value = str(each["key"]), str(each.get("value", ""))
            if run.params.get(key, value) != value:
                raise _invalid(
                    f"the parameter {key} is {run.params[key]!r} already, and cannot become "
                    f"{value!r}"
                )
            if len(run.params) < MOST_KEYS:
                run.params[key] = value
        prefix = self._names[run.info["run_id"]]
        self._params({f"{prefix}{each['key']}": str(each.get("value", "")) for each in params})

    def _add_tags(self, run: _TrackedRun, tags: list[Fields]) -> None:
        for each in tags:
            if len(run.tags) < MOST_KEYS:
                run.tags[str(each["key"])] = str(each.get("value", ""))

    def _get_history(self, fields: Fields) -> Fields:
        run = self._find(fields)
        return {"metrics": run.history.get(str(fields.get("metric_key")), [])}

    def _accept(self, fields: Fields) -> Fields:
        """Answer what changes nothing here, such as data sets that a run has used."""
        return {}

    def _list_artifacts(self, fields: Fields) -> Fields:
        run = self._find(fields)
        return {"root_uri": run.info["artifact_uri"], "files": []}

    # Models of runs: their files are artifacts

    def _answer_of_models(self, method: str, path: str, fields: Fields) -> Fields:
        if method == "POST" and not path:
            if len(self._models) >= MOST_MODELS:
                raise _invalid(f"a job has at most {MOST_MODELS} models")
            number = f"m-{os.urandom(16).hex()}"
            experiment = str(fields.get("experiment_id") or "0")
            info = {
                "model_id": number,
                "experiment_id": experiment,
                "name": str(fields.get("name") or number),
                "creation_timestamp_ms": self._now(),
                "last_updated_timestamp_ms": self._now(),
                "artifact_uri": self._place(experiment, "models", number, "artifacts"),
                "status": "LOGGED_MODEL_PENDING",
                "model_type": fields.get("model_type") or "",
                "source_run_id": fields.get("source_run_id") or "",
                "tags": fields.get("tags") or [],
            }
            data = {"params": fields.get("params") or [], "metrics": []}
            self._models[number] = {"info": info, "data": data}
            return {"model": self._models[number]}
        if method == "POST" and path == "search":
            return {"models": [*self._models.values()]}
        number, _, more = path.partition("/")
        if number not in self._models:
            raise _missing(f"model {number}")
        model = self._models[number]
        if method == "PATCH" and "status" in fields:
            model["info"]["status"] = fields["status"]
        elif method == "PATCH" and more == "tags":
            model["info"]["tags"] += fields.get("tags") or []
        elif method == "POST" and more == "params":
            model["data"]["params"] += fields.get("params") or []
        return {"model": model}

    def _place(self, *names: str) -> str:
        return "/".join((self._folder, ARTIFACTS, *names))

    def _now(self) -> int:
        return int(self._clock() * 1000)


def _show(value: float) -> float | str:
    """Return a value as JSON of protobuf has it: NaN and infinity as texts."""
    if value - value == 0:
        return value
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"


def read_filter(text: str) -> list[tuple[str, str, str, str]]:
    """Return the comparisons of a filter, which `AND` joins: kind, key, operator and value. Raises
    Refusal."""
    tests = []
    if len(text) > LONGEST_FILTER:
        raise _invalid(f"a filter has at most {LONGEST_FILTER} characters")
    for clause in re.split(r"\s+and\s+", text.strip(), flags=re.IGNORECASE) if text.strip() else ():
        found = _CLAUSE.fullmatch(clause)
        if found is None:
            raise _invalid(f"the filter {clause!r} is no comparison that a job of Cavvy knows")
        kind = (found["kind"] or "attributes").lower()[:3]
        tests.append(
            (kind, found["key"].strip('`"'), found["by"].upper(), found["value"].strip("'\""))
        )
    return tests


def _fits(run: _TrackedRun, kind: str, key: str, by: str, wanted: str) -> bool:
    if kind == "met":
        history = run.history.get(key)
        return history is not None and _compare(float(history[-1]["value"]), by, float(wanted))
    tables: dict[str, dict[str, Any]] = {"tag": run.tags, "par": run.params}
    table = tables.get(kind, run.info)
    value = table.get(key)
    if value is None:
        return by == "!="
    if "LIKE" in by:
        if by == "ILIKE":
            return _is_like(str(value).lower(), wanted.lower())
        return _is_like(str(value), wanted)
    if isinstance(value, int):
        return _compare(value, by, float(wanted))
    return _compare(str(value), by, wanted)


def _is_like(text: str, pattern: str) -> bool:
    """Whether a text is one of the pattern, in which % stands for any text. The parts between are
    looked for one after the other, so that the time grows with the text only."""
    first, *inner = pattern.split("%")
    if not inner:
        return text == pattern
    last = inner.pop()
    if len(text) < len(first) + len(last) or not text.startswith(first) or not text.endswith(last):
        return False
    at, end = len(first), len(text) - len(last)
    for part in inner:
        at = text.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True


def _compare(one: Any, by: str, two: Any) -> bool:
    return bool(
        {
            "=": one == two,
            "!=": one != two,
            ">": one > two,
            "<": one < two,
            ">=": one >= two,
            "<=": one <= two,
        }[by]
    )


_ROUTES: dict[tuple[str, str], Callable[[TrackingStore, Fields], Fields]] = {
    ("POST", "experiments/create"): TrackingStore._create_experiment,
    ("GET", "experiments/get"): TrackingStore._get_experiment,
    ("GET", "experiments/get-by-name"): TrackingStore._get_by_name,
    ("POST", "experiments/search"): TrackingStore._search_experiments,
    ("GET", "experiments/search"): TrackingStore._search_experiments,
    ("POST", "experiments/set-experiment-tag"): TrackingStore._accept,
    ("POST", "runs/create"): TrackingStore._create_run,
    ("GET", "runs/get"): TrackingStore._get_run,
    ("POST", "runs/update"): TrackingStore._update_run,
    ("POST", "runs/delete"): TrackingStore._delete_run,
    ("POST", "runs/restore"): TrackingStore._restore_run,
    ("POST", "runs/search"): TrackingStore._search_runs,
    ("POST", "runs/log-metric"): TrackingStore._log_metric,
    ("POST", "runs/log-parameter"): TrackingStore._log_param,
    ("POST", "runs/set-tag"): TrackingStore._set_tag,
    ("POST", "runs/delete-tag"): TrackingStore._delete_tag,
    ("POST", "runs/log-batch"): TrackingStore._log_batch,
    ("POST", "runs/log-model"): TrackingStore._accept,
    ("POST", "runs/log-inputs"): TrackingStore._accept,
    ("POST", "runs/outputs"): TrackingStore._accept,
    ("GET", "metrics/get-history"): TrackingStore._get_history,
    ("GET", "artifacts/list"): TrackingStore._list_artifacts,
}
