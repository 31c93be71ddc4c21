"""Which processes of a container get SIGTERM: the shell of its first process decides, whichever its
image has. A process namespace stands in for the container.
"""

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.agent.system.test_agent_signals import LAUNCHER, SERVED, TRAIN, WAITS
from tests.agent.unit.test_agent_documents import WORK
from tests.waits import PATIENCE_S, wait_until

from cavvy.agent.config import AgentConfig, ConfigFields
from cavvy.agent.work import container
from cavvy.agent.work.reaper import list_children
from cavvy.domain.values import replace

pytestmark = pytest.mark.system
NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
SHELLS = {"dash": ["dash"], "busybox": ["busybox", "sh"], "bash": ["bash"]}
WAYS = {
    "exec": "exec python3 train.py",
    "stages": "echo begin; python3 train.py && touch done; echo end",
    "in a script": "echo 'python3 train.py; echo end' >x.sh; sh x.sh; echo end",
    "passed on": (
        "echo 'python3 train.py & p=$!; trap \"kill $p; wait $p\" TERM; wait $p' >x.sh; sh x.sh"
    ),
    "a pipe": "python3 train.py | cat",
    "timeout": "timeout 600 python3 train.py",
    "a wrapper": 'cp "$(command -v timeout)" wrap && ./wrap 600 python3 train.py',
}
SLOW = TRAIN.replace(
    "    signal.signal(signal.SIGTERM, lambda",
    "    print('starts', flush=True)\n"
    "    while not os.path.exists('asked'): time.sleep(0.01)\n"
    "    signal.signal(signal.SIGTERM, lambda",
)


class Container:
    """A container whose work has said that it is ready."""

    def __init__(self, process: "subprocess.Popen[str]", output: Path) -> None:
        self._process, self._output = process, output

    def ask(self) -> None:
        """As an engine does, whose client got the signal."""
        [first] = list_children()[self._process.pid]
        subprocess.run(["kill", "-s", "TERM", str(first)], check=True)

    def wait(self, answer: str = "interrupted") -> tuple[int, list[str]]:
        """Wait for the end, and answer as the agent does when the container asks."""
        folder = self._output.parent
        asked, told = folder / "halted", folder / "answer"
        wait_until(lambda: asked.exists() or self._process.poll() is not None)
        told.write_text(f"{answer}\n")
        code = self._process.wait(PATIENCE_S)
        return code, [line for line in self.lines() if line and "erminated" not in line]

    def lines(self) -> list[str]:
        return self._output.read_text().splitlines()


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    if subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user cannot make a process namespace; run the tests as root")
    monkeypatch.setattr(container, "find_engine", lambda: "/usr/bin/podman")


