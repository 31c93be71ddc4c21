"""A strict stand-in of SGLang's router with `--pd-disaggregation`: `role_router.py PORT`.

It has the routes of the real one (sglang-router 0.3) that Cavvy uses: GET and POST /workers, and
DELETE /workers/ID, which refuse everything else. A request goes to one prefill and one decode
worker, and the answer is that of decode.
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from urllib.request import Request, urlopen

WORKERS: dict[str, dict[str, object]] = {}
IDS = count()


class Router(BaseHTTPRequestHandler):
    def log_message(self, format: str, *words: object) -> None:
        pass

    def answer(self, status: int, body: object) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/liveness":
            self.answer(200, {})
        elif self.path == "/workers":
            rows = [{"id": key, "is_healthy": True, **each} for key, each in WORKERS.items()]
            self.answer(200, {"workers": rows})
        else:
            self.answer(404, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/workers":
            self.add(json.loads(body))
            return
        kinds = ("prefill", "decode")
        found = [[each for each in WORKERS.values() if each["worker_type"] == k] for k in kinds]
        if not all(found):
            self.answer(503, {"error": "no available servers"})
            return
        answers = [self.send(f"{each[0]['url']}{self.path}", body) for each in found]
        self.answer(200, answers[1])

    def add(self, asked: dict[str, object]) -> None:
        kind = asked.get("worker_type")
        wanted = {"url", "worker_type"} | ({"bootstrap_port"} if kind == "prefill" else set())
        taken = [each["url"] for each in WORKERS.values()]
        if asked.keys() != wanted or asked["url"] in taken or kind not in ("prefill", "decode"):
            self.answer(400, {"error": f"{asked}"})
            return
        self.send(f"{asked['url']}/health")
        WORKERS[str(next(IDS))] = asked
        self.answer(202, {"status": "accepted"})

    def do_DELETE(self) -> None:
        found = WORKERS.pop(self.path.removeprefix("/workers/"), None)
        self.answer(404 if found is None else 202, {})

    def send(self, url: str, body: bytes | None = None) -> bytes:
        with urlopen(Request(url, body, {"Content-Type": "application/json"})) as answer:
            return bytes(answer.read())


if __name__ == "__main__":
    ThreadingHTTPServer((os.environ["SERVE_HOST"], int(sys.argv[1])), Router).serve_forever()
