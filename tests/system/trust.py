"""A user of this machine with a state folder of their own: the real CLI, server and agents, and
nothing left behind.

Tests act through `User.cli` as a person would; `User.api` only looks, faster than a command would.
"""

import json
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from tests.system import prepared
from tests.system.packed_python import give_python
from tests.waits import PATIENCE_S, START_S, pause_after, wait_until

from cavvy.client import ApiClient, ApiError, connect
from cavvy.client.state import process_mark, read_server
from cavvy.client.wire import JobDetail

ENDED = frozenset({"done", "failed", "stopped"})


class User:
    """One person with a state folder, settings and a working folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / "home"
        self.config = root / "settings.toml"
        self.work = root / "work"
        self.work.mkdir(parents=True)
        self.config.touch()
        self.variables: dict[str, str] = {}
        self.starts = True  # whether a look starts a server where none answers
        self.popen: Callable[..., subprocess.Popen[str]] = prepared.popen
        self._client: ApiClient | None = None
        self._commands: list[subprocess.Popen[str]] = []

    # Acting

    @property
    def environ(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CAVVY_")}
        own = {
            "CAVVY_HOME": str(self.home),
            "CAVVY_CONFIG": str(self.config),
            "XDG_RUNTIME_DIR": str(self.root / "run"),
            "CAVVY_SERVER_START_TIMEOUT_S": str(round(START_S)),
            "TERM": "dumb",
            "COLUMNS": "400",
        }
        return {**kept, **own, **self.variables}

    def start(
        self,
        *arguments: str,
        stdin: int = subprocess.DEVNULL,
        variables: Mapping[str, str] | None = None,
    ) -> "subprocess.Popen[str]":
        """A command in the background, in a session of its own as in a terminal of its own, with
        these variables in addition to the user's.
        """
        command = self.popen(
            [*prepared.CLI, *arguments],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**self.environ, **(variables or {})},
            cwd=self.work,
            start_new_session=True,
        )
        self._commands.append(command)
        return command

    def cli(self, *arguments: str, stdin: str | None = None, code: int | None = 0) -> str:
        """Run a command to its end; its output. `code` is the exit code that it must have, None
        is any.
        """
        return "".join(self._run(arguments, stdin, code))

    def _run(
        self, arguments: tuple[str, ...], stdin: str | None, code: int | None
    ) -> tuple[str, str]:
        command = self.start(
            *arguments, stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE
        )
        try:
            out, err = command.communicate(stdin, timeout=START_S)
        finally:
            command.kill()
        assert code is None or command.returncode == code, (
            f"{arguments}: {command.returncode}\n{out}\n{err}"
        )
        return out, err

    def output(self, *arguments: str, code: int | None = 0) -> str:
        """What a command prints, without its notes on stderr, such as that a server starts slowly."""
        return self._run(arguments, None, code)[0]

    def json(self, *arguments: str, code: int | None = 0) -> Any:
        return json.loads(self.output(*arguments, "-o", "json", code=code))

    def task(self, text: str, file: str = "task.yaml") -> str:
        """Write a task file; its path."""
        path = self.work / file
        path.write_text(text)
        return str(path)

    def submit(self, text: str, *arguments: str) -> str:
        """Submit a task without following it; the job's name."""
        return str(self.json("run", "-d", *arguments, self.task(text))["name"])

    def settings(self, text: str) -> None:
        self.config.write_text(text)

    # Looking

    @property
    def api(self) -> ApiClient:
        """A client of the server, which it starts where none runs, if it may."""
        if self._client is None:
            with environment(self.environ):
                self._client = connect(home=str(self.home), start=self.starts)
        return self._client

    def forget(self) -> None:
        """Drop the connection: the next look finds the server anew."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def job(self, name: str) -> JobDetail:
        with environment(self.environ):  # which a server started again inherits
            return self.api.job("default", name)

    def has(self, name: str) -> bool:
        """Whether the job exists."""
        try:
            self.job(name)
        except ApiError as error:
            if error.code == "job-not-found":
                return False
            raise
        return True

    def wait(
        self, name: str, good: "Callable[[JobDetail], bool] | str", seconds: float = PATIENCE_S
    ) -> JobDetail:
        """Wait until the job is in a phase, or until a function of it says so; the job."""
        began = time.monotonic()
        wait_until(lambda: self.has(name), lambda: f"there is no job {name}", seconds)
        while True:
            job = self.job(name)
            if job.phase == good if isinstance(good, str) else good(job):
                return job
            told = (
                f"{name}: {job.phase}, {job.reason}; attempts "
                f"{[(a.number, a.phase, a.reason) for a in job.attempts]}"
            )
            waited = time.monotonic() - began
            assert waited < seconds, told
            assert not (isinstance(good, str) and job.phase in ENDED), told
            time.sleep(pause_after(waited))

    def ended(self, name: str) -> JobDetail:
        """Wait until the job has ended and all of its gangs are gone."""
        return self.wait(
            name, lambda job: job.phase in ENDED and all(a.phase == "ended" for a in job.attempts)
        )

    def log(self, name: str, *arguments: str) -> str:
        return self.output("logs", name, *arguments)

    def said(self, name: str, rank: int = 0) -> str:
        """What one rank of the job has said so far: looked at without a command, which would
        take the machine's time from the job that is waited for.
        """
        with environment(self.environ):  # which a server started again inherits
            return b"".join(self.api.logs("default", name, rank=rank)).decode(errors="replace")

    def scenario(self, name: str) -> list[tuple[str, str]]:
        """(kind, text) of each event."""
        return [(event["kind"], event["text"]) for event in self.json("events", name)]

    # Processes

    def server(self) -> int | None:
        """The server's process id, None where none runs."""
        found = read_server(str(self.home))
        return found.pid if found is not None and _lives(found.pid, found.process) else None

    def kill_server(self, number: int = signal.SIGKILL) -> None:
        found = read_server(str(self.home))
        self.forget()
        if found is not None and process_mark(found.pid) == found.process:
            kill(found.pid, number)
            wait_until(lambda: not _lives(found.pid, found.process))

    def agents(self) -> list[int]:
        """Process ids of agents and their reapers."""
        return [pid for pid, command, _ in self._processes() if b"/config.json" in command]

    def worked(self) -> list[int]:
        """Process ids of the work itself."""
        return [
            pid
            for pid, command, marks in self._processes()
            if marks and b"/config.json" not in command
        ]

    def left(self) -> list[str]:
        """Every process of our gangs, as a line for people."""
        lines = [
            (pid, b" ".join(command.split(b"\0"))[:200]) for pid, command, _ in self._processes()
        ]
        return [f"{pid}: {command.decode(errors='replace')}" for pid, command in lines]

    def gang_folders(self) -> list[str]:
        """The folders in the shared folder of a batch system, with unfinished ones."""
        return [str(path) for path in self.root.glob("shared/*/gangs/*")]

    def _processes(self) -> Iterator[tuple[int, bytes, bool]]:
        """(pid, command line, whether it carries a gang's mark) of what belongs to our gangs."""
        home, server = str(self.home).encode(), self.server()
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                environ = Path(f"/proc/{name}/environ").read_bytes()
                command = Path(f"/proc/{name}/cmdline").read_bytes()
                zombie = (
                    Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
                )
            except OSError:
                continue
            marked = b"CAVVY_GANG=" in environ and home in environ
            if (
                not zombie
                and int(name) not in (server, os.getpid())
                and (marked or home + b"/providers" in command)
                and b"\0--forks\0" not in command  # a server's fork server, which is no gang's
            ):
                yield int(name), command, marked

    # The provider's own records

    def lives(self, gang: str) -> dict[int, tuple[datetime, datetime]]:
        """When each node of an ended gang began and ended, by the local provider's record."""
        record = json.loads((self.home / "providers/local/ended" / f"{gang}.json").read_text())
        return {
            rank["rank"]: (_time(rank["started_at"]), _time(rank["ended_at"]))
            for rank in record["ranks"]
        }

    def close(self) -> None:
        """End everything of this user's, by force."""
        self.forget()
        for command in self._commands:
            command.kill()
            command.communicate(timeout=PATIENCE_S)
        for _ in range(200):
            self.kill_server()
            pids = [pid for pid, _, _ in self._processes()]
            if not pids:
                return
            for pid in pids:
                kill(pid)
            time.sleep(0.02)
        raise AssertionError(f"these processes do not go: {self.left()}")


