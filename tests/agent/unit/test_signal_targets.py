"""The program that the user wrote gets SIGTERM, and what serves it runs on until it has ended."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.waits import wait_until

from cavvy.agent.work.environment import SHELL_LINE
from cavvy.agent.work.reaper import descendants, halt, list_children
from cavvy.agent.work.signal_targets import (
    Targets,
    adopt,
    choose,
    find_first,
    list_awaited,
    sets_trap,
)

# A program as people write it: two helpers feed it, and it saves when it is asked to end.
TRAINS = """
import multiprocessing, os, signal, sys, time
def feed(queue, inherits):
    if not inherits:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        queue.put(1)
        time.sleep(0.01)
def note(*_):
    global stop
    stop = True
if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[2])
    stop, queue = False, multiprocessing.Queue(2)
    signal.signal(signal.SIGTERM, note)
    for inherits in (True, False):
        multiprocessing.Process(target=feed, args=(queue, inherits), daemon=True).start()
    open(sys.argv[1], "w").write("ready")
    while not stop:
        queue.get(timeout=30)
    for _ in range(10):  # it finishes its batch
        queue.get(timeout=30)
    with open(sys.argv[1], "w") as file: file.write("saved")
    os._exit(0)  # a helper that inherited the handler would never end
"""
# Like torchrun: it ends its ranks by SIGKILL soon after it was asked to end.
LAUNCHES = """
import signal, subprocess, sys
ranks = [subprocess.Popen(sys.argv[1:]) for _ in range(1)]
def end(*_):
    for rank in ranks: rank.kill()
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
sys.exit(max(rank.wait() for rank in ranks))
"""


# As GNU parallel does, it starts nothing new after the signal, and waits for what it has started.
WAITS = """
import signal, subprocess, sys
def wait(*_): print("waits", flush=True)
CALLS
sys.exit(subprocess.call(sys.argv[1:]))
"""


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@contextmanager
def running(command: list[str], state: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command, once its program is ready, as the first process of a group of its own."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        wait_until(lambda: state.exists() and state.read_text() == "ready")
        yield process
    finally:
        for pid in descendants(process.pid):
            os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the helpers of a program that has ended
        process.wait()


def ask(process: subprocess.Popen[bytes]) -> Targets:
    """What a reaper does."""
    targets = choose(process.pid, list_children())
    assert targets is not None
    for pid in targets.held:
        os.kill(pid, signal.SIGSTOP)
    for pid in targets.first:
        os.kill(pid, signal.SIGTERM)
    wait_until(targets.have_ended)
    return targets


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


Make = Callable[[Path, list[str]], list[str]]
WAYS: dict[str, Make] = {
    "alone": lambda folder, train: train,
    "a shell": lambda folder, train: ["sh", "-c", " ".join(train) + "; true"],
    "two shells": lambda folder, train: ["bash", "-c", f"sh -c '{' '.join(train)}; true'; true"],
    "a shell with a trap": lambda folder, train: [
        "bash",
        "-c",
        f"trap : TERM; {' '.join(train)}; true",
    ],
    "a pipe": lambda folder, train: ["bash", "-c", " ".join(train) + " | cat; true"],
    "timeout": lambda folder, train: ["timeout", "300", *train],
    "an unknown wrapper": lambda folder, train: [
        str(shutil.copy(shutil.which("timeout") or "", folder / "wrap")),
        "300",
        *train,
    ],
    "parallel": lambda folder, train: [
        sys.executable,
        write(folder, "parallel", WAITS.replace("CALLS", "signal.signal(signal.SIGTERM, wait)")),
        *train,
    ],
    "Python": lambda folder, train: [
        sys.executable,
        write(folder, "runs.py", WAITS.replace("CALLS", "")),
        *train,
    ],
    "torchrun": lambda folder, train: [
        sys.executable,
        write(folder, "torchrun", LAUNCHES),
        *train,
    ],
}


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("way", WAYS)
def test_the_program_saves_while_its_helpers_serve_it(
    way: str, start: str, state: Path, tmp_path: Path
) -> None:
    train = [sys.executable, write(tmp_path, "train.py", TRAINS), str(state), start]
    with running(WAYS[way](tmp_path, train), state) as process:
        ask(process)
        assert state.read_text() == "saved"


def test_a_task_can_choose_what_its_commands_have_started(state: Path, tmp_path: Path) -> None:
    """With `main`, the launcher gets the signal, and not its ranks."""
    train = [sys.executable, write(tmp_path, "train.py", TRAINS), str(state), "spawn"]
    launch = " ".join([sys.executable, write(tmp_path, "torchrun", LAUNCHES), *train])
    shell = ["bash", "-c", SHELL_LINE, write(tmp_path, "run.sh", f"{launch} | cat; true\n")]
    with running(shell, state) as process:
        below = list_children()
        launcher = next(each for each in below[process.pid] if each in below)
        targets = choose(process.pid, below, "main")
        assert targets is not None
        assert (targets.programs, targets.held) == ([launcher], [process.pid])
        assert targets.first == [launcher]
        assert choose(process.pid, below, "all") is None
        found = choose(process.pid, below)
        assert found is not None
        assert found.programs == below[launcher]


@contextmanager
def waiting_for(*commands: list[str]) -> Iterator[int]:
    """A process of the agent that waits for the commands, outside of the work's namespaces."""
    fork = os.fork()
    if not fork:
        with suppress(BaseException):
            for each in [subprocess.Popen(command) for command in commands]:
                each.wait()
        os._exit(0)
    try:
        yield fork
    finally:
        for pid in [*descendants(fork), fork]:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(fork, 0)


