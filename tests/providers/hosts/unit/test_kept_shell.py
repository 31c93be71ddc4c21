"""A shell stays on the node while its user is not connected."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waits import PATIENCE_S, wait_until

from cavvy.agent.access import kept_shell

SIZE = {"rows": 30, "cols": 100}
ENV = {"PATH": os.environ["PATH"], "PS1": "", "TERM": "xterm"}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for name in (tmp_path / ".cavvy-shells").glob("*"):
        with attach(tmp_path, name.name) as last:
            last.sendall(b"exit\n")
            read_until_end(last)


def attach(folder: Path, name: str = "dev") -> socket.socket:
    made = kept_shell.attach(str(folder), name, ["/bin/sh"], ENV, SIZE, str(folder))
    made.settimeout(PATIENCE_S)
    return made


def read_until(connection: socket.socket, word: bytes) -> bytes:
    seen = b""
    while word not in seen:
        data = connection.recv(65536)
        assert data, seen
        seen += data
    return seen


def read_until_end(connection: socket.socket) -> bytes:
    seen = b""
    try:
        while data := connection.recv(65536):
            seen += data
    except ConnectionResetError:
        pass
    return seen


def ask(connection: socket.socket, line: str) -> str:
    """Run a command in the shell, and return its output, which must be one line."""
    connection.sendall(f'echo "<$({line})"">"\n'.encode())
    seen = read_until(connection, b">\r\n")
    return seen[seen.rindex(b"<") + 1 : seen.rindex(b">\r\n")].decode()


def test_a_user_who_comes_back_finds_the_same_shell_and_its_output(folder: Path) -> None:
    with attach(folder) as first:
        first.sendall(b"here=kept\n")
        pid = ask(first, "echo $$")
    with attach(folder) as second:
        assert pid.encode() in read_until(second, f"<{pid}>".encode())
        assert ask(second, "echo $$ $here") == f"{pid} kept"


def test_programs_write_on_while_nobody_is_connected(folder: Path) -> None:
    with attach(folder) as first:
        ask(first, "echo ready")
        first.sendall(b"(while [ ! -e go ]; do sleep 0.02; done; seq 200000; touch done)\n")
    (folder / "go").touch()
    wait_until((folder / "done").exists)
    with attach(folder) as second:
        seen = read_until(second, b"200000\r\n")
    assert len(seen) < 3 * kept_shell._KEPT, "only the newest output comes again"


def test_the_terminal_has_the_size_of_the_last_window(folder: Path) -> None:
    with attach(folder) as first:
        assert ask(first, "stty size") == "30 100"
        kept_shell.resize(str(folder), "dev", {"rows": 10**9, "cols": -4})
        wait_until(lambda: ask(first, "stty size") == "9999 1")


def test_the_end_of_the_shell_ends_the_connection_and_the_next_is_new(folder: Path) -> None:
    with attach(folder) as first:
        pid = ask(first, "echo $$")
        # a program that stays behind does not keep the terminal
        first.sendall(b"sleep 1000 & echo $! > sleeper; exit\n")
        read_until_end(first)
    os.kill(int((folder / "sleeper").read_text()), 9)
    wait_until(lambda: not (folder / ".cavvy-shells" / "dev").exists())
    with attach(folder) as second:
        assert ask(second, "echo $$") != pid


def test_a_deep_folder_has_shells_too(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    with attach(deep) as made:
        assert ask(made, "echo hi") == "hi"
        made.sendall(b"exit\n")
        read_until_end(made)


@pytest.mark.parametrize("name", ["", "../dev", "a b", "x" * 33])
def test_a_name_leads_to_no_other_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="at most 32 letters"):
        attach(tmp_path, name)


def test_a_client_that_sends_nonsense_is_dropped(folder: Path) -> None:
    with attach(folder) as first:
        pid = ask(first, "echo $$")
        for nonsense in (b"{\n", b"[]\n", b'{"rows": "x"}\n', b"x" * 200_000):
            with socket.socket(socket.AF_UNIX) as odd:
                odd.connect(str(folder / ".cavvy-shells" / "dev"))
                odd.settimeout(PATIENCE_S)
                try:
                    odd.sendall(nonsense)
                except BrokenPipeError:
                    continue
                assert read_until_end(odd) == b""
        assert ask(first, "echo $$") == pid
