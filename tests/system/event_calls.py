"""A service whose calls come from the objects of a bucket, with a server that is killed meanwhile."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

from tests.system.trust import User, environment
from tests.waits import wait_until

from cavvy.capabilities.serving.call_wire import find_call, list_calls
from cavvy.store.objects.base import ObjectBucket
from cavvy.store.objects.locations import open_place

# It reads the object of each event, and answers with its content.
PROGRAM = """
import json, os, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import urlopen

class Reader(BaseHTTPRequestHandler):
    def do_POST(self):
        event = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open(os.environ["CALLED"], "a") as called:
            called.write(event["subject"] + chr(10))
        body = event["subject"].encode() + b"=" + urlopen(event["data"]["url"]).read()
        time.sleep(0.02)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *about): ...

ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Reader).serve_forever()
"""
SERVICE = """
name: reader
run: exec python3 reader.py
env: {{CALLED: {called}}}
resources: {{cpu: 0.2, memory: 64MiB}}
workdir: files
service:
  port: 8000
  replicas: {{min: 0, max: 1}}
  concurrency: 4
  keys: true
  events: {{bucket: "s3://data/{folder}/", every: 1s}}
"""


def put_objects(keys: Mapping[str, str], folder: str, count: int) -> None:
    place = open_place("s3://data/", keys, lambda: datetime.now(UTC)).place
    assert isinstance(place, ObjectBucket)
    bucket = place
    with ThreadPoolExecutor(8) as pool:
        numbers = range(count)
        list(pool.map(lambda n: bucket.put(f"{folder}/{n}", f"content {n}".encode()), numbers))


def serve_reader(user: User, keys: Mapping[str, str], folder: str) -> None:
    """Start the service."""
    for name, value in keys.items():
        user.cli("secret", "set", name, stdin=value)
    (user.work / "files").mkdir()
    (user.work / "files" / "reader.py").write_text(PROGRAM)
    text = SERVICE.format(called=user.work / "called", folder=folder)
    (user.work / "service.yaml").write_text(text)
    user.cli("serve", "--yes", "service.yaml")


def count_calls(user: User) -> Mapping[str, int]:
    with environment(user.environ):
        return list_calls(user.api, "default", "reader", limit=1).counts


def read_results(user: User) -> list[str]:
    """The results of all calls that are done."""
    found: list[str] = []
    after = ""
    with environment(user.environ):
        while calls := list_calls(
            user.api, "default", "reader", state="done", after=after, limit=1000
        ).calls:
            found += [
                find_call(user.api, "default", "reader", each.id).body.decode() for each in calls
            ]
            after = calls[-1].id
    return found


def check_each_once(user: User, folder: str, count: int, kills: int) -> None:
    """Kill the server several times while it works, and check that there is one result for each
    object.
    """
    for kill in range(kills):
        wanted = count * (kill + 1) // (kills + 2)
        wait_until(lambda wanted=wanted: count_calls(user).get("done", 0) >= wanted)  # type: ignore[misc]
        user.kill_server()
    wait_until(lambda: count_calls(user) == {"done": count})
    wanted_results = sorted(f"{folder}/{n}=content {n}" for n in range(count))
    assert sorted(read_results(user)) == wanted_results