def test_the_shell_of_a_task_is_below_what_waits_outside_of_its_namespaces(
    state: Path, tmp_path: Path
) -> None:
    script = write(tmp_path, "run.sh", f"printf ready > {state}; sleep 300\ntrue\n")
    orphan = ["sleep", "301"]  # which a process outside has adopted
    with waiting_for(orphan, ["bash", "-c", SHELL_LINE, script]) as fork:
        wait_until(lambda: state.exists() and len(descendants(fork)) == 3)
        # the process of the tests may have other children
        below = {**list_children(), os.getpid(): [fork]}
        adopted, shell = below[fork]
        assert find_first(fork, below) == find_first(shell, below) == shell
        assert list_awaited(shell, below) == below[shell]
        assert find_first(below[shell][0], below) == below[shell][0]
        assert adopt(shell, below)[shell] == [*below[shell], adopted]


def test_a_program_in_the_place_of_the_shell_is_below_what_waits_for_it() -> None:
    with waiting_for(["sleep", "300"]) as fork:
        wait_until(lambda: descendants(fork) != [])
        [program] = descendants(fork)
        wait_until(lambda: b"sleep" in Path(f"/proc/{program}/cmdline").read_bytes())
        below = list_children()
        assert find_first(fork, below) == below[fork][0]


@pytest.mark.parametrize(
    ("commands", "found"),
    [
        ("trap 'touch stop' TERM\npython a.py & wait", True),
        ("set -e; trap save SIGTERM SIGINT; python a.py", True),
        ("  trap 'kill $p' INT 15", True),
        ("trap 'rm -r tmp' EXIT\npython a.py", False),
        ("echo trap TERM\n# trap x TERM", False),
    ],
)
def test_a_trap_in_the_commands_of_a_task_is_found(commands: str, found: bool) -> None:
    assert sets_trap(commands) is found


def test_a_trap_in_the_commands_of_a_task_is_the_users(state: Path, tmp_path: Path) -> None:
    # until the child has become `sleep`, it is another shell
    child = 'until [ "$(cat /proc/$!/comm)" = sleep ]; do :; done'
    trap = f"trap 'echo saved >{state}' TERM; sleep 300 & {child}; printf ready >{state}; wait\n"
    with running(["bash", "-c", SHELL_LINE, write(tmp_path, "run.sh", trap)], state) as process:
        found = choose(process.pid, list_children())
        assert found is not None
        assert (found.first, found.programs, found.held) == ([process.pid], [process.pid], [])


@pytest.mark.parametrize("outer", ["", "set -m; "])
def test_a_shell_whose_command_is_stopped_does_not_go_on(
    outer: str, state: Path, tmp_path: Path
) -> None:
    """With `set -m`, a shell waits no longer for a command that is stopped."""
    train = f"{sys.executable} {write(tmp_path, 'train.py', TRAINS)} {state} fork"
    done = tmp_path / "done"
    inner = write(tmp_path, "inner.sh", f"{train}; true\n")
    with running(["bash", "-c", f"{outer}bash {inner}; touch {done}; true"], state) as process:
        targets = choose(process.pid, list_children())
        assert targets is not None
        assert targets.held[-1] == process.pid
        for pid in reversed(targets.held):
            halt(pid)
        assert not done.exists()


