"""The program of the jobs of a batch: each row has one result, whatever happens to the jobs."""

import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import IO

import pytest
from hypothesis import given
from hypothesis import strategies as st
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
def ends(rows):
    yield 1
    raise SystemExit(int(os.environ["CODE"]))
def moves(rows):
    os.chdir("/")
    return double(rows)
def odd(rows):
    return ["\\ud800\u00e9" for _ in rows]
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


def test_results_of_two_plans_have_different_names_in_a_bucket(folder: Path) -> None:
    names: dict[str, list[str]] = {}
    for state, rows in (("first", 50), ("again", 50), ("other", 25)):
        words = ["--input", "rows.jsonl", "--output", state, "--rows", str(rows), "--striped"]
        assert batch.main([*words, "--state", f"state-{state}", "--command", "cat"]) == 0
        names[state] = sorted(os.listdir(state))
    assert re.fullmatch(r"part-000000\.[0-9a-f]{8}\.jsonl", names["first"][0])
    assert names["first"] == names["again"]
    assert (len(names["other"]), {*names["other"]} & {*names["first"]}) == (4, set())


@pytest.mark.parametrize(
    ("code", "ended", "told"),
    [("0", 1, "the function ended the program"), ("256", 1, "ended the program"), ("75", 75, "")],
)
def test_a_function_that_ends_the_program_is_not_done(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, ended: int, told: str
) -> None:
    monkeypatch.setenv("CODE", code)
    done, said = run("ends")
    assert (done, told in said) == (ended, True)
    assert not [*(folder / "out").glob("part-*")]
    (folder / "own_code.py").write_text(f"import sys\nsys.exit({code})")
    done, said = run("ends")
    assert (done, "own_code ends the program" in said) == (2, True)


@pytest.mark.parametrize("more", [(), ("--striped", "--state", "state")])
def test_a_function_may_change_the_folder(folder: Path, more: tuple[str, ...]) -> None:
    words = ["--input", "rows.jsonl", "--output", "out", "--rows", "10", *more]
    words += ["--function", "own_code:moves"]
    own = {**os.environ, "PYTHONPATH": str(folder)}
    assert subprocess.run([sys.executable, PROGRAM, *words], env=own).returncode == 0
    assert read(folder) == list(range(100))


def test_a_lone_surrogate_is_valid_json(folder: Path) -> None:
    assert run("odd")[0] == 0
    for part in (folder / "out").glob("part-*"):
        lines = part.read_bytes().decode("utf-8").splitlines()
        assert [json.loads(line) for line in lines] == ["\ud800é"] * 10


def test_jobs_with_equal_process_ids_write_no_common_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = batch.ResultFolder("out", 0, "many")

    def meet(*given: str) -> IO[bytes]:
        """The other job writes the same shard after this one has opened its file."""
        monkeypatch.delattr(batch, "open")
        file: IO[bytes] = open(*given)  # noqa: SIM115  # the caller closes it
        assert results.commit(0, b"other")
        return file

    monkeypatch.setattr(batch, "open", meet, raising=False)
    assert not results.commit(0, b"late and longer")
    assert (folder / "out/part-000000.jsonl").read_bytes() == b"other"


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
    size = (folder / "rows.jsonl").stat().st_size
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
    text = "".join(f'{{"id": {number}}}\n' for number in range(100))
    (folder / "rows.jsonl").write_text(text.replace("99", "98").ljust(size))
    code, said = run("double")  # the size is equal
    assert (code, "input was" in said) == (2, True)
    for damaged in ("{", "[1]", "\0"):
        (folder / "out/.batch/plan.json").write_text(damaged)
        code, said = run("double")
        assert (code, "plan.json is damaged" in said) == (2, True)
    shutil.rmtree(folder / "out/.batch")
    code, said = run("double")
    assert (code, "has results of an unknown batch" in said) == (2, True)


def test_content_of_equal_size_is_another_input(tmp_path: Path) -> None:
    def digest(name: str, content: bytes) -> str:
        (tmp_path / name).write_bytes(content)
        os.utime(tmp_path / name, (0, 0))
        return batch.BatchPlan(str(tmp_path / name), "", 2).digest

    for at in (0, 5000, 9999):  # the beginning, which is long, and the end
        image = bytearray(10_000)
        first = digest("a.png", bytes(image)), digest("a.tar", make_tar({"a.png": bytes(image)}))
        image[at] = 1
        other = digest("a.png", bytes(image)), digest("a.tar", make_tar({"a.png": bytes(image)}))
        assert [a == b for a, b in zip(first, other, strict=True)] == [at == 5000] * 2
    assert digest("a.tar", make_tar({"a.png": b"1"})) != digest("a.tar", make_tar({"b.png": b"1"}))