@contextmanager
def user_at(root: Path) -> Iterator[User]:
    """A user whose processes are all gone afterwards."""
    user = User(root)
    give_python(user.home)
    prepared.use()
    try:
        yield user
    finally:
        user.close()


@contextmanager
def serving_user_at(root: Path) -> Iterator[User]:
    """A user whose server is stopped at the end, which ends the gateway too."""
    with user_at(root) as user:
        try:
            yield user
        finally:
            user.cli("server", "stop", code=None)


def check_clean(user: User) -> None:
    """Nothing of any job runs or bills any more, on the machine and in the books."""
    wait_until(lambda: not user.left(), lambda: f"left: {user.left()}")
    assert user.json("nodes") == []
    # A server whose disk was full writes after the next successful try.
    wait_until(lambda: not _list_allocations(user), lambda: f"booked: {_list_allocations(user)}")


def _list_allocations(user: User) -> list[object]:
    with closing(sqlite3.connect(f"file:{user.home}/cavvy.db?mode=ro", uri=True)) as database:
        return database.execute("SELECT * FROM allocations").fetchall()


def check_bill(user: User, job: JobDetail) -> None:
    """Each second of each node's life, as its provider recorded it, is charged once and at its
    rate.
    """
    charges = user.json("cost", job.id)["charges"]
    total = 0
    for attempt in job.attempts:
        for rank, (began, ended) in user.lives(attempt.gang).items():
            own = sorted(
                (
                    _time(c["since"]),
                    _time(c["until"]),
                    c["rate_micros_per_hour"],
                    c["amount_micros"],
                )
                for c in charges
                if (c["attempt"], c["rank"], c["kind"]) == (attempt.number, rank, "node")
            )
            assert own[0][0] == began
            assert own[-1][1] == ended
            assert all(a[1] == b[0] for a, b in pairwise(own))
            exact = sum(
                (until - since).total_seconds() * rate / 3600 for since, until, rate, _ in own
            )
            amount = sum(amount for *_, amount in own)
            assert abs(amount - exact) <= len(own)
            total += amount
    assert total == job.spent_micros == sum(c["amount_micros"] for c in charges)


def counting(held: str = "[ $CAVVY_ATTEMPT = 1 ]") -> str:
    """Commands that count to 4 in a checkpoint folder, say where they began, and wait at 2 while
    `held` is true.

    They write a line when they are told to go. A provider can signal each process by itself, first
    `sleep` and then the shell, which must not end because `sleep` has failed.
    """
    return f"""
    n=$(cat $CAVVY_CHECKPOINT_DIR/$NODE_RANK 2>/dev/null || echo 0); echo "begins at $n"
    trap 'echo told to go; exit 143' TERM
    while [ $n -lt 4 ]; do
      n=$((n + 1)); echo $n > $CAVVY_CHECKPOINT_DIR/$NODE_RANK; echo "step $n"
      while [ $n = 2 ] && {held}; do sleep 0.05 || :; done
    done
"""


@contextmanager
def environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """These variables and no others while the block runs."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(wanted)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal a process that may have gone meanwhile."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _lives(pid: int, mark: str) -> bool:
    """Whether that very process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX" and process_mark(pid) == mark


def _time(text: str) -> datetime:
    return msgspec.convert(text, datetime)
