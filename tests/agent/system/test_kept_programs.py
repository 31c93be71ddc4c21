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
