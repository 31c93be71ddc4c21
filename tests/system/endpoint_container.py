"""The program of an image for managed endpoints, as `docker run IMAGE serve` starts it: it answers
GET /ping and POST /invocations. The stand-in maps the container's port 8080 to MAPPED_PORT.
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(200 if self.path == "/ping" else 404, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            total = sum(json.loads(body)["numbers"])
        except (KeyError, ValueError) as error:
            self.answer(400, {"problem": repr(error)})
        else:
            self.answer(200, {"sum": total, "level": os.environ["LEVEL"], "process": os.getpid()})

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
