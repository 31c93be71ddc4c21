"""`cavvy deploy`: a job leaves a model, and a service answers with it."""

from pathlib import Path
from urllib.request import urlopen

import pytest
from tests.system.trust import user_at
from tests.waits import START_S

pytestmark = pytest.mark.system
JOB = """\
name: train
workdir: .
resources: {cpu: 0.1}
checkpoint: {path: state}
run: echo 42 > state/answer.txt
"""
SERVICE = """\
workdir: site
resources: {cpu: 0.1}
run: exec python3 -m http.server $PORT --bind 127.0.0.1
service: {port: 8000, probe: /index.html}
"""


def test_a_service_answers_with_what_a_job_has_left(tmp_path: Path) -> None:
    with user_at(tmp_path) as user:
        try:
            user.submit(JOB)
            user.wait("train", "done")
            (user.work / "site").mkdir()
            (user.work / "site" / "index.html").write_text("here")
            (user.work / "service.yaml").write_text(SERVICE)
            said = user.cli("deploy", "train", "--as", "site", code=1)
            assert "no engine is known for the files of job train (answer.txt)" in said
            found = user.json("deploy", "train", "--as", "site", "--service", "service.yaml")
            for path, content in (("model/answer.txt", b"42\n"), ("index.html", b"here")):
                with urlopen(f"{found['url']}/{path}", timeout=START_S) as answer:
                    assert answer.read() == content
        finally:
            user.cli("unserve", "site", code=None)
            user.cli("server", "stop", code=None)
