"""A job's checkpoints between places: from this machine's folder to the server's care and back,
and under kills.
"""

import hashlib
import json
import os
import random
import re
import signal
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
from tests.system.server_state import kill_server, wait_until

from cavvy.client import connect
from cavvy.client.state import server_holds_lock

pytestmark = pytest.mark.system
HANDED = "[providers.local]\nhand_over_checkpoints = true\n"


def settle(home: Path, text: str) -> None:
    """Other settings from now on."""
    kill_server(home)
    (home.parent / "settings.toml").write_text(text)


def start(home: Path) -> None:
    """The server, where none runs."""
    with connect() as client:
        client.health()
    assert server_holds_lock(str(home))


def phase(name: str) -> str:
    with connect() as client:
        return client.job("default", name).phase


def scenario(name: str, kind: str) -> list[str]:
    with connect() as client:
        return [each.text for each in client.events("default", name).events if each.kind == kind]


def attempt_runs(name: str, number: int) -> bool:
    with connect() as client:
        job = client.job("default", name)
    assert job.phase not in ("failed", "stopped"), job.reason
    return job.attempt == number and job.phase == "running"


MOVER = """
name: mover
retry: {preemption: 5}
checkpoint: {path: state, every: 1s}
run: |
  test -e state/log && cat state/log
  echo "attempt $CAVVY_ATTEMPT" >>state/log
  while ! test -e HOME/go-$CAVVY_ATTEMPT; do sleep 0.05; done
  test $CAVVY_ATTEMPT = 5 || exit 75
"""


def test_a_job_that_moves_takes_its_newest_state_along(home: Path) -> None:
    places = ["", HANDED, "", "", HANDED]  # of each attempt: this machine's folder, or handed over
    settle(home, places[0])
    with connect() as client:
        client.submit(MOVER.replace("HOME", str(home.parent)))
    for number in range(1, 6):
        wait_until(lambda number=number: attempt_runs("mover", number))
        settle(home, places[number] if number < 5 else HANDED)
        start(home)
        (home.parent / f"go-{number}").touch()
    wait_until(lambda: phase("mover") == "done")
    [storage] = (home / "storage/default").iterdir()
    with connect() as client:
        log = b"".join(client.logs("default", "mover", attempt=5)).decode()
    assert log == "attempt 1\nattempt 2\nattempt 3\nattempt 4\n"
    told = [
        text.partition(":")[0]
        for text in scenario("mover", "restored")
        if text.startswith("restored")
    ]
    assert told == [
        "restored the files that attempt 1 left on this machine",
        "restored the upload of attempt 2",
        "restored the files that attempt 4 left on this machine",
    ]
    assert (storage / "attempt").read_text() == "4"


# Each step is a folder of its own, made whole before the index names it; what cannot be loaded ends
# the job for good.
TRAINER = """
name: trainer
retry: {node: 1000}
checkpoint: {path: state, every: 1s}
run: |
  exec python3 - <<'END'
  import hashlib, json, os, shutil, time
  os.makedirs("state", exist_ok=True)
  step = 0
  if os.path.exists("state/index.json"):
      index = json.load(open("state/index.json"))
      for name, digest in index["files"].items():
          assert hashlib.sha256(open("state/" + name, "rb").read()).hexdigest() == digest, name
      step = index["step"]
  print("loaded", step, flush=True)
  while True:
      step += 1
      os.makedirs(f"state/{step}", exist_ok=True)
      files = {}
      for n in range(40):
          data = os.urandom(20_000)
          files[f"{step}/{n}"] = hashlib.sha256(data).hexdigest()
          open(f"state/{step}/{n}", "wb").write(data)
      json.dump({"step": step, "files": files}, open("state/new", "w"))
      os.rename("state/new", "state/index.json")
      shutil.rmtree(f"state/{step - 1}", ignore_errors=True)
      time.sleep(0.7)
  END
"""


