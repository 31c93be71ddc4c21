"""A service that takes batches: `{"instances": [...]}` is answered with `{"predictions": [...]}`.

Each prediction is the square of its instance. Like a model on a GPU, a batch takes a fixed time and
a small time for each instance, and one batch is processed at a time.
"""

import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BASE_S = float(os.environ.get("BASE_S", "0.02"))  # the fixed time of a batch
INSTANCE_S = float(os.environ.get("INSTANCE_S", "0.001"))
_one_at_a_time = threading.Lock()


class Predictor(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 65536  # one segment for head and body

    def do_GET(self) -> None:
        self.reply(200, {"ready": True})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            instances = [float(each) for each in json.loads(body)["instances"]]
        except (ValueError, KeyError, TypeError) as error:
            self.reply(400, {"error": f"instances must be a list of numbers: {error}"})
            return
        with _one_at_a_time:
            time.sleep(BASE_S + INSTANCE_S * len(instances))
        squares = [each * each for each in instances]
        self.reply(200, {"predictions": squares, "batch": len(instances)})

    def reply(self, status: int, told: object) -> None:
        body = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """The gateway counts requests; the log stays short."""


class PredictServer(ThreadingHTTPServer):
    request_queue_size = 128


if __name__ == "__main__":
    PredictServer(("127.0.0.1", int(os.environ["PORT"])), Predictor).serve_forever()