@contextmanager
def running(
    folder: Path, run: str, *, shell: str = "dash", notify: str = "handlers", ready: str = "ready"
) -> Iterator[Container]:
    if shutil.which(SHELLS[shell][0]) is None:
        pytest.skip(f"there is no {shell} here")
    (folder / "train.py").write_text(TRAIN)
    (folder / "slow.py").write_text(SLOW)
    (folder / "launcher.py").write_text(LAUNCHER)
    fields = {"gang": "g", "rank": 0, "address": "unix:/s", "token": "t", "home": str(folder)}
    config = AgentConfig(ConfigFields(fields, "configuration"))
    (folder / "run.sh").write_text(run + "\n")
    work = replace(
        WORK, run=run, notify=notify, setup=None, inputs=[], volumes=[], env={}, secrets={}
    )
    container.write_entry(config, work)
    output = folder / "output"
    with output.open("w") as file:
        process = subprocess.Popen(
            [*NAMESPACE, *SHELLS[shell], config.entry_script],
            cwd=folder,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        wait_until(lambda: ready in output.read_text())
        yield Container(process, output)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("how", WAYS)
def test_a_program_saves_while_its_helpers_serve_it(how: str, tmp_path: Path) -> None:
    with running(tmp_path, WAYS[how]) as work:
        work.ask()
        _, lines = work.wait()
        assert lines[-1] == "saved 1"
        assert not (tmp_path / "done").exists()


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_that_an_image_may_have_decides_the_same(shell: str, tmp_path: Path) -> None:
    with running(tmp_path, WAYS["stages"], shell=shell) as work:
        work.ask()
        assert work.wait() == (0, ["begin", "ready", "saved 1"])


def test_the_ranks_of_a_launcher_get_the_signal_in_its_place(tmp_path: Path) -> None:
    with running(tmp_path, "python3 launcher.py train.py; echo end") as work:
        wait_until(lambda: work.lines().count("ready") == 2)
        work.ask()
        code, lines = work.wait()
        assert (code, lines[-2:]) == (0, ["saved 1", "saved 1"])


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("notify", ["handlers", "main"])
def test_complete_work_goes_on_with_its_next_stage(shell: str, notify: str, tmp_path: Path) -> None:
    with running(tmp_path, WAYS["stages"], shell=shell, notify=notify) as work:
        work.ask()
        assert work.wait("complete") == (0, ["begin", "ready", "saved 1", "end"])


def test_complete_work_without_a_handler_goes_on_with_its_next_stage(tmp_path: Path) -> None:
    with running(tmp_path, "echo ready; sleep 600 || echo end") as work:
        work.ask()
        assert work.wait("complete") == (0, ["ready", "end"])


def test_a_trap_in_the_commands_is_the_users(tmp_path: Path) -> None:
    run = "trap 'touch asked' TERM; python3 polls.py & wait $! || true; wait"
    polls = "import os, time\nprint('ready', flush=True)\n"
    polls += "while not os.path.exists('asked'): time.sleep(0.01)\nprint('saved')\n"
    (tmp_path / "polls.py").write_text(polls)
    with running(tmp_path, run) as work:
        work.ask()
        assert work.wait() == (0, ["ready", "saved"])


def test_what_a_script_writes_to_is_left_to_it(tmp_path: Path) -> None:
    """As with ffmpeg, which has a handler, and ends its file at once."""
    shutil.copy(shutil.which("timeout") or "", tmp_path / "encode")
    with running(tmp_path, "python3 train.py | ./encode 600 cat; echo end") as work:
        work.ask()
        assert work.wait() == (0, ["ready", "saved 1"])


def test_what_nohup_has_started_gets_the_signal(tmp_path: Path) -> None:
    run = "sh -c 'nohup python3 train.py >log 2>&1 &'; tail -n +1 -f log; echo end"
    with running(tmp_path, f"touch log; {run}") as work:
        work.ask()
        assert work.wait()[1][-2:] == ["ready", "saved 1"]


def test_a_program_without_a_handler_ends_at_once(tmp_path: Path) -> None:
    with running(tmp_path, "echo ready; sleep 600 | cat; echo end") as work:
        work.ask()
        assert work.wait() == (128 + signal.SIGTERM, ["ready"])


def test_a_notice_lets_a_program_that_starts_install_its_handler(tmp_path: Path) -> None:
    (tmp_path / "notice.json").write_text(json.dumps({"seconds": 600.0, "deadline": "x"}))
    with running(tmp_path, "python3 slow.py; echo end", ready="starts") as work:
        work.ask()
        (tmp_path / "asked").touch()
        code, lines = work.wait()
        assert (code, lines[-1]) == (0, "saved 1")


def test_a_stop_ends_a_program_that_starts(tmp_path: Path) -> None:
    with running(tmp_path, "python3 slow.py; echo end", ready="starts") as work:
        work.ask()
        assert work.wait() == (128 + signal.SIGTERM, ["starts"])


def test_a_task_may_notify_every_process(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    with running(tmp_path, "python3 waits.py; echo end", notify="all") as work:
        work.ask()
        assert work.wait() == (0, ["ready", "3"])


def test_a_server_in_the_background_may_outlast_the_program_that_needs_it(tmp_path: Path) -> None:
    with running(tmp_path, SERVED, notify="main") as work:
        work.ask()
        assert work.wait() == (0, ["ready", "saved 1"])


def test_a_task_may_notify_only_what_its_commands_have_started(tmp_path: Path) -> None:
    with running(tmp_path, "python3 launcher.py train.py; echo end", notify="main") as work:
        wait_until(lambda: work.lines().count("ready") == 2)
        work.ask()
        code, lines = work.wait()
        assert code == 256 - signal.SIGKILL  # the launcher has killed its ranks
        assert lines[-1] == "ready"
