"""The program of the jobs of a batch: each row has one result, whatever happens to the jobs."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from tests.waits import wait_until

from cavvy.readers import batch

PROGRAM = str(Path(batch.__file__))
CODE = """
import json, os, time
def double(rows):
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(f"{rows[0]['id']}\\n")
    return [{"id": row["id"], "twice": 2 * row["id"]} for row in rows]
def hang(rows):
    if rows[0]["id"] == 30:
        open("hangs", "w").close()
        time.sleep(600)
    return double(rows)
def picky(rows):
    if rows[0]["id"] == 20:
        raise RuntimeError("no twenty")
    return double(rows)
def short(rows):
    return rows[1:]
def nan(rows):
    return [float("nan") for _ in rows]
def one(rows):
    return {row["id"]: 1 for row in rows}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    lines = [f'{{"id": {number}}}\n' for number in range(100)]
    lines.insert(7, "  \n")
    (tmp_path / "rows.jsonl").write_text("".join(lines).rstrip("\n"))
    (tmp_path / "code.py").write_text("")
    (tmp_path / "own_code.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    for name in ("CAVVY_ARRAY_INDEX", "CAVVY_ARRAY_COUNT", "NNODES", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def start(
    function: str, index: int = 0, count: int = 1, *, source: str = "rows.jsonl", rows: int = 10
) -> "subprocess.Popen[str]":
    own = {"CAVVY_ARRAY_INDEX": str(index), "CAVVY_ARRAY_COUNT": str(count)}
    own |= {"CAVVY_JOB": f"many.{index}", "CAVVY_PROGRESS_FILE": f"progress.{index}"}
    words = ["--input", source, "--output", "out", "--rows", str(rows)]
    return subprocess.Popen(
        [sys.executable, PROGRAM, *words, "--function", f"own_code:{function}"],
        env=os.environ | own,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(function: str, index: int = 0, count: int = 1, *, rows: int = 10) -> tuple[int, str]:
    return finish(start(function, index, count, rows=rows))


def finish(process: "subprocess.Popen[str]") -> tuple[int, str]:
    _, said = process.communicate(timeout=60)
    return process.returncode, said


def read(folder: Path) -> list[int]:
    """The rows of the results, in their order."""
    parts = sorted((folder / "out").glob("part-*.jsonl"))
    rows = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
    assert all(row["twice"] == 2 * row["id"] for row in rows)
    return [row["id"] for row in rows]


def count_calls(folder: Path) -> int:
    return len((folder / "calls").read_text().splitlines())


def test_jobs_share_the_shards(folder: Path) -> None:
    running = [start("double", index, 3) for index in range(3)]
    assert [finish(each)[0] for each in running] == [0, 0, 0]
    assert read(folder) == [*range(100)]
    assert count_calls(folder) == 10
    told = [json.loads((folder / f"progress.{index}").read_text()) for index in range(3)]
    assert {each["total"] for each in told} == {each["batch_rows"] for each in told} == {100}
    assert max(each["done"] for each in told) == sum(each["own_rows"] for each in told) == 100
    # Another job, or the same one again, has nothing left to do.
    assert run("double", 1, 3)[0] == 0
    assert count_calls(folder) == 10
    assert not [*(folder / "out/.batch").glob("*.part.*")]


def test_a_killed_job_goes_on_with_its_own_shard(folder: Path) -> None:
    first = start("hang", 0, 2)
    wait_until((folder / "hangs").exists)
    # The other job leaves this shard and the next one, which was read ahead, alone, because the
    # first may still be at them.
    assert run("hang", 1, 2)[0] == 0
    assert read(folder) == [each for each in range(100) if not 30 <= each < 50]
    first.send_signal(signal.SIGKILL)
    finish(first)
    (folder / "own_code.py").write_text(CODE.replace("600", "0"))
    assert run("hang", 0, 2)[0] == 0
    assert read(folder) == [*range(100)]
    assert count_calls(folder) == 10


def test_random_kills_lose_and_repeat_nothing(folder: Path) -> None:
    """Three jobs are killed at random moments and start again, some of them before their end."""
    chance = Random(5)
    running = {index: start("double", index, 3, rows=3) for index in range(3)}
    for _ in range(12):
        time.sleep(chance.uniform(0, 0.15))
        index = chance.randrange(3)
        running[index].send_signal(signal.SIGKILL)
        late = running[index]
        if chance.random() < 0.7:
            finish(late)
        running[index] = start("double", index, 3, rows=3)
        finish(late)  # here at the latest: the server noticed its end late
    assert [finish(each)[0] for each in running.values()] == [0, 0, 0]
    assert read(folder) == [*range(100)]
    assert len([*(folder / "out").glob("part-*")]) == 34


def test_fewer_jobs_take_what_more_jobs_left(folder: Path) -> None:
    third = start("hang", 2, 3)
    wait_until((folder / "hangs").exists)
    third.send_signal(signal.SIGKILL)
    finish(third)
    (folder / "own_code.py").write_text(CODE.replace("600", "0"))
    assert run("hang")[0] == 0
    assert read(folder) == [*range(100)]


def test_the_next_shard_is_read_ahead(folder: Path) -> None:
    plan = batch.BatchPlan("rows.jsonl", "", 50)
    ahead, read = threading.Event(), plan.read

    def watch(number: int) -> list[object]:
        if number == 1:
            ahead.set()
        return read(number)

    plan.read = watch  # type: ignore[method-assign]  # the test waits for the call
    results = batch.ResultFolder("out", 0, "many")

    def work(rows: Sequence[object]) -> list[object]:
        assert ahead.wait(60)
        return [*rows]

    assert batch.BatchWorker(plan, results, work, 0, 1, striped=False).run() == 0


def test_a_late_job_replaces_nothing(folder: Path) -> None:
    """A node that was lost for the server, but still works, finishes after its successor."""
    plan = batch.BatchPlan("rows.jsonl", "", 10)
    results = batch.ResultFolder("out", 0, "many")
    late = threading.Event()

    def slow(rows: Sequence[object]) -> list[object]:
        late.wait(60)
        return ["late" for _ in rows]

    worker = batch.BatchWorker(plan, results, slow, 0, 1, striped=False)
    thread = threading.Thread(target=worker.run)
    thread.start()
    assert run("double")[0] == 0
    late.set()
    thread.join()
    assert read(folder) == [*range(100)]


def test_jobs_that_cannot_see_each_other_have_their_own_shards(folder: Path) -> None:
    plan = batch.BatchPlan("rows.jsonl", "", 10)
    for index in range(3):
        results = batch.ResultFolder(f"own{index}", index, "many", f"state{index}")
        results.keep_plan({"rows": 10})
        worker = batch.BatchWorker(plan, results, list, index, 3, striped=True)
        assert worker.run() == 0
        assert worker.run() == 0
    names = [sorted(os.listdir(f"own{index}")) for index in range(3)]
    assert names == [[f"part-{at:06}.jsonl" for at in range(index, 10, 3)] for index in range(3)]


def test_a_shard_that_fails_stops_no_other(folder: Path) -> None:
    code, said = run("picky")
    assert code == 1
    assert "shard 2 (10 rows of rows.jsonl) failed" in said
    assert "no twenty" in said
    assert read(folder) == [each for each in range(100) if not 20 <= each < 30]
    (folder / "own_code.py").write_text(CODE.replace("== 20", "< 0"))
    assert run("picky")[0] == 0
    assert read(folder) == [*range(100)]


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("short", "9 results for 10 rows"),
        ("nan", "Out of range float values"),
        ("one", "expected a list of results, not a dict"),
    ],
)
def test_wrong_results_are_none(folder: Path, function: str, told: str) -> None:
    code, said = run(function)
    assert code == 1
    assert told in said
    assert said.count("failed:") == batch.FAILURES  # it gives up early
    assert not [*(folder / "out").glob("part-*")]


