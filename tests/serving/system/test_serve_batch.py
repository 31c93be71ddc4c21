"""A service whose requests the gateway joins, on a real server and with a real program."""

import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
from tests.model_server.unit.test_model_server import WIDTH, write_model
from tests.repository.system.test_deploy import ENV
from tests.system.trust import User, serving_user_at
from tests.waits import START_S, wait_until

from cavvy.capabilities.serving.call_wire import QueuedCallAsk, find_call, list_calls, submit_call

pytestmark = pytest.mark.system

EXAMPLE = Path(__file__).parents[3] / "examples" / "serve-batch"
MODEL = f"""\
name: tiny
workdir: .
resources: {{cpu: 0.1}}
env: {json.dumps(ENV)}
service:
  engine: onnxruntime
  model: tiny.onnx
  concurrency: 1
  replicas: {{max: 1}}
  batch: 16
"""


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    with serving_user_at(tmp_path) as user:
        yield user


def predict(url: str, *instances: object) -> dict[str, Any]:
    body = json.dumps({"instances": instances}).encode()
    headers = {"Content-Type": "application/json"}
    try:
        with urlopen(Request(url, body, headers), timeout=START_S) as reply:
            return json.load(reply)
    except HTTPError as error:
        return {"status": error.code, **json.load(error)}


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


def test_an_onnx_model_answers_batches_like_single_requests(user: User) -> None:
    write_model(user.work)
    url = user.json("serve", "--yes", user.task(MODEL, "model.yaml"))["url"]
    rows = np.random.default_rng(3).standard_normal((40, WIDTH)).tolist()
    path = f"{url}/v1/models/tiny:predict"
    wrong = 17  # a request whose instance has another length
    sent: list[list[float]] = [*rows[:wrong], [0.5], *rows[wrong:]]
    with ThreadPoolExecutor(len(sent)) as pool:
        replies = list(pool.map(lambda row: predict(path, row), sent))
    computed = count_computed(url)
    refused = replies.pop(wrong)
    assert (refused["status"], "the shape [1]; expected [64]" in refused["error"]) == (400, True)
    for row, reply in zip(rows, replies, strict=True):
        [alone] = predict(path, row)["predictions"]
        assert reply["predictions"][0] == pytest.approx(alone, rel=1e-5, abs=1e-5)
    assert computed < len(sent), "also with the requests of a batch that was sent again"
    traffic = user.json("services", "show", "tiny")["traffic"]
    assert 1 < traffic["joined"] / traffic["batches"] <= 16
    user.cli("unserve", "tiny")


def count_computed(url: str) -> int:
    """Return the number of requests that the model's server has answered."""
    with urlopen(f"{url}/metrics", timeout=START_S) as reply:
        counts = re.findall(rb"model_requests_total\S+ (\d+)", reply.read())
    return sum(map(int, counts))
