"""The HTTP routes of one model and its metrics: the Open Inference Protocol (version 2), and the
prediction API of TensorFlow Serving in its row format, which is version 1 of KServe's protocol.

In the prediction API, an instance contains one row of values for each input of the model. If the
model has one input, the instance is the row itself; otherwise the instance is an object that maps
the inputs' names to rows. A prediction is one row of each output, in the same form as an instance.
"""

from __future__ import annotations

import json
import re
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import numpy as np

from .inference import TYPES, WrongRequest
from .processing import ProcessingFailed

if TYPE_CHECKING:
    from .inference import CountedModel, OnnxModel
    from .processing import Processing

_MOST_BYTES = 1 << 30  # of a body
_LINE_BYTES = 65_536
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})[\t ]*(?:;.*)?\r\n")


class ModelServer(ThreadingHTTPServer):
    """Handles each connection in its own thread."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(
        self,
        address: tuple[str, int],
        served: CountedModel,
        processing: Processing | None = None,
    ) -> None:
        self.served, self.processing = served, processing
        super().__init__(address, ModelRequestHandler)


class ModelRequestHandler(BaseHTTPRequestHandler):
    """A client's connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body are sent together
    server: ModelServer

    def do_GET(self) -> None:
        served, path = self.server.served, self.path.partition("?")[0]
        if "Transfer-Encoding" in self.headers or self.headers.get("Content-Length", "0") != "0":
            self.close_connection = True  # the body is not read, and must not be the next request
        if path in ("/v2/health/live", "/v2/health/ready", self._model("/ready")):
            self._answer(200, {})
        elif path == "/v2":
            self._answer(200, {"name": "cavvy-onnxruntime", "version": "2", "extensions": []})
        elif path == self._model():
            about = {"name": served.name, "versions": ["1"], **served.model.describe()}
            self._answer(200, {**about, "parameters": served.notes})
        elif path == f"/v1/models/{served.name}":
            self._answer(200, {"name": served.name, "ready": True})
        elif path == "/metrics":
            self._send(200, served.write_metrics().encode(), "text/plain; version=0.0.4")
        else:
            self._refuse(404, f"there is no {path}; this server has {self._model()}")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        served, path = self.server.served, self.path.partition("?")[0]
        body = self._read_body()
        if body is None:
            return
        predicts = path == f"/v1/models/{served.name}:predict"
        if not predicts and path != self._model("/infer"):
            self._refuse(404, f"there is no {self.path}; post to {self._model('/infer')}")
            return
        started = time.perf_counter()
        try:
            asked = json.loads(body)
            request = self._process("before", asked)
            answer = self._predict(request) if predicts else self._infer(request)
            answer = self._process("after", asked, answer)
        except ProcessingFailed as error:
            served.count("failure", time.perf_counter() - started)
            self._refuse(500, str(error))
            return
        except (WrongRequest, ValueError, RecursionError) as error:
            served.count("failure", time.perf_counter() - started)
            broken = isinstance(error, json.JSONDecodeError)
            self._refuse(400, f"the request is not JSON: {error}" if broken else str(error))
            return
        served.count("success", time.perf_counter() - started)
        self._answer(200, answer)

    def _process(self, function: str, *values: Any) -> Any:
        processing = self.server.processing
        return values[-1] if processing is None else processing.call(function, *values)

    def _predict(self, request: Any) -> dict[str, Any]:
        return {"predictions": predict(self.server.served.model, request)}

    def _infer(self, request: Any) -> dict[str, Any]:
        served = self.server.served
        outputs = served.model.infer(request)
        answer = {"model_name": served.name, "model_version": "1", "outputs": outputs}
        if isinstance(request.get("id"), str):
            answer["id"] = request["id"]
        return answer

    def _model(self, rest: str = "") -> str:
        return f"/v2/models/{self.server.served.name}{rest}"

    def _read_body(self) -> bytes | None:
        """Return the body of a request, or None if the request was refused."""
        length = self.headers.get("Content-Length", "")
        coding = self.headers.get("Transfer-Encoding", "").lower()
        if coding == "chunked" and not length:
            body = self._read_chunks()
        elif coding or not length.isdecimal() or int(length) > _MOST_BYTES:
            body = None
        else:
            return self.rfile.read(int(length))
        if body is None:
            self.close_connection = True
            self._refuse(
                413 if length else 411,
                f"the body must have a Content-Length or chunks, and at most {_MOST_BYTES} bytes",
            )
        return body

    def _read_chunks(self) -> bytes | None:
        """Return a body of chunks, or None if the body is not valid or too large."""
        body = bytearray()
        while found := _CHUNK.fullmatch(self.rfile.readline(_LINE_BYTES)):
            size = int(found[1], 16)
            if not size:
                while self.rfile.readline(_LINE_BYTES).strip():
                    pass  # a trailer
                return bytes(body)
            if len(body) + size > _MOST_BYTES:
                return None
            body += self.rfile.read(size)
            self.rfile.readline(_LINE_BYTES)
        return None

    def _refuse(self, status: int, message: str) -> None:
        self._answer(status, {"error": message})

    def _answer(self, status: int, body: Any) -> None:
        self._send(status, json.dumps(body).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status, HTTPStatus(status).phrase)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, *arguments: Any) -> None:
        """Do nothing, so that requests cause no lines in the log. The server's metrics already
        count the requests.
        """


