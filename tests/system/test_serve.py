"""`cavvy serve`: a cold service answers all requests, grows, loses its replicas, and ends."""

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

import pytest
from tests.system.trust import User, check_clean, user_at
from tests.waits import START_S, wait_until

pytestmark = pytest.mark.system
EXAMPLE = Path(__file__).parents[2] / "examples" / "serve-hello"


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    with user_at(tmp_path) as user:
        try:
            yield user
        finally:
            user.cli("server", "stop", code=None)  # it ends the gateway too


def call(url: str) -> int:
    with urlopen(url, timeout=START_S) as answer:
        answer.read()
        return int(answer.status)


def read_command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_cold_service_answers_grows_recovers_and_ends(user: User) -> None:
    shutil.copytree(EXAMPLE, user.work, dirs_exist_ok=True)
    user.settings("[providers.local]\nprice_usd_hr = 3.6\n")
    assert "--yes" in user.cli("serve", "service.yaml", code=2), "replicas cost money"
    url = user.json("serve", "--yes", "service.yaml")["url"]
    assert user.json("services", "show", "hello")["state"] == "idle"
    with ThreadPoolExecutor(50) as pool:
        assert list(pool.map(call, [f"{url}/{number}" for number in range(50)])) == [200] * 50

    def is_grown() -> bool:
        return int(user.json("services", "show", "hello")["ready"]) > 1

    wait_until(is_grown)
    programs = [pid for pid in user.worked() if b"hello.py" in read_command(pid)]
    os.kill(programs[0], signal.SIGKILL)
    assert [call(url) for _ in range(10)] == [200] * 10, "the others answer"
    assert '"hello": "ada"' in user.output("call", "hello", "/", "-d", "ada")
    user.cli("unserve", "hello")
    assert user.json("services") == []
    check_clean(user)
    with pytest.raises(OSError):
        urlopen(url, timeout=START_S)
    [bill] = user.json("cost", "--by", "tag:service")
    assert (bill["tag:service"], bill["spent_micros"] > 0) == ("hello", True)
