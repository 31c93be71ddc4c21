"""Sessions of `cavvy dev` as a user has them: a shell in a terminal that stays over the loss of the
server, a folder that is mirrored beside it, and a home folder that is kept.
"""

import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

import pytest
from tests.system import prepared
from tests.system.server_state import kill_server
from tests.system.trust import User, user_at
from tests.waits import PATIENCE_S, START_S, wait_until

from cavvy.client.state import read_server

pytestmark = pytest.mark.system


class Terminal:
    """A command in a terminal, at which a user types."""

    def __init__(self, user: User, *arguments: str) -> None:
        self.terminal, theirs = os.openpty()
        self.process = subprocess.Popen(
            [*prepared.CLI, *arguments],
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
def terminal(user: User, *arguments: str) -> Iterator[Terminal]:
    made = Terminal(user, *arguments)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    with user_at(tmp_path / "user") as made:
        yield made


def test_the_same_shell_after_the_command_and_the_server_are_killed(user: User) -> None:
    with terminal(user, "dev", "--sync", ".") as first:
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


def test_a_session_is_resumed_with_its_home(user: User) -> None:
    with terminal(user, "dev", "--home") as first:
        first.wait("kept for")
        assert first.ask("echo ~").endswith("/home")
        first.type("echo 'alias x=y' > ~/.profile; mkdir -p ~/notes; echo kept > ~/notes/one")
        assert first.ask("cat ~/notes/one") == "kept"
    user.cli("machines", "stop", "dev", "--yes")
    with terminal(user, "dev", "--home") as second:
        second.wait("is resumed")
        second.wait("kept for")
        assert second.ask("cat ~/notes/one") == "kept"
    user.cli("machines", "stop", "dev", "--yes")