def test_a_batch_that_cannot_run_says_why(folder: Path) -> None:
    def refuse(*words: str) -> str:
        own = ["--output", "out", "--rows", "10", "--command", "cat"]
        done = subprocess.run(
            [sys.executable, PROGRAM, *own, *words], capture_output=True, text=True
        )
        assert done.returncode == 2, done.stderr
        return done.stderr

    assert "does not exist on this node" in refuse("--input", "none.jsonl")
    (folder / "empty.jsonl").write_text("\n")
    assert "has no rows" in refuse("--input", "empty.jsonl")
    (folder / "wrong.tar").write_text("no tar" * 200)
    assert "cannot be read as webdataset" in refuse("--input", "wrong.tar")
    assert "no file with a known ending" in refuse("--input", "own_code.py")
    assert "jsonl and webdataset" in refuse("--input", ".")
    assert "no files of the format images" in refuse("--input", ".", "--format", "images")
    code, said = run("nowhere")
    assert (code, "own_code:nowhere cannot be imported" in said) == (2, True)


def test_results_of_another_batch_are_not_mixed(folder: Path) -> None:
    assert run("double")[0] == 0
    code, said = run("double", rows=20)
    assert code == 2
    assert "results of another batch: rows was 10" in said
    with (folder / "rows.jsonl").open("a") as file:
        file.write('\n{"id": 100}\n')
    code, said = run("double")
    assert code == 2
    assert "input was" in said
    assert read(folder) == [*range(100)]
    for damaged in ("{", "[1]", "\0"):
        (folder / "out/.batch/plan.json").write_text(damaged)
        code, said = run("double")
        assert (code, "plan.json is damaged" in said) == (2, True)


