"""`cavvy deploy`: a job leaves a model, and services answer with it."""

import json
import os
import shlex
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from tests.model_server.unit.test_model_server import WIDTH, write_model
from tests.system.trust import user_at
from tests.waits import START_S

pytestmark = pytest.mark.system
# the Python of the tests, which has ONNX Runtime
ENV = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
JOB = f"""\
name: train
workdir: .
resources: {{cpu: 0.1}}
env: {json.dumps(ENV)}
checkpoint: {{path: state}}
run: cp tiny.onnx state/best.onnx && echo 42 > state/answer.txt
"""
MAIN = {"train": "best.onnx", "tiny.onnx": ""}
SERVICE = f"""\
workdir: site
resources: {{cpu: 0.1}}
env: {json.dumps(ENV)}
run: exec {shlex.quote(sys.executable)} -m http.server $PORT --bind 127.0.0.1
service: {{port: 8000, probe: /index.html}}
"""


def fetch(url: str, body: object = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data), timeout=START_S) as answer:
        content: bytes = answer.read()
        return content


def test_services_answer_with_what_a_job_has_left(tmp_path: Path) -> None:
    with user_at(tmp_path) as user:
        try:
            write_model(user.work)
            user.submit(JOB)
            user.wait("train", "done")
            (user.work / "site").mkdir()
            (user.work / "site" / "index.html").write_text("here")
            (user.work / "service.yaml").write_text(SERVICE)
            said = user.cli("deploy", "train", "--as", "x", "--engine", "vlm", code=2)
            assert "vlm is not an engine" in said
            said = user.cli("deploy", "train", "--as", "x", "--from", "outputs", code=2)
            assert "job train has no outputs" in said

            model = user.json("deploy", "train", "--as", "model")
            tensor = {"name": "x", "shape": [1, WIDTH], "datatype": "FP32", "data": [1] * WIDTH}
            answer = fetch(f"{model['url']}/v2/models/best/infer", {"inputs": [tensor]})
            assert json.loads(answer)["outputs"][0]["shape"] == [1, 10]

            site = user.json("deploy", "train", "--as", "site", "--service", "service.yaml")
            assert fetch(f"{site['url']}/model/answer.txt") == b"42\n"
            assert fetch(f"{site['url']}/index.html") == b"here"

            for number in (1, 2):
                source = "train" if number == 1 else "tiny.onnx"
                made = user.json(
                    "model", "publish", source, "--name", "tiny", "--main", MAIN[source]
                )
                assert made["name"] == f"tiny@{number}"
            user.cli("model", "promote", "tiny@2", "--label", "next")
            moved = user.json("model", "promote", "tiny@2")
            assert (moved["name"], moved["former"]) == ("tiny@2", "")
            moved = user.json("model", "promote", "tiny@1")
            assert (moved["name"], moved["former"]) == ("tiny@1", "tiny@2")
            labels = {each["name"]: each["labels"] for each in user.json("model", "list")}
            assert labels == {"tiny@1": "production", "tiny@2": "next"}
            assert "2 files" in user.cli("model", "pull", "tiny@production", "--out", "pulled")
            assert (user.work / "pulled" / "answer.txt").read_text() == "42\n"
            whole = (user.work / "pulled" / "best.onnx").read_bytes()
            assert whole == (user.work / "tiny.onnx").read_bytes()
            assert "known: tiny@1, tiny@2" in user.cli("model", "pull", "tiny@prod", code=1)

            user.cli("deploy", "tiny@next", "--as", "model", code=2)  # no job, so no resources
            known = user.json("deploy", "tiny@production", "--as", "model")
            assert known["revision"] == 1, "these are the files that the service has"
            answer = fetch(f"{known['url']}/v2/models/best/infer", {"inputs": [tensor]})
            assert json.loads(answer)["outputs"][0]["shape"] == [1, 10]
            more = ("--service", "service.yaml")
            site = user.json("deploy", "tiny@next", "--as", "next", *more)
            assert fetch(f"{site['url']}/model/tiny.onnx") == whole
        finally:
            for name in ("model", "site", "next"):
                user.cli("unserve", name, code=None)
            user.cli("server", "stop", code=None)
