"""Contexts: which server commands use, and what is refused before a token is sent."""

import os
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cavvy.cli.main import cli
from cavvy.client.addresses import check_address
from cavvy.client.contexts import (
    LOCAL,
    Context,
    Contexts,
    chosen_context,
    read_contexts,
    write_contexts,
)
from cavvy.client.errors import ApiError

OFFICE = Context(name="office", address="https://cavvy.example.org", token="t1")
LAB = Context(name="lab", address="https://lab.example.org", token="t2", ca="PEM")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CAVVY_CONTEXT", raising=False)
    return str(tmp_path / "home")


def call(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(cli, arguments, input=stdin)


def test_without_a_file_commands_use_this_machine(home: str) -> None:
    assert chosen_context(home) is None


def test_the_file_is_private_and_holds_what_was_written(home: str) -> None:
    contexts = Contexts().with_context(OFFICE).with_context(LAB)
    write_contexts(home, contexts)
    assert read_contexts(home) == contexts
    assert stat.S_IMODE(os.stat(f"{home}/contexts.json").st_mode) == 0o600
    assert stat.S_IMODE(os.stat(home).st_mode) == 0o700
    assert chosen_context(home) == LAB  # the one signed in to last


def test_signing_in_again_replaces_the_token() -> None:
    again = Context(name="office", address=OFFICE.address, token="new")
    contexts = Contexts().with_context(OFFICE).with_context(LAB).with_context(again)
    assert [each.token for each in contexts.contexts] == ["t2", "new"]
    assert contexts.current == "office"


def test_the_variable_comes_before_the_current_one(
    home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_contexts(home, Contexts().with_context(OFFICE).with_context(LAB))
    monkeypatch.setenv("CAVVY_CONTEXT", "office")
    assert chosen_context(home) == OFFICE
    monkeypatch.setenv("CAVVY_CONTEXT", LOCAL)
    assert chosen_context(home) is None
    monkeypatch.setenv("CAVVY_CONTEXT", "none")
    with pytest.raises(ApiError, match="there is no context 'none'") as caught:
        chosen_context(home)
    assert "local, lab, office" in caught.value.hint


def test_a_forgotten_current_server_leaves_this_machine() -> None:
    contexts = Contexts().with_context(OFFICE).with_context(LAB)
    assert contexts.without("lab").current == LOCAL
    assert contexts.without("office").current == "lab"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"contexts": [{"name": 1}]}', "\x00"])
def test_a_damaged_file_is_reported_and_kept(home: str, text: str) -> None:
    Path(home).mkdir()
    path = Path(home) / "contexts.json"
    path.write_text(text)
    with pytest.raises(ApiError, match="cannot be read"):
        read_contexts(home)
    result = call("ps")
    assert result.exit_code == 1
    assert "contexts.json cannot be read" in result.output
    assert path.read_text() == text


@pytest.mark.parametrize(
    "address",
    [
        "cavvy.example.org",
        "ftp://cavvy.example.org",
        "https://",
        "https://a/path",
        "https://user:secret@a",
        "https://a?x=1",
        "https://a:port",
        "https://a:99999",
        "https://[::1",
        "http://a:0",
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ApiError, match="is not the address of a server"):
        check_address(address)


def test_a_token_is_sent_only_by_tls_or_to_this_machine() -> None:
    for address in (
        "https://a",
        "https://a:8443",
        "http://127.0.0.1:1",
        "http://[::1]:1",
        "unix:/s",
    ):
        check_address(address)
    for address in ("http://a", "http://10.0.0.1:80", "http://localhost.example.org"):
        with pytest.raises(ApiError, match="is not encrypted"):
            check_address(address)


def test_login_refuses_what_it_cannot_use(home: str, tmp_path: Path) -> None:
    no_pem = tmp_path / "ca.pem"
    no_pem.write_text("hello\n")
    for arguments, said in (
        (("http://a.example.org",), "is not encrypted"),
        (("https://a", "--token", "two words"), "this is not a token"),
        (("https://a", "--token", "tokén"), "this is not a token"),
        (("https://a", "--token", "t", "--token-file", "f"), "were both given"),
        (("https://a", "--token-file", str(tmp_path / "none")), "No such file"),
        (("https://a", "--token", "t", "--ca-file", str(no_pem)), "contains no certificates"),
        (("https://a", "--token", "t", "--name", "local"), "this machine's own server"),
    ):
        result = call("login", *arguments)
        assert result.exit_code != 0, arguments
        assert said in result.output
        assert not os.path.exists(f"{home}/contexts.json")


def test_contexts_are_listed_chosen_and_forgotten(home: str) -> None:
    write_contexts(home, Contexts().with_context(OFFICE).with_context(LAB))
    listed = call("context", "list").output
    assert "t1" not in listed  # no token is shown
    assert [line[0] for line in listed.splitlines()[1:]] == ["*", " ", " "]
    assert call("context", "use", "office").exit_code == 0
    assert read_contexts(home).current == "office"
    assert call("context", "use", "none").exit_code == 1
    assert call("logout").exit_code == 0
    assert read_contexts(home) == Contexts(contexts=[LAB])
    assert "no server to forget" in call("logout").output
    assert call("logout", "none").exit_code == 1


def test_a_variable_that_comes_first_is_mentioned(
    home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_contexts(home, Contexts().with_context(OFFICE).with_context(LAB))
    monkeypatch.setenv("CAVVY_CONTEXT", "lab")
    assert "CAVVY_CONTEXT is set to lab" in call("context", "use", "office").output


def test_the_option_chooses_for_one_command(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAVVY_CONTEXT", LOCAL)  # restored after the test
    result = call("--context", "none", "ps")
    assert result.exit_code == 1
    assert "there is no context 'none'" in result.output


@pytest.mark.parametrize("command", ["ps", "plan"])
def test_a_state_folder_that_is_a_file_is_told(
    command: str, home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(home).write_text("")
    task = tmp_path / "task.yaml"
    task.write_text("run: x\n")
    monkeypatch.delenv("CAVVY_CONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    done = call(command, *([str(task)] if command == "plan" else []))
    assert done.exit_code != 0
    assert home in done.output
    assert "set CAVVY_HOME to a folder that you can write to" in done.output
