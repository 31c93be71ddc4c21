"""What an agent does with a program that stays while its gang is repaired. The program speaks the
same protocol as `cavvy.train`, without PyTorch."""

import sys
from pathlib import Path

import pytest
from tests.agent.system.test_agent_kept import Keeper
from tests.system.agent_server import Rig, make_rig

pytestmark = pytest.mark.system
PROGRAM = """
import json, os, socket, sys
line = socket.socket(socket.AF_UNIX)
line.connect(os.environ["CAVVY_NOTICE"])
said = line.makefile("rw")

def say(**message):
    said.write(json.dumps(message) + chr(10))
    said.flush()

def hear(kind):
    for text in said:
        if kind in (message := json.loads(text)):
            return message[kind]
    sys.exit(9)

say(keeps={"kept": 1})
print("kept" if os.environ.get("CAVVY_REJOINS") else "not kept", flush=True)
if sys.argv[1] == "cut":
    say(apart={"code": 1, "error": "Connection reset by peer"})
else:
    hear("regroup")
    say(apart={"code": 75, "error": ""})
hear("stay")
env = hear("rejoin")["env"]
print("goes on in attempt", env["CAVVY_ATTEMPT"], env["MASTER_ADDR"], flush=True)
say(keeps={"kept": 0})
sys.exit(5)
"""


def make_work(folder: Path, how: str) -> dict[str, object]:
    (folder / "program.py").write_text(PROGRAM)
    return {
        "run": f"{sys.executable} {folder}/program.py {how}",
        "repair_s": 60,
        "checkpoint": {"path": "saved", "storage": f"{folder}/saved"},
    }


def follow(rig: Rig, **work: object) -> Keeper:
    named = {"job": "again", "repair_s": 0, "addresses": ["10.0.0.7", "10.0.0.8"], "nodes": 2}
    return Keeper(rig, 1, attempt=2, **{**work, **named})


def test_a_program_that_is_cut_off_stays_and_gets_the_next_addresses(tmp_path: Path) -> None:
    work = make_work(tmp_path, "cut")
    with make_rig(**work) as rig:
        keeper = follow(rig, **work)
        assert rig.finish() == 0
        [(kinds, log, _)] = keeper.before
        assert (kinds[-1], log) == ("exited", "kept\n")
        assert rig.output() == "goes on in attempt 2 10.0.0.7\n"
        assert rig.exited()["exit_code"] == 5
        assert [kind for kind in rig.stub.kinds() if kind != "event"] == ["running", "exited"]


def test_the_server_learns_that_the_work_was_cut_off(tmp_path: Path) -> None:
    with make_rig(**make_work(tmp_path, "cut")) as rig:
        Keeper(rig, 0)  # nothing follows
        assert rig.finish() == 0
        exited = rig.exited()
        assert (exited["outcome"], exited["failure"], exited["exit_code"]) == ("exit", "network", 1)
        assert "Connection reset by peer" in str(exited["reason"])


def test_a_stop_keeps_the_program(tmp_path: Path) -> None:
    work = make_work(tmp_path, "stop")
    with make_rig(**work) as rig:
        keeper = follow(rig, **work)
        agent = rig.launch()
        rig.until(lambda: rig.output() == "kept\n")
        rig.stub.give("stop", 30, "rank 1 failed")
        assert agent.wait(60) == 0
        assert keeper.before
        assert rig.output() == "goes on in attempt 2 10.0.0.7\n"


def test_other_work_gets_a_clean_node(tmp_path: Path) -> None:
    work = make_work(tmp_path, "cut")
    with make_rig(**work) as rig:
        keeper = Keeper(rig, 1, job="next", attempt=1, run="echo other; ls -A")
        assert rig.finish() == 0
        assert keeper.before
        assert rig.output() == "other\n"


@pytest.mark.parametrize(
    "changes", [{"repair_s": 0}, {"checkpoint": {"path": "saved", "sync": True}}]
)
def test_such_a_program_starts_again(tmp_path: Path, changes: dict[str, object]) -> None:
    with make_rig(**{**make_work(tmp_path, "cut"), **changes}) as rig:
        rig.launch()
        rig.until(lambda: rig.output().startswith("not kept\n"))


# A program that could be kept and ends, and another one after it, which is cut off.
TWO = """
import json, os, socket, sys
for last in (False, True):
    line = socket.socket(socket.AF_UNIX)
    line.connect(os.environ["CAVVY_NOTICE"])
    said = line.makefile("rw")
    end = {"apart": {"code": 3, "error": ""}} if last else {"keeps": {"kept": 0}}
    said.write("".join(json.dumps(each) + chr(10) for each in ({"keeps": {"kept": 1}}, end)))
    said.flush()
    if last:
        heard = (json.loads(text) for text in said)
        print(next(kind for each in heard for kind in each if kind in ("stay", "leave")))
        sys.exit(3)
"""


def test_the_second_program_of_a_node_does_not_stay(tmp_path: Path) -> None:
    """The other nodes may be at the first one."""
    work = make_work(tmp_path, "")
    (tmp_path / "program.py").write_text(TWO)
    with make_rig(**work) as rig:
        assert rig.finish() == 0
        assert rig.output() == "leave\n"
        assert rig.exited()["exit_code"] == 3


def test_each_python_of_work_that_asks_for_it_knows_how_launchers_start_ranks(
    tmp_path: Path,
) -> None:
    look = (
        "import os, sys; print([type(each).__name__ for each in sys.meta_path][0], "
        "'launchers' in str(sys.path), os.environ['PYTHONPATH'].endswith('/launchers:/own'))"
    )
    run = f'{sys.executable} -c "{look}"'
    env = {"PYTHONPATH": "/own", "CAVVY_FORK_RANKS": "1"}
    with make_rig(**{**make_work(tmp_path, ""), "run": run, "env": env}) as rig:
        assert rig.finish() == 0
        assert rig.output() == "ApiFinder False True\n"


def test_a_user_can_let_all_programs_start_again(tmp_path: Path) -> None:
    run = 'echo "$CAVVY_REJOINS ${PYTHONPATH-none}"'
    env = {"CAVVY_REJOINS": "0"}
    with make_rig(**{**make_work(tmp_path, ""), "run": run, "env": env}) as rig:
        assert rig.finish() == 0
        assert rig.output() == " none\n"
