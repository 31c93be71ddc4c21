"""The HTTP routes of one model and its metrics: the Open Inference Protocol (version 2), and the
prediction API of TensorFlow Serving, which is version 1 of KServe's protocol.
"""

from __future__ import annotations

import json
import re
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from .inference import WrongRequest
from .instances import predict

if TYPE_CHECKING:
    from .inference import CountedModel

_MOST_BYTES = 1 << 30  # of a body
_LINE_BYTES = 65_536
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})[\t ]*(?:;.*)?\r\n")


class ModelServer(ThreadingHTTPServer):
    """Handles each connection in its own thread."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], served: CountedModel) -> None:
        self.served = served
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
            request = json.loads(body)
            answer = self._predict(request) if predicts else self._infer(request)
        except (WrongRequest, ValueError, RecursionError) as error:
            served.count("failure", time.perf_counter() - started)
            self._refuse(400, str(error))
            return
        served.count("success", time.perf_counter() - started)
        self._answer(200, answer)

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