def predict(model: OnnxModel, body: Any) -> list[Any]:
    """Return a prediction for each instance of a request's body. Only instances of the same shape
    are computed together, so that instances of different shapes do not affect each other. Raises
    WrongRequest.
    """
    if not isinstance(body, dict) or not isinstance(body.get("instances"), list):
        raise WrongRequest("the body needs a list `instances`")
    together = _joins(model)
    groups: dict[Any, list[int]] = {}
    rows = []
    for index, instance in enumerate(body["instances"]):
        try:
            row = _read_instance(model, instance)
        except WrongRequest as error:
            raise WrongRequest(f"instances[{index}]: {error}") from error
        rows.append(row)
        shapes = tuple(value.shape for value in row.values())
        groups.setdefault(shapes if together else index, []).append(index)
    predictions: list[Any] = [None] * len(rows)
    for members in groups.values():
        feeds = {name: np.stack([rows[index][name] for index in members]) for name in model.inputs}
        found = _run(model, feeds, len(members))
        for index, prediction in zip(members, found):  # noqa: B905 - Python 3.8 runs this too
            predictions[index] = prediction
    return predictions


def _joins(model: OnnxModel) -> bool:
    """Return whether the model computes several instances together, each independent of the others.
    Raises WrongRequest if an input has no axis of instances.
    """
    for name, known in model.inputs.items():
        first = known.shape[0] if known.shape else 0
        if isinstance(first, int) and first not in (-1, 1):
            raise WrongRequest(
                f"the input {name} has the shape {known.shape}, without an axis for instances; "
                f"post to /infer instead"
            )
    fixed = any(known.shape[0] == 1 for known in model.inputs.values())
    return not (fixed or model.mixes)


def _read_instance(model: OnnxModel, instance: Any) -> dict[str, Any]:
    if not isinstance(instance, dict):
        if len(model.inputs) > 1:
            raise WrongRequest(f"an object with the inputs {', '.join(model.inputs)} is needed")
        instance = dict.fromkeys(model.inputs, instance)
    for name in instance:
        if name not in model.inputs:
            raise WrongRequest(f"there is no input {name!r}; expected {', '.join(model.inputs)}")
    missing = [name for name in model.inputs if name not in instance]
    if missing:
        raise WrongRequest(f"the model also needs the inputs {', '.join(missing)}")
    return {name: _read_value(name, known, instance[name]) for name, known in model.inputs.items()}


def _read_value(name: str, known: Any, value: Any) -> Any:
    if known.type not in TYPES:
        raise WrongRequest(f"the input {name} is a {known.type}, which a request cannot contain")
    kind, dtype = TYPES[known.type]
    try:
        found = np.asarray(value, dtype=dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise WrongRequest(f"the input {name}, which is {kind}: {error}") from error
    wanted = known.shape[1:]
    fits = len(wanted) == found.ndim and all(
        not isinstance(axis, int) or axis in (-1, size)
        for axis, size in zip(wanted, found.shape)  # noqa: B905 - Python 3.8 runs this too
    )
    if not fits:
        raise WrongRequest(f"the input {name} has the shape {list(found.shape)}; expected {wanted}")
    return found


def _run(model: OnnxModel, feeds: dict[str, Any], count: int) -> list[Any]:
    """Return the predictions for `count` stacked instances. Raises WrongRequest."""
    names = list(model.outputs)
    columns = []
    for name, value in zip(names, model.run(feeds, names)):  # noqa: B905 - as above
        # an output that is not a tensor, as the probabilities of scikit-learn's models, is a list
        column = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(column, list) or len(column) != count:
            raise WrongRequest(
                f"the output {name} has no row for each instance; post to /infer instead"
            )
        columns.append(column)
    if len(columns) == 1:
        return columns[0]
    return [dict(zip(names, row)) for row in zip(*columns)]  # noqa: B905 - as above
