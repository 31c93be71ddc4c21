"""Reaching into nodes: shells with a terminal, copies, forwarded ports, and plain ssh, scp and
sftp; all of it real.
"""

import fcntl
import getpass
import os
import pty
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.system.packages import install_packages
from tests.system.ports import free_port
from tests.system.server_state import home_at, kill_server, wait_until
from tests.waits import PATIENCE_S

from cavvy.client import ApiClient, connect

pytestmark = pytest.mark.system
NAMES = ("saved", "none")  # jobs that end
CAVVY = [sys.executable, "-P", "-c", "from cavvy.cli.main import main; main()"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HOME", str(tmp_path))  # for ~/.ssh
    with home_at(tmp_path / "home") as folder:
        yield folder
        with connect() as client:
            client.down()
            wait_until(lambda: not client.nodes())


@pytest.fixture
def client(home: Path) -> Iterator[ApiClient]:
    with connect() as client:
        client.submit("{name: box, run: 'exec sleep 1000', env: {COLOUR: bay}}")
        wait_until(lambda: client.job("default", "box").phase == "running")
        yield client


def cavvy(
    *words: str, stdin: bytes = b"", seconds: float = PATIENCE_S
) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run([*CAVVY, *words], input=stdin, capture_output=True, timeout=seconds)


class Terminal:
    """A user's terminal with a command in it."""

    def __init__(self, *words: str) -> None:
        self.said = b""
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = "xterm"
            os.execvp(CAVVY[0], [*CAVVY, *words])

    def type(self, keys: bytes) -> None:
        os.write(self.file, keys)

    def expect(self, pattern: bytes, seconds: float = PATIENCE_S) -> None:
        until = time.monotonic() + seconds
        while not re.search(pattern, self.said):
            assert time.monotonic() < until, self.said
            if select.select([self.file], [], [], 0.2)[0]:
                try:
                    self.said += os.read(self.file, 65536)
                except OSError:
                    break
        assert re.search(pattern, self.said), self.said
        self.said = b""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.file, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def exit_code(self) -> int:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self.file)
                return os.waitstatus_to_exitcode(status)
            if select.select([self.file], [], [], 0.1)[0]:
                try:
                    os.read(self.file, 65536)
                except OSError:
                    time.sleep(0.05)
        os.kill(self.pid, signal.SIGKILL)
        raise AssertionError("it did not end")