def test_whatever_is_killed_the_latest_checkpoint_is_whole_and_no_older_than_was_told(
    home: Path,
) -> None:
    chance = random.Random(20260)
    settle(home, HANDED)
    with connect() as client:
        client.submit(TRAINER)
    number = step = 0
    for _ in range(25):
        wait_for_next(home, number)
        time.sleep(chance.uniform(0, 0.7))
        victim = chance.choice(["agent", "agent", "server", "both"])
        if victim != "server":
            kill_agent(home)
        if victim != "agent":
            kill_server(home)
        number, told = newest(home)
        assert number >= told  # checkpoint by checkpoint, for nothing is forgotten
        found = load(home)
        assert found >= step
        step = found
        start(home)
    with connect() as client:
        job = client.job("default", "trainer")
        assert job.phase not in ("done", "failed", "stopped"), job.reason
        log = b"".join(client.logs("default", "trainer")).decode()
    loaded = [int(line.split()[1]) for line in log.splitlines() if line.startswith("loaded")]
    assert loaded == sorted(loaded)
    assert len(set(loaded)) > 10
    wait_until(lambda: newest(home)[0] > number)
    kept = list((home / "storage/default").glob("*/blobs/??/*"))
    assert len(kept) < 4 * 45  # two checkpoints of 42 files, and one on its way


def wait_for_next(home: Path, number: int) -> None:
    """Wait for a checkpoint after this one; where none comes, say how the job and its agents
    are.
    """
    try:
        wait_until(lambda: newest(home)[0] > number)
    except AssertionError:
        with connect() as client:
            job = client.job("default", "trainer")
            told = [
                f"{each.kind}: {each.text}" for each in client.events("default", "trainer").events
            ][-12:]
        attempts = [(each.number, each.phase, each.reason) for each in job.attempts][-2:]
        logs = sorted((home / "providers/local/agents").glob("*/0/agent.log"))
        said = "\n".join(path.read_text()[-500:] for path in logs)
        raise AssertionError(
            f"no checkpoint after {number}: {job.phase} {job.reason} {attempts} {told} {said}"
        ) from None


def newest(home: Path) -> tuple[int, int]:
    """The number of the newest checkpoint, and the highest that anybody was told of."""
    with closing(sqlite3.connect(f"file:{home}/cavvy.db?mode=ro", uri=True)) as database:
        number = database.execute("SELECT MAX(number) FROM checkpoints").fetchone()[0] or 0
        texts = database.execute("SELECT text FROM events WHERE kind = 'checkpoint'").fetchall()
    told = [
        int(found[1]) for (text,) in texts if (found := re.match(r"checkpoint (\d+) is safe", text))
    ]
    return number, max(told, default=0)


def load(home: Path) -> int:
    """The step of the newest checkpoint, after every byte of it was checked."""
    [job] = (home / "storage/default").iterdir()
    with closing(sqlite3.connect(f"file:{home}/cavvy.db?mode=ro", uri=True)) as database:
        manifest = database.execute(
            "SELECT manifest FROM checkpoints ORDER BY number DESC LIMIT 1"
        ).fetchone()[0]

    def read(name: str) -> bytes:
        data = (job / "blobs" / name[:2] / name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == name
        return data

    files = {each["path"]: read(each["sha256"]) for each in json.loads(read(manifest))["files"]}
    index = json.loads(files["index.json"])
    for path, digest in index["files"].items():
        assert hashlib.sha256(files[path]).hexdigest() == digest
    return int(index["step"])


def kill_agent(home: Path) -> None:
    """Kill the agent of the newest attempt, if one lives."""
    found = sorted(
        (home / "providers/local/agents").glob("*/0/agent.json"),
        key=lambda path: path.stat().st_mtime,
    )
    if found:
        with suppress(ProcessLookupError, ValueError):
            os.kill(json.loads(found[-1].read_text())["pid"], signal.SIGKILL)
