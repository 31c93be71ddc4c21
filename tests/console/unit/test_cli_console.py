"""`cavvy console`: its options, what it prints, and how it refuses."""

import errno
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.certificates import Authority
from tests.console_rig import CannedClient

from cavvy.cli import console
from cavvy.cli.main import cli
from cavvy.client import ApiClient
from cavvy.console.access import EachUser, OneUser


class Served:
    """What `cavvy console` would have served, instead of serving it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.client: ApiClient = CannedClient({})
        self.client.address = "https://cavvy.example:7777"
        self.calls: list[tuple[Any, ...]] = []
        self.opened: list[str] = []
        for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION", "CAVVY_CONTEXT"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("sys.platform", "linux")
        monkeypatch.setattr(console, "session", self._session)
        monkeypatch.setattr("cavvy.console.serving.serve", self._serve)
        monkeypatch.setattr("webbrowser.open", self.opened.append)

    @contextmanager
    def _session(self, *, patience_s: float) -> Iterator[ApiClient]:
        yield self.client

    def _serve(
        self,
        access: Any,
        name: str,
        listener: socket.socket,
        make_http_server: Any,
        start: Any,
    ) -> None:
        tls = make_http_server(lambda: None)._context is not None
        self.calls.append((access, name, listener.getsockname()[1], tls, start))
        listener.close()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(monkeypatch)


def run(*options: str) -> Result:
    return CliRunner().invoke(cli, ["console", *options])


def test_the_address_stands_alone_in_its_line(served: Served) -> None:
    told = run("--port", "0")
    assert told.exit_code == 0, told.output
    ((access, name, port, tls, start),) = served.calls
    assert isinstance(access, OneUser)
    address = f"http://localhost:{port}/sign-in?key={access.secret}"
    assert told.stdout == f"The console of cavvy.example:7777, until Ctrl-C:\n{address}\n"
    assert (name, tls, start) == ("cavvy.example:7777", False, None)
    assert served.opened == [], "there is no screen"


def test_another_program_cannot_take_the_name_of_the_console(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Browsers try ::1 first, where a program of another user could wait for the secret."""
    with socket.create_server(("127.0.0.1", 0)) as free:  # a port that nobody has there either
        port = free.getsockname()[1]
        try:
            other = socket.create_server(("::1", port), family=socket.AF_INET6)
        except OSError as error:
            pytest.skip(f"no IPv6: {error}")
    with other:
        assert f"http://127.0.0.1:{port}/sign-in" in run("--port", str(port)).stdout
    refused: list[OSError] = []

    def take(*arguments: Any) -> None:
        listener = arguments[2]
        try:
            socket.create_server(("::1", listener.getsockname()[1]), family=socket.AF_INET6).close()
        except OSError as error:
            refused.append(error)
        listener.close()

    monkeypatch.setattr("cavvy.console.serving.serve", take)
    assert "http://localhost:" in run("--port", "0").stdout
    assert [each.errno for each in refused] == [errno.EADDRINUSE]


def test_in_an_ssh_session_the_command_that_forwards_the_port_is_printed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "login-1")
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    for server_port, option in (("22", ""), ("2222", "-p 2222 ")):
        monkeypatch.setenv("SSH_CONNECTION", f"10.0.0.9 50000 10.0.0.1 {server_port}")
        told = run("--port", "0").stdout
        port = served.calls[-1][2]
        line = f"ssh -N -L {port}:127.0.0.1:{port} {option}ada@login-1"
        assert told.splitlines()[-1] == line
    monkeypatch.setenv("DISPLAY", ":0")
    assert "ssh" not in run("--port", "0").stdout


def test_a_browser_opens_only_from_a_terminal_with_a_screen(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    run("--port", "0")
    assert served.opened == [], "the output is no terminal"
    assert console._has_screen()
    monkeypatch.delenv("WAYLAND_DISPLAY")
    assert not console._has_screen()


def test_a_port_that_is_in_use_is_refused_and_the_usual_one_is_replaced(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        told = run("--port", str(taken))
        assert told.exit_code == 1
        assert f"cannot listen on 127.0.0.1:{taken}: Address already in use" in told.stderr
        assert "choose another one with --port" in told.stderr
        monkeypatch.setattr(console, "_USUAL_PORT", taken)
        monkeypatch.setattr(console, "_TRIES", 1)
        assert run().exit_code == 0
        assert served.calls[-1][2] != taken


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.EACCES, "ports below 1024"),
        (errno.EADDRNOTAVAIL, "does not have this address"),
        (errno.ENOBUFS, "choose another port"),
    ],
)
def test_an_address_that_cannot_be_used_is_explained(
    served: Served, monkeypatch: pytest.MonkeyPatch, number: int, hint: str
) -> None:
    def refuse(host: str, port: int) -> socket.socket:
        raise OSError(number, "the reason (while attempting to bind)")

    monkeypatch.setattr(console, "_listen", refuse)
    for options in (("--port", "80"), ("--listen", "127.0.0.1:80")):
        told = run(*options)
        assert told.exit_code == 1
        assert "cannot listen on 127.0.0.1:80: the reason\n" in told.stderr
        assert hint in told.stderr
        assert options[0] in told.stderr


