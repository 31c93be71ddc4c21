"""`cavvy deploy`: a job leaves a model, and services answer with it."""

import json
import os
import shlex
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from tests.system.trust import user_at
from tests.unit.test_model_server import WIDTH, write_model
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
        finally:
            for name in ("model", "site"):
                user.cli("unserve", name, code=None)
            user.cli("server", "stop", code=None)
