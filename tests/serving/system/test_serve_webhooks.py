"""Webhooks of a service with a server that is killed meanwhile, and functions that send to them."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path

import pytest
from tests.system.event_calls import count_calls
from tests.system.ports import free_port
from tests.system.trust import User, environment, serving_user_at
from tests.waits import wait_until

from cavvy.capabilities.serving.call_wire import list_calls
from cavvy.capabilities.serving.decide.webhook_calls import sign_standard

pytestmark = pytest.mark.system
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
COUNT = 40
SERVICE = """
name: reader
run: exec python3 reader.py
env: {{CALLED: {called}}}
resources: {{cpu: 0.2, memory: 64MiB}}
workdir: files
service:
  port: 8000
  concurrency: 4
  events: [{{webhook: in, secret: HOOK, path: /in}}, {{cron: "* * * * *"}}]
"""
PROGRAM = """
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Reader(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        with open(os.environ["CALLED"], "a") as called:
            called.write(self.headers["ce-type"] + " " + self.headers["ce-id"] + chr(10))
        self.do_GET()

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *about): ...

ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Reader).serve_forever()
"""
# the providers' own examples, read 2026-11-24
LAMBDA = {  # https://docs.aws.amazon.com/AmazonS3/latest/userguide/notification-content-structure.html
    "Records": [
        {
            "eventVersion": "2.0",
            "eventSource": "aws:s3",
            "awsRegion": "us-west-2",
            "eventTime": "1970-01-01T00:00:00.000Z",
            "eventName": "ObjectCreated:Put",
            "responseElements": {
                "x-amz-request-id": "EXAMPLE123456789",
                "x-amz-id-2": "EXAMPLE123/5678abcdefghijklambdaisawesome/mnopqrstuvwxyzABCDEFGH",
            },
            "s3": {
                "bucket": {"name": "lambda-bucket-name"},
                "object": {"key": "file-name.csv", "size": 0},
            },
        }
    ]
}
CALLERS = {
    "aws-lambda": f"lambda_handler({LAMBDA!r}, None)",
    "google-function": """
class Event:
    def get_attributes(self):
        return {"specversion": "1.0", "id": "1234567890", "time": "2020-08-08T00:11:44.895529672Z",
                "source": "//pubsub.googleapis.com/projects/p/topics/t", "subject": None,
                "type": "google.cloud.pubsub.topic.v1.messagePublished"}
    def get_data(self):
        return {"subscription": "projects/p/subscriptions/s", "message": {"data": "SGVsbG8="}}
forward_event(Event())
""",
    "azure-function": """
from datetime import datetime, timezone
class Event:
    id = "831e1650-001e-001b-66ab-eeb76e069631"
    topic = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Storage/storageAccounts/a"
    subject = "/blobServices/default/containers/c/blobs/b.txt"
    event_type = "Microsoft.Storage.BlobCreated"
    event_time = datetime(2017, 6, 26, 18, 41, 0, tzinfo=timezone.utc)
    def get_json(self):
        return {"api": "PutBlockList", "contentLength": 524288}
main(Event())
""",
}


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    with serving_user_at(tmp_path) as user:
        yield user


def deliver(url: str, number: int) -> bool:
    """Send one delivery as a sender does that repeats what was not answered; whether it was new."""
    event = {"specversion": "1.0", "id": f"{number:03}", "source": "/test", "type": "sent"}
    body = json.dumps(event).encode()

    def send() -> bool | None:
        headers = sign_standard(SECRET, f"d-{number}", datetime.now(UTC), body)
        headers = {**headers, "content-type": "application/cloudevents+json"}
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
                return bool(json.loads(answer.read())["new"])
        except urllib.error.HTTPError as error:
            if error.code != 429:
                raise
            return None
        except (OSError, HTTPException):  # the server was killed, perhaps within its answer
            return None

    found: list[bool | None] = []
    wait_until(lambda: found.append(send()) or found[-1] is not None)  # type: ignore[func-returns-value]
    return bool(found[-1])


def test_each_delivery_is_called_once_though_the_server_is_killed(user: User) -> None:
    port = free_port()
    user.settings(f'[server]\nlisten = "127.0.0.1:{port}"\n')
    url = f"http://127.0.0.1:{port}/hooks/v1/default/reader/in"
    user.cli("secret", "set", "HOOK", stdin=SECRET)
    (user.work / "files").mkdir()
    (user.work / "files" / "reader.py").write_text(PROGRAM)
    called = user.work / "called"
    user.task(SERVICE.format(called=called), "service.yaml")
    user.cli("serve", "--yes", "service.yaml")
    with ThreadPoolExecutor(4) as pool:
        sent = pool.map(lambda number: deliver(url, number), range(COUNT))
        for kill in range(2):
            wanted = COUNT * (kill + 1) // 4
            wait_until(lambda wanted=wanted: sum(count_calls(user).values()) >= wanted)  # type: ignore[misc]
            user.kill_server()
            count_calls(user)  # starts the server again
        list(sent)
    assert [deliver(url, number) for number in range(COUNT)] == [False] * COUNT
    for platform, call in CALLERS.items():
        program = user.output("queue", "trigger", platform) + call
        given = {**os.environ, "CAVVY_HOOK_URL": url, "CAVVY_HOOK_SECRET": SECRET}
        for _ in range(2):  # the platform repeats what it is unsure of
            subprocess.run([sys.executable, "-I", "-c", program], env=given, check=True)
    wait_until(lambda: set(count_calls(user)) == {"done"})
    seen = [line.split(" ", 1) for line in called.read_text().splitlines()]
    ids = {kind: {name for each, name in seen if each == kind} for kind, _ in seen}
    ids.pop("dev.cavvy.cron.due", None)
    assert ids.pop("sent") == {f"{number:03}" for number in range(COUNT)}
    assert {kind: len(names) for kind, names in ids.items()} == {
        "com.amazonaws.s3.ObjectCreated:Put": 1,
        "google.cloud.pubsub.topic.v1.messagePublished": 1,
        "Microsoft.Storage.BlobCreated": 1,
    }
    with environment(user.environ):
        calls = list_calls(user.api, "default", "reader", limit=1000).calls
    assert len([each for each in calls if each.source == "webhook"]) == COUNT + 3
    due = [each.submitted_at for each in calls if each.source == "cron"]
    assert len(set(due)) == len(due)
