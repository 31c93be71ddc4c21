"""The launcher that keeps what it has imported while the job replaces a lost node, with a stand-in
of PyTorch and of the agent."""

import ast
import json
import os
import signal
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
HELPERS = """
import atexit, os, signal, sys, time
folder, first = sys.argv[1], os.environ["LOCAL_RANK"] == "0"
def tell(name):
    with open(f"{folder}/{name}", "w"):
        pass
def wait(name="never"):
    until = time.monotonic() + 60
    while not os.path.exists(f"{folder}/{name}") and time.monotonic() < until:
        time.sleep(0.02)
LOST = RuntimeError("[third_party/gloo/x.cc] Connection closed by peer")
"""
# the first rank fails by itself, or the second one loses its connection first
RAISES = """
if first:
    atexit.register(wait)
    atexit.register(tell, "raised")
    raise KeyError("label")
wait("raised")
raise LOST
"""
EXITS = """
if first:
    wait("lost")
    os._exit(1)
atexit.register(wait)
atexit.register(tell, "lost")
raise LOST
"""
SAVES = """
if first:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    tell("saves")
    wait()
wait("saves")
raise LOST
"""
SAVES_AND_ENDS = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
tell(f"1-{os.environ['RANK']}")
wait()
"""
HEEDS = """
signal.signal(signal.SIGUSR1, lambda *_: tell(f"2-{os.environ['RANK']}"))
tell(f"1-{os.environ['RANK']}")
wait()
"""
KILLED = """
if first:
    os.kill(os.getpid(), signal.SIGKILL)
wait()
"""
DRAWS = """
import numpy.random
tell(f"drawn-{numpy.random.random()}")
"""
PATIENCE_S = 120


class StandIn:
    """The agent's end of the connection, and the launcher."""

    def __init__(
        self, folder: Path, *words: str, attempt: int = 1, program: str = "", imports: str = ""
    ) -> None:
        (folder / "torch").mkdir()
        imported = f"{imports}\nprint('imported', flush=True)"
        for name, text in (("__init__", imported), ("distributed", "")):
            (folder / f"torch/{name}.py").write_text(text)
        (folder / "code").mkdir()
        (folder / "code/train.py").write_text(HELPERS + program if program else PROGRAM)
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

    def find(self, name: str) -> Path:
        while not (path := self.folder / name).exists():
            assert self.process.poll() is None
            time.sleep(0.02)
        return path

    def read(self, attempt: int, rank: int) -> list[object]:
        found: list[object] = json.loads(self.find(f"{attempt}-{rank}").read_text())
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


def test_ranks_that_save_and_end_with_0_when_asked_are_apart(tmp_path: Path) -> None:
    agent = StandIn(tmp_path, program=SAVES_AND_ENDS)
    agent.hear()
    for rank in (2, 3):
        agent.find(f"1-{rank}")
    agent.say(regroup={})
    assert agent.hear() == {"apart": {"code": 0, "error": ""}}
    agent.say(leave={})
    assert agent.end() == (0, 1)


def test_the_launcher_ends_by_the_signal_that_has_killed_a_rank(tmp_path: Path) -> None:
    agent = StandIn(tmp_path, program=KILLED)
    agent.hear()
    assert agent.hear() == {"apart": {"code": 137, "error": ""}}
    agent.say(leave={})
    assert agent.end() == (-9, 1)


@pytest.mark.parametrize("how", ["missing", "refused"])
def test_the_launcher_needs_no_pidfds(tmp_path: Path, how: str) -> None:
    """Pythons that were built for kernels before 5.3 have none, and these kernels refuse them."""
    imports = "import os\ndef refuse(pid): raise OSError(38, 'not implemented')\n"
    imports += "os.pidfd_open = refuse\n" + ("del os.pidfd_open" if how == "missing" else "")
    agent = StandIn(tmp_path, "fail", attempt=2, imports=imports)
    agent.hear()
    assert agent.hear() == {"apart": {"code": 3, "error": ""}}
    agent.say(leave={})
    assert agent.end() == (3, 1)


@pytest.mark.parametrize(
    ("program", "lost"),
    [(RAISES, False), (EXITS, False), (SAVES, True)],
    ids=["raises", "exits", "saves"],
)
def test_a_connection_is_lost_unless_another_rank_of_the_node_has_failed(
    tmp_path: Path, program: str, lost: bool
) -> None:
    agent = StandIn(tmp_path, program=program)
    agent.hear()
    apart = agent.hear()["apart"]  # type: ignore[index]
    assert (apart["code"], bool(apart["error"])) == (1, lost)
    agent.say(leave={})
    assert agent.end() == (1, 1)


def test_ranks_that_have_heard_sigusr1_can_still_be_replaced(tmp_path: Path) -> None:
    agent = StandIn(tmp_path, program=HEEDS)
    agent.hear()
    for rank in (2, 3):
        agent.find(f"1-{rank}")
    agent.process.send_signal(signal.SIGUSR1)
    for rank in (2, 3):
        agent.find(f"2-{rank}")
    agent.say(regroup={})
    assert agent.hear() == {"apart": {"code": 143, "error": ""}}
    agent.say(leave={})
    assert agent.end() == (-15, 1)


def test_ranks_draw_different_numbers_if_torch_has_imported_the_generator_of_numpy(
    tmp_path: Path,
) -> None:
    """As with numpy 1."""
    agent = StandIn(tmp_path, program=DRAWS, imports="import numpy.random")
    agent.hear()
    assert agent.hear() == {"keeps": {"kept": 0}}
    assert agent.end() == (0, 1)
    assert len([*tmp_path.glob("drawn-*")]) == 2


def test_the_launcher_and_kept_programs_talk_alike_with_the_agent() -> None:
    """Neither may import the other. Only the first statements of some functions differ: the
    launcher may have no connection, and tells how several ranks have ended."""
    launcher = list_statements("agent/work/torchrun.py")
    kept = {**list_statements("train/world.py"), **list_statements("train/rejoin.py")}
    alike = {
        "_leave": 3,
        "_as_shell": 1,
        "_read": 6,
        "_wait_for_rejoin": 4,
        "is_lost_connection": 2,
    }
    for name, last in alike.items():
        assert launcher[name][-last:] == kept[name][-last:], name
    for name in ("WAIT_S", "_LONGEST"):
        assert launcher[name] == kept[name], name


def list_statements(path: str) -> dict[str, list[str]]:
    """Return the statements of each function and method of a file by its name, without docstrings,
    and the value of each constant."""
    source = Path(torchrun.__file__).parents[2] / path
    found = {}
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.FunctionDef):
            found[node.name] = [ast.unparse(each) for each in node.body]
        elif isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0])] = [ast.unparse(node.value)]
    return found
