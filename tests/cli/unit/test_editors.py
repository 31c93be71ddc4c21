"""The commands and links that open a session in an editor."""

import pytest

from cavvy.cli.reach import ssh_config

FOLDER = "/home/me/my work&x"


@pytest.mark.parametrize(
    ("ide", "command", "link"),
    [
        ("vscode", ["code", "--remote", "ssh-remote+dev", FOLDER], "vscode://vscode-remote/ssh-remote+dev/home/me/my%20work%26x"),
        ("cursor", ["cursor", "--remote", "ssh-remote+dev", FOLDER], "cursor://vscode-remote/ssh-remote+dev/home/me/my%20work%26x"),
        ("zed", ["zed", "ssh://dev/home/me/my%20work%26x"], "zed://ssh/dev/home/me/my%20work%26x"),
    ],
)  # fmt: skip
def test_a_path_cannot_add_to_a_link(ide: str, command: list[str], link: str) -> None:
    assert list(ssh_config.make_command(ide, "dev", FOLDER)) == command
    assert ssh_config.make_link(ide, "dev", FOLDER) == link


def test_gateway_gets_all_that_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "me")
    link = ssh_config.make_link("jetbrains", "dev.cavvy", FOLDER)
    assert link == (
        "jetbrains-gateway://connect#type=ssh&deploy=true&host=dev.cavvy&port=22&user=me"
        "&projectPath=%2Fhome%2Fme%2Fmy%20work%26x"
    )
    assert ssh_config.make_command("jetbrains", "dev.cavvy", FOLDER)[1] == link
