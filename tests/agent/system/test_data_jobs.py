"""Inputs and outputs of real jobs on real storages; the keys stay at the server."""

import hashlib
import json
import os
import random
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex

import pytest
from tests.system.server_state import follow_to_end, home_at, wait_until
from tests.system.storages import (
    AZURE_KEY,
    SECRET,
    servers,
    start_azure,
    start_google,
    start_s3,
    start_sftp,
    start_web,
)

from cavvy.client import ApiClient, connect
from cavvy.store.objects.base import ObjectBucket
from cavvy.store.objects.locations import open_place

__all__ = ["servers"]
pytestmark = pytest.mark.system
LARGE = random.Random(1).randbytes((32 << 20) + 12345)  # two pieces down, three parts up


@pytest.fixture
def own() -> str:
    """The folder of a bucket that this try of this test alone uses: the storages stay."""
    return token_hex(4)


def run_to_end(client: ApiClient, text: str) -> tuple[str, str]:
    """How a job ended, and what its events told."""
    name = client.submit(text).name
    follow_to_end(client, name)
    log = b"".join(client.logs("default", name)).decode()
    events = "\n".join(each.text for each in client.events("default", name).events)
    return client.job("default", name).phase, f"{events}\n{log}"


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_a_job_moves_folders_in_and_out(scheme: str, home: Path, servers: Path, own: str) -> None:
    start = {
        "s3": lambda: start_s3(servers / "s3"),
        "az": lambda: start_azure(servers / "az"),
        "gs": start_google,
    }
    keys = start[scheme]()
    place = open_place(f"{scheme}://data/x", keys, lambda: datetime.now(UTC)).place
    assert isinstance(place, ObjectBucket)
    files = {"a.txt": b"alpha\n", "sub/ü &.txt": b"beta\n", "empty": b"", "large.bin": LARGE}
    for name, data in files.items():
        place.put(f"{own}/in/{name}", data)
    with connect() as client:
        for name, value in keys.items():
            client.put_secret("default", name, value)
        run = (
            "cat in/a.txt 'in/sub/ü &.txt'; test ! -s in/empty; test -z \"$(find . -name "
            "'*cavvy-part')\"\n"
            "mkdir -p out/deep; cp in/large.bin out/deep/; cp one out/\n"
            "env | grep -e STORAGE -e AWS_ -e GOOGLE || echo no keys"
        )
        task = {
            "name": "data",
            "run": run,
            "inputs": [
                {"source": f"{scheme}://data/{own}/in", "target": "in"},
                {"source": f"{scheme}://data/{own}/in/a.txt", "target": "one"},
            ],
            "outputs": [
                {"source": "out", "target": f"{scheme}://data/{own}/out"},
                {"source": "one", "target": f"{scheme}://data/{own}/copies/"},
            ],
        }
        text = json.dumps(task)
        phase, told = run_to_end(client, text)
        assert phase == "done", told
        assert told.endswith("alpha\nbeta\nno keys\n"), told
        assert f"input {scheme}://data/{own}/in: 4 files, 32.0 MiB in " in told
        assert f"output {scheme}://data/{own}/out: 2 files, 32.0 MiB in " in told
    assert place.get(f"{own}/out/deep/large.bin") == LARGE
    assert place.get(f"{own}/out/one") == b"alpha\n"
    assert place.get(f"{own}/copies/one") == b"alpha\n"
    secret = {"s3": SECRET, "az": AZURE_KEY[:40], "gs": "BEGIN PRIVATE KEY"}[scheme].encode()
    held = [path for path in home.rglob("*") if path.is_file() and secret in path.read_bytes()]
    assert (
        held == []
    )  # neither the node's files nor logs, events and the database, where keys are sealed


def test_sftp_and_the_web(home: Path, servers: Path, tmp_path: Path) -> None:
    keys = dict(start_sftp(servers / "sftp"))
    where, web = keys.pop("where"), start_web(tmp_path / "web")
    (tmp_path / "far" / "in" / "sub").mkdir(parents=True)
    (tmp_path / "far" / "in" / "sub" / "a").write_bytes(LARGE[: 9 << 20])
    (tmp_path / "web" / "b").write_bytes(LARGE)
    with connect() as client:
        for name, value in keys.items():
            client.put_secret("default", name, value)
        far = f"sftp://{where}{tmp_path}/far"
        text = f"""
name: data
run: cp in/sub/a out; cmp b {tmp_path}/web/b
inputs: [{{source: "{far}/in", target: in}}, {{source: "{web}/b", target: b}}]
outputs: [{{source: out, target: "{far}/out/result"}}]
"""
        phase, told = run_to_end(client, text)
        assert phase == "done", told
        assert (tmp_path / "far" / "out" / "result").read_bytes() == LARGE[: 9 << 20]
        phase, told = run_to_end(
            client, f'{{name: none, run: "true", inputs: [{{source: "{web}/c", target: c}}]}}'
        )
        assert phase == "failed"
        assert "no object exists at c" in told


