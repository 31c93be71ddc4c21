"""Whether a machine may separate the jobs of projects."""

import os
import socket
import subprocess
from pathlib import Path

import pytest

from cavvy.agent.bundle import make_archive, make_command
from cavvy.agent.work.separate import METADATA, NAMESPACES, NONE, ROOT, find_metadata
from cavvy.providers.base import Refused
from cavvy.providers.hosts.isolation import (
    HostIsolation,
    read_isolation,
    say_isolation,
    say_obstacle,
)

ONE = "the machine runs jobs of one project at a time"


def test_the_setting_has_few_values() -> None:
    assert read_isolation("ssh", {}) is HostIsolation.ONE_PROJECT
    assert read_isolation("ssh", {"isolation": "none"}) is HostIsolation.NONE
    assert read_isolation("join", {"isolation": "namespaces"}) is HostIsolation.NAMESPACES
    with pytest.raises(Refused, match="expected `namespaces` or `none`, not 'users'"):
        read_isolation("ssh", {"isolation": "users"})


def test_only_a_machine_without_an_obstacle_separates() -> None:
    assert say_obstacle(NONE) == ""
    assert "other than root" in say_obstacle(ROOT)
    assert "unprivileged users" in say_obstacle(NAMESPACES)
    assert "answers at 169.254.169.254" in say_obstacle(f"{METADATA} 169.254.169.254")
    # what a host makes up is neither believed nor repeated
    for code in ("yes", f"{METADATA} <b>", "root 1"):
        assert say_obstacle(code) == "the machine did not report whether it can separate jobs"


def test_the_mode_is_said_with_its_reason() -> None:
    mode = HostIsolation.NAMESPACES
    assert say_isolation(mode, "") == "side by side, separated by namespaces"
    assert say_isolation(mode, "why") == f"{ONE}, because why"
    assert say_isolation(mode, None).startswith(f"{ONE}, until")
    assert say_isolation(HostIsolation.ONE_PROJECT, None) == ONE


@pytest.mark.parametrize("packed", [False, True])
def test_root_separates_nothing(tmp_path: Path, packed: bool) -> None:
    """The agent tells so from its folder and from the archive that nodes get."""
    if os.getuid() != 0:
        pytest.skip("only root can try")
    command = make_command()
    if packed:
        command[-1] = str(tmp_path / "agent.pyz")
        (tmp_path / "agent.pyz").write_bytes(make_archive())
    command += ["--separates", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"{ROOT}\n"


def test_a_metadata_service_is_found_without_a_question() -> None:
    with socket.create_server(("127.0.0.1", 0)) as service:
        port = service.getsockname()[1]
        assert find_metadata(["127.0.0.1"], port) == "127.0.0.1"
        line, _ = service.accept()
        with line:
            assert line.recv(1) == b""
    assert find_metadata(["127.0.0.1"], port) == ""
