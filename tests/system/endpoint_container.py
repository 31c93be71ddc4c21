"""The program of an image for managed endpoints, as `docker run IMAGE serve` starts it: it answers
GET /ping and POST /invocations. A request may hold its answer until the file `go` exists, or ask for
an answer in `parts`. The stand-in maps the container's port 8080 to MAPPED_PORT.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(200 if self.path == "/ping" else 404, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            told = json.loads(body)
            total = sum(told["numbers"])
        except (KeyError, ValueError) as error:
            self.answer(400, {"problem": repr(error)})
            return
        if "go" in told:
            Path(told["got"]).touch()
            while not Path(told["go"]).exists():
                time.sleep(0.05)
        if "parts" in told:
            self.answer_in_parts(told["parts"])
        else:
            self.answer(200, {"sum": total, "level": os.environ["LEVEL"], "process": os.getpid()})

    def answer_in_parts(self, count: int) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for _ in range(count):
            self.wfile.write(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def answer(self, status: int, told: dict[str, object]) -> None:
        data = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        return


if __name__ == "__main__":
    if sys.argv[1:] != ["serve"] or "BROKEN" in os.environ:
        sys.exit("the model cannot be loaded")
    ThreadingHTTPServer(("127.0.0.1", int(os.environ["MAPPED_PORT"])), Handler).serve_forever()
