"""Batches on real servers and nodes: each row has one result, whatever is killed."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.server_state import home_with_jobs

from cavvy import Client, JobFailed

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.system


def test_rows_outlive_preemptions_and_killed_servers() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/batch_rows.py"), "-o", "json"]
    arguments = ["--rows", "12000", "--shard", "100", "--row-ms", "4"]
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
    with pytest.raises(JobFailed, match="3 shards failed; a retry runs only what is left"):
        array.wait()
    allowed.touch()
    array.retry()
    array.wait()
    progress = array.progress()
    assert progress is not None
    assert (progress.done, progress.total, progress.total_cost) == (10, 10, progress.cost)
    parts = sorted((tmp_path / "out").glob("part-*.jsonl"))
    assert [part.read_text().split() for part in parts] == [["true"] * 4] * 2 + [["true"] * 2]