def test_make_is_stopped_like_a_shell(state: Path, tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("there is no make here")
    train = f"{sys.executable} {write(tmp_path, 'train.py', TRAINS)} {state} fork"
    done = tmp_path / "done"
    write(tmp_path, "Makefile", f"all:\n\t{train}\n\ttouch {done}\n")
    with running(["make", "-C", str(tmp_path)], state) as process:
        assert process.pid in ask(process).held
        assert state.read_text() == "saved"
        assert not done.exists()


def test_a_shell_does_not_go_on_with_its_next_command(state: Path, tmp_path: Path) -> None:
    """What a program was asked to leave unfinished is not marked as done."""
    train = f"{sys.executable} {write(tmp_path, 'train.py', TRAINS)} {state} fork"
    done = tmp_path / "done"
    with running(["bash", "-c", f"{train} && touch {done}; true"], state) as process:
        targets = ask(process)
        assert targets.held == [process.pid]
        assert process.pid in targets.left
        os.kill(process.pid, signal.SIGTERM)
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait() == -signal.SIGTERM
    assert state.read_text() == "saved"
    assert not done.exists()


@pytest.mark.parametrize(
    "script",
    [
        "touch {state}.new; mv {state}.new {state}; printf ready >{state}; sleep 300; true",
        "trap 'exit 0' TERM; sleep 300 & printf ready >{state}; sleep 300; true",
    ],
)
def test_without_a_handler_but_that_of_a_shell_every_process_gets_it(
    script: str, state: Path
) -> None:
    with running(["bash", "-c", script.format(state=state)], state) as process:
        assert choose(process.pid, list_children()) is None


def test_a_shell_with_a_trap_that_only_waits_is_the_program(state: Path) -> None:
    script = f"trap 'exit 0' TERM; sleep 300 & printf ready >{state}; wait; true"
    with running(["bash", "-c", script], state) as process:
        found = choose(process.pid, list_children())
        assert found is not None
        assert found.first == found.programs == [process.pid]


def test_ranks_without_a_handler_are_left_to_their_launcher(state: Path, tmp_path: Path) -> None:
    rank = f"import time; open({str(state)!r}, 'w').write('ready'); time.sleep(300)"
    launcher = write(tmp_path, "torchrun", LAUNCHES)
    with running([sys.executable, launcher, sys.executable, "-c", rank], state) as process:
        wait_until(lambda: len(descendants(process.pid)) == 1)
        assert choose(process.pid, list_children()) is None


# As the agent's function that waits for a container engine's client, which passes the signal on.
WAITS_FOR_CLIENT = """
import os, signal, subprocess
from cavvy.agent.loop import EventLoop
from cavvy.agent.work.process import WorkProcess
from cavvy.agent.work.reaper import ChildCommand
def call(channel):
    signal.signal(signal.SIGTERM, lambda *_: None)
    client = subprocess.Popen(["/bin/sh", "-c", "echo ready; exec sleep 600"])
    return client.wait() + 100
loop, process = EventLoop(), None
command = ChildCommand([], dict(os.environ), "/", call)
process = WorkProcess(
    loop, command, wrote=lambda _: process.ask(), heard=print, ended=print, gone=loop.stop
)
loop.run()
"""


def test_what_a_function_of_the_agent_waits_for_gets_the_signal() -> None:
    command = [sys.executable, "-c", WAITS_FOR_CLIENT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{100 - signal.SIGTERM}\n"


# As podman's client: the container's processes, which the reaper adopts, get the signal from it alone.
CLIENT = """
trap 'echo asked; sleep 1; touch end; sleep 1; exit 0' TERM
(setsid sh -c 'trap "echo torn" TERM; echo ready; until [ -e end ]; do sleep 0.1; done' &)
while :; do sleep 0.1; done
"""
ASKS_CLIENT = """
import os, signal, subprocess, sys
from cavvy.agent.loop import EventLoop
from cavvy.agent.work.process import WorkProcess
from cavvy.agent.work.reaper import ChildCommand
def call(channel):
    signal.signal(signal.SIGTERM, lambda *_: None)
    return subprocess.Popen(["/bin/sh", "-c", sys.argv[1]]).wait()
def wrote(data):
    os.write(1, data)
    process.ask()
loop, process = EventLoop(), None
command = ChildCommand([], dict(os.environ), os.getcwd(), call)
process = WorkProcess(
    loop, command, wrote=wrote, heard=print, ended=lambda code: None, gone=loop.stop
)
loop.run()
"""


def test_a_container_gets_the_signal_from_its_client_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ASKS_CLIENT, CLIENT]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert ("asked" in done.stdout, "torn" in done.stdout) == (True, False)
