"""The address for nodes from outside: what cannot be listened on or served with is told, and
leaves nothing bound.
"""

import socket
from pathlib import Path

import pytest
from tests.system.ports import free_port

from cavvy.server.node_listener import listen_for_nodes, read_listen, told_address
from cavvy.server.state_dir import StateDir, StateDirError
from cavvy.settings import Settings


def make_settings(home: Path, listen: str, advertise: str = "") -> Settings:
    values = {"server.tls_listen": listen, "server.advertise": advertise}
    return Settings(home=home, file=home / "config.toml", values=values)


def refused(home: Path, listen: str, advertise: str = "") -> StateDirError:
    with pytest.raises(StateDirError) as found:
        listen_for_nodes(StateDir(str(home)), make_settings(home, listen, advertise))
    assert found.value.code == "settings-invalid"
    assert found.value.hint
    return found.value


def test_nothing_is_bound_where_the_settings_say_nothing(tmp_path: Path) -> None:
    assert listen_for_nodes(StateDir(str(tmp_path)), make_settings(tmp_path, "")) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host", ["zwö..lf", "ü" * 70, "two..dots"])
def test_what_is_no_name_of_a_host_is_told_as_a_setting(tmp_path: Path, host: str) -> None:
    """It is refused before any lookup, with another kind of error than a name that nobody knows."""
    error = refused(tmp_path, f"{host}:0")
    assert error.message.startswith(f"cannot listen on {host}:0: ")


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert (
            refused(tmp_path, f"127.0.0.1:{port}").message
            == f"cannot listen on 127.0.0.1:{port}: Address already in use"
        )


@pytest.mark.parametrize(
    ("damaged", "advertise", "told"),
    [
        (True, "", "tls.pem cannot be used: "),
        (False, "http://here", "server.advertise is 'http://here'"),
    ],
)
def test_what_cannot_be_served_is_not_listened_on(
    tmp_path: Path, damaged: bool, advertise: str, told: str
) -> None:
    if damaged:
        (tmp_path / "tls.pem").write_text("not a certificate")
    port = free_port()
    error = refused(tmp_path, f"127.0.0.1:{port}", advertise)
    assert told in error.message
    socket.create_server(("127.0.0.1", port)).close()
    assert error.__traceback__ is not None, "which would keep a socket open that nobody has closed"


def test_the_address_that_nodes_are_told(tmp_path: Path) -> None:
    listener = listen_for_nodes(StateDir(str(tmp_path)), make_settings(tmp_path, "127.0.0.1:0"))
    assert listener is not None
    with listener.sock:
        assert listener.address == f"https://127.0.0.1:{listener.sock.getsockname()[1]}"
        assert not listener.sock.getblocking()
    told = make_settings(tmp_path, "0.0.0.0:7443", "https://head.example:443/")
    assert told_address(told, "0.0.0.0", 7443) == "https://head.example:443"
    assert told_address(make_settings(tmp_path, "[::1]:7443"), "::1", 7443) == "https://[::1]:7443"


@pytest.mark.parametrize("where", ["7443", "host:", "host:x", "host:65536", "host:-1"])
def test_an_address_without_a_port_is_told(tmp_path: Path, where: str) -> None:
    with pytest.raises(StateDirError, match=r"server\.tls_listen is"):
        read_listen(make_settings(tmp_path, where))


def test_an_address_of_version_6_is_written_in_brackets(tmp_path: Path) -> None:
    assert read_listen(make_settings(tmp_path, "[::1]:0")) == ("::1", 0)
