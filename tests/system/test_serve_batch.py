"""A service whose requests the gateway joins, on a real server and with a real program."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from tests.system.trust import User, user_at
from tests.waits import START_S

pytestmark = pytest.mark.system

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve-batch"


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    with user_at(tmp_path) as user:
        try:
            yield user
        finally:
            user.cli("server", "stop", code=None)  # it ends the gateway too


def predict(url: str, *instances: float) -> dict[str, Any]:
    body = json.dumps({"instances": instances}).encode()
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(url, body, headers), timeout=START_S) as reply:
        return json.load(reply)


def test_requests_to_a_cold_service_are_answered_in_batches(user: User) -> None:
    shutil.copytree(EXAMPLE, user.work, dirs_exist_ok=True)
    url = user.json("serve", "--yes", "service.yaml")["url"]
    with ThreadPoolExecutor(40) as pool:
        replies = list(pool.map(lambda number: predict(url, number), range(40)))
    assert [each["predictions"] for each in replies] == [[n * n] for n in range(40)]
    assert 1 < max(each["batch"] for each in replies) <= 16
    traffic = user.json("services", "show", "predict")["traffic"]
    assert 1 < traffic["joined"] / traffic["batches"] <= 16
    assert f"{traffic['batches']}, with " in user.output("services", "show", "predict")
    user.cli("unserve", "predict")
