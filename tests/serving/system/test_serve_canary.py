"""A canary that fails is rolled back, and one that does not takes over, while requests come."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from tests.system.trust import User, environment, serving_user_at
from tests.waits import START_S, wait_until

from cavvy.capabilities.serving.wire import ServedView, find_service

pytestmark = pytest.mark.system
SERVICE = """\
name: hello
run: exec python3 program.py
env: {FAILS: "%s"}
resources: {cpu: 0.1, memory: 64MiB}
workdir: .
service:
  port: 8000
  replicas: {min: 1, max: 1}
  concurrency: 8
  probe: {path: /health, every: 1s, timeout: 1s}
  update: {strategy: canary, weight: 50%%, requests: 100}
"""
PROGRAM = """\
import os
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle

# Both revisions take these times in turn, so their mean latencies are equal. Other work on the
# machine delays the requests of one process together, but by much less than the times differ.
TIMES_S = cycle((0.03, 0.06, 0.12))

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        fails = self.path != "/health" and os.environ["FAILS"] == "yes"
        if self.path != "/health":
            time.sleep(next(TIMES_S))
        self.send_response(500 if fails else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()

ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    with serving_user_at(tmp_path) as user:
        yield user


def call(url: str) -> int:
    try:
        with urlopen(url, timeout=START_S) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


def read_service(user: User) -> ServedView:
    with environment(user.environ):
        return find_service(user.api, "default", "hello")


def serve(user: User, fails: str) -> str:
    (user.work / "service.yaml").write_text(SERVICE % fails)
    url: str = user.json("serve", "--yes", "service.yaml")["url"]
    return url


def try_out(user: User, url: str) -> tuple[str, set[int]]:
    """How the trial ends, and the answers to requests meanwhile."""
    wait_until(lambda: read_service(user).ready == 2)
    answers = set()

    def find_end() -> str:
        with ThreadPoolExecutor(8) as clients:
            answers.update(clients.map(call, [url] * 50))
        trial = read_service(user).trial
        return "" if trial is None else trial.end

    wait_until(find_end)
    return find_end(), answers


def test_a_canary_that_fails_is_rolled_back_and_one_that_does_not_takes_over(user: User) -> None:
    (user.work / "program.py").write_text(PROGRAM)
    url = serve(user, "no")
    assert call(url) == 200
    serve(user, "yes")
    assert try_out(user, url) == ("errors", {200, 500})
    shown = user.output("services", "show", "hello")
    assert "revision 2 was rolled back: more requests fail than with the old revision" in shown
    wait_until(lambda: read_service(user).ready == 1)
    assert {call(url) for _ in range(50)} == {200}
    serve(user, "never")
    assert try_out(user, url) == ("enough", {200})
    wait_until(lambda: (read_service(user).revision, read_service(user).ready) == (3, 1))
    assert {call(url) for _ in range(50)} == {200}
    user.cli("unserve", "hello")