def test_a_skypilot_file_with_copies_of_buckets_at_full_paths(
    home: Path, tmp_path: Path, own: str
) -> None:
    keys = start_google()
    place = open_place("gs://data/x", keys, lambda: datetime.now(UTC)).place
    assert isinstance(place, ObjectBucket)
    place.put(f"{own}/sky/a", b"alpha\n")
    with connect() as client:
        for name, value in keys.items():
            client.put_secret("default", name, value)
        text = f"""
name: sky
num_nodes: 1
file_mounts:
  {tmp_path}/seen/in: gs://data/{own}/sky
  {tmp_path}/seen/rw: {{source: gs://data/{own}/sky, mode: COPY}}
run: |
  cat {tmp_path}/seen/in/a {tmp_path}/seen/rw/a
  echo changed >{tmp_path}/seen/rw/a
"""
        for name in ("sky", "again"):  # the links of the first are old
            phase, told = run_to_end(client, text.replace("name: sky", f"name: {name}"))
            assert phase == "done", told
            assert told.endswith("alpha\nalpha\n")
        assert place.get(f"{own}/sky/a") == b"alpha\n"
        (tmp_path / "seen" / "taken").mkdir()
        (tmp_path / "seen" / "taken" / "file").touch()
        phase, told = run_to_end(client, text.replace("seen/in:", "seen/taken:"))
        assert phase == "failed"
        assert "already in use on this node" in told


def test_an_output_is_sent_while_the_work_runs_and_however_it_ends(
    home: Path, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    keys = start_google()
    place = open_place("gs://data/x", keys, lambda: datetime.now(UTC)).place
    assert isinstance(place, ObjectBucket)
    with connect() as client:
        for name, value in keys.items():
            client.put_secret("default", name, value)
        task = {
            "name": "live",
            "grace": "20s",
            "run": "mkdir out; echo early >out/a; trap 'echo late >out/b; exit 1' TERM; while :; "
            "do sleep 0.1; done",
            "outputs": [{"source": "out", "target": f"gs://data/{own}/live", "every": "1s"}],
        }
        client.submit(json.dumps(task))
        wait_until(lambda: there(place, f"{own}/live/a") == b"early\n")
        assert client.job("default", "live").phase == "running"
        client.stop("default", "live")
        wait_until(lambda: client.job("default", "live").phase == "stopped")
        assert there(place, f"{own}/live/b") == b"late\n"

        fails = {**task, "name": "fails", "run": "mkdir out; echo result >out/c; exit 3"}
        phase, told = run_to_end(client, json.dumps(fails))
        assert phase == "failed"
        assert there(place, f"{own}/live/c") == b"result\n"
        assert f"output gs://data/{own}/live: 1 file, 7 B in " in told
        well = {**task, "name": "well", "run": "mkdir out; echo well >out/d"}
        phase, told = run_to_end(client, json.dumps(well))
        assert phase == "done", told
        assert told.count(f"output gs://data/{own}/live: ") == 1, (
            told
        )  # what was sent is not sent again
        nowhere = {**task, "name": "nowhere", "run": "mkdir out; echo x >out/d; exit 3"}
        nowhere["outputs"] = [{"source": "out", "target": "s3://none/live", "every": "1s"}]
        phase, told = run_to_end(client, json.dumps(nowhere))
        assert "the last changes to the outputs may be missing: s3://none/live: " in told


def there(place: ObjectBucket, key: str) -> bytes | None:
    """What lies under a key; None where nothing does."""
    return place.get(key) if place.head(key) is not None else None


def test_streams(home: Path, own: str) -> None:
    keys = start_google()
    place = open_place("gs://data/x", keys, lambda: datetime.now(UTC)).place
    assert isinstance(place, ObjectBucket)
    place.put(f"{own}/shards/1", b"one " * 1000)
    place.put(f"{own}/shards/2", LARGE)
    with connect() as client:
        for name, value in keys.items():
            client.put_secret("default", name, value)
        task = {
            "name": "streams",
            "run": "test -p all; cat all | md5sum; head -c 4 some; echo",
            "inputs": [
                {"source": f"gs://data/{own}/shards/", "target": "all", "mode": "stream"},
                {"source": f"gs://data/{own}/shards/1", "target": "some", "mode": "stream"},
            ],
        }
        phase, told = run_to_end(client, json.dumps(task))
        assert phase == "done", told
        assert hashlib.md5(b"one " * 1000 + LARGE).hexdigest() in told
        assert told.endswith("one \n")
        assert f"input gs://data/{own}/shards/: 2 files, 32.0 MiB in " in told
        phase, told = run_to_end(
            client,
            json.dumps(
                {
                    **task,
                    "name": "none",
                    "inputs": [{"source": "gs://data/nothing", "target": "all", "mode": "stream"}],
                }
            ),
        )
        assert phase == "failed"
        assert (
            "the input gs://data/nothing could not be streamed: no object exists at nothing" in told
        )


def test_a_key_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    with home_at(tmp_path / "home"), connect() as client:
        text = '{name: none, run: "true", inputs: [{source: "s3://data/in", target: in}]}'
        phase, told = run_to_end(client, text)
        assert phase == "failed"
        assert "set the project's secrets AWS_ACCESS_KEY_ID" in told
