"""Launchers of PyTorch that keep what they have imported while the job replaces a lost node, with a
stand-in of PyTorch and of the agent."""

import ast
import gzip
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cavvy.agent.config import AgentConfig, ConfigFields, read_work
from cavvy.agent.documents import WorkConfig
from cavvy.agent.work import python_start, torchrun
from cavvy.agent.work.environment import ROOM, ROOM_SIZE, add_keeping, write_rank_files
from cavvy.agent.work.reaper import list_children
from cavvy.agent.work.signal_targets import choose, is_starting

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
SHOWS = """
with open("/proc/self/environ") as file:
    shown = file.read()
with open(f"{folder}/shown-{os.environ['RANK']}", "w") as file:
    file.write(shown)
"""
LEAVES_OPEN = """
import gzip
plain, text = open(f"{folder}/plain-{first}", "w"), gzip.open(f"{folder}/text-{first}", "wt")
plain.write("all")
text.write("all")
"""
# has a helper, which inherits the command line, and a handler once it has been told so
WORKS = """
import multiprocessing
if first:
    helper = multiprocessing.get_context("fork").Process(target=wait, daemon=True)
    helper.start()
    tell(f"helper-{helper.pid}")
tell(f"starts-{os.getpid()}")
wait("handle")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
tell(f"ready-{os.getpid()}")
wait()
"""
# what the file has of PyTorch: its launcher, and what the launcher needs
API = """
import dataclasses

class DefaultLogsSpecs:
    def __init__(self, tee=0):
        self._root_log_dir, self._run_log_dir = f"/tmp/torchelastic_{id(self)}", None
        self._redirects, self._tee, self._local_ranks_filter = 0, tee, None

@dataclasses.dataclass
class LaunchConfig:
    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "etcd"
    rdzv_configs: dict = dataclasses.field(default_factory=dict)
    max_restarts: int = 3
    signals_to_handle: str = "SIGTERM"
    filters: list = None
    tee: dataclasses.InitVar = 0
    logs_specs: DefaultLogsSpecs = None

    def __post_init__(self, tee):
        self.logs_specs = DefaultLogsSpecs(tee)

def launch_agent(config, entrypoint, args):
    print("plain", flush=True)

class elastic_launch:
    def __init__(self, config, entrypoint):
        self.config, self.entrypoint = config, entrypoint

    def __call__(self, *args):
        return launch_agent(self.config, self.entrypoint, [*args])
"""
RUN = """
import json, os, sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

config = {
    **{"min_nodes": 2, "max_nodes": 2, "nproc_per_node": 2, "max_restarts": 0, "filters": []},
    **{"rdzv_backend": "static", "rdzv_configs": {"rank": 1, "timeout": 900}},
    "rdzv_endpoint": os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"],
    **json.loads(sys.argv[1]),
}
elastic_launch(LaunchConfig(**config), sys.executable)("-u", *sys.argv[2:])
print("after", flush=True)
"""
MACROS = """
class macros:
    def substitute(args, local_rank):
        return [each.replace("${local_rank}", local_rank) for each in args]
"""
TORCH = {
    "distributed/__init__": "",
    "distributed/run": RUN,
    "distributed/launcher/__init__": "",
    "distributed/launcher/api": API,
    "distributed/elastic/__init__": "",
    "distributed/elastic/utils/__init__": "",
    "distributed/elastic/utils/api": MACROS,
}
PATIENCE_S = 120
Launch = Callable[..., str]