def test_a_command_gets_lines_and_prints_lines(folder: Path) -> None:
    words = ["--input", "rows.jsonl", "--output", "out", "--rows", "30"]
    command = """sed 's/"id":\\(.*\\)}/"id":\\1,"twice":0}/'"""
    assert batch.main([*words, "--command", command]) == 0
    parts = sorted((folder / "out").glob("part-*"))
    assert [len(part.read_text().splitlines()) for part in parts] == [30, 30, 30, 10]
    assert json.loads(parts[3].read_text().splitlines()[-1]) == {"id": 99, "twice": 0}


def list_rows(source: Path, rows: int) -> list[list[object]]:
    plan = batch.BatchPlan(str(source), "", rows)
    return [plan.read(number) for number in range(len(plan.shards))]


def test_webdataset(tmp_path: Path) -> None:
    for name, keys in (("a", range(5)), ("b", range(5, 7))):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as file:
            for key in keys:
                for ending in ("jpg", "cls.txt"):
                    member = tarfile.TarInfo(f"deep/{key:03d}.{ending}")
                    member.size = key + 1
                    file.addfile(member, io.BytesIO(ending[:1].encode() * (key + 1)))
    found = list_rows(tmp_path, 2)
    assert [len(each) for each in found] == [2, 2, 1, 2]
    rows = [row for each in found for row in each]
    assert rows == [
        {"__key__": f"deep/{key:03d}", "jpg": b"j" * (key + 1), "cls.txt": b"c" * (key + 1)}
        for key in range(7)
    ]


def test_images(tmp_path: Path) -> None:
    for name in ("b/2.PNG", "a/1.jpg", "c.jpeg", ".hidden.png", "d/3.webp", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    found = list_rows(tmp_path, 3)
    names = ["a/1.jpg", "b/2.PNG", "c.jpeg", "d/3.webp"]
    expected = [{"path": name, "image": name.encode()} for name in names]
    assert found == [expected[:3], expected[3:]]


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"id": [*range(25)], "name": [f"n{each}" for each in range(25)]})
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=4)
    found = list_rows(tmp_path / "rows.parquet", 10)
    assert [len(each) for each in found] == [10, 10, 5]
    assert [row for each in found for row in each] == table.to_pylist()
