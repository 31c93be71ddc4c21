"""`cavvy serve` with HAProxy before the gateway: what is killed comes back, and no service is lost."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from tests.serving.system.test_serve import EXAMPLE, read_command, read_service
from tests.system.packages import install_packages
from tests.system.trust import User, check_clean, serving_user_at
from tests.waits import START_S, wait_until

from cavvy.capabilities.serving.gateway.haproxy.runtime import (
    HaproxyMissing,
    HaproxyRuntime,
    find_haproxy,
)

pytestmark = pytest.mark.system


def need_haproxy() -> None:
    """Install HAProxy where it is missing. Skips the test if that fails."""
    try:
        find_haproxy()
    except HaproxyMissing as error:
        if why := install_packages(["haproxy"]):
            pytest.skip(f"{error}; {why}")


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    need_haproxy()
    with serving_user_at(tmp_path) as user:
        yield user


def call(url: str) -> int:
    """Ask for the host name of the service, at the address of its URL."""
    port = url.rpartition(":")[2]
    request = Request(f"http://127.0.0.1:{port}/", headers={"Host": "hello.ai.example.com"})
    with urlopen(request, timeout=START_S) as answer:
        return int(answer.status)


def answers(url: str) -> bool:
    try:
        return call(url) == 200
    except OSError:
        return False


def find_haproxies(user: User) -> list[int]:
    config = f"{user.home}/gateway/haproxy.cfg".encode()
    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and config in read(pid)]


def read(pid: str) -> bytes:
    return read_command(int(pid))


def uses_connections_again(user: User) -> bool:
    """Return whether HAProxy sends POST requests over used connections, because the server has seen
    that the replica keeps them."""
    text = Path(f"{user.home}/gateway/haproxy.cfg").read_text()
    socket, name = re.search(r"stats socket (\S+)", text), re.search(r"proc\.keep_\w+", text)
    assert socket is not None
    assert name is not None
    try:
        return "value=<1>" in HaproxyRuntime(Path(socket[1])).command(f"get var {name[0]}")
    except OSError:
        return False


def test_what_is_killed_comes_back_with_all_services(user: User) -> None:
    text = (EXAMPLE / "service.yaml").read_text()
    (user.work / "hello.py").write_text((EXAMPLE / "hello.py").read_text())
    file = user.work / "service.yaml"
    file.write_text(text.replace("service:\n", "service:\n  hosts: [hello.ai.example.com]\n"))
    user.settings(
        "[providers.local]\nprice_usd_hr = 3.6\n"
        "[services]\nplane = 'haproxy'\ndomains = 'ai.example.com'\n"
    )
    url = user.json("serve", "--yes", "service.yaml")["url"]
    assert call(url) == 200, "it waits in the gateway while nothing runs"
    wait_until(lambda: read_service(user).ready)
    before = read_service(user).traffic
    assert before is not None
    assert [call(url) for _ in range(5)] == [200] * 5

    def is_counted() -> bool:
        now = read_service(user).traffic
        return now is not None and now.arrivals == before.arrivals + 5

    wait_until(is_counted)
    wait_until(lambda: uses_connections_again(user))
    [haproxy] = find_haproxies(user)
    os.kill(haproxy, signal.SIGKILL)
    wait_until(lambda: answers(url))
    wait_until(lambda: uses_connections_again(user))
    [haproxy] = find_haproxies(user)
    user.kill_server()
    assert call(url) == 200, "neither of the two needs the server"
    wait_until(lambda: read_service(user).url == url)  # another server
    wait_until(lambda: find_haproxies(user) not in ([], [haproxy]))
    assert call(url) == 200
    user.cli("unserve", "hello")
    wait_until(lambda: not find_haproxies(user))
    check_clean(user)
