"""Threads of the server that do not end: they are told with their stacks, and keep no process."""

import asyncio
import logging
import subprocess
import sys
import threading

import pytest
from tests.waits import PATIENCE_S, wait_until

from cavvy.server import embedded, threads


def spin(began: threading.Event, let_go: threading.Event) -> None:
    began.set()
    let_go.wait()


class SpinningServer:
    """A server that stops while one of its threads goes on."""

    def __init__(self) -> None:
        self.began, self.let_go = threading.Event(), threading.Event()

    async def run(self) -> bool:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(threads.open_threads())
        self.task = asyncio.create_task(asyncio.to_thread(spin, self.began, self.let_go))
        while not self.began.is_set():
            await asyncio.sleep(0)
        return False


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_pools", [])
    monkeypatch.setattr(embedded, "_left", threading.Event())


def test_a_server_that_stops_waits_for_no_thread_that_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threads, "END_S", 0.0)
    server = SpinningServer()
    loop = asyncio.new_event_loop()
    with caplog.at_level(logging.INFO, "cavvy.server"):
        embedded._run(server, lambda: loop)  # type: ignore[arg-type]
    server.let_go.set()
    wait_until(lambda: not threads._pools[0].list_long(-1))
    loop.run_until_complete(server.task)
    loop.close()
    assert embedded._left.is_set()
    [told, stopped] = caplog.records
    assert "a thread does not end" in told.getMessage()
    assert told.getMessage().startswith(
        "a thread does not end, and is killed with the process: spin"
    )
    assert "let_go.wait()" in told.stack
    assert stopped.getMessage() == "stopped"


def test_a_server_whose_threads_end_stops_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    server = SpinningServer()
    server.let_go.set()
    embedded._run(server, asyncio.new_event_loop)  # type: ignore[arg-type]
    assert not embedded._left.is_set()


def test_a_call_that_takes_too_long_is_told_once_with_its_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    began, let_go = threading.Event(), threading.Event()
    pool = threads.open_threads()
    done = pool.submit(spin, began, let_go)
    began.wait()
    assert threads.describe_long() == []
    monkeypatch.setattr(threads, "LIMIT_S", -1.0)
    [told] = threads.describe_long()
    assert told.startswith("spin has run for 0 s at ")
    with caplog.at_level(logging.WARNING, "cavvy.server"):
        threads.tell_long()
        threads.tell_long()
    let_go.set()
    done.result()
    wait_until(lambda: not threads.describe_long())
    assert len(caplog.records) == 1
    assert "let_go.wait()" in caplog.records[0].stack
    assert pool.end(0) == []


ENDLESS = """
import logging, sys, threading
from cavvy.server import threads
logging.basicConfig(format="%(message)s")
threads.END_S = 0.1
threading.Thread(target=threading.Event().wait, name="of-a-library").start()
print("begins", flush=True)
threads.exit_at_last(3)
sys.exit(3)
"""


def test_a_process_that_ends_waits_for_no_thread_of_a_library() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDLESS],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, "begins\n")
    assert "a thread does not end, and is killed with the process: of-a-library" in done.stderr
