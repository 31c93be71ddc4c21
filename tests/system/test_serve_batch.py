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
from tests.waits import START_S, wait_until

from cavvy.client.queue_wire import QueuedCallAsk, find_call, list_calls, submit_call

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


def test_queued_calls_fill_batches(user: User) -> None:
    shutil.copytree(EXAMPLE, user.work, dirs_exist_ok=True)
    with (user.work / "service.yaml").open("a") as file:
        file.write("env: {BASE_S: '0.5'}  # so that calls are queued faster than answered\n")
    user.json("serve", "--yes", "service.yaml")
    for number in range(40):
        ask = QueuedCallAsk(
            id=f"call-{number}",
            path="/predict",
            headers={"content-type": "application/json"},
            body=json.dumps({"instances": [number]}).encode(),
        )
        submit_call(user.api, "default", "predict", ask)

    def are_done() -> bool:
        return list_calls(user.api, "default", "predict", limit=1).counts.get("done", 0) == 40

    wait_until(are_done, seconds=START_S)
    results = [
        json.loads(find_call(user.api, "default", "predict", f"call-{number}").body)
        for number in range(40)
    ]
    assert [each["predictions"] for each in results] == [[n * n] for n in range(40)]
    assert max(each["batch"] for each in results) > 4, "four are in flight without batches"
    user.cli("unserve", "predict")
