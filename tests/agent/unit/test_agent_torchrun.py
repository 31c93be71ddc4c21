"""The launcher that keeps what it has imported while the job replaces a lost node, with a stand-in
of PyTorch and of the agent."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cavvy.agent.work import torchrun

PROGRAM = """
import json, os, sys, time
from beside import WORD
names = "RANK WORLD_SIZE LOCAL_RANK MASTER_PORT CAVVY_ATTEMPT".split()
said = [*(os.environ[each] for each in names), sys.argv[1:], WORD, __name__]
with open(f"{sys.argv[1]}/{os.environ['CAVVY_ATTEMPT']}-{os.environ['RANK']}.new", "w") as file:
    json.dump(said, file)
os.rename(file.name, file.name[:-4])
if os.environ["CAVVY_ATTEMPT"] == "1" or "hold" in sys.argv:
    time.sleep(60)
if "lost" in sys.argv:
    raise RuntimeError("[third_party/gloo/x.cc] Connection closed by peer")
sys.exit(3 if "fail" in sys.argv else 0)
"""
PATIENCE_S = 120


class StandIn:
    """The agent's end of the connection, and the launcher."""

    def __init__(self, folder: Path, *words: str, attempt: int = 1) -> None:
        (folder / "torch").mkdir()
        for name, text in (("__init__", "print('imported', flush=True)"), ("distributed", "")):
            (folder / f"torch/{name}.py").write_text(text)
        (folder / "code").mkdir()
        (folder / "code/train.py").write_text(PROGRAM)
        (folder / "code/beside.py").write_text("WORD = 'beside'")
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(str(folder / "notice"))
        self._door.listen()
        self._door.settimeout(PATIENCE_S)
        self.folder = folder
        ranks = {"NODE_RANK": "1", "NNODES": "2", "NPROC_PER_NODE": "2", "MASTER_PORT": "1234"}
        agent = {"CAVVY_NOTICE": str(folder / "notice"), "CAVVY_REJOINS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, torchrun.__file__, str(folder / "code/train.py"), str(folder), *words],
            env={**os.environ, **ranks, **agent, "CAVVY_ATTEMPT": str(attempt)}
            | {"PYTHONPATH": str(folder)},
            stdout=subprocess.PIPE,
            text=True,
        )
        self._line, _ = self._door.accept()
        self._line.settimeout(PATIENCE_S)
        self._file = self._line.makefile("rw")

    def hear(self) -> object:
        return json.loads(self._file.readline())

    def say(self, **line: object) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def read(self, attempt: int, rank: int) -> list[object]:
        path = self.folder / f"{attempt}-{rank}"
        while not path.exists():
            assert self.process.poll() is None
            time.sleep(0.02)
        found: list[object] = json.loads(path.read_text())
        return found

    def end(self) -> tuple[int, int]:
        """Return the exit code, and how often the stand-in of PyTorch was imported."""
        out, _ = self.process.communicate(timeout=PATIENCE_S)
        for each in (self._file, self._line, self._door):
            each.close()
        return self.process.returncode, out.count("imported")


def test_ranks_of_the_next_attempt_need_not_import_torch_again(tmp_path: Path) -> None:
    agent = StandIn(tmp_path, "--lr", "0.1")
    assert agent.hear() == {"keeps": {"kept": 1}}
    assert [agent.read(1, rank)[:4] for rank in (2, 3)] == [
        ["2", "4", "0", "1234"],
        ["3", "4", "1", "1234"],
    ]
    agent.say(regroup={})
    assert agent.hear() == {"apart": {"code": 143, "error": ""}}
    agent.say(stay={})
    agent.say(rejoin={"env": {"CAVVY_ATTEMPT": "2", "MASTER_PORT": "1235", "NNODES": "3"}})
    for rank in (2, 3):
        assert agent.read(2, rank) == [
            *(str(rank), "6", str(rank - 2), "1235", "2"),
            [str(tmp_path), "--lr", "0.1"],
            *("beside", "__main__"),
        ]
    assert agent.hear() == {"keeps": {"kept": 0}}
    assert agent.end() == (0, 1)


@pytest.mark.parametrize(
    ("word", "code", "error"), [("lost", 1, "RuntimeError: [third_party/gloo"), ("fail", 3, "")]
)
def test_the_agent_hears_whether_a_connection_was_lost(
    tmp_path: Path, word: str, code: int, error: str
) -> None:
    agent = StandIn(tmp_path, word, attempt=2)
    agent.hear()
    apart = agent.hear()["apart"]  # type: ignore[index]
    assert (apart["code"], apart["error"][: len(error)] == error) == (code, True)
    assert bool(apart["error"]) is bool(error)
    agent.say(leave={})
    assert agent.end() == (code, 1)


def test_a_notice_ends_the_launcher_with_its_ranks(tmp_path: Path) -> None:
    agent = StandIn(tmp_path)
    agent.hear()
    for rank in (2, 3):
        agent.read(1, rank)
    agent.process.terminate()
    assert agent.hear() == {"keeps": {"kept": 0}}
    assert agent.end() == (-15, 1)
