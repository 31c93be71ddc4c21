"""What a device keeps for its server until it has taken it: requests whose answers were uncertain,
or which are unlike those before, in a SQLite file of bounded size. Each has a number that is never
used again, so that the server stores it once, however often it is sent.
"""

from __future__ import annotations

import json
import math
import os
import random
import sqlite3
import threading
import time
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

MOST_SAMPLE = 64 * 1024  # bytes of a request with its answer; larger ones are not kept
_BATCH_BYTES = 128 * 1024
_ENOUGH = 1e-3  # by which the sum of probabilities may differ from 1
_LEARN = 200  # requests from which the usual inputs are learned
_FAR = 6.0  # standard deviations
_LARGE_INPUT = 1e100  # of inputs, whose squares are summed
_LARGEST = 1e300  # of values, so that a model cannot make numbers that floats do not have


class SampleSpool:
    """The file `path`, which holds at most `most_bytes` of samples: the oldest are dropped for new
    ones."""

    def __init__(self, path: str, most_bytes: int) -> None:
        self._most = most_bytes
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS samples"
            " (number INTEGER PRIMARY KEY AUTOINCREMENT, size INTEGER, body TEXT)"
        )
        fresh = self._db.execute("SELECT 1 FROM sqlite_sequence").fetchone() is None
        if fresh:  # the numbers of a file that was lost must not return
            start = random.getrandbits(50)
            self._db.execute("INSERT INTO sqlite_sequence VALUES ('samples', ?)", (start,))
        row = self._db.execute("SELECT COUNT(*), COALESCE(SUM(size), 0) FROM samples").fetchone()
        self.waiting, self._bytes = int(row[0]), int(row[1])

    def put(self, sample: dict[str, Any]) -> None:
        """Keep a sample, unless it is too large, contains numbers that JSON does not have, or the
        disk is full: samples never cost an answer."""
        try:
            body = json.dumps(sample, allow_nan=False)
        except (ValueError, RecursionError):
            return
        if len(body) > min(MOST_SAMPLE, self._most):
            return
        with self._lock, suppress(sqlite3.Error):
            self._db.execute("INSERT INTO samples (size, body) VALUES (?, ?)", (len(body), body))
            self.waiting += 1
            self._bytes += len(body)
            self._trim()

    def limit(self, most_bytes: int) -> None:
        """Hold at most so many bytes from now on."""
        with self._lock, suppress(sqlite3.Error):
            less, self._most = most_bytes < self._most, most_bytes
            self._trim()
            if less:  # gives what is free in the file back to the disk
                self._db.execute("VACUUM")
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _trim(self) -> None:
        while self._bytes > self._most:
            number, size = self._db.execute(
                "SELECT number, size FROM samples ORDER BY number LIMIT 1"
            ).fetchone()
            self._drop(number, 1, size)

    def batch(self) -> list[dict[str, Any]]:
        """Return the oldest samples, at most as many as one request may have."""
        found: list[dict[str, Any]] = []
        size = 0
        with self._lock:
            rows = self._db.execute("SELECT number, size, body FROM samples ORDER BY number")
            for number, length, body in rows:
                size += length
                if found and size > _BATCH_BYTES:
                    break
                found.append({"number": number, **json.loads(body)})
        return found

    def sent(self, last: int) -> None:
        """Drop the samples up to this number, which the server has stored."""
        with self._lock:
            count, size = self._db.execute(
                "SELECT COUNT(*), COALESCE(SUM(size), 0) FROM samples WHERE number <= ?", (last,)
            ).fetchone()
            self._drop(last, count, size)

    def close(self) -> None:
        self._db.close()

    def _drop(self, last: int, count: int, size: int) -> None:
        self._db.execute("DELETE FROM samples WHERE number <= ?", (last,))
        self.waiting -= count
        self._bytes -= size


