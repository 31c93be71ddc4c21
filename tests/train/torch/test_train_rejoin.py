"""A program that stays while its job replaces a lost node: its copies end, and it makes new ones."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.waits import PATIENCE_S

PROGRAM = """
import os, signal, sys, threading
from cavvy.train import rejoin

if sys.argv[1] == "thread":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
if sys.argv[1] == "old kernel":
    def refuse(pid):
        raise OSError(38, "not implemented")
    os.pidfd_open = refuse
rejoin.stand_by()
attempt = os.environ["CAVVY_ATTEMPT"]
print("attempt", attempt, "kept" if rejoin.is_kept() else "alone", os.getpid(), flush=True)
if not rejoin.is_kept():
    sys.exit(3)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if attempt == "1":
    rejoin.leave_lost("Connection closed by peer")
if attempt == "2":
    signal.pause()
sys.exit(7)
"""


class Agent:
    """The agent's end of the socket."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "notice.sock")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._listener.settimeout(PATIENCE_S)
        self.opened: list[Any] = [self._listener]

    def accept(self) -> None:
        self._program, _ = self._listener.accept()
        self._program.settimeout(PATIENCE_S)
        self._lines = self._program.makefile("rb")
        self.opened += [self._lines, self._program]

    def say(self, **message: object) -> None:
        self._program.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        return dict(json.loads(self._lines.readline()))


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path)
    yield made
    for each in made.opened:
        each.close()


def launch(agent: Agent, how: str = "plain", **env: str) -> subprocess.Popen[str]:
    told = {"CAVVY_NOTICE": agent.path, "CAVVY_REJOINS": "1", "CAVVY_ATTEMPT": "1", **env}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how],
        env={**os.environ, **told},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_copies_go_on_with_the_variables_of_the_next_attempt(agent: Agent) -> None:
    program = launch(agent)
    agent.accept()
    assert agent.hear() == {"keeps": {"kept": 1}}
    assert agent.hear() == {"apart": {"code": 1, "error": "Connection closed by peer"}}
    agent.say(stay={})
    agent.say(rejoin={"env": {"CAVVY_ATTEMPT": "2"}})
    assert program.stdout is not None
    first, second = (program.stdout.readline().split() for _ in range(2))
    agent.say(regroup={})
    stopped = {"code": 128 + signal.SIGTERM, "error": ""}
    assert agent.hear() == {"apart": stopped}
    agent.say(stay={})
    agent.say(rejoin={"env": {"CAVVY_ATTEMPT": "3"}})
    assert agent.hear() == {"keeps": {"kept": 0}}
    rest = program.communicate(timeout=PATIENCE_S)[0]
    assert program.returncode == 7
    assert (first[1:3], second[1:3]) == (["1", "kept"], ["2", "kept"])
    assert rest.split()[1:3] == ["3", "kept"]
    assert len({first[3], second[3], rest.split()[3], str(program.pid)}) == 4


def test_the_process_has_the_exit_code_of_its_copy_if_nothing_follows(agent: Agent) -> None:
    program = launch(agent)
    agent.accept()
    assert agent.hear() == {"keeps": {"kept": 1}}
    assert "apart" in agent.hear()
    agent.say(leave={})
    program.communicate(timeout=PATIENCE_S)
    assert program.returncode == 1


def test_the_process_ends_by_the_signal_that_has_killed_its_copy(agent: Agent) -> None:
    program = launch(agent, "killed")
    agent.accept()
    program.communicate(timeout=PATIENCE_S)
    assert program.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("how", "env"),
    [
        ("thread", {}),
        ("old kernel", {}),
        ("plain", {"CAVVY_REJOINS": ""}),
        ("plain", {"RANK": "0"}),
    ],
)
def test_a_process_that_cannot_be_copied_works_itself(
    agent: Agent, how: str, env: dict[str, str]
) -> None:
    program = launch(agent, how, **env)
    out = program.communicate(timeout=PATIENCE_S)[0]
    assert program.returncode == 3
    assert out.split()[2:] == ["alone", str(program.pid)]
