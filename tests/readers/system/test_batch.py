"""Batches on real servers and nodes: each row has one result, whatever is killed."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex

import pytest
from tests.system.server_state import home_with_jobs
from tests.system.storages import servers, start_s3

from cavvy import Client, JobFailed
from cavvy.client import connect
from cavvy.store.objects.base import ObjectBucket
from cavvy.store.objects.locations import open_place

__all__ = ["servers"]
ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.system


def test_rows_outlive_preemptions_and_killed_servers() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/batch_rows.py"), "-o", "json"]
    arguments = ["--rows", "12000", "--shard", "100", "--row-ms", "2", "--hold"]
    ran = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(ran.stdout[ran.stdout.index("{") :])
    assert (found["exactly_once"], found["missing"], found["repeated"]) == (True, 0, 0)
    assert found["attempts"] == 4 + 3
    # A preemption costs at most the shard that the job was at.
    assert 0 <= found["begun_again"] <= 3 * 100


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with home_with_jobs(tmp_path / "home"), Client() as made:
        yield made


def test_python_maps_rows(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    (work / "rows.jsonl").write_text("".join(f"{each}\n" for each in range(10)))
    command = "if [ -e $ALLOWED ]; then sed s/.*/true/; else exit 3; fi"
    allowed = tmp_path / "allowed"
    array = client.map(
        command, "rows.jsonl", output=tmp_path / "out", rows=4, parallel=1, env={"ALLOWED": allowed}
    )
    with pytest.raises(JobFailed, match="3 shards failed; a retry"):
        array.wait()
    allowed.touch()
    array.retry()
    array.wait()
    progress = array.progress()
    assert progress is not None
    assert (progress.done, progress.total, progress.total_cost) == (10, 10, progress.cost)
    parts = sorted((tmp_path / "out").glob("part-*.jsonl"))
    assert [part.read_text().split() for part in parts] == [["true"] * 4] * 2 + [["true"] * 2]


CODE = """
import os
def run(rows):
    # After two shards, each job loses its node once.
    if os.environ["CAVVY_ATTEMPT"] == "1" and len(os.listdir(".cavvy/batch/results")) == 2:
        raise SystemExit(75)
    if os.environ["CAVVY_ATTEMPT"] == "2" and rows[0] == 35:
        raise RuntimeError("not yet")
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(f"{rows[0]}\\n")
    return [{"row": row} for row in rows]
"""


def test_results_in_a_bucket_outlive_preemptions(
    client: Client, servers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, folder = start_s3(servers / "s3"), f"batch-{token_hex(4)}"
    place = open_place("s3://data/x", keys, lambda: datetime.now(UTC)).place
    assert isinstance(place, ObjectBucket)
    place.put(f"{folder}/in/a.jsonl", "".join(f"{each}\n" for each in range(40)).encode())
    place.put(f"{folder}/in/b.jsonl", "".join(f"{each}\n" for each in range(40, 63)).encode())
    with connect() as connection:
        for name, value in keys.items():
            connection.put_secret("default", name, value)
    (tmp_path / "bucket_code.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    code = __import__("bucket_code")
    array = client.map(
        code.run,
        f"s3://data/{folder}/in/",
        output=f"s3://data/{folder}/out",
        rows=5,
        parallel=2,
        env={"CALLS": tmp_path / "calls"},
        retry={"preemption": 3},
    )
    phases = sorted(each.phase for each in array.wait(check=False))
    assert phases == ["done", "failed"]
    array.retry()
    array.wait()
    names = [each.key for each in place.list(f"{folder}/out/part-")[0]]
    found = Counter(
        json.loads(line)["row"] for name in names for line in place.get(name).splitlines()
    )
    assert found == Counter(range(63))
    parts = [os.path.basename(name).split(".") for name in names]
    mark = parts[0][1]
    assert parts == [[f"part-{at:06}", mark, "jsonl"] for at in range(13)]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == len({*calls}) == 13  # the checkpoints had what was done
    progress = array.progress()
    assert progress is not None
    assert (progress.done, progress.total) == (63, 63)
