"""Reads the files of W&B runs (`run-ID.wandb`), which the work writes without a network, too, so
that their values become curves. It needs neither W&B nor protobuf.

A file begins with 7 bytes, and is a log of blocks of 32 KiB as LevelDB writes it
(github.com/google/leveldb/blob/main/doc/log_format.md), with the CRC-32 of zlib over the kind of a
piece and its data. The data is a message `Record` (wandb/proto/wandb_internal.proto), whose fields
are read by their numbers. Values and settings are texts in JSON.
"""

from __future__ import annotations

import json
import struct
import zlib

from .protobuf import read_fields
from .run_events import GrowingFile, RunEvent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HEAD = b":W&B\xe1\xbe"  # and the version, 0
HEAD_BYTES = 7
BLOCK = 32 << 10
PIECE_HEAD = 7  # bytes: checksum, length, kind
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4  # kinds of pieces
LARGEST = 256 << 10  # bytes of a record that is read; larger ones are left out
MOST_PARAMS, MOST_LOGGED, DEEPEST = 256, 1000, 4
# fields of `Record`
HISTORY, SUMMARY, CONFIG, RUN, EXIT, FINAL = 2, 3, 5, 17, 18, 20
HOST, BEGAN = 13, 17  # of `RunRecord`


class WandbRecords:
    """The records of a file of a run. With `host`, only a run of this host has values."""

    def __init__(self, file: GrowingFile, host: str = "") -> None:
        self._file, self._host = file, host
        self._is_own = not host
        self._time = self._step = 0.0  # of the newest value
        self._logged: set[str] = set()  # names of the history
        self._stated: dict[str, float] = {}  # results of the summary, until the next record
        self._begun: list[bytes] | None = None  # pieces of a record; None if it is left out
        self._size = 0
        self._has_head = False

    def take(self) -> bytes | None:
        """Return what the next piece completes: a record, b"" if it completes none that is read, or
        None if it is not there yet. So the caller can stop after each piece, since a file may have
        any number of them that complete nothing."""
        piece = self._next_piece()
        if piece is None:
            return None
        kind, data = piece
        if kind == WHOLE:
            self._begun = None
            return data
        if kind == FIRST:
            self._begun, self._size = [], 0
        if self._begun is None:
            return b""
        self._size += PIECE_HEAD + len(data)
        if self._size > LARGEST:
            self._begun = None
            return b""
        self._begun.append(data)
        if kind != LAST:
            return b""
        record, self._begun = b"".join(self._begun), None
        return record

    def _next_piece(self) -> tuple[int, bytes] | None:
        """Return the kind and the data of the next piece, with kind 0 where it is broken; None if
        it is not there yet."""
        if not self._has_head:
            if not self._file.fill(HEAD_BYTES):
                return None
            if not self._file.data.startswith(HEAD):
                self._file.give_up()
                return None
            self._has_head = True
            self._file.skip(HEAD_BYTES)
        left = BLOCK - self._file.place() % BLOCK
        if left < PIECE_HEAD:  # the end of a block is filled
            if not self._file.fill(left):
                return None
            self._file.skip(left)
            left = BLOCK
        if not self._file.fill(PIECE_HEAD):
            return None
        crc, length, kind = struct.unpack_from("<IHB", self._file.data, self._file.at)
        if not WHOLE <= kind <= LAST or length > left - PIECE_HEAD:
            return self._skip_block(left)
        if not self._file.fill(PIECE_HEAD + length):
            return None
        begin = self._file.at + PIECE_HEAD
        data = self._file.data[begin : begin + length]
        if zlib.crc32(data, zlib.crc32(bytes([kind]))) != crc:
            return self._skip_block(left)
        self._file.skip(PIECE_HEAD + length)
        return kind, data

    def _skip_block(self, left: int) -> tuple[int, bytes] | None:
        """Leave out the rest of a block with a broken piece, once it is complete: the next one
        begins anew."""
        if not self._file.fill(left):
            return None
        self._file.skip(left)
        self._begun = None
        return 0, b""

    def parse(self, record: bytes) -> RunEvent:
        event = RunEvent()
        try:
            for number, value in read_fields(record):
                if not isinstance(value, bytes):
                    continue
                if number == HISTORY and self._is_own:
                    self._read_history(value, event)
                elif number == RUN:
                    self._read_run(value, event)
                elif number == CONFIG and self._is_own:
                    self._read_config(value, event)
                elif number == SUMMARY and self._is_own:
                    self._read_summary(value, event)
                elif number in (EXIT, FINAL):
                    self._state(event)
        except (ValueError, IndexError, RecursionError):
            return RunEvent()
        return event

    def _read_run(self, data: bytes, event: RunEvent) -> None:
        fields = dict(read_fields(data))
        self._is_own = not self._host or fields.get(HOST) == self._host.encode()
        began, config = fields.get(BEGAN), fields.get(4)
        if isinstance(began, bytes):
            seconds = dict(read_fields(began)).get(1, 0)
            self._time = event.at = float(seconds) if isinstance(seconds, int) else 0.0
        if self._is_own and isinstance(config, bytes):
            self._read_config(config, event)

    def _read_config(self, data: bytes, event: RunEvent) -> None:
        event.at = self._time
        for name, value in _read_table(data).items():
            if name != "_wandb":  # what W&B tells about itself
                _add_params(name, value, event.params)

    def _read_history(self, data: bytes, event: RunEvent) -> None:
        for number, value in read_fields(data):
            if number == 2 and isinstance(value, bytes):
                step = dict(read_fields(value)).get(1, 0)
                event.step = float(step) if isinstance(step, int) else 0.0
        for name, value in _read_table(data).items():
            if name == "_step":
                event.step = _to_float(value) or 0.0
            elif name == "_timestamp":
                event.at = _to_float(value) or 0.0
            elif not name.startswith("_"):
                _add_values(name, value, event.values)
        self._time, self._step = event.at, event.step
        if len(self._logged) < MOST_LOGGED:
            self._logged.update(event.values)
        self._state(event)

    def _read_summary(self, data: bytes, event: RunEvent) -> None:
        """Take results that the program states itself, such as `run.summary["best"]`. Those that
        W&B copies from the history come before it, so results wait for the next record."""
        for name, value in _read_table(data).items():
            if not name.startswith("_") and len(self._stated) < MOST_LOGGED:
                _add_values(name, value, self._stated)

    def _state(self, event: RunEvent) -> None:
        """Add the results that were stated, as values of the newest step."""
        if self._stated:
            event.at, event.step = self._time, self._step
            for name, value in self._stated.items():
                if name not in self._logged:
                    event.values.setdefault(name, value)
            self._stated.clear()