def open_spool(path: str, most_bytes: int) -> SampleSpool:
    """Open or make the file. A damaged one is set aside, and one that cannot be written, for
    example on a full disk, is replaced by memory until the program starts again."""
    try:
        return SampleSpool(path, most_bytes)
    except sqlite3.OperationalError:
        return SampleSpool(":memory:", most_bytes)
    except sqlite3.DatabaseError:
        for ending in ("", "-wal", "-shm"):
            with suppress(OSError):
                os.replace(path + ending, f"{path}.damaged{ending}")
        return SampleSpool(path, most_bytes)


class DriftWatch:
    """Learns from the first requests for a model how their inputs are distributed: the mean and the
    spread of the numbers of a request. A later request is odd if one of the two is more than _FAR
    standard deviations from what was learned."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen = 0
        self._means, self._squares = [0.0, 0.0], [0.0, 0.0]  # as of Welford's algorithm

    def is_odd(self, request: Any) -> bool:
        found = list(_list_numbers(request))
        if not found:
            return False
        mean = sum(found) / len(found)
        spread = math.sqrt(sum((each - mean) ** 2 for each in found) / len(found))
        with self._lock:
            if self._seen < _LEARN:
                self._learn((mean, spread))
                return False
            return any(map(self._is_far, (0, 1), (mean, spread)))

    def _learn(self, values: tuple[float, float]) -> None:
        self._seen += 1
        for place, value in enumerate(values):
            before = value - self._means[place]
            self._means[place] += before / self._seen
            self._squares[place] += before * (value - self._means[place])

    def _is_far(self, place: int, value: float) -> bool:
        deviation = math.sqrt(self._squares[place] / (_LEARN - 1))
        # values that never differed must not make each rounding odd
        least = 1e-3 * abs(self._means[place]) + 1e-9
        return abs(value - self._means[place]) > _FAR * max(deviation, least)


def _list_numbers(value: Any) -> Iterator[float]:
    """Yield the numbers in a decoded request."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            # only the data of tensors, and not their shapes
            left += [inner for name, inner in each.items() if name not in ("shape", "parameters")]
        elif isinstance(each, list):
            left += each
        elif isinstance(each, (int, float)) and abs(each) < _LARGE_INPUT:
            yield float(each)


def make_sample(
    model: str, number: int, request: bytes, answer: bytes, watch: DriftWatch
) -> dict[str, Any] | None:
    """Return a request with its answer, the certainty of the answer and why it may be kept:
    "drift" if the request is odd, otherwise "uncertain". Return None if the answer has no
    probabilities."""
    try:
        asked, told = json.loads(request), json.loads(answer)
    except (ValueError, RecursionError):
        return None
    certainty = find_certainty(told)
    if certainty is None:
        return None
    return {
        "model": model,
        "version": number,
        "at": time.time(),
        "certainty": certainty,
        "why": "drift" if watch.is_odd(asked) else "uncertain",
        "request": asked,
        "answer": told,
    }


def find_certainty(answer: Any) -> float | None:
    """Return the smallest, over the rows of an answer, of the largest probability of a row. Rows
    that are no probabilities are taken as their logarithms (softmax)."""
    found = [each for each in map(_certainty_of, _list_rows(answer)) if each is not None]
    return min(found, default=None)


def _list_rows(answer: Any) -> list[Any]:
    if not isinstance(answer, dict):
        return []
    if isinstance(rows := answer.get("predictions"), list):
        return rows
    found: list[Any] = []
    outputs = answer.get("outputs")
    for each in outputs if isinstance(outputs, list) else []:
        if not isinstance(each, dict):
            continue
        shape, data = each.get("shape"), each.get("data")
        floats = str(each.get("datatype", "")).startswith("FP")
        if floats and isinstance(data, list) and isinstance(shape, list) and len(shape) == 2:
            width = shape[1] if isinstance(shape[1], int) else 0
            found += [data[start : start + width] for start in range(0, len(data), max(1, width))]
    return found


def _certainty_of(row: Any) -> float | None:
    if not isinstance(row, list) or len(row) < 2:
        return None
    if not all(isinstance(each, (int, float)) and abs(each) < _LARGEST for each in row):
        return None
    if min(row) >= 0 and abs(sum(row) - 1) < _ENOUGH:
        return float(max(row))
    most = max(row)
    return 1 / sum(math.exp(each - most) for each in row)