class StandIn:
    """The agent's end of the connection, and the launcher."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        attempt: int = 1,
        program: str = "",
        imports: str = "",
        config: dict[str, object] | None = None,
        joined: bool = False,
        script: bool = False,
    ) -> None:
        imported = f"{imports}\ndef set_num_threads(n): pass\nprint('imported', flush=True)"
        for name, text in {**TORCH, "__init__": imported}.items():
            (folder / f"torch/{name}.py").parent.mkdir(parents=True, exist_ok=True)
            (folder / f"torch/{name}.py").write_text(text)
        (folder / "launchers").mkdir()
        shutil.copy(python_start.__file__, folder / "launchers/sitecustomize.py")
        shutil.copy(torchrun.__file__, folder / f"launchers/{python_start.LAUNCHER}.py")
        (folder / "code").mkdir()
        (folder / "code/train.py").write_text(HELPERS + program if program else PROGRAM)
        (folder / "code/beside.py").write_text("WORD = 'beside'")
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(str(folder / "notice"))
        self._door.listen()
        self._door.settimeout(PATIENCE_S)
        self.folder = folder
        ranks = {"NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1234"}
        agent = {"CAVVY_NOTICE": str(folder / "notice"), "CAVVY_REJOINS": "1"}
        agent |= {"CAVVY_ATTEMPT": str(attempt), ROOM: " " * ROOM_SIZE}
        given = {name: torchrun.digest_of(value) for name, value in os.environ.items()}
        (folder / "launchers" / torchrun.GIVEN).write_text(json.dumps(given))
        launcher = ["-m", "torch.distributed.run"]
        if script:
            (folder / "torchrun").write_text(RUN)
            launcher = [str(folder / "torchrun")]
        self.process = subprocess.Popen(
            [
                sys.executable,
                *launcher,
                json.dumps(config or {}),
                str(folder / "code/train.py"),
                str(folder),
                *words,
            ],
            env={**os.environ, **ranks, **agent, "PYTHONPATH": f"{folder}/launchers:{folder}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if joined else None,
            text=True,
            start_new_session=True,
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

    def find_numbers(self, name: str, count: int) -> set[int]:
        """Return the numbers in the names of so many files."""
        while len(found := [*self.folder.glob(f"{name}-*")]) < count:
            assert self.process.poll() is None
            time.sleep(0.02)
        return {int(each.name.rpartition("-")[2]) for each in found}

    def read(self, attempt: int, rank: int) -> list[object]:
        found: list[object] = json.loads(self.find(f"{attempt}-{rank}").read_text())
        return found

    def end(self) -> tuple[int, int]:
        """Return the exit code, and how often the stand-in of PyTorch was imported."""
        out, _ = self.process.communicate(timeout=PATIENCE_S)
        with pytest.raises(ProcessLookupError):  # nothing is left of it
            os.killpg(self.process.pid, 0)
        self.close()
        return self.process.returncode, out.count("imported")

    def close(self) -> None:
        for each in (self._file, self._line, self._door):
            each.close()


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


# modules of PyTorch that are imported late, of which the second one starts a thread
LATE = "import os; open(f'{FOLDER}/late-{os.getpid()}', 'w').close()"
THREAD = (
    "import threading, time; threading.Thread(target=time.sleep, args=[90], daemon=True).start()"
)
IMPORTS_LATE = """
import json, torch.late, torch.thread
seen = [each in launched for each in ("torch.late", "torch.thread")]
with open(f"{folder}/new-{os.environ['RANK']}", "w") as file:
    json.dump(seen, file)
os.rename(file.name, f"{folder}/{os.environ['CAVVY_ATTEMPT']}-{os.environ['RANK']}")
if os.environ["CAVVY_ATTEMPT"] == "1":
    wait()
"""


def test_the_launcher_imports_what_the_ranks_have_of_torch_while_they_work(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/late.py").write_text(LATE.replace("{FOLDER}", str(tmp_path)))
    (tmp_path / "torch/thread.py").write_text(THREAD)
    program = f"import sys; launched = set(sys.modules)\n{IMPORTS_LATE}"
    agent = StandIn(tmp_path, program=program)
    agent.hear()
    assert [agent.read(1, rank) for rank in (2, 3)] == [[False, False]] * 2
    agent.find(f"late-{agent.process.pid}")
    agent.say(regroup={})
    agent.hear()
    agent.say(stay={})
    agent.say(rejoin={"env": {"CAVVY_ATTEMPT": "2"}})
    assert [agent.read(2, rank) for rank in (2, 3)] == [[True, False]] * 2
    assert agent.hear() == {"keeps": {"kept": 0}}
    assert agent.end() == (0, 1)


def test_no_name_is_written_to_a_file_of_the_programs(tmp_path: Path) -> None:
    """A program may close all files that it has inherited."""
    ahead = torchrun.ImportsAhead()
    ahead.find_spec("torch.early")
    with (tmp_path / "own").open("w") as own:
        os.dup2(own.fileno(), ahead._file)
        ahead.find_spec("torch.late")
        os.close(ahead._file)
    ahead.find_spec("torch.last")
    assert (tmp_path / "own").read_text() == ""


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
    """Neither may import the other, so how they read the agent's lines and errors is written twice.
    Only the first statements differ: the launcher may have no connection."""
    launcher = list_statements("agent/work/torchrun.py")
    kept = {**list_statements("train/world.py"), **list_statements("train/rejoin.py")}
    alike = {
        "_as_shell": 1,
        "_read": 6,
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


def test_what_follows_the_launcher_is_done_once(tmp_path: Path) -> None:
    agent = StandIn(tmp_path, attempt=2)
    agent.hear()
    assert agent.hear() == {"keeps": {"kept": 0}}
    out, _ = agent.process.communicate(timeout=PATIENCE_S)
    agent.close()
    assert out.split() == ["imported", "after"]


# sends a signal when the first rank has been forked: the fork before only looks whether it can
EARLY = """
import os, signal
forks = []
def tell():
    forks.append(1)
    if len(forks) == 2:
        os.kill(os.getpid(), signal.SIGTERM)