def _read_table(data: bytes) -> dict[str, Any]:
    """Return a list of items by name: of the history, the configuration or the summary, whose
    fields have the same numbers. A name of several words is a table in tables."""
    found: dict[str, Any] = {}
    for number, item in read_fields(data):
        if number != 1 or not isinstance(item, bytes):
            continue
        names, text = [], b""
        for inner, part in read_fields(item):
            if inner in (1, 2) and isinstance(part, bytes) and part:
                names.append(part.decode("utf-8", "replace"))
            elif inner == 16 and isinstance(part, bytes):
                text = part
        if not names or not text or len(names) > DEEPEST:
            continue
        place = found
        for name in names[:-1]:
            inside = place.setdefault(name, {})
            place = inside if isinstance(inside, dict) else {}
        try:
            place[names[-1]] = json.loads(text)
        except (ValueError, RecursionError):
            continue
    return found


def _to_float(value: object) -> float | None:
    if isinstance(value, (int, float)):  # True counts as 1, as in W&B
        try:
            return float(value)
        except OverflowError:
            return float("inf")
    if value in ("NaN", "Infinity", "-Infinity"):
        return float(str(value))
    return None


def _add_values(name: str, value: object, values: dict[str, float], depth: int = 0) -> None:
    if isinstance(value, dict):
        if "_type" not in value and depth < DEEPEST:
            for inner, each in value.items():
                _add_values(f"{name}/{inner}", each, values, depth + 1)
        return
    number = _to_float(value)
    if number is not None:
        values[name] = number


def _add_params(name: str, value: object, params: dict[str, str], depth: int = 0) -> None:
    if len(params) >= MOST_PARAMS:
        return
    if isinstance(value, dict) and depth < DEEPEST:
        for inner, each in value.items():
            _add_params(f"{name}/{inner}", each, params, depth + 1)
    elif isinstance(value, float):
        params[name] = f"{value:g}"
    elif isinstance(value, str):
        params[name] = value
    elif value is not None:
        params[name] = json.dumps(value)