@pytest.mark.parametrize(
    "listen", ["8520", "localhost:8520", ":8520", "127.0.0.1", "127.0.0.1:", "1.2.3:1", ":::"]
)
def test_listen_needs_an_address_and_a_port(served: Served, listen: str) -> None:
    told = run("--listen", listen)
    assert told.exit_code == 2
    assert "expects an address and a port, such as 0.0.0.0:8520" in told.stderr


@pytest.mark.parametrize("port", ["65536", "-1", "+1", "1_0", "²"])
def test_listen_needs_a_real_port(served: Served, port: str) -> None:
    assert run("--listen", f"127.0.0.1:{port}").exit_code == 2


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.168.1.2:0"])
def test_tokens_of_users_are_not_sent_in_the_clear(served: Served, listen: str) -> None:
    told = run("--listen", listen)
    assert told.exit_code == 2
    assert "other machines can reach" in told.stderr
    assert "--tls-cert" in told.stderr
    assert served.calls == []


def test_options_that_exclude_each_other(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for options, said in (
        (("--tls-cert", str(file)), "used together"),
        (("--listen", "127.0.0.1:0", "--tls-key", str(file)), "used together"),
        (("--tls-cert", str(file), "--tls-key", str(file)), "used with --listen"),
        (("--listen", "127.0.0.1:0", "--port", "1"), "--listen contains the port"),
        (("--tls-cert", str(tmp_path / "none")), "does not exist"),
    ):
        told = run(*options)
        assert told.exit_code == 2
        assert said in told.stderr
    assert served.calls == []


def test_a_certificate_that_cannot_be_used_is_explained(served: Served, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue()
    _, other_key = authority.issue("other")
    text = tmp_path / "text"
    text.write_text("no certificate")
    listen = ("--listen", "127.0.0.1:0")
    for cert_file, key_file, said in (
        (certificate, other_key, "the key does not belong to the certificate"),
        (text, key, "not in PEM"),
        (certificate, text, "not in PEM"),
    ):
        told = run(*listen, "--tls-cert", str(cert_file), "--tls-key", str(key_file))
        assert told.exit_code == 1
        assert said in told.stderr
        assert "--tls-cert" in told.stderr
        assert "server.tls_cert" not in told.stderr
    told = run(*listen, "--tls-cert", str(certificate), "--tls-key", str(key))
    assert told.exit_code == 0, told.output
    assert "https://127.0.0.1:" in told.stdout
    assert served.calls[-1][3], "it uses TLS"


def test_the_address_of_a_console_for_several_users_can_be_opened(
    served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "login-1")
    files = map(str, Authority(tmp_path).issue())
    tls = [text for pair in zip(("--tls-cert", "--tls-key"), files, strict=True) for text in pair]
    for listen, shown in (
        ("127.0.0.1:0", r"http://127\.0\.0\.1"),
        ("0.0.0.0:0", "https://login-1"),
    ):
        told = run("--listen", listen, *(tls if "https" in shown else ())).stdout
        assert re.search(rf"^{shown}:[0-9]+/$", told, re.M), told
        assert "key=" not in told
        assert isinstance(served.calls[-1][0], EachUser)


def test_a_console_for_several_users_never_uses_the_token_of_the_one_who_started_it(
    served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def start_again() -> tuple[str, str]:
        return "unix:/new", "the-token-of-the-owner"

    monkeypatch.setattr("cavvy.console.memory.find_embedded", lambda home: start_again)
    served.client.revive = start_again
    run("--listen", "127.0.0.1:0")
    access = served.calls[-1][0]
    client = access._connect("the-token-of-ada")
    for each in (client, client.sibling()):
        assert each.revive() == ("unix:/new", "the-token-of-ada")


def test_an_unknown_context_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path))
    monkeypatch.setenv("CAVVY_CONTEXT", "nowhere")
    told = run("--port", "0")
    assert told.exit_code == 1
    assert "no context 'nowhere'" in told.stderr


def test_the_help_says_how_to_use_a_browser_elsewhere() -> None:
    told = run("--help").stdout
    assert "ssh -L 8520:127.0.0.1:8520 HOST" in " ".join(told.split())