def test_commands_have_input_errors_and_exit_codes_of_their_own(client: ApiClient) -> None:
    done = cavvy(
        "ssh", "box", "--", 'echo "$COLOUR $CAVVY_JOB"; cat; echo bad >&2; exit 7', stdin=b"given\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, b"bay box\ngiven\n", b"bad\n")
    assert cavvy("ssh", "box:0", "kill -9 $$").returncode == 137
    assert cavvy("exec", "box:0", "--", "sh", "-c", "exit 3").returncode == 3
    done = cavvy("exec", "box", "--", "cat", stdin=b"given\n")
    assert (done.returncode, done.stdout, b"use `cavvy ssh box" in done.stderr) == (0, b"", True)
    assert cavvy("exec", "box", "--", "cat").stderr == b""
    large = os.urandom(3 << 20)
    assert (
        cavvy("ssh", "box", "cat", stdin=large).stdout == large
    )  # more than any window, both ways
    missing = cavvy("ssh", "box:1", "true")
    assert missing.returncode == 1
    assert b"box has no rank 1" in missing.stderr
    assert [
        event.text for event in client.events("default", "box").events if event.kind == "access"
    ][:2] == [
        f"{getpass.getuser()} opened a session on this rank with `cavvy ssh`",
        f"{getpass.getuser()} opened a session on this rank with `cavvy ssh`",
    ]


def test_a_shell_has_a_terminal_that_resizes_and_interrupts(client: ApiClient) -> None:
    terminal = Terminal("ssh", "box")
    terminal.type(b"stty -echo; PS1=; tty; echo term=$TERM\n")
    terminal.expect(rb"/dev/pts/\d+\s+term=xterm")
    terminal.resize(33, 111)
    terminal.type(b"sleep 0.5; stty size\n")
    terminal.expect(rb"33 111")
    # the program that prints is the one that is interrupted, so the signal cannot come before it
    terminal.type(b"sh -c 'echo on; exec sleep 100'; echo never\n")
    terminal.expect(rb"on")
    terminal.type(b"\x03")
    terminal.type(b"echo code=$?\n")
    terminal.expect(rb"code=130")
    terminal.type(b"exit 9\n")
    assert terminal.exit_code() == 9


def test_copies_are_whole_and_go_on_where_they_broke_off(client: ApiClient, tmp_path: Path) -> None:
    source = tmp_path / "data"
    (source / "inner").mkdir(parents=True)
    (source / "inner/größe").write_bytes(os.urandom(700_000))
    (source / "run.sh").write_text("#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)
    (source / "link").symlink_to("run.sh")
    (source / ("l" * 255)).write_text("the longest name")
    os.mkfifo(source / "pipe")
    sent = cavvy("cp", str(source), "box:there")
    assert (sent.returncode, b"were skipped: pipe\n" in sent.stderr) == (0, True), sent.stderr
    assert b"box:nothing: No such file" in cavvy("cp", "box:nothing", str(tmp_path)).stderr
    work = next((tmp_path / "home/providers/local/gangs").glob("*/0/work"))
    assert (work / "there/inner/größe").read_bytes() == (source / "inner/größe").read_bytes()
    assert os.readlink(work / "there/link") == "run.sh"
    done = cavvy("cp", "box:0:there", str(tmp_path / "back"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "back/run.sh").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "back/run.sh").stat().st_mtime == (source / "run.sh").stat().st_mtime
    assert (tmp_path / "back/inner/größe").read_bytes() == (source / "inner/größe").read_bytes()
    assert (tmp_path / "back" / ("l" * 255)).read_text() == "the longest name"

    large, part = os.urandom(2_000_000), work / "large.cavvy-part"
    (tmp_path / "large").write_bytes(large)
    part.write_bytes(large[:1_500_000])
    kept = part.stat().st_ino
    assert cavvy("cp", str(tmp_path / "large"), "box:large").returncode == 0
    assert (work / "large").read_bytes() == large
    assert (work / "large").stat().st_ino == kept  # it went on in the same file
    (tmp_path / "again.cavvy-part").write_bytes(b"x" * 1000)  # the start of something else
    assert cavvy("cp", "box:large", str(tmp_path / "again")).returncode == 0
    assert (tmp_path / "again").read_bytes() == large
    assert not list(tmp_path.glob("*.cavvy-part"))
    missing = cavvy("cp", "box:nothing", str(tmp_path))
    assert missing.returncode == 1
    assert b"No such file" in missing.stderr


@pytest.mark.parametrize(
    ("there", "here", "told"),
    [
        ("box:file", "nowhere/file", b"nowhere/file: No such file or directory"),
        ("box:file", "nowhere/", b"nowhere/: there is no such folder here"),
    ],
)
def test_a_copy_to_nowhere_is_told_in_a_line(
    client: ApiClient, tmp_path: Path, there: str, here: str, told: bytes
) -> None:
    (tmp_path / "file").write_text("text")
    sent = cavvy("cp", str(tmp_path / "file"), "box:nowhere/")
    assert b"nowhere/: there is no such folder on the node" in sent.stderr
    assert b"4 B" in cavvy("cp", str(tmp_path / "file"), "box:").stderr
    done = cavvy("cp", there, f"{tmp_path}/{here}")
    assert (done.returncode, done.stderr.splitlines()[0].endswith(told)) == (1, True), done.stderr
    assert not (tmp_path / "nowhere").exists()


def echo_server() -> tuple[socket.socket, int]:
    """Answers what it hears in capitals, after its peer has said all."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                peer, _ = server.accept()
            except OSError:
                return
            with peer:
                said = b""
                while data := peer.recv(65536):
                    said += data
                peer.sendall(said.upper())

    threading.Thread(target=serve, daemon=True).start()
    return server, server.getsockname()[1]


def talk(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as peer:
        peer.sendall(data)
        peer.shutdown(socket.SHUT_WR)
        said = b""
        while part := peer.recv(65536):
            said += part
    return said


@pytest.mark.parametrize("way", [[], ["-R"]], ids=["here", "there"])
def test_ports_are_forwarded_both_ways(client: ApiClient, way: list[str]) -> None:
    server, port = echo_server()
    ports = f"0:{port}" if not way else f"{port}:{free_port()}"
    forward = subprocess.Popen(
        [*CAVVY, "forward", "box", ports, *way], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert forward.stdout is not None
    assert forward.stderr is not None
    try:
        line = forward.stdout.readline().decode()
        found = re.search(r"127.0.0.1:(\d+) leads" if not way else r"port (\d+) of \S+ leads", line)
        assert found is not None, line
        there = int(found.group(1))
        large = b"abc" * 700_000
        assert talk(there, large) == large.upper()
        assert talk(there, b"again") == b"AGAIN"
        server.shutdown(socket.SHUT_RDWR)  # which also wakes who waits in it
        server.close()
        assert talk(there, b"nobody") == b""
    finally:
        forward.send_signal(signal.SIGINT)
        assert forward.wait(PATIENCE_S) in (0, -signal.SIGINT, 1)
        forward.stdout.close()
        forward.stderr.close()


@pytest.mark.parametrize("way", [[], ["-R"]], ids=["here", "there"])
@pytest.mark.parametrize("served", [False, True], ids=["before the server", "after it"])
def test_a_port_that_would_lead_to_itself_is_told(
    client: ApiClient, way: list[str], served: bool
) -> None:
    """The job of a local place has this machine's network: its server has the port, or could not
    get it any more.
    """
    server, port = echo_server() if served else (None, free_port())
    try:
        done = cavvy("forward", "box", str(port), *way)
        assert done.returncode == 1
        assert (
            f"port {port} of box is the same as port {port} of this machine".encode() in done.stderr
        )
        other = (
            f"{port}:PORT forwards another port of the node"
            if way
            else f"0:{port} forwards a free port of this machine"
        )
        assert other.encode() in done.stderr
    finally:
        if server is not None:
            server.close()


def test_what_nobody_serves_is_told_with_what_to_do(client: ApiClient) -> None:
    nobody = free_port()
    forward = subprocess.Popen([*CAVVY, "forward", "box", f"0:{nobody}"], stdout=-1, stderr=-1)
    assert forward.stdout is not None
    assert forward.stderr is not None
    try:
        found = re.search(r"127.0.0.1:(\d+) leads", forward.stdout.readline().decode())
        assert found is not None
        assert talk(int(found[1]), b"x") == b""
        told = forward.stderr.readline().decode()
        assert told.startswith(
            f"port {nobody} of the node: Connection refused; the program on the node may not have "
            "started yet"
        ), told
    finally:
        forward.send_signal(signal.SIGINT)
        forward.communicate(timeout=PATIENCE_S)


def test_ports_and_ranks_that_cannot_be_are_told(client: ApiClient) -> None:
    for words in (["box", "70000"], ["box", "80:70000"], ["box", "80:x"], ["box", "0"]):
        done = cavvy("forward", *words)
        assert (done.returncode, b"each at most 65535" in done.stderr) == (2, True), done
    assert b"box has no rank 3: it has rank 0 alone" in cavvy("ssh", "box:3").stderr


def require_clients() -> None:
    """Skip the test, saying what to do, where OpenSSH's clients are not installed and cannot be."""
    why = "" if shutil.which("sftp") else install_packages(["openssh-client"])
    if shutil.which("sftp") is None:
        pytest.skip(f"OpenSSH's clients are not installed: {why}")


def test_plain_ssh_scp_and_sftp_reach_a_node(client: ApiClient, tmp_path: Path) -> None:
    require_clients()
    (tmp_path / ".ssh").mkdir(mode=0o700)
    (tmp_path / ".ssh/config").write_text("Host other\n  User me\n")
    assert cavvy("ssh", "--setup").returncode == 0
    assert (tmp_path / ".ssh/config").read_text().startswith("Include config.d/cavvy\n")
    assert cavvy("ssh", "--setup").returncode == 0
    assert (tmp_path / ".ssh/config").read_text().count("Include") == 1
    file = ["-F", str(tmp_path / ".ssh/config.d/cavvy")]

    def plain(*words: str, stdin: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
        return subprocess.run(
            [words[0], *file, *words[1:]], input=stdin, capture_output=True, timeout=PATIENCE_S
        )

    done = plain("ssh", "box", "cat; echo $COLOUR; exit 6", stdin=b"in\n")
    assert (done.returncode, done.stdout) == (6, b"in\nbay\n"), done.stderr
    assert b"/dev/pts/" in plain("ssh", "-tt", "box.cavvy", "tty").stdout
    data = os.urandom(1_000_000)
    (tmp_path / "one").write_bytes(data)
    done = plain("scp", str(tmp_path / "one"), "box:two")
    assert done.returncode == 0, done.stderr
    batch = f"mkdir d\nrename two d/three\nget d/three {tmp_path}/3\n"
    done = plain("sftp", "-q", "-b", "-", "box", stdin=batch.encode())
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "3").read_bytes() == data
    assert plain("ssh", "box", "ls d").stdout == b"three\n"
    _, port = echo_server()
    assert plain("ssh", "-W", f"127.0.0.1:{port}", "box", stdin=b"through").stdout == b"THROUGH"


def runs(*words: str) -> bool:
    wanted = "\0".join([*words, ""]).encode()
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if each.read_bytes() == wanted:
                return True
    return False


def test_a_line_ends_with_its_user_its_job_and_its_server(
    client: ApiClient, home: Path, tmp_path: Path
) -> None:
    outside = tmp_path.with_name(f"{tmp_path.name}-outside")  # of the home folder, which is HOME
    outside.mkdir()
    server = outside / "server"  # a program that stays, such as an editor's server
    stays = f"nohup sh -c 'echo $$ >{server}; exec sleep 1000.125' >/dev/null 2>&1 &"
    assert cavvy("ssh", "box", stays).returncode == 0
    tmux = "tmux new-session -d 'sleep 1000'; tmux list-sessions" if shutil.which("tmux") else ":"
    assert cavvy("ssh", "box", tmux).returncode == 0
    again = cavvy("ssh", "box", tmux.rpartition(";")[2])
    assert again.returncode == 0, again.stderr
    assert cavvy("ssh", "box", f"kill -0 $(cat {server})").returncode == 0

    left = outside / "left"
    line = f"trap 'touch {left}; exit' HUP; echo on; while :; do sleep 0.1; done"
    user = subprocess.Popen([*CAVVY, "ssh", "box", line], stdout=subprocess.PIPE)
    assert user.stdout is not None
    assert user.stdout.readline() == b"on\n"
    user.send_signal(signal.SIGHUP)
    wait_until(left.exists)
    user.wait(PATIENCE_S)
    user.stdout.close()

    pipe = subprocess.PIPE
    user = subprocess.Popen([*CAVVY, "ssh", "box", "echo on; sleep 1000"], stdout=pipe, stderr=pipe)
    assert user.stdout is not None
    assert user.stderr is not None
    assert user.stdout.readline() == b"on\n"
    client.stop("default", "box")
    assert user.wait(PATIENCE_S) == 255
    assert b"hint" in user.stderr.read()
    wait_until(lambda: not runs("sleep", "1000.125"))  # the job has process IDs of its own
    user.stdout.close()
    user.stderr.close()
    kill_server(home)


def test_the_checkpoint_of_an_ended_job_is_copied(home: Path, tmp_path: Path) -> None:
    run = "mkdir -p state/deep state/.git; echo a > state/deep/w; echo b > state/.git/config"
    with connect() as client:
        client.submit(f"{{name: saved, checkpoint: state, run: '{run}; ln -s /etc state/l'}}")
        client.submit("{name: none, run: 'true'}")
        wait_until(lambda: {client.job("default", each).phase for each in NAMES} == {"done"})
    folder = tmp_path / "out"
    hint = cavvy("cp", "saved:state", str(folder))
    assert hint.returncode == 1
    assert b"`cavvy cp --checkpoint saved FOLDER` copies its newest checkpoint" in hint.stderr
    assert not folder.exists()
    done = cavvy("cp", "--checkpoint", "saved", str(folder))
    assert (done.returncode, done.stdout) == (0, b""), done.stderr
    found = {str(each.relative_to(folder)) for each in folder.rglob("*") if not each.is_dir()}
    assert found == {"deep/w", ".git/config"}
    assert (folder / "deep/w").read_text() == "a\n"
    assert b".git" in done.stderr  # named, since git would obey it
    assert [each.name for each in tmp_path.iterdir() if "part" in each.name] == []
    again = cavvy("cp", "--checkpoint", "saved", str(folder))
    assert (again.returncode, (folder / "saved/deep/w").read_text()) == (0, "a\n")
    twice = cavvy("cp", "--checkpoint", "saved", str(folder))
    assert (twice.returncode, b"needs a new folder" in twice.stderr) == (2, True)
    refused = cavvy("cp", "--checkpoint", "none", str(tmp_path / "no"))
    assert (refused.returncode, b"has no checkpoint" in refused.stderr) == (1, True)
    assert not (tmp_path / "no").exists()


def test_one_file_or_folder_of_a_checkpoint_is_copied(home: Path, tmp_path: Path) -> None:
    run = "mkdir -p state/deep; echo a > state/deep/w; echo b > state/deep/v; echo c > state/top"
    with connect() as client:
        client.submit(f"{{name: saved, checkpoint: state, run: '{run}'}}")
        wait_until(lambda: client.job("default", "saved").phase == "done")
    (here := tmp_path / "here").mkdir()
    done = cavvy("cp", "--checkpoint", "saved:deep/w", str(here))
    assert (done.returncode, done.stdout) == (0, b""), done.stderr
    assert [(each.name, each.read_text()) for each in here.iterdir()] == [("w", "a\n")]
    again = cavvy("cp", "--checkpoint", "saved:deep/w", str(here))
    assert (again.returncode, b"is not replaced" in again.stderr) == (2, True)
    assert cavvy("cp", "--checkpoint", "saved:top", str(here / "new")).returncode == 0
    assert (here / "new").read_text() == "c\n"
    assert cavvy("cp", "--checkpoint", "saved:deep/", str(here)).returncode == 0
    assert {each.name for each in (here / "deep").iterdir()} == {"v", "w"}
    missing = cavvy("cp", "--checkpoint", "saved:state/top", str(here / "no"))
    assert missing.returncode == 1
    assert b"has no state/top" in missing.stderr
    assert b"it has deep/v, deep/w, top" in missing.stderr
    assert {each.name for each in here.iterdir()} == {"w", "new", "deep"}