os.register_at_fork(after_in_parent=tell)
"""


def test_a_signal_between_two_forks_reaches_all_ranks(tmp_path: Path) -> None:
    agent = StandIn(tmp_path, imports=EARLY)
    agent.hear()
    assert agent.hear() == {"keeps": {"kept": 0}}
    assert agent.end() == (-15, 1)


def test_a_signal_ends_a_launcher_that_waits_for_the_next_attempt(tmp_path: Path) -> None:
    agent = StandIn(tmp_path)
    agent.hear()
    for rank in (2, 3):
        agent.read(1, rank)
    agent.say(regroup={})
    agent.hear()
    agent.say(stay={})
    agent.process.terminate()
    assert agent.hear() == {"keeps": {"kept": 0}}
    assert agent.end() == (-15, 1)


def test_others_see_the_variables_of_a_rank(tmp_path: Path) -> None:
    agent = StandIn(tmp_path, program=SHOWS)
    agent.hear()
    agent.hear()
    agent.end()
    for rank in (2, 3):
        shown = (tmp_path / f"shown-{rank}").read_text().split("\0")
        assert {f"RANK={rank}", f"LOCAL_RANK={rank - 2}", "WORLD_SIZE=4"} <= {*shown}
        assert "CAVVY_ATTEMPT=1" in shown


# sends a signal before the ranks of one of the attempts have been forked
BETWEEN = """
import gc, os, signal
attempts, freeze = [], gc.freeze
def tell():
    attempts.append(1)
    if len(attempts) == {attempt}:
        os.kill(os.getpid(), signal.SIGTERM)
    freeze()
