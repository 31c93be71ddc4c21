"""The files of a state folder: which a server removes when it ends, and where it listens."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from cavvy.client.state import ServerFile, host_name, read_server, write_server
from cavvy.server.state_dir import StateDir, StateDirError


def describe(host: str) -> ServerFile:
    return ServerFile(
        pid=1,
        process="p",
        host=host,
        address="unix:/x",
        version="1",
        api=1,
        revision=1,
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
    )


@pytest.mark.parametrize("served", [True, False])
def test_a_server_removes_its_own_files_at_its_end(tmp_path: Path, served: bool) -> None:
    home = StateDir(str(tmp_path))
    write_server(str(tmp_path), describe(host_name()))
    Path(home.file("server.beat")).touch()
    Path(home.socket_path()).touch()
    home.forget(served=served)
    assert (read_server(str(tmp_path)) is None) is served
    assert Path(home.file("server.beat")).exists() is not served
    assert not Path(home.socket_path()).exists()


def test_a_server_leaves_the_files_of_the_one_that_took_over_on_another_host(
    tmp_path: Path,
) -> None:
    """Without them, commands on that host could not find their server."""
    home = StateDir(str(tmp_path))
    write_server(str(tmp_path), describe("another-host"))
    Path(home.file("server.beat")).touch()
    home.forget()
    assert read_server(str(tmp_path)) == describe("another-host")
    assert Path(home.file("server.beat")).exists()


def test_a_state_folder_may_be_a_symbolic_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home folder on a small disk often links to a folder on a large disk."""
    monkeypatch.chdir(tmp_path)  # so that the path of the socket is short enough
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "home").symlink_to("disk")
    listener, address = StateDir("home").listen()
    with listener:
        assert address == "unix:home/server.sock"
        assert (tmp_path / "disk" / "server.sock").is_socket()


def test_a_link_to_a_folder_that_others_can_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk").chmod(0o755)
    (tmp_path / "home").symlink_to("disk")
    with pytest.raises(StateDirError, match="other users can access it"):
        StateDir("home").listen()


def test_the_error_names_the_file_that_cannot_be_used(tmp_path: Path) -> None:
    """A command with sudo can leave single files that belong to another user."""
    (tmp_path / "server.lock").mkdir()
    with pytest.raises(StateDirError, match=r"server\.lock: Is a directory"):
        StateDir(str(tmp_path)).claim(wait_s=0)
