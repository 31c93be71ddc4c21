"""Pictures, sound, texts, tables and histograms that programs reported: what is stored of them, and
how they are read. Only a few media types are stored, by the bytes' own begin, and browsers run none
of them.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from cavvy.domain.figures import StepExample, StepValues
from cavvy.domain.values import Struct
from cavvy.store.documents import plain
from cavvy.store.drivers import DatabaseSession

MOST_NAMES, MOST_STEPS = 64, 60  # of a rank, and of each name
MOST_BYTES = 32 << 20  # of a rank
PER_MESSAGE = 64  # examples of a message; their numbers follow from the message's
_MOST_BINS, _MOST_COLUMNS, _MOST_ROWS, _LONGEST_CELL = 256, 50, 1000, 1000
TEXT, TABLE, HISTOGRAM = "text/plain", "table", "histogram"
_IMAGES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
}
_SOUNDS = {
    b"fLaC": "audio/flac",
    b"OggS": "audio/ogg",
    b"ID3": "audio/mpeg",
    b"\xff\xfb": "audio/mpeg",
}
_RIFF = {b"WEBP": ("image", "image/webp"), b"WAVE": ("audio", "audio/wav")}
_PUT = (
    "INSERT INTO curve_examples "
    "(attempt_id, rank, number, name, process, step, at_ms, kind, size, data) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
)
_OF_RANK = "attempt_id = ? AND rank = ?"
_KNOWN = f"SELECT name, number, step, size FROM curve_examples WHERE {_OF_RANK} ORDER BY number"
_DELETE = f"DELETE FROM curve_examples WHERE {_OF_RANK} AND number = ?"


class StoredExample(Struct, frozen=True, kw_only=True):
    """An example without its bytes. `kind` is its media type, TABLE or HISTOGRAM."""

    attempt_id: str
    rank: int
    number: int
    name: str
    process: int
    step: float | None
    at_ms: float
    kind: str
    size: int


def check(example: StepExample) -> tuple[str, bytes] | None:
    """Return the media type of an example and the bytes to store, or None if it is not what it
    says."""
    data = example.data
    try:
        if example.kind == "text":
            return TEXT, plain(data.decode()).encode()
        if example.kind == "table":
            return TABLE, _check_table(json.loads(data))
        if example.kind == "histogram":
            return HISTOGRAM, _check_histogram(json.loads(data))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    kind, found = _RIFF.get(data[8:12], ("", "")) if data.startswith(b"RIFF") else ("", "")
    if found:
        return (found, data) if kind == example.kind else None
    known = {"image": _IMAGES, "audio": _SOUNDS}.get(example.kind, {})
    found = next((name for begin, name in known.items() if data.startswith(begin)), "")
    return (found, data) if found else None


def _check_table(found: Any) -> bytes:
    columns = [_cell(each) for each in found["columns"][:_MOST_COLUMNS]]
    rows = [[_cell(each) for each in row[: len(columns)]] for row in found["rows"][:_MOST_ROWS]]
    return json.dumps({"columns": columns, "rows": rows}, separators=(",", ":")).encode()


def _cell(value: Any) -> str:
    return plain("" if value is None else str(value)[:_LONGEST_CELL])


def _check_histogram(found: Any) -> bytes:
    edges, counts = ([float(each) for each in found[name]] for name in ("edges", "counts"))
    if not 0 < len(counts) <= _MOST_BINS or len(edges) != len(counts) + 1:
        raise ValueError("a histogram has one edge more than bins")
    made = json.dumps({"edges": edges, "counts": counts}, allow_nan=False, separators=(",", ":"))
    return made.encode()


def add_examples(session: DatabaseSession, told: StepValues) -> None:
    """Store the examples of a message in the open transaction. Of a name with many, those are
    removed first that lie closest to others, so that the whole run stays visible."""
    key = told.attempt_id, told.rank
    rows = session.run(_KNOWN, key).fetchall()
    known = [(str(name), int(number), step, int(size)) for name, number, step, size in rows]
    for index, example in enumerate(told.examples[:PER_MESSAGE]):
        checked = check(example)
        names = {name for name, *_ in known}
        if checked is None or (example.name not in names and len(names) >= MOST_NAMES):
            continue
        kind, data = checked
        number, at = PER_MESSAGE * told.number + index, told.at.timestamp() * 1000 - example.age_ms
        row = (*key, number, example.name, example.process, example.step, at, kind, len(data), data)
        session.run(_PUT, row)
        known.append((example.name, number, example.step, len(data)))
    for number in choose_removed(known):
        session.run(_DELETE, (*key, number))


def choose_removed(known: Sequence[tuple[str, int, float | None, int]]) -> Sequence[int]:
    """Return the numbers of examples that are too many: those of the name with the most of them, or
    with the most bytes. Of each, the name, number, step and size are given, in their order."""
    series: dict[str, list[tuple[int, float, int]]] = {}
    for name, number, step, size in known:
        place = float(number) if step is None else step
        series.setdefault(name, []).append((number, place, size))
    removed = []
    for own in series.values():
        while len(own) > MOST_STEPS:
            removed.append(own.pop(_find_closest(own))[0])
    while sum(size for own in series.values() for *_, size in own) > MOST_BYTES:
        own = max(series.values(), key=lambda each: sum(size for *_, size in each))
        removed.append(own.pop(_find_closest(own))[0])
    return removed


def _find_closest(own: Sequence[tuple[int, float, int]]) -> int:
    """Return the position of the example whose neighbours are closest to each other; the first and
    the last stay while there are others."""
    if len(own) < 3:
        return 0
    return min(range(1, len(own) - 1), key=lambda at: own[at + 1][1] - own[at - 1][1])


def read_examples(
    attempt_ids: Collection[str], most_ranks: int
) -> Callable[[DatabaseSession], Sequence[StoredExample]]:
    """Return a read of the examples of the first ranks, without their bytes, in their order."""
    marks = ", ".join("?" * len(attempt_ids))
    sql = (
        "SELECT attempt_id, rank, number, name, process, step, at_ms, kind, size "
        f"FROM curve_examples WHERE attempt_id IN ({marks}) AND rank < ? ORDER BY number"
    )

    def read(session: DatabaseSession) -> Sequence[StoredExample]:
        asked = (*attempt_ids, most_ranks)
        rows = session.run(sql, asked).fetchall() if attempt_ids else []
        names = StoredExample.__struct_fields__
        return [StoredExample(**dict(zip(names, row, strict=True))) for row in rows]

    return read


def read_example(
    attempt_id: str, rank: int, number: int
) -> Callable[[DatabaseSession], tuple[str, bytes] | None]:
    """Return a read of the media type and the bytes of an example, or None if there is none."""
    sql = f"SELECT kind, data FROM curve_examples WHERE {_OF_RANK} AND number = ?"

    def read(session: DatabaseSession) -> tuple[str, bytes] | None:
        rows = session.run(sql, (attempt_id, rank, number)).fetchall()
        return (str(rows[0][0]), bytes(rows[0][1])) if rows else None

    return read


MEDIA_TYPES: Mapping[str, str] = {
    TEXT: "text/plain; charset=utf-8",
    TABLE: "application/json",
    HISTOGRAM: "application/json",
    **{each: each for each in (*_IMAGES.values(), *_SOUNDS.values(), "image/webp", "audio/wav")},
}