gc.freeze = tell
"""


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_signal_before_the_ranks_are_forked_ends_the_launcher(
    tmp_path: Path, attempt: int
) -> None:
    agent = StandIn(tmp_path, "hold", imports=BETWEEN.replace("{attempt}", str(attempt)))
    agent.hear()
    if attempt == 2:
        for rank in (2, 3):
            agent.read(1, rank)
        agent.say(regroup={})
        agent.hear()
        agent.say(stay={})
        agent.say(rejoin={"env": {"CAVVY_ATTEMPT": "2"}})
    assert agent.hear() == {"keeps": {"kept": 0}}
    assert agent.end() == (-15, 1)
    assert not [*tmp_path.glob(f"{attempt}-*")]


def test_files_that_a_rank_leaves_open_are_whole(tmp_path: Path) -> None:
    agent = StandIn(tmp_path, program=LEAVES_OPEN)
    agent.hear()
    agent.hear()
    assert agent.end() == (0, 1)
    for first in (True, False):
        assert (tmp_path / f"plain-{first}").read_text() == "all"
        assert gzip.decompress((tmp_path / f"text-{first}").read_bytes()) == b"all"


def test_forked_ranks_and_not_their_helpers_get_the_signal(tmp_path: Path) -> None:
    agent = StandIn(tmp_path, program=WORKS, script=True)
    agent.hear()
    root = agent.process.pid
    ranks = agent.find_numbers("starts", 2)
    [helper] = agent.find_numbers("helper", 1)
    assert is_starting(root, list_children())
    (tmp_path / "handle").touch()
    assert agent.find_numbers("ready", 2) == ranks
    assert not is_starting(root, list_children())
    targets = choose(root, list_children())
    assert targets is not None
    assert ({*targets.first}, {*targets.programs}) == (ranks, ranks)
    assert {*targets.left} == {root, helper}
    for pid in targets.first:
        os.kill(pid, signal.SIGTERM)
    assert agent.hear() == {"keeps": {"kept": 0}}
    assert agent.end() == (0, 1)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"max_restarts": 1}, "restart the ranks by itself"),
        ({"min_nodes": 1}, "number of nodes"),
        ({"rdzv_backend": "etcd"}, "rendezvous of its own"),
        ({"rdzv_configs": {"rank": 0}}, "another rank"),
        ({"rdzv_endpoint": "elsewhere:1234"}, "another address"),
        ({"rdzv_endpoint": "10.0.0.7:4321"}, "another port"),
        ({"filters": ["loss"]}, "filters=['loss']"),
        ({"tee": 3}, "options for logs"),
        ({"signals_to_handle": "SIGUSR2"}, "signals_to_handle='SIGUSR2'"),
    ],
)
def test_pytorch_starts_the_ranks_if_the_launcher_is_asked_for_more(
    tmp_path: Path, config: dict[str, object], why: str
) -> None:
    agent = StandIn(tmp_path, config=config, joined=True)
    # a second launcher is not the first that could be kept
    assert [agent.hear(), agent.hear()] == [{"keeps": {"kept": 1}}, {"keeps": {"kept": 0}}]
    out, _ = agent.process.communicate(timeout=PATIENCE_S)
    agent.close()
    imported, note, plain, after = out.splitlines()
    assert (imported, plain, after) == ("imported", "plain", "after")
    assert note.startswith("cavvy: if a node is lost")
    assert why in note


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Return what finds an obstacle for a launcher that has none."""
    ranks = {"NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1234"}
    job = {**ranks, "CAVVY_HOSTS": "10.0.0.7,10.0.0.8", "no_proxy": "10.0.0.8"}
    (tmp_path / "train.py").write_text("pass")
    (tmp_path / "stand_in_api.py").write_text(API)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "warnoptions", [])
    monkeypatch.setattr(sys, "_xoptions", {})
    config = importlib.import_module("stand_in_api").LaunchConfig(
        min_nodes=2, max_nodes=2, nproc_per_node=1, max_restarts=0, rdzv_backend="c10d"
    )

    def find(
        *words: str, python: str = sys.executable, port: str = "1234", **env: str | None
    ) -> str:
        config.rdzv_endpoint = f"10.0.0.7:{port}"
        whole = {name: value for name, value in {**job, **env}.items() if value is not None}
        script = words if words[:1] == ("none.py",) else (str(tmp_path / "train.py"), *words)
        return torchrun.find_obstacle(config, python, ["-u", *script], whole, whole)

    assert find() == ""
    return find


def make_work_that_forks(
    folder: Path, env: dict[str, str], repair_s: int = 60
) -> tuple[AgentConfig, WorkConfig]:
    saved = {"path": "saved", "storage": str(folder / "saved")}
    basics = {"job": "x", "job_id": "1", "project": "p", "attempt": 1, "run": "true"}
    fields = {**basics, "repair_s": repair_s, "checkpoint": saved, "env": env}
    home = {"gang": "g", "rank": 0, "address": "", "token": "", "home": str(folder)}
    config = AgentConfig(ConfigFields(home, "configuration"))
    return config, read_work(ConfigFields(fields, "work"))


def test_pytorch_starts_what_has_the_address_or_port_of_a_node(launch: Launch) -> None:
    for word in ("--peer=10.0.0.8:99", "tcp://10.0.0.8", "10.0.0.7,10.0.0.8"):
        assert launch(word) == "the program's arguments have the address of a node"
        assert launch(MASTER_ADDRESS=word) == "$MASTER_ADDRESS has the address of a node"
    for word in ("tcp://main:1234", "--port=1234", "1234"):
        assert launch(word) == "the program's arguments have the value of $MASTER_PORT"
        assert launch(MEET=word) == "$MEET has the value of $MASTER_PORT"
    for word in ("10.0.0.81:/data", "110.0.0.8", "12345", "61234", "/opt/10.0.0.8/bin"):
        assert launch(word, DATA=word) == ""


