"""A state folder of a test's own, whose servers are gone when the test is over."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.system import prepared
from tests.waits import PATIENCE_S, START_S, wait_until

from cavvy.client import ApiClient, connect
from cavvy.client.state import process_mark, read_server, server_holds_lock

PYTHON = sys.executable


@contextmanager
def home_at(folder: Path, **variables: str) -> Iterator[Path]:
    """Make `folder` the state folder of this process and its children; end its server
    afterwards.
    """
    wanted = {
        "CAVVY_HOME": str(folder),
        "CAVVY_CONFIG": str(folder.parent / "settings.toml"),
        "XDG_RUNTIME_DIR": str(folder.parent / "run"),
        "CAVVY_SERVER_START_TIMEOUT_S": str(round(START_S)),
        **variables,
    }
    (folder.parent / "settings.toml").touch()
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    prepared.use()
    try:
        yield folder
    finally:
        kill_server(folder)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def home_with_jobs(folder: Path) -> Iterator[Path]:
    """As `home_at`; jobs that still run at the end are stopped, and their nodes are gone."""
    with home_at(folder):
        try:
            yield folder
        finally:
            if server_holds_lock(str(folder)):
                with connect() as client:
                    client.down()
                    wait_until(lambda: not client.nodes())


@contextmanager
def home_beside_another(root: Path) -> Iterator[Path]:
    """As `home_with_jobs`, in the first of two folders."""
    (root / "one").mkdir()
    (root / "two").mkdir()
    with home_with_jobs(root / "one" / "home") as folder:
        yield folder


def kill_server(folder: Path, number: int = signal.SIGKILL) -> int | None:
    """Send the server of this folder a signal and wait for its end; its process id."""
    server = read_server(str(folder))
    if server is None or process_mark(server.pid) != server.process:
        return None
    os.kill(server.pid, number)
    wait_until(lambda: not server_holds_lock(str(folder)))
    return server.pid


def follow_to_end(client: ApiClient, name: str, seconds: float = PATIENCE_S) -> None:
    """Follow a job's events until it has ended, as `ApiClient.follow` does; where it does not, say
    how it is.
    """
    give_up = time.monotonic() + seconds
    after, over = 0, False
    while not over:
        page = client.events("default", name, after=after, wait_s=2)
        after, over = page.last, page.over and not page.events
        if not over and time.monotonic() > give_up:
            job = client.job("default", name)
            told = "; ".join(each.text for each in client.events("default", name).events)
            raise AssertionError(
                f"{name} has not ended after {seconds:.0f} s: {job.phase}, {job.reason}: {told}"
            )


def run_python(code: str) -> "subprocess.Popen[str]":
    """A process of its own, as a command is."""
    return subprocess.Popen(
        [PYTHON, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
