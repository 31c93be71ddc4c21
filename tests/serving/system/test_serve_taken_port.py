"""Settings with which a server cannot work: commands say so."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.trust import User, serving_user_at, wait_until

from cavvy.capabilities.serving.addresses import find_listener

pytestmark = pytest.mark.system
EXAMPLE = Path(__file__).parents[3] / "examples" / "serve-hello" / "service.yaml"


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    with serving_user_at(tmp_path) as user:
        yield user


def test_commands_name_the_port_that_is_taken(user: User) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        user.settings(f'[services]\nlisten = "127.0.0.1:{port}"\n')
        what = find_listener(port)
        assert f"process {os.getpid()} (" in what
        reason = f"address 127.0.0.1:{port} is in use by {what}; end it, or change services.listen"
        assert f"services cannot be reached: {reason}" in user.cli("server", "start")
        assert reason in user.cli("server", "status")
        said = user.cli("serve", str(EXAMPLE), code=1)
        assert f"service hello cannot be reached: {reason}" in said
        assert "cavvy server restart" in said
        assert reason in user.cli("services")
        assert reason in user.cli("services", "show", "hello")
        assert reason in user.cli("call", "hello", code=1)
        assert reason in user.cli("chat", "hello", "Good morning", code=1)
        assert reason in user.cli("server", "logs")
    wait_until(lambda: "in use" not in user.cli("services", "show", "hello"))  # without a restart
    assert "Ada" in user.cli("call", "hello", "/", "-d", "Ada")
    assert reason not in user.cli("services", "show", "hello")
    user.cli("unserve", "hello")


def test_a_server_keeps_running_if_it_could_not_start_again(user: User) -> None:
    user.cli("server", "start")
    running = user.json("server", "status")["pid"]
    for wrong in ("[server]\nidle_stop = 3\n", "[providers.local]\nprice = 1\n"):
        user.settings(wrong)
        assert "setting" in user.cli("server", "restart", code=2)
        assert user.json("server", "status")["pid"] == running
