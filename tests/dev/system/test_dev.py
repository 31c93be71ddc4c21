"""Sessions of `cavvy dev` as a user has them: a shell in a terminal that stays over the loss of the
server, a folder that is mirrored beside it, and a home folder that is kept.
"""

import os
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest
from tests.certificates import Authority
from tests.system import prepared
from tests.system.server_state import kill_server
from tests.system.trust import User, user_at
from tests.waits import PATIENCE_S, START_S, wait_until

from cavvy.client.state import read_server

pytestmark = pytest.mark.system
NEAR, FAR = "10.98.0.1", "10.98.0.2"  # addresses of the ends of a wire


class Terminal:
    """A command in a terminal, at which a user types."""

    def __init__(self, user: User, *arguments: str, within: Sequence[str] = ()) -> None:
        self.terminal, theirs = os.openpty()
        self.process = subprocess.Popen(
            [*within, *prepared.CLI, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=user.environ | {"TERM": "xterm", "SHELL": "/bin/sh", "PS1": "$ "},
            cwd=user.work,
            start_new_session=True,
        )
        os.close(theirs)
        self.seen = ""

    def wait(self, pattern: str, seconds: float = START_S) -> str:
        """Wait until the output since the last call has the pattern; its first group."""
        until = time.monotonic() + seconds
        while (found := re.search(pattern, self.seen)) is None:
            left = until - time.monotonic()
            assert left > 0, f"{pattern}: {self.seen}"
            if select.select([self.terminal], [], [], left)[0]:
                try:
                    data = os.read(self.terminal, 65536)
                except OSError:
                    data = b""
                assert data, f"{pattern}: the command has ended: {self.seen}"
                self.seen += data.decode(errors="replace")
        self.seen = self.seen[found.end() :]
        return found[1] if found.groups() else ""

    def ask(self, line: str) -> str:
        """Run a command in the shell; its output, which must be one line."""
        mark = token_hex(4)  # a terminal that is opened again shows earlier answers
        self.type(f'echo "<{mark}:$({line})"">"')
        return self.wait(rf"<{mark}:([^<>$\r\n]+)>")

    def type(self, line: str) -> None:
        os.write(self.terminal, f"{line}\n".encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.terminal)


@contextmanager
def terminal(user: User, *arguments: str, within: Sequence[str] = ()) -> Iterator[Terminal]:
    made = Terminal(user, *arguments, within=within)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    with user_at(tmp_path / "user") as made:
        yield made


def test_the_same_shell_after_the_command_and_the_server_are_killed(user: User) -> None:
    with terminal(user, "dev", "--sync", ".", "--take-new") as first:
        first.wait("kept for")
        pid = first.ask("echo $$")
        first.type("left=behind")
        (user.work / "mine").write_text("from here")
        wait_until(lambda: first.ask("cat mine 2>/dev/null || echo none") == "from here")
        first.type("echo there > theirs")
        wait_until((user.work / "theirs").exists)
        assert kill_server(user.home) is not None
        first.wait("connecting again")
        first.wait("connected again")
        assert first.ask("echo $$ $left") == f"{pid} behind"
        (user.work / "mine").write_text("again")
        wait_until(lambda: first.ask("cat mine") == "again")
    with terminal(user, "dev") as second:
        second.wait("kept for")
        assert second.ask("echo $$ $left") == f"{pid} behind"
        second.type("exit")
        second.wait("the session continues")
        assert second.process.wait(PATIENCE_S) == 0
    user.cli("machines", "stop", "dev", "--yes")


def test_the_same_shell_after_a_minute_without_the_network(user: User) -> None:
    """The server is stopped meanwhile: like a network that drops everything, it refuses nothing."""
    with terminal(user, "dev") as shell:
        shell.wait("kept for")
        pid = shell.ask("echo $$")
        shell.type("left=behind")
        server = read_server(str(user.home))
        assert server is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            shell.type("typed=meanwhile")
            time.sleep(60)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert shell.ask("echo $$ $left") == f"{pid} behind"
        shell.type("exit")
        assert shell.process.wait(PATIENCE_S) == 0
    user.cli("machines", "stop", "dev", "--yes")


@contextmanager
def wire() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a wire between them, which ends as `near` and `far` in them."""
    mark = token_hex(3)
    near, far = f"cavvy-near-{mark}", f"cavvy-far-{mark}"
    if os.getuid() != 0 or shutil.which("ip") is None or shutil.which("nsenter") is None:
        pytest.skip("a wire to cut needs root, `ip` and `nsenter`: install iproute2, run as root")
    try:
        for name in (near, far):
            made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"this machine permits no network namespaces: {made.stderr.strip()}")
            ip("-n", name, "link", "set", "lo", "up")
        ends = ("near", "netns", near, "type", "veth", "peer", "name", "far", "netns", far)
        ip("link", "add", *ends)
        for name, end, address in ((near, "near", NEAR), (far, "far", FAR)):
            ip("-n", name, "address", "add", f"{address}/30", "dev", end)
            ip("-n", name, "link", "set", end, "up")
        yield near, far
    finally:
        for name in (near, far):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def inside(space: str) -> list[str]:
    return ["nsenter", f"--net=/run/netns/{space}"]


def move(user: User, space: str) -> None:
    """Run the user's commands, and the server that they start, in a network namespace."""

    def popen(words: Sequence[str], **rest: Any) -> "subprocess.Popen[str]":
        return subprocess.Popen([*inside(space), *words], **rest)

    user.popen = popen


def test_the_same_shell_after_the_wire_is_cut(user: User, tmp_path: Path) -> None:
    """Nothing refuses a connection meanwhile: what is sent into the wire is lost."""
    authority = Authority(tmp_path)
    certificate, key = authority.issue(address=NEAR)
    with wire() as (near, far), user_at(tmp_path / "ada") as ada:
        move(user, near)
        move(ada, far)
        user.settings("[providers.local]\n")
        files = ("--tls-cert", str(certificate), "--tls-key", str(key))
        user.cli("server", "start", "--listen", f"{NEAR}:7443", *files)
        line = user.output("server", "init", "--admin", "ada").split()
        ada.cli(*line[1:], "--ca-file", str(authority.ca))
        with terminal(ada, "dev", within=inside(far)) as shell:
            shell.wait("kept for")
            pid = shell.ask("echo $$")
            shell.type("left=behind")
            assert shell.ask("echo $left") == "behind"
            ip("-n", near, "link", "set", "near", "down")
            shell.type("typed=meanwhile")
            shell.wait("connecting again")
            ip("-n", near, "link", "set", "near", "up")
            shell.wait("connected again")
            assert shell.ask("echo $$ $left") == f"{pid} behind"
            shell.type("exit")
            assert shell.process.wait(PATIENCE_S) == 0
        ada.cli("machines", "stop", "dev", "--yes")
        user.cli("server", "stop")


def test_a_session_is_resumed_with_its_home(user: User) -> None:
    with terminal(user, "dev", "--home") as first:
        first.wait("kept for")
        assert first.ask("echo ~").endswith("/home")
        first.type("echo 'alias x=y' > ~/.profile; mkdir -p ~/notes; echo kept > ~/notes/one")
        assert first.ask("cat ~/notes/one") == "kept"
    user.cli("machines", "stop", "dev", "--yes")
    with terminal(user, "dev", "resume") as second:
        second.wait("is resumed")
        second.wait("kept for")
        assert second.ask("cat ~/notes/one") == "kept"
        first_node = second.ask("pwd")
    with terminal(user, "dev", "resume") as third:
        third.wait("is already running")
        assert third.ask("pwd") == first_node
    user.cli("machines", "stop", "dev", "--yes")


def test_a_session_without_a_kept_home_is_not_resumed(user: User) -> None:
    told = user.cli("dev", "resume", "--machine", "other", code=1)
    assert "no session other has a kept home" in told
    assert user.json("ps") == []


def test_a_session_ends_when_nobody_types_at_its_shell(user: User) -> None:
    with terminal(user, "dev", "--keep", "15s") as shell:
        shell.wait("kept for")
        assert shell.ask("echo here") == "here"
        wait_until(lambda: user.json("status", "dev")["phase"] == "done")
        assert "no connection in use for 15 s" in user.json("status", "dev")["reason"]
        assert shell.process.wait(PATIENCE_S) is not None
