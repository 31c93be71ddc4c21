"""The supervisor that runs on SSH hosts, spoken to directly: what is asked twice happens once, and
nothing is left.
"""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.waits import PATIENCE_S, wait_until

from cavvy.providers.hosts.bundles import pack_supervisor
from cavvy.providers.hosts.supervisor import service
from cavvy.providers.hosts.supervisor.processes import identify, is_overdue

pytestmark = pytest.mark.system
# What an agent does as far as a supervisor sees it: it locks, says that it was here, and leaves with
# the code in `code`.
AGENT = """
import fcntl, json, os, sys, time
home = os.path.dirname(sys.argv[-1])
lock = os.open(home + "/lock", os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
with open(home + "/starts", "a") as file:
    file.write("deliver\\n" if "--deliver" in sys.argv else "work\\n")
if "--deliver" in sys.argv:
    away = home + "/away"  # how often nobody will answer
    left = int(open(away).read()) if os.path.exists(away) else 0
    if left:
        open(away, "w").write(str(left - 1))
    sys.exit(75 if left else 0)
code = ""
while not code:  # the file is there before it is written
    time.sleep(0.005)
    code = open(home + "/code").read() if os.path.exists(home + "/code") else ""
sys.exit(int(code))
"""


class Supervisor:
    """One supervisor and a pipe to it."""

    def __init__(self, root: Path, file: Path, python: str = sys.executable) -> None:
        self.root, self.python = root, python
        command = [python, "-I", "-S", str(file), "serve", str(root)]
        # Unbuffered: `select` must see each line that was not read yet.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self.changed: list[str] = []
        self._number = 0

    def ask(self, do: str, **fields: object) -> Any:
        """The whole answer, errors included."""
        assert self.process.stdin is not None
        self._number += 1
        self.process.stdin.write(
            json.dumps({"id": self._number, "do": do, **fields}).encode() + b"\n"
        )
        self.process.stdin.flush()
        while (line := self.read()).get("id") != self._number:
            self.changed.append(line["changed"])
        return line

    def read(self, seconds: float = PATIENCE_S) -> Any:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        assert ready, "the supervisor says nothing"
        return json.loads(self.process.stdout.readline())

    def launch(self, gang: str, *, devices: tuple[str, ...] = (), ranks: int = 1) -> Any:
        agent = self.root.parent / "agent.py"
        agent.write_text(AGENT)
        asked = [
            {"rank": n, "config": {"home": str(self.rank(gang, n))}, "devices": devices}
            for n in range(ranks)
        ]
        return self.ask(
            "launch", gang=gang, intent={"n": 1}, command=[self.python, str(agent)], ranks=asked
        )

    def rank(self, gang: str, number: int = 0) -> Path:
        return self.root / "agents" / gang / str(number)

    def states(self, gang: str) -> list[str]:
        found = [each for each in self.ask("look")["answer"]["gangs"] if each["name"] == gang]
        return [rank["state"] for each in found for rank in each["ranks"]]

    def until(self, gang: str, *states: str) -> None:
        wait_until(
            lambda: self.states(gang) == list(states), lambda: str(self.states(gang)), pause_s=0.02
        )

    def close(self) -> None:
        """Hang up, as a connection's end does."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


Make = Callable[..., Supervisor]  # by the folder under which it works, and the Python


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "supervisor.pyz"
    path.write_bytes(pack_supervisor().content)
    return path


@pytest.fixture
def make(tmp_path: Path, file: Path) -> Iterator[Make]:
    made: list[Supervisor] = []

    def start(folder: str, python: str = sys.executable) -> Supervisor:
        root = tmp_path / "base" / folder / "host"
        root.mkdir(parents=True, exist_ok=True)
        made.append(Supervisor(root, file, python))
        return made[-1]

    yield start
    for supervisor in made:
        supervisor.close()
    for path in tmp_path.glob("base/*/host/agents/*/*/run.json"):
        with suppress(ProcessLookupError):  # of a test that failed
            os.killpg(json.loads(path.read_text())["pid"], signal.SIGKILL)


@pytest.fixture
def supervisor(make: Make) -> Supervisor:
    return make("mark")


def starts(supervisor: Supervisor, gang: str) -> list[str]:
    path = supervisor.rank(gang) / "starts"
    wait_until(lambda: path.exists() and path.read_text(), pause_s=0.01)
    return path.read_text().split()


def test_a_name_is_launched_once_and_its_end_is_told(supervisor: Supervisor) -> None:
    supervisor.launch("g", ranks=2)
    supervisor.launch("g", ranks=2)
    assert starts(supervisor, "g") == ["work"]
    assert supervisor.states("g") == ["runs", "runs"]
    for rank in range(2):
        (supervisor.rank("g", rank) / "code").write_text("0")
    supervisor.until("g", "over", "over")
    wait_until(lambda: supervisor.states("g") and "g" in supervisor.changed)  # it may be told later
    supervisor.ask("forget", gang="g")
    assert not supervisor.rank("g").exists()
    assert supervisor.launch("g")["answer"] == {"over": True}
    assert not supervisor.rank("g").exists()


def test_an_unfinished_launch_leaves_no_folder(supervisor: Supervisor) -> None:
    """A host that breaks down during a launch leaves one, with a token in it."""
    (supervisor.root / "agents" / ".new-earlier" / "0").mkdir(parents=True)
    supervisor.launch("g")
    assert [each.name for each in (supervisor.root / "agents").iterdir()] == ["g"]


def test_gangs_of_an_earlier_version_are_taken_over_and_never_started_again(
    make: Make, tmp_path: Path
) -> None:
    """The earlier version kept all records in the work's folders. The work of the second gang has
    changed them, and removed the marks of its start.
    """
    root = tmp_path / "base/mark/host"
    agent = root.parent.parent / "agent.pyz"
    running, forged = (start_as_earlier(root, agent, name) for name in ("g", "h"))
    gang = {"intent": {"n": 2}, "command": ["touch", str(tmp_path / "taken")], "boot": "x"}
    (root / "gangs/h/gang.json").write_text(json.dumps(gang))
    (root / "gangs/h/removing.json").write_text('{"kill_at": "soon"}')
    (root / "gangs/h/0/left").write_text("0")
    for mark in ("run.json", "lock", "starts"):
        (root / "gangs/h/0" / mark).unlink()
    os.killpg(forged.pid, signal.SIGKILL)
    forged.wait()
    supervisor = make("mark")
    supervisor.until("h", "over")
    assert supervisor.states("g") == ["runs"]
    (found,) = [each for each in supervisor.ask("look")["answer"]["gangs"] if each["name"] == "g"]
    assert (found["intent"], found["ranks"][0]["pid"]) == ({"n": 1}, running.pid)
    (root / "gangs/g/0/left").write_text("0")  # forged: the agent runs
    assert supervisor.states("g") == ["runs"]
    (root / "gangs/g/0/started").touch()
    (root / "gangs/g/0/code").write_text("1")
    running.wait()
    supervisor.until("g", "over")
    assert (root / "agents/g/0/starts").read_text() == "deliver\n"
    assert not (root / "gangs/h/0/starts").exists()
    assert not (root / "agents/h/0/starts").exists()
    assert not (tmp_path / "taken").exists()


def start_as_earlier(root: Path, agent: Path, name: str) -> "subprocess.Popen[bytes]":
    """Start a gang as the version before the folder `agents` did."""
    rank = root / "gangs" / name / "0"
    rank.mkdir(parents=True)
    agent.write_text(AGENT)
    command = [sys.executable, str(agent)]
    gang = {"intent": {"n": 1}, "command": command, "boot": "x"}
    (rank.parent / "gang.json").write_text(json.dumps(gang))
    config = {"home": str(rank), "address": "unix:/nonexistent", "token": "t"}
    (rank / "config.json").write_text(json.dumps(config))
    environ = {**os.environ, "CAVVY_GANG": name, "CAVVY_RANK": "0"}
    process = subprocess.Popen(
        [*command, str(rank / "config.json")], env=environ, start_new_session=True
    )
    (rank / "run.json").write_text(json.dumps(identify(process.pid)))
    wait_until(lambda: (rank / "starts").exists(), pause_s=0.01)
    return process


def test_a_new_supervisor_takes_over(supervisor: Supervisor, make: Make) -> None:
    supervisor.launch("g")
    assert starts(supervisor, "g") == ["work"]
    second = make("mark")
    assert second.states("g") == ["runs"]
    assert supervisor.process.wait(PATIENCE_S) == -9
    (supervisor.rank("g") / "code").write_text("0")
    second.until("g", "over")


def test_an_agent_that_was_started_without_a_record_is_found(supervisor: Supervisor) -> None:
    supervisor.launch("g")
    assert starts(supervisor, "g") == ["work"]
    (
        supervisor.rank("g") / "run.json"
    ).unlink()  # as if it had been killed between the start and the record
    assert supervisor.states("g") == ["runs"]
    assert starts(supervisor, "g") == ["work"]
    (supervisor.rank("g") / "code").write_text("0")
    supervisor.until("g", "over")


def test_a_removal_kills_what_does_not_leave(supervisor: Supervisor) -> None:
    supervisor.launch("g")
    assert starts(supervisor, "g") == ["work"]
    supervisor.ask("remove", gang="g", grace_s=-1, forbid=True)
    supervisor.until("g", "over")
    assert supervisor.launch("g")["answer"] == {"over": True}
    supervisor.ask("remove", gang="never", grace_s=1, forbid=True)
    assert supervisor.launch("never")["answer"] == {"over": True}
    assert supervisor.states("never") == []


def test_a_removal_acts_even_if_it_cannot_be_recorded(supervisor: Supervisor) -> None:
    supervisor.launch("g")
    assert starts(supervisor, "g") == ["work"]
    block = supervisor.rank("g").parent / f"removing.json.{supervisor.process.pid}.new"
    block.mkdir()  # in the place of the file to write, as on a full disk
    with suppress(AssertionError):
        supervisor.ask("remove", gang="g", grace_s=-1, forbid=True)
    supervisor.until("g", "over")
    assert not (supervisor.rank("g").parent / "removing.json").exists()


def test_last_words_of_an_agent_that_broke_are_delivered(supervisor: Supervisor) -> None:
    supervisor.launch("g")
    assert starts(supervisor, "g") == ["work"]
    (supervisor.rank("g") / "started").touch()
    (supervisor.rank("g") / "code").write_text("1")
    supervisor.until("g", "over")
    assert starts(supervisor, "g") == ["work", "deliver"]
    (rank,) = supervisor.ask("look")["answer"]["gangs"][0]["ranks"]
    assert not rank["in_order"]


def test_what_an_agent_left_undelivered_is_delivered_once_somebody_answers(
    supervisor: Supervisor,
) -> None:
    supervisor.launch("g")
    assert starts(supervisor, "g") == ["work"]
    for name, text in (("started", ""), ("undelivered", ""), ("away", "5"), ("code", "0")):
        (supervisor.rank("g") / name).write_text(text)
    supervisor.until("g", "over")
    assert starts(supervisor, "g") == ["work"] + 6 * ["deliver"]
    (rank,) = supervisor.ask("look")["answer"]["gangs"][0]["ranks"]
    assert rank["in_order"]


def test_a_delivery_that_takes_days_is_not_looked_at_ten_times_a_second(tmp_path: Path) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as delivery:  # which ends with this block
        folder = tmp_path / "agents" / "g" / "0"
        folder.mkdir(parents=True)
        for name, text in (("started", ""), ("undelivered", ""), ("left", "0")):
            (folder / name).write_text(text)
        (folder / "deliver.json").write_text(
            json.dumps({"run": identify(delivery.pid), "tries": 0})
        )
        supervisor = service.HostSupervisor(str(tmp_path))
        assert supervisor._look("g")["ranks"][0]["why"] == service.DELIVERING
        assert supervisor._tend() == service.POLL_S
        (folder.parent / "removing.json").write_text(json.dumps({"kill_at": time.time() + 60}))
        (folder / "left").unlink()
        (folder / "run.json").write_text(json.dumps(identify(delivery.pid)))
        assert supervisor._tend() == service.SOON_S, "what is to go is looked after closely"


def test_the_grace_period_ends_on_time_when_the_date_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "agents" / "g"
    folder.mkdir(parents=True)
    for seconds, overdue in ((60, False), (0, True)):
        service.HostSupervisor(str(tmp_path))._note_removal(str(folder), seconds)
        record = service.HostSupervisor(str(tmp_path))._removal(str(folder))  # after a restart
        for moved_s in (-86400, 86400):
            moved = time.time() + moved_s
            with monkeypatch.context() as patch:
                patch.setattr(time, "time", lambda moved=moved: moved)
                assert is_overdue(record) is overdue
    assert is_overdue({"kill_at": time.time() - 1}), "the record of an older supervisor"
    assert not is_overdue({"kill_at": time.time() + 60, "boot": "other", "kill_since_boot_s": 0})


def test_a_device_is_held_once_on_a_host(supervisor: Supervisor, make: Make) -> None:
    other = make("other")
    supervisor.launch("g", devices=("GPU-1",))
    refused = other.launch("h", devices=("GPU-1", "GPU-2"))
    assert refused["kind"] == "busy"
    assert "gang g is using GPU-1" in refused["error"]
    assert other.states("h") == []
    assert "answer" in other.launch("i", devices=("GPU-2",))
    for each, gang in ((supervisor, "g"), (other, "i")):
        (each.rank(gang) / "code").write_text("0")
        each.until(gang, "over")
    assert "answer" in other.launch("j", devices=("GPU-1",))
    (other.rank("j") / "code").write_text("0")
    other.until("j", "over")


def test_names_that_are_no_names_are_refused(supervisor: Supervisor) -> None:
    assert supervisor.ask("remove", gang="../x", grace_s=1)["kind"] == "refused"


def test_a_request_that_cannot_be_answered_says_why_and_ends_no_other(
    supervisor: Supervisor,
) -> None:
    for wrong in ({"intent": "x"}, {"intent": {"volumes": 3}}):
        told = supervisor.ask("launch", gang="g", command=["true"], ranks=[], **wrong)
        assert told["kind"] == "again"
        assert "the supervisor failed: " in told["error"]
    assert supervisor.ask("no_such")["kind"] == "again"
    assert supervisor.ask("look")["answer"]["gangs"] == []


def test_the_agent_tries_to_separate_work_and_a_failure_is_told(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text("import sys\nprint(sys.argv[1:])")
    command = [sys.executable, str(agent)]
    said = supervisor.ask("try_separation", command=command)["answer"]
    folder, root = str(supervisor.root.parent.parent), str(supervisor.root)
    assert said == {"obstacle": str(["--separates", folder, root])}
    said = supervisor.ask("try_protection", command=command)["answer"]
    assert said == {"ability": str(["--protects", folder, root])}
    agent.write_text("1 / 0")
    assert supervisor.ask("try_separation", command=command)["answer"] == {"obstacle": "?"}
    assert supervisor.ask("try_separation", command=[])["answer"] == {"obstacle": "?"}


@pytest.mark.parametrize("version", ["3.8", "3.9", "3.10", "3.12", "3.13"])
def test_it_runs_on_other_pythons(make: Make, file: Path, tmp_path: Path, version: str) -> None:
    folder = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    python = shutil.which(
        f"python{version}", path=":".join(map(str, folder.glob(f"{version}.*/bin")))
    ) or (shutil.which(f"python{version}"))
    if (
        python is None
        or subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode != 0
    ):
        pytest.skip(f"no python{version} is installed here")
    command = [python, "-I", "-S", str(file), "facts", str(tmp_path)]
    facts = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
    assert facts["python"].startswith(version)
    supervisor = make("mark", python)
    supervisor.launch("g")
    assert starts(supervisor, "g") == ["work"]
    (supervisor.rank("g") / "code").write_text("0")
    assert supervisor.read() == {"changed": "g"}


def test_a_machine_of_a_cloud_is_told_no_intent(supervisor: Supervisor) -> None:
    agent = supervisor.root.parent / "agent.py"
    agent.write_text(AGENT)
    rank = {"rank": 0, "config": {"home": str(supervisor.rank("g"))}, "devices": ()}
    command = [sys.executable, str(agent)]
    told = supervisor.ask("launch", gang="g", intent=None, command=command, ranks=[rank])
    assert "answer" in told
    assert supervisor.ask("look")["answer"]["volumes"] == {}
    (supervisor.rank("g") / "code").write_text("0")
    supervisor.until("g", "over")
    assert supervisor.ask("remove_volume", project="p", name="models")["answer"] == {}


def test_volumes_are_made_before_the_work_reported_counted_and_removed(
    supervisor: Supervisor, file: Path
) -> None:
    agent = supervisor.root.parent / "agent.py"
    agent.write_text(AGENT)
    rank = {"rank": 0, "config": {"home": str(supervisor.rank("g"))}, "devices": ()}
    fields = {"command": [sys.executable, str(agent)], "ranks": [rank]}
    intent = {"project": "p", "volumes": ["models"]}
    assert supervisor.ask("look")["answer"]["volumes"] == {}
    assert "answer" in supervisor.ask("launch", gang="g", intent=intent, **fields)
    folder = supervisor.root / "volumes/p/models"
    assert supervisor.ask("look")["answer"]["volumes"] == {"p": ["models"]}
    (folder / "deep").mkdir()
    (folder / "deep/file").write_bytes(b"x" * 5000)
    (folder / "out").symlink_to("/usr")
    (folder.parent / "link").symlink_to("/usr")  # which no work could make if it is hidden
    (folder.parent / ".hidden").mkdir()
    command = [sys.executable, "-I", "-S", str(file), "volumes", str(supervisor.root)]
    (found,) = json.loads(subprocess.run([*command, "p"], check=True, capture_output=True).stdout)
    assert (found["name"], found["files"]) == ("models", 2)
    assert 5000 <= found["size_bytes"] < 50_000
    assert subprocess.run([*command, "q"], check=True, capture_output=True).stdout == b"[]"

    told = supervisor.ask("remove_volume", project="p", name="models")
    assert (told["kind"], told["error"]) == ("refused", "the gang g uses the volume models")
    (supervisor.rank("g") / "code").write_text("0")
    supervisor.until("g", "over")
    for name in ("..", "../../agents", "", ".hidden", "a/b", "models\n"):
        assert supervisor.ask("remove_volume", project="p", name=name)["kind"] == "refused"
        assert supervisor.ask("remove_volume", project=name, name="models")["kind"] == "refused"
        bad = {"project": "p", "volumes": [name]}
        assert supervisor.ask("launch", gang="bad", intent=bad, **fields)["kind"] == "refused"
    assert not (supervisor.root / "agents/bad").exists(), "nothing of it starts later"
    supervisor.ask("remove_volume", project="p", name="link")
    assert (folder.parent / "link").is_symlink()
    folder.chmod(0o555)
    assert supervisor.ask("remove_volume", project="p", name="models")["answer"] == {}
    assert not folder.exists()
    assert supervisor.ask("remove_volume", project="p", name="models")["answer"] == {}
    assert os.path.isdir("/usr")