def test_only_variables_that_the_commands_have_set_are_looked_at(tmp_path: Path) -> None:
    """The agent's own name this node: the address of its tracking server, `PATH`, proxies."""
    config, work = make_work_that_forks(tmp_path, {"CAVVY_FORK_RANKS": "1"})
    given = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:1234", "PATH": "/opt/127.0.0.1"}
    write_rank_files(config, work, given)
    env = {**given, "PATH": "/opt/127.0.0.1:/bin", "MEET": "127.0.0.1"}
    assert torchrun.list_changed(env, config.launchers_folder) == ["PATH", "MEET"]
    assert "127.0.0.1" not in Path(config.launchers_folder, torchrun.GIVEN).read_text()
    assert torchrun.list_changed(given, str(tmp_path / "none")) == [*given]


def test_pytorch_starts_the_ranks_if_a_port_of_ones_own_could_change(launch: Launch) -> None:
    assert (launch(port="29500"), launch(port="29400")) == ("", "")
    assert "another port" in launch(port="2345")


def test_pytorch_starts_what_is_no_script_or_not_in_the_job(launch: Launch) -> None:
    assert "no script" in launch("none.py")
    assert "own Python" in launch(python="bash")
    assert "missing" in launch(NNODES=None)


@pytest.mark.parametrize(
    ("name", "value"), [("warnoptions", ["error"]), ("_xoptions", {"importtime": True})]
)
def test_pytorch_starts_what_would_not_have_the_options_of_the_launcher(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    monkeypatch.setattr(sys, name, value)
    assert "options" in launch()
    if name == "warnoptions":  # what a variable says holds for each Python
        assert launch(PYTHONWARNINGS="error") == ""


@pytest.mark.parametrize(
    "flag",
    ["-O", pytest.param("-P", marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="new"))],
)
def test_options_of_this_python_are_seen(flag: str) -> None:
    look = f"sys.path.insert(0, {str(Path(torchrun.__file__).parent)!r}); import torchrun"
    for flags in ([], [flag]):
        done = subprocess.run(
            [
                sys.executable,
                *flags,
                "-c",
                f"import sys; {look}; print(torchrun._has_options({{}}))",
            ],
            capture_output=True,
            text=True,
            check=True,
            env={"PATH": os.environ["PATH"]},
        )
        assert done.stdout.strip() == str(bool(flags))


@pytest.mark.parametrize(
    ("env", "keeps", "forks"),
    [
        ({}, True, False),
        ({"CAVVY_FORK_RANKS": "1"}, True, True),
        ({"CAVVY_FORK_RANKS": "0"}, True, False),
        ({"CAVVY_REJOINS": "0", "CAVVY_FORK_RANKS": "1"}, False, False),
        ({"CAVVY_REJOINS": "1", "CAVVY_FORK_RANKS": "1", "ALONE": ""}, False, False),
    ],
)
def test_ranks_are_forked_only_if_the_task_asks_for_it(
    tmp_path: Path, env: dict[str, str], keeps: bool, forks: bool
) -> None:
    # without a repair, a program that asks for it would wait in vain
    config, work = make_work_that_forks(tmp_path, env, 0 if "ALONE" in env else 60)
    found = {"PYTHONPATH": "/own", **env}
    add_keeping(config, work, found)
    write_rank_files(config, work, found)
    folder = tmp_path / "launchers"
    assert ("CAVVY_REJOINS" in found) == keeps
    assert (ROOM in found) == folder.exists() == forks
    assert found["PYTHONPATH"] == (f"{folder}:/own" if forks else "/own")


def test_the_python_of_the_work_keeps_its_own_customization(tmp_path: Path) -> None:
    for name, file in (("sitecustomize", python_start), (python_start.LAUNCHER, torchrun)):
        (tmp_path / "launchers").mkdir(exist_ok=True)
        shutil.copy(str(file.__file__), tmp_path / f"launchers/{name}.py")
    (tmp_path / "own").mkdir()
    (tmp_path / "own/sitecustomize.py").write_text("print('own')")
    look = "import sys, sitecustomize; print(sitecustomize.__file__); print(sys.path)"
    for own in (f":{tmp_path}/own", ""):
        path = {"PYTHONPATH": f"{tmp_path}/launchers{own}", "CAVVY_REJOINS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", look],
            env={**os.environ, **path},
            capture_output=True,
            text=True,
            check=True,
        )
        *said, found, paths = done.stdout.splitlines()
        assert (said, done.stderr) == (["own"] if own else [], "")
        assert not own or found.startswith(f"{tmp_path}/own")
        assert "launchers" not in paths
