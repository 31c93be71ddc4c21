"""Requests to a device whose model hangs, dies or has too many requests, and which go to the cloud.

    python benchmarks/edge_failover.py [--per-s 20] [--overload 120]

All processes are real: a server, its gateway, a service with a replica, and a device. The device's
engine computes one request after the other, each in 20 ms; the replica computes any number at once.
Requests come at a steady rate, whatever the answers. Times begin with the fault, so they include
its detection.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from measure import PYTHON, fresh_home, record, table

from cavvy.capabilities.edge.on_device.device import free_port
from cavvy.capabilities.edge.wire import EnrolmentAsk, RolloutAsk, deploy_model, invite_devices
from cavvy.capabilities.models.wire import ModelAsk, publish_model
from cavvy.capabilities.serving.wire import find_service
from cavvy.client import connect
from cavvy.client.blobs import upload
from cavvy.client.service_wire import put_service
from cavvy.spec.workdir import freeze

_SETTINGS = '[server]\nidle_stop_s = 0\ntls_listen = "127.0.0.1:0"\n'
_ENGINE = """
import sys, threading, time
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
port, one = int(sys.argv[1]), threading.Lock() if sys.argv[2] == "one" else nullcontext()
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.answer(b"{}")
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        with one:
            time.sleep(0.02)
        self.answer(b'{"predictions": [[0.9, 0.1]]}')
    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
ThreadingHTTPServer.request_queue_size = 256
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
_SERVICE = """
name: line
run: exec {engine} $PORT many
resources: {{cpu: 0.1, memory: 64MiB}}
service:
  replicas: {{min: 1, max: 1}}
  probe: /ready
  concurrency: 256
  edge: {{site: here, model: m}}
"""
_PHASE_S = 8.0


class Answer(NamedTuple):
    begun: float
    ended: float
    by: str  # "device", "cloud", or why the request was lost


class Load:
    """Sends requests to the device at a rate, and notes what became of them."""

    def __init__(self, url: str, per_s: float) -> None:
        self.url, self.per_s, self.answers = url, per_s, list[Answer]()
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(400)
        self._thread = threading.Thread(target=self._send)

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._pool.shutdown()

    def _send(self) -> None:
        due = time.monotonic()
        while not self._over.is_set():
            time.sleep(max(0.0, due - time.monotonic()))
            due += 1 / self.per_s
            self._pool.submit(lambda: self.answers.append(self.call()))

    def call(self) -> Answer:
        begun = time.monotonic()
        asked = urllib.request.Request(self.url, b'{"instances": [[1.0]]}')
        try:
            with urllib.request.urlopen(asked, timeout=60) as reply:
                reply.read()
                by = reply.headers["Cavvy-Answered-By"]
        except OSError as error:
            by = f"lost: {error}"
        return Answer(begun, time.monotonic(), by)

    def first(self, by: str, after: float) -> float:
        """Return the seconds from a time to the first answer, of a request that came later."""
        found = [each.ended for each in self.answers if each.by == by and each.begun >= after]
        return min(found, default=float("inf")) - after


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not true():
        if time.monotonic() > until:
            raise SystemExit("the service or the device does not start")
        time.sleep(0.2)


def signal_engine(folder: Path, number: int) -> None:
    for each in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            line = Path(f"/proc/{each}/cmdline").read_bytes()
            if b"engine.py" in line and line.endswith(b"\0one\0"):
                os.kill(int(each), number)


def start_device(stack: ExitStack, folder: Path, command: str, engine: list[str]) -> str:
    """Start an enrolled device, and return the URL of its model."""
    folder.mkdir()
    port = free_port()
    options = {"listen": f"127.0.0.1:{port}", "engine": [*engine, "{port}", "one"]}
    options |= {"probation_s": 1, "every_s": 1, "look_s": 0.2}
    (folder / "edge.json").write_text(json.dumps(options))
    given = {"CAVVY_EDGE_FOLDER": str(folder), "CAVVY_EDGE_PYTHON": sys.executable}
    with (folder / "log").open("wb") as log:
        device = subprocess.Popen(
            ["sh", "-c", command],
            env={**os.environ, **given},
            stderr=log,
            stdout=log,
            start_new_session=True,
        )
    stack.callback(os.killpg, device.pid, signal.SIGKILL)
    return f"http://127.0.0.1:{port}/v1/models/m:predict"


