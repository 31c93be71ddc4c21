"""Two servers with state folders of their own, whose files are in a bucket and whose jobs run on a
machine that joined. One is killed; the other one has everything. Who steals the bucket, the
database and the servers' logs learns nothing.
"""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer
from scripts.drills.stolen_state import KINDS, search
from tests.system.hosts import Lab, lab_at
from tests.system.packed_python import give_python
from tests.system.postgres import PostgresMissing, find, new_database
from tests.system.server_state import follow_to_end, home_at, kill_server
from tests.waits import PATIENCE_S, wait_until

from cavvy.client import ApiClient, connect
from cavvy.client.transport import Patience
from cavvy.store.objects.base import ObjectBucket
from cavvy.store.objects.http import ask
from cavvy.store.objects.locations import open_place

pytestmark = pytest.mark.system
_CAVVY = str(Path(sys.executable).with_name("cavvy"))
SETTINGS = """[server]
tls_listen = "10.99.0.254:7443"
files = "s3://data/team"
[secrets]
key = "file:{key}"
[files]
key = "server"
[providers.local]
enabled = false
[providers.join]
"""
TASK = """name: planted
resources: {cpu: 1}
secrets: [PLANTED]
workdir: .
checkpoint: {path: state, every: 1s}
run: python3 source.py GO
"""
PROGRAM = """import os, sys, time
mark = "%s"
assert os.environ["PLANTED"]
open("state/new", "w").write(open("state.txt").read()[::-1] * 99)
os.rename("state/new", "state/done")
print("first", open("log.txt").read()[::-1], flush=True)
for word in ("second", "third"):
    while not os.path.exists(sys.argv[1] + word):
        time.sleep(0.1)
    print(word, flush=True)
"""


class BucketSite:
    """Servers `a` and `b`, a machine that joins them, a bucket and a database."""

    def __init__(self, root: Path, lab: Lab, url: str, keys: dict[str, str]) -> None:
        self.root, self.lab, self.url = root, lab, url
        self.homes = {name: root / name for name in "ab"}
        place = open_place("s3://data/team", keys, lambda: datetime.now(UTC)).place
        assert isinstance(place, ObjectBucket)
        self.bucket = place

    def connect(self, name: str) -> ApiClient:
        return connect(home=str(self.homes[name]), patience=Patience(PATIENCE_S))

    def cavvy(self, name: str, folder: Path, *words: str, given: str = "") -> str:
        done = subprocess.run(
            [_CAVVY, *words],
            cwd=folder,
            env={**os.environ, "CAVVY_HOME": str(self.homes[name])},
            input=given,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def join(self) -> None:
        (host,) = self.lab.hosts
        with self.connect("a") as client:
            host.run(client.invite().shell.replace("sh -s -- ", "sh -s -- --background "))
            wait_until(lambda: any(each.state == "up" for each in client.joined()))

    def objects(self) -> dict[str, bytes]:
        found, after = list[str](), ""
        while True:
            page, after = self.bucket.list("team/", after)
            found += [each.key for each in page]
            if not after:
                return {key: self.bucket.get(key) for key in found}

    def dump(self) -> bytes:
        argv = [find() / "pg_dump", self.url.replace("+psycopg", "")]
        return subprocess.run(argv, check=True, capture_output=True, timeout=PATIENCE_S).stdout


@pytest.fixture
def site(tmp_path: Path) -> Iterator[BucketSite]:
    try:
        url = new_database()
    except PostgresMissing as missing:
        pytest.skip(f"no PostgreSQL: {missing}")
    with lab_at(tmp_path / "lab") as lab, lab.entered():
        lab.add()
        storage = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        storage.start()
        keys = {
            "AWS_ACCESS_KEY_ID": "AKIDTEST",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_ENDPOINT_URL_S3": "http://{}:{}".format(*storage.get_host_and_port()),
        }
        ask("PUT", f"{keys['AWS_ENDPOINT_URL_S3']}/data", b"")
        made = BucketSite(tmp_path, lab, url, keys)
        (tmp_path / "key").write_bytes(secrets.token_bytes(32))
        (tmp_path / "key").chmod(0o600)
        for home in made.homes.values():
            give_python(home)
        with home_at(made.homes["a"], CAVVY_SERVER_DATABASE=url, **keys):
            (tmp_path / "settings.toml").write_text(SETTINGS.format(key=tmp_path / "key"))
            try:
                yield made
            finally:
                kill_server(made.homes["b"])
                kill_server(made.homes["a"])
                storage.stop()


def take(pieces: Iterator[bytes], length: int) -> bytes:
    """At least so many bytes. A line arrives in several pieces if the program wrote it so."""
    found = b""
    while len(found) < length:
        found += next(pieces)
    return found


def test_a_killed_server_takes_no_file_with_it_and_thieves_learn_nothing(site: BucketSite) -> None:
    marks = {kind: f"{kind}{secrets.token_hex(12)}" for kind in KINDS}
    work, go = site.root / "work", site.root / "go"
    work.mkdir()
    go.mkdir()
    (work / "source.py").write_text(PROGRAM % marks["source"])
    # reversed, so that these marks occur only where the job puts them
    (work / "log.txt").write_text(marks["log"][::-1])
    (work / "state.txt").write_text(marks["checkpoint"][::-1])
    (work / "task.yaml").write_text(TASK.replace("GO", f"{go}/"))
    site.join()
    site.cavvy("a", work, "secret", "set", "PLANTED", given=marks["secret"])
    site.cavvy("a", work, "run", "task.yaml", "--detach")

    with site.connect("a") as client:
        wait_until(lambda: client.job("default", "planted").phase == "running")
    first, whole = f"first {marks['log']}\n", f"first {marks['log']}\nsecond\nthird\n"
    with site.connect("b") as client:
        follower = client.logs("default", "planted", follow=True)
        assert take(follower, len(first)) == first.encode()
        (go / "second").touch()
        assert take(follower, 7) == b"second\n"  # the agent is connected to `a`

        def saved() -> bool:
            events = client.events("default", "planted").events
            return any("checkpoint 1 is safe" in each.text for each in events)

        wait_until(saved, lambda: str(client.events("default", "planted").events))
        assert kill_server(site.homes["a"])
        (go / "third").touch()
        follow_to_end(client, "planted")
        job = client.job("default", "planted")
        assert (job.phase, job.attempt) == ("done", 1)
        assert b"".join(client.logs("default", "planted")) == whole.encode()
    with site.connect("a") as client:  # it starts again
        assert b"".join(client.logs("default", "planted")) == whole.encode()

        site.cavvy("a", work, "server", "backup", str(site.root / "archive.tar"))
    objects = site.objects()
    kinds = {key.split("/")[1] for key in objects}
    own = {"files.id", "files.database"}
    assert {"folders", "logs", "storage", "downloads"} | own == kinds
    found = search(((key, key.encode() + data) for key, data in objects.items()), marks)
    found += search(iter([("the dump of the database", site.dump())]), marks)
    logs = [home / "server.log" for home in site.homes.values()]
    found += search(((str(path), path.read_bytes()) for path in logs), marks)
    assert not found
