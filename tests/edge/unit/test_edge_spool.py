"""Samples of devices: which answers are uncertain, and what the file keeps."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from cavvy.capabilities.edge.on_device.spool import (
    MOST_SAMPLE,
    DriftWatch,
    SampleSpool,
    find_certainty,
    make_sample,
)


@pytest.mark.parametrize(
    ("answer", "certainty"),
    [
        ({"predictions": [[0.7, 0.2, 0.1]]}, 0.7),
        ({"predictions": [[0.7, 0.2, 0.1], [0.4, 0.35, 0.25]]}, 0.4),
        ({"predictions": [[1.0, 1.0]]}, 0.5),
        ({"predictions": [[1000.0, 0.0]]}, 1.0),
        ({"outputs": [{"datatype": "FP32", "shape": [2, 2], "data": [0.9, 0.1, 0.6, 0.4]}]}, 0.6),
        ({"outputs": [{"datatype": "INT64", "shape": [1, 2], "data": [3, 4]}]}, None),
        ({"predictions": [3.0, "a", [], ["x", 1], [float("nan"), 1.0], {"a": 1}]}, None),
        ({"outputs": [{"datatype": "FP32", "shape": "x", "data": 3}]}, None),
        ({"outputs": 7}, None),
        ({"outputs": [7, "x", None]}, None),
        ({"outputs": [{"datatype": "FP32", "shape": [1, "x"], "data": [0.5, 0.5]}]}, None),
        ({"predictions": [[10**400, 1], [10**400, -(10**400)]]}, None),
        ([], None),
    ],
)
def test_the_certainty_of_an_answer(answer: Any, certainty: float | None) -> None:
    assert find_certainty(answer) == (None if certainty is None else pytest.approx(certainty))


def make(index: int, size: int = 10) -> dict[str, Any]:
    return {"model": "m", "index": index, "text": "x" * size}


def test_samples_are_kept_until_they_are_sent(tmp_path: Path) -> None:
    path = str(tmp_path / "s.db")
    spool = SampleSpool(path, 1 << 20)
    for index in range(5):
        spool.put(make(index))
    first = spool.batch()
    spool.close()
    again = SampleSpool(path, 1 << 20)
    assert again.batch() == first
    assert again.waiting == 5
    assert [each["index"] for each in first] == list(range(5))
    again.sent(first[2]["number"])
    assert [each["index"] for each in again.batch()] == [3, 4]
    assert again.waiting == 2


def test_a_full_file_drops_the_oldest(tmp_path: Path) -> None:
    spool = SampleSpool(str(tmp_path / "s.db"), 10_000)
    for index in range(100):
        spool.put(make(index, 500))
    kept = [each["index"] for each in spool.batch()]
    assert kept == list(range(100 - len(kept), 100))
    assert 10 < len(kept) < 20
    spool.put(make(1000, MOST_SAMPLE))
    spool.put({"model": "m", "value": float("nan")})
    assert [each["index"] for each in spool.batch()] == kept


def test_numbers_do_not_return_with_a_new_file(tmp_path: Path) -> None:
    numbers = []
    for name in ("a.db", "b.db"):
        spool = SampleSpool(str(tmp_path / name), 10_000)
        spool.put(make(0))
        numbers.append(spool.batch()[0]["number"])
    assert abs(numbers[0] - numbers[1]) > 1000


def test_a_batch_has_a_size(tmp_path: Path) -> None:
    spool = SampleSpool(str(tmp_path / "s.db"), 1 << 20)
    for index in range(10):
        spool.put(make(index, 60_000))
    assert [each["index"] for each in spool.batch()] == [0, 1]
    assert len(json.dumps(spool.batch())) <= 128 * 1024


def test_a_full_disk_costs_samples_and_no_answer(tmp_path: Path) -> None:
    spool = SampleSpool(str(tmp_path / "s.db"), 1 << 20)
    spool.put(make(0))
    spool._db.execute("PRAGMA max_page_count = 1")  # SQLite then says that the disk is full
    for index in range(1, 100):
        spool.put(make(index, 500))
    kept = [each["index"] for each in spool.batch()]
    assert kept == list(range(spool.waiting))
    assert spool.waiting < 99


def test_odd_bodies_are_no_samples() -> None:
    watch = DriftWatch()
    assert make_sample("m", 1, b"{", b"{}", watch) is None
    assert make_sample("m", 1, b"{}", b"[" * 100_000, watch) is None
    assert make_sample("m", 1, b"{}", b'{"predictions": [[0.5, 0.5]]}', watch) is not None


def test_inputs_that_are_unlike_those_before_are_kept_and_usual_ones_are_not() -> None:
    chance, watch = random.Random(1), DriftWatch()

    def ask(least: float, most: float) -> bool:
        row = [chance.uniform(least, most) for _ in range(64)]
        tensor = {"shape": [1, 64], "datatype": "FP32", "data": row}
        return watch.is_odd({"inputs": [tensor]})

    usual = [ask(0, 1) for _ in range(2000)]
    assert sum(usual) <= 2
    assert all(ask(0, 3) for _ in range(20)), "a wider range"
    assert all(ask(0.4, 0.6) for _ in range(20)), "the same mean, with less spread"
    for odd in ({}, [], {"instances": [["a", None]]}, [[1e300, 10**400]], [1e99]):
        watch.is_odd(odd)
    still = DriftWatch()
    assert not any(still.is_odd([[1.0, 1.0]]) for _ in range(1000))
