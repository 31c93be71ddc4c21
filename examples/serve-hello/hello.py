"""A service that needs only the standard library: it answers every GET and POST with a greeting."""

import json
import os
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WORK_S = float(os.environ.get("WORK_S", "0.05"))  # how long a request takes
# the job of this replica: its process number says little, since a replica may have a namespace
REPLICA = {"replica": os.environ.get("CAVVY_JOB", ""), "job": os.environ.get("CAVVY_JOB_ID", "")}


class Hello(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path != "/health":
            time.sleep(WORK_S)
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length).decode()
        answer = {"hello": body or "world", "pid": os.getpid(), **REPLICA}
        told = json.dumps(answer).encode() + b"\n"
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """The gateway counts requests; the log stays short."""


class HelloServer(ThreadingHTTPServer):
    request_queue_size = 128  # connections of a burst; with the usual 5, some wait for seconds


if __name__ == "__main__":
    address = ("127.0.0.1", int(os.environ["PORT"]))
    print(f"listening on {address[1]}", flush=True)
    HelloServer(address, Hello).serve_forever()