def make_tar(files: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as file:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return made.getvalue()


def test_a_damaged_tar_file_is_refused(tmp_path: Path) -> None:
    whole = make_tar({f"{key}.txt": b"x" * 600 for key in range(3)})
    damaged = bytearray(whole)
    damaged[2 * 1536] ^= 1  # in the header of the third file
    # After the second file; within the end; and two files after each other.
    for wrong in (bytes(damaged), whole[: 2 * 1536], whole[: 3 * 1536 + 9], whole + whole):
        (tmp_path / "a.tar").write_bytes(wrong)
        with pytest.raises(batch.WrongInput, match=r"a\.tar cannot .* damaged or incomplete"):
            batch.BatchPlan(str(tmp_path), "", 2)
    (tmp_path / "a.tar").write_bytes(whole[: 3 * 1536 + 512])  # as some programs end it
    assert batch.BatchPlan(str(tmp_path), "", 2).rows == 3


def test_no_part_of_an_input_is_left_out_silently(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep/closed").mkdir(parents=True)
    for name in ("a.jsonl", "b.jsonl.gz", "deep/c.txt"):
        (tmp_path / name).write_text("1\n")
    assert batch.BatchPlan(str(tmp_path), "", 2).rows == 1
    assert "left out for their ending: 2 of 3 files" in capsys.readouterr().err
    (tmp_path / "link").symlink_to("deep")
    with pytest.raises(batch.WrongInput, match="link is a link to a folder"):
        batch.BatchPlan(str(tmp_path), "", 2)
    (tmp_path / "link").unlink()

    def scan(path: str) -> "os.ScandirIterator[str]":
        if path.endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", scan)
    with pytest.raises(PermissionError, match="closed"):
        batch.BatchPlan(str(tmp_path), "", 2)


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


def test_csv(tmp_path: Path) -> None:
    text = 'id,name\r\n1,"a, ""b"""\r\n\r\n2,"two\nlines"\r\n3,\u00e9'
    (tmp_path / "rows.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "tabs.TSV").write_text("id\tname\n4\tx,y\n")
    rows = [{"id": "1", "name": 'a, "b"'}, {"id": "2", "name": "two\nlines"}]
    rows += [{"id": "3", "name": "\u00e9"}, {"id": "4", "name": "x,y"}]
    for size in (1, 2, 5):
        assert [row for each in list_rows(tmp_path, size) for row in each] == rows
    first = batch.BatchPlan(str(tmp_path), "", 2).digest
    (tmp_path / "tabs.TSV").write_text("id\tname\n5\tx,y\n")
    assert batch.BatchPlan(str(tmp_path), "", 2).digest != first


@given(
    rows=st.lists(
        st.tuples(
            *[st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))] * 2
        ),
        min_size=1,
        max_size=12,
    ),
    size=st.integers(1, 5),
)
def test_any_row_that_python_writes_as_csv_is_read_in_its_shard(
    rows: list[tuple[str, str]], size: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows([("a", "b"), *rows])
        found = list_rows(path, size)
    assert [len(each) for each in found[:-1]] == [size] * (len(found) - 1)
    assert [tuple(row.values()) for each in found for row in each] == rows


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,a\n1,2\n", "each column needs a name of its own"),
        ("a,\n1,2\n", "each column needs a name of its own"),
        ("a,b\n1,2,3\n", "a row has 3 values instead of 2 before byte 10"),
        ('a,b\n1,"2\n', "no CSV before byte 9"),
        ("a,b\n1,\udcff\n", "can't decode"),
        ("", "has no rows"),
        ("a,b\n", "has no rows"),
    ],
)
def test_a_damaged_csv_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "rows.csv").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(batch.WrongInput, match=said):
        batch.BatchPlan(str(tmp_path), "", 2)


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"id": [*range(25)], "name": [f"n{each}" for each in range(25)]})
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=4)
    found = list_rows(tmp_path / "rows.parquet", 10)
    assert [len(each) for each in found] == [10, 10, 5]
    assert [row for each in found for row in each] == table.to_pylist()
    seen = set()
    for last in (24, 25):  # the files have the same size
        other = pyarrow.table({"id": [*range(24), last]})
        parquet.write_table(other, tmp_path / "rows.parquet", use_dictionary=False)
        path = tmp_path / "rows.parquet"
        seen.add((path.stat().st_size, batch.BatchPlan(str(path), "", 10).digest))
    assert (len({size for size, _ in seen}), len(seen)) == (1, 2)


@pytest.mark.parametrize(("rows", "shard"), [(1, 3), (2, 1), (10, 0)])
def test_a_line_that_is_no_json_is_named_by_its_number(
    tmp_path: Path, rows: int, shard: int
) -> None:
    """Whichever shard reads it; empty lines count as lines, and not as rows."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"id": 1}\n\n"two"\r\n3\n{broken\n[5]\n')
    reader = batch.JsonLines()
    pieces = list(reader.cut(str(path), rows, lambda _: None))
    for piece in pieces[:shard]:
        assert len(list(reader.read(str(path), piece))) == piece.rows
    with pytest.raises(ValueError, match=r"rows\.jsonl: line 5 is no JSON: b'\{broken"):
        list(reader.read(str(path), pieces[shard]))
