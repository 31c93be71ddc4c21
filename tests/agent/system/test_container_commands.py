"""A user's command in a container ends when the user disconnects: against a stand-in of docker, in
which, as in the real one, a daemon runs the commands and gets no signals from the client.
"""

import json
import os
import pty
import shutil
import signal
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.system.agent_server import make_rig
from tests.system.server_state import home_at
from tests.waits import PATIENCE_S, wait_until

from cavvy.agent.work.container import HANG_UP, STARTED
from cavvy.client import connect

pytestmark = pytest.mark.system
CLIENT = f"""\
#!{sys.executable} -IS
import json, socket, sys
link = socket.socket(socket.AF_UNIX)
link.connect(sys.argv[0].rpartition("/")[0] + "/daemon")
link.sendall(json.dumps(sys.argv[1:]).encode() + b"\\n")
reader = link.makefile("rb")
for line in reader:
    kind, _, rest = line.partition(b" ")
    if kind == b"exit":
        sys.exit(int(rest))
    sys.stdout.buffer.write(rest)
    sys.stdout.buffer.flush()
"""


class DockerDaemon(socketserver.ThreadingUnixStreamServer):
    """Runs the commands of clients in sessions of their own, and ignores when a client ends."""

    daemon_threads = True
    running: dict[str, "subprocess.Popen[bytes]"]  # by the last word of the command


class DockerCall(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, DockerDaemon)
        line = self.rfile.readline()
        if not line:  # the server has tried whether the daemon runs
            return
        argv = json.loads(line)
        code = 0
        if argv[0] in ("run", "exec"):
            folder = argv[argv.index("--workdir") + 1] if "--workdir" in argv else "/"
            os.makedirs(folder, exist_ok=True)  # as the real one does
            command = argv[argv.index("sh") :]
            if argv[0] == "run":
                # The entry script may signal all processes, which in a container are only its own.
                home = Path(command[1]).parent
                (home / "phase").write_text("run\n")
                command = ["sh", str(home / "run.sh")]
            program = subprocess.Popen(
                command,
                cwd=folder,
                env={"PATH": "/usr/bin:/bin"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            self.server.running[argv[-1]] = program
            with program:
                assert program.stdout is not None
                for line in program.stdout:
                    self.tell(b"line " + line)
            code = program.returncode
        self.tell(b"exit %d\n" % (code if code >= 0 else 128 - code))

    def tell(self, line: bytes) -> None:
        with suppress(OSError):
            self.wfile.write(line)


@pytest.fixture
def docker(tmp_path: Path) -> Iterator[DockerDaemon]:
    tools = tmp_path / "docker"
    tools.write_text(CLIENT)
    tools.chmod(0o755)
    with DockerDaemon(str(tmp_path / "daemon"), DockerCall) as daemon:
        daemon.running = {}
        threading.Thread(target=daemon.serve_forever).start()
        yield daemon
        daemon.shutdown()
        for program in daemon.running.values():
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            program.wait(PATIENCE_S)


def test_commands_in_a_container_end_when_their_users_disconnect(
    docker: DockerDaemon, tmp_path: Path
) -> None:
    lines = {
        "quiet": "echo quiet; sleep 1000; true",
        "kept": "trap '' HUP; echo kept; while [ ! -e go ]; do sleep 0.1; done",
        "read": "echo read; while [ ! -e go ]; do sleep 0.1; done; exit 4",
        "left": "(while [ ! -e go ]; do sleep 0.1; done) >/dev/null & echo left; exit 5",
    }
    with make_rig(run="sleep 1000") as rig:
        rig.stub.work["image"] = "registry.example/team/image:1"
        rig.environ["PATH"] = f"{tmp_path}:/usr/bin:/bin"
        agent = rig.launch()
        rig.until(lambda: "running" in rig.stub.kinds())
        for name, line in lines.items():
            rig.stub.run_beside(name, ["sh", "-c", line])
        rig.until(lambda: all(rig.stub.exec_output.get(name) for name in lines))
        commands = {name: docker.running[line] for name, line in lines.items()}
        rig.until(lambda: rig.stub.exec_codes.get("left") == 5)
        rig.stub.execs_left = {"quiet", "kept"}
        rig.until(lambda: not survives(commands["quiet"].pid))
        rig.until(lambda: set(rig.stub.exec_codes) == {"quiet", "kept", "left"})
        assert all(survives(commands[name].pid) for name in ("kept", "read", "left"))
        (rig.home / "work" / "go").touch()
        rig.until(lambda: rig.stub.exec_codes.get("read") == 4)
        rig.stub.give("stop", 5)
        os.killpg(docker.running[str(rig.home / "entry.sh")].pid, signal.SIGKILL)
        assert agent.wait(PATIENCE_S) == 0


def test_an_interactive_shell_in_a_container_ends_with_its_terminal(tmp_path: Path) -> None:
    bash, file = shutil.which("bash"), str(tmp_path / "group")
    if bash is None:
        pytest.skip("bash is not installed here")
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp("sh", ["sh", "-c", STARTED, file, bash, "--norc", "-i"])
    try:
        os.write(terminal, f"sleep 1000 & echo $! >{file}.job; sleep 1000\n".encode())
        wait_until(lambda: Path(f"{file}.job").exists() and Path(f"{file}.job").read_text())
        job = int(Path(f"{file}.job").read_text())
        (shell,) = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        assert survives(shell)
        subprocess.run(["sh", "-c", HANG_UP, file], check=False)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGHUP
        wait_until(lambda: not survives(shell) and not survives(job))
    finally:
        os.close(terminal)


def test_a_session_s_command_in_a_container_ends_when_its_user_disconnects(
    docker: DockerDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/daemon")
    with home_at(tmp_path / "home"), connect() as client:
        task = {"name": "boxed", "image": "registry.example/team/image:1", "run": "sleep 1000"}
        client.submit(json.dumps(task))
        wait_until(lambda: client.job("default", "boxed").phase == "running")
        line = "echo up; sleep 1000; true"
        argv = [sys.executable, "-m", "cavvy", "ssh", "boxed", "--", line]
        null = subprocess.DEVNULL
        with subprocess.Popen(argv, stdin=null, stdout=subprocess.PIPE) as user:
            assert user.stdout is not None
            assert user.stdout.readline() == b"up\n"
            (command,) = [each for key, each in docker.running.items() if line in key]
            assert survives(command.pid)
            user.send_signal(signal.SIGHUP)
        wait_until(lambda: not survives(command.pid))
        (work,) = [each for key, each in docker.running.items() if key.endswith("/entry.sh")]
        os.killpg(work.pid, signal.SIGKILL)
        wait_until(lambda: client.job("default", "boxed").phase != "running")


def survives(group: int) -> bool:
    """Whether a process of this group runs; one that has ended may not be reaped yet."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, number = path.read_text().rpartition(") ")[2].split()[:3]
            if int(number) == group and state != "Z":
                return True
    return False