def break_engine(load: Load, device: Path, overload: float) -> list[tuple[str, float, str]]:
    """Break the device's engine in several ways. Return what is measured each time, since when, and
    whose answer counts."""
    rows = []
    for name, fault in (("hangs", signal.SIGSTOP), ("is killed", signal.SIGKILL)):
        time.sleep(_PHASE_S)
        signal_engine(device, fault)
        at = time.monotonic()
        time.sleep(_PHASE_S)
        rows.append((f"s until the cloud answers: the engine {name}", at, "cloud"))
        if fault == signal.SIGSTOP:
            rows.append(("s until the device answers again", time.monotonic(), "device"))
            signal_engine(device, signal.SIGCONT)
        else:
            rows.append(("s until the device answers again", at, "device"))
    time.sleep(_PHASE_S)
    usual, load.per_s, at = load.per_s, overload, time.monotonic()
    time.sleep(_PHASE_S)
    rows.append(("s until the cloud answers: too many requests", at, "cloud"))
    load.per_s = usual
    time.sleep(_PHASE_S)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--per-s", type=float, default=20)
    parser.add_argument("--overload", type=float, default=120)
    options = parser.parse_args()
    with ExitStack() as stack:
        os.environ.update(stack.enter_context(fresh_home()))
        Path(os.environ["CAVVY_CONFIG"]).write_text(_SETTINGS)
        folder = Path(os.environ["CAVVY_HOME"]).parent / "edge"
        folder.mkdir()
        (folder / "engine.py").write_text(_ENGINE)
        (folder / "m.onnx").write_bytes(b"a model")
        engine = [PYTHON, str(folder / "engine.py")]
        client = stack.enter_context(connect())
        command = invite_devices(client, "default", EnrolmentAsk(site="here")).command
        snapshot = freeze(folder, only="m.onnx")
        upload(client, "default", snapshot.blobs())
        publish_model(client, "default", ModelAsk(name="m", snapshot=snapshot.hash))
        text = _SERVICE.format(engine=shlex.join(engine))
        named = {"project": "default", "name": "line", "path": "line.yaml", "params": {}}
        put_service(client, text, **named, origin=None, user="bench", consent=True)
        device = folder / "device"
        url = start_device(stack, device, command, engine)
        wait_until((device / "card.json").exists)
        deploy_model(client, "default", RolloutAsk(model="m", to=1, soak_s=0))
        wait_until(lambda: find_service(client, "default", "line").ready == 1)
        with Load(url, options.per_s) as load:
            wait_until(lambda: load.call().by == "device" and (device / "clouds.json").exists())
            time.sleep(3)
            load.answers.clear()
            rows = break_engine(load, device, options.overload)
        told: list[list[object]] = []
        for what, at, by in rows:
            took = load.first(by, at)
            judged = [2, record(what, took, 2, "s")] if by == "cloud" else ["", ""]
            told.append([what, took, *judged])
        lost = [each for each in load.answers if each.by not in ("device", "cloud")]
        slowest = max(each.ended - each.begun for each in load.answers)
        count = sum(each.by == "cloud" for each in load.answers)
        told += [
            ["requests", len(load.answers), "", ""],
            ["of these answered by the cloud", count, "", ""],
            ["s, the slowest answer", slowest, "", ""],
            ["lost requests", len(lost), 0, record("lost requests", len(lost), 0, "")],
        ]
        table("a device that goes to the cloud and back", ["what", "figure", "bar", ""], told)
        for each in lost[:5]:
            print(each)


if __name__ == "__main__":
    main()
