"""Runs a function or a command over the rows of files: the program of the jobs of a `batch`.

The file is submitted with the task and runs on nodes, so it needs nothing but Python 3.8; only
Parquet files need pyarrow. All jobs of a batch compute the same plan: the rows of all files, cut
into numbered shards. The result of a shard is one file, which gets its name only when it is
complete, and which is never replaced. So each row is in the results once, although shards are
repeated after a job has lost its node.

Jobs that share the folder of the results take one shard after another, each with a file that only
one of them can create. A shard belongs to its job until the end: if the job starts again on another
node, it goes on with its own shard. Jobs whose results go to a bucket cannot see each other: each
takes every N-th shard, and has its results in its checkpoint until it copies them to the bucket.
"""

from __future__ import annotations

import argparse
import base64
import csv
import glob
import hashlib
import importlib
import json
import os
import secrets
import subprocess
import sys
import tarfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from typing import Any, NamedTuple, Protocol

    Row = Any  # what JSON can describe or, in WebDataset, Parquet and images, a table with bytes
    Work = Callable[[Sequence[Row]], Iterable[Any]]
    See = Callable[[bytes], object]

    class FilePiece(NamedTuple):
        """A piece of one file: its number of rows, and where it begins in a unit of the format."""

        rows: int
        at: int

    class RowSource(Protocol):
        """How the rows of a file are cut and read. `cut` shows `see` the content that it reads."""

        endings: tuple[str, ...]

        def cut(self, path: str, rows: int, see: See) -> Iterator[FilePiece]: ...
        def read(self, path: str, part: FilePiece) -> Iterable[Row]: ...

else:
    from collections import namedtuple

    FilePiece = namedtuple("FilePiece", "rows at")

_DECODER = json.JSONDecoder()
OWN_FOLDER = ".batch"  # in the folder of the results
FAILURES = 3  # shards in a row whose failure ends the job
REPORT_S = 1.0
SAMPLE = 4096  # bytes
LONGEST_VALUE = 16 << 20  # characters of a value in CSV, which an open quote would make endless


class WrongInput(Exception):
    """Raised if the batch cannot run as it is written. The text says what to change."""


def see_ends(file: Any, at: int, size: int, see: See) -> None:
    """Show the beginning and the end of `size` bytes of a file. All of it would be read by each job
    before its first shard; times differ between the nodes to which an input is copied."""
    for begin in (at, max(at, at + size - SAMPLE)):
        file.seek(begin)
        see(file.read(min(SAMPLE, at + size - begin)))


def _cut(ends: Iterable[int], rows: int) -> Iterator[FilePiece]:
    """Yield pieces of `rows` rows, which end at these offsets; the last piece may have fewer."""
    count = begin = 0
    for end in ends:
        count += 1
        if count == rows:
            yield FilePiece(count, begin)
            count, begin = 0, end
    if count:
        yield FilePiece(count, begin)


def count_lines(path: str, end: int) -> int:
    """Return how many lines of a file begin before an offset in bytes."""
    with open(path, "rb") as file:
        count = 0
        for line in file:
            count, end = count + 1, end - len(line)
            if end <= 0:
                break
        return count


class JsonLines:
    """A row is the value of a line; empty lines are left out. `at` is an offset in bytes."""

    endings: tuple[str, ...] = (".jsonl", ".ndjson")

    def cut(self, path: str, rows: int, see: See) -> Iterator[FilePiece]:
        return _cut(self._list_ends(path, see), rows)

    def _list_ends(self, path: str, see: See) -> Iterator[int]:
        at = 0
        with open(path, "rb") as file:
            for line in file:
                see(line)
                at += len(line)
                if not line.isspace():
                    yield at

    def read(self, path: str, part: FilePiece) -> Iterable[Row]:
        at, left = part.at, part.rows
        with open(path, "rb") as file:
            file.seek(at)
            for line in file:
                at += len(line)
                if line.isspace():
                    continue
                try:
                    row = _DECODER.decode(line.decode("utf-8-sig"))
                except ValueError as error:
                    number = count_lines(path, at)
                    text = f"{path}: line {number} is no JSON: {line[:80]!r}: {error}"
                    raise ValueError(text) from None
                yield row
                left -= 1
                if not left:
                    return


class CsvTable:
    """A row is a table of the columns that the first line names; all values are texts. A quoted
    value may contain line ends. Empty lines are left out. `at` is an offset in bytes.
    """

    endings: tuple[str, ...] = (".csv", ".tsv")

    def _list(self, path: str, at: int, see: See | None = None) -> Iterator[tuple[int, Row]]:
        """Yield the rows from an offset on, 0 for the first row, each with the offset behind it."""
        csv.field_size_limit(LONGEST_VALUE)
        with open(path, "rb") as file:
            ends = [0]

            def lines() -> Iterator[str]:
                for line in file:
                    ends[0] += len(line)
                    if see is not None:
                        see(line)
                    yield line.decode("utf-8-sig" if ends[0] == len(line) else "utf-8")

            try:
                mark = "\t" if path.lower().endswith(".tsv") else ","
                names = next(csv.reader(lines(), delimiter=mark, strict=True), [])
                if len(set(names)) < len(names) or not all(names):
                    raise ValueError("each column needs a name of its own in the first line")
                if at:
                    file.seek(at)
                    ends[0] = at
                for values in csv.reader(lines(), delimiter=mark, strict=True):
                    if values and len(values) != len(names):
                        raise ValueError(
                            f"a row has {len(values)} values instead of {len(names)} before byte "
                            f"{ends[0]}"
                        )
                    if values:
                        yield ends[0], dict(zip(names, values))  # noqa: B905  # nodes may have 3.8
            except csv.Error as error:
                raise ValueError(f"no CSV before byte {ends[0]}: {error}") from error

    def cut(self, path: str, rows: int, see: See) -> Iterator[FilePiece]:
        return _cut((end for end, _ in self._list(path, 0, see)), rows)

    def read(self, path: str, part: FilePiece) -> Iterable[Row]:
        return [row for _, row in islice(self._list(path, part.at), part.rows)]


class ParquetTable:
    """A row is a table of the columns. `at` is the number of the first row."""

    endings: tuple[str, ...] = (".parquet",)

    def _open(self, path: str) -> Any:
        try:
            from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]  # has no types
        except ImportError:
            raise WrongInput("Parquet needs pyarrow: add `setup: pip install pyarrow`") from None
        return ParquetFile(path)

    def cut(self, path: str, rows: int, see: See) -> Iterator[FilePiece]:
        with self._open(path) as file:
            count = file.metadata.num_rows
        size = os.path.getsize(path)
        with open(path, "rb") as raw:
            see_ends(raw, 0, size, see)
            raw.seek(max(0, size - 8))  # the length of the footer, and the format's mark
            footer = int.from_bytes(raw.read(4), "little") + 8
            raw.seek(max(0, size - footer))
            see(raw.read(footer))
        for at in range(0, count, rows):
            yield FilePiece(min(rows, count - at), at)

    def read(self, path: str, part: FilePiece) -> Iterable[Row]:
        with self._open(path) as file:
            first = begin = 0
            groups: list[int] = []
            for number in range(file.num_row_groups):
                after = first + file.metadata.row_group(number).num_rows
                if after > part.at and first < part.at + part.rows:
                    begin = begin if groups else first
                    groups.append(number)
                first = after
            table = file.read_row_groups(groups)
        rows: list[Row] = table.slice(part.at - begin, part.rows).to_pylist()
        return rows


class TarSamples:
    """WebDataset: adjacent files of a tar file whose names are equal up to the first dot are a row,
    {"__key__": name, ending: bytes, ...}. `at` is the offset of the first header.
    """

    endings: tuple[str, ...] = (".tar",)

    def _list(self, path: str, at: int) -> Iterator[tuple[int, str, list[tarfile.TarInfo], Any]]:
        """Yield the samples from an offset on: offset, key, members, and the open tar file."""
        with open(path, "rb") as raw:
            raw.seek(at)
            with tarfile.open(fileobj=raw, mode="r:") as file:
                key, begin = "", at
                members: list[tarfile.TarInfo] = []
                for member in file:
                    if member.isfile():
                        folder, name = os.path.split(member.name)
                        own = os.path.join(folder, name.partition(".")[0])
                        if own != key and members:
                            yield begin, key, members, file
                            members = []
                        if not members:
                            key, begin = own, member.offset
                        members.append(member)
                    # a list of millions of files would fill the memory
                    file.members = []  # type: ignore[attr-defined]  # which is public
                if members:
                    yield begin, key, members, file
                # Python reads a damaged header, and the end of the first of joined files, as the
                # end of the file.
                raw.seek(file.offset)
                rest = raw.read(tarfile.BLOCKSIZE)
                whole = len(rest) == tarfile.BLOCKSIZE
                while whole and rest:
                    whole = not rest.strip(b"\0")
                    rest = raw.read(1 << 20)
                if not whole:
                    raise tarfile.ReadError(
                        f"damaged or incomplete: no sample and no end at byte {file.offset}; "
                        "make the file again (joined tar files are no tar file)"
                    )

    def cut(self, path: str, rows: int, see: See) -> Iterator[FilePiece]:
        count = begin = 0
        for at, _, members, file in self._list(path, 0):
            for each in members:
                see(each.name.encode("utf-8", "surrogateescape") + b"\0%d\n" % each.size)
                see_ends(file.fileobj, each.offset_data, each.size, see)
            if count == rows:
                yield FilePiece(count, begin)
                count = 0
            begin = begin if count else at
            count += 1
        if count:
            yield FilePiece(count, begin)

    def read(self, path: str, part: FilePiece) -> Iterable[Row]:
        for _, key, members, file in islice(self._list(path, part.at), part.rows):
            row: dict[str, Any] = {"__key__": key}
            for each in members:
                ending = os.path.basename(each.name).partition(".")[2]
                row[ending] = file.extractfile(each).read()
            yield row


class ImageFiles:
    """A row is a file: {"path": its path below the input, "image": its bytes}."""

    endings: tuple[str, ...] = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")

    def cut(self, path: str, rows: int, see: See) -> Iterator[FilePiece]:
        with open(path, "rb") as file:
            see_ends(file, 0, os.path.getsize(path), see)
        yield FilePiece(1, 0)

    def read(self, path: str, part: FilePiece) -> Iterable[Row]:
        with open(path, "rb") as file:
            return [{"path": path, "image": file.read()}]


FORMATS: dict[str, RowSource] = {
    "jsonl": JsonLines(),
    "csv": CsvTable(),
    "parquet": ParquetTable(),
    "webdataset": TarSamples(),
    "images": ImageFiles(),
}


class BatchPlan:
    """The shards of a batch: for each, its rows and its pieces of files. The same input gives the
    same plan on each node. `digest` tells whether an input is the one of an earlier plan: it is of
    the files' names and sizes, of all lines, of Parquet's footers, and of the ends of the files of
    tar files and of images.
    """

    def __init__(self, source: str, format: str, rows: int) -> None:
        self._source = source
        self._files, self.format = list_files(source, format)
        self._reader = FORMATS[self.format]
        found = hashlib.sha256()
        self.shards: list[tuple[int, list[tuple[str, FilePiece]]]] = []
        waiting: list[tuple[str, FilePiece]] = []
        for path in self._files:
            name = os.path.relpath(path, source) if path != source else os.path.basename(path)
            found.update(f"{name}\0{os.path.getsize(path)}\n".encode("utf-8", "surrogateescape"))
            for part in self._cut(path, rows, found.update):
                waiting.append((path, part))
                # Only images share a shard; a shard of other formats is a piece of one file.
                if self.format != "images" or len(waiting) == rows:
                    waiting = self._close(waiting)
        self._close(waiting)
        self.rows = sum(count for count, _ in self.shards)
        self.digest = found.hexdigest()
        if not self.rows:
            raise WrongInput(f"{source} has no rows")

    def _cut(self, path: str, rows: int, see: See) -> Iterator[FilePiece]:
        try:
            yield from self._reader.cut(path, rows, see)
        except (ValueError, tarfile.TarError) as error:
            raise WrongInput(f"{path} cannot be read as {self.format}: {error}") from error

    def _close(self, pieces: list[tuple[str, FilePiece]]) -> list[tuple[str, FilePiece]]:
        if pieces:
            self.shards.append((sum(part.rows for _, part in pieces), pieces))
        return []

    def read(self, number: int) -> list[Row]:
        """Return the rows of a shard. Raises ValueError, OSError."""
        found: list[Row] = []
        for path, part in self.shards[number][1]:
            found += self._reader.read(path, part)
        for row in found if self.format == "images" else ():
            row["path"] = os.path.relpath(row["path"], self._source)
        return found

    def describe(self, number: int) -> str:
        count, pieces = self.shards[number]
        path = os.path.relpath(pieces[0][0], os.path.dirname(self._source))
        return f"shard {number} ({count:,} rows of {path})"


def list_files(source: str, format: str) -> tuple[list[str], str]:
    """Return the files of an input in the order of their names, and their format, which the names
    tell if `format` is "". Hidden files are left out. Raises WrongInput, OSError.
    """
    if not os.path.exists(source):
        raise WrongInput(f"the input {source} does not exist on this node")
    if os.path.isfile(source):
        files = [source]
    else:
        files = []
        for folder, below, names in os.walk(source, onerror=_raise):
            below[:] = [each for each in below if not each.startswith(".")]
            for each in below:
                if os.path.islink(os.path.join(folder, each)):
                    raise WrongInput(
                        f"{os.path.join(folder, each)} is a link to a folder, whose files would be "
                        "left out; move the files there, or remove the link"
                    )
            files += [os.path.join(folder, each) for each in names if not each.startswith(".")]
        files.sort()
    endings = {end: name for name, each in FORMATS.items() for end in each.endings}
    told = {path: endings.get(os.path.splitext(path)[1].lower(), "") for path in files}
    kinds = sorted({kind for kind in told.values() if kind})
    if not format:
        if len(kinds) != 1:
            found = f"files of {' and '.join(kinds)}" if kinds else "no file with a known ending"
            known = ", ".join(sorted(endings))
            raise WrongInput(f"{source} has {found}; set `batch.format` (endings: {known})")
        format = kinds[0]
    chosen = files if os.path.isfile(source) else [each for each in files if told[each] == format]
    if not chosen:
        raise WrongInput(f"{source} has no files of the format {format}")
    if len(chosen) < len(files):
        left = len(files) - len(chosen)
        tell(f"batch: left out for their ending: {left:,} of {len(files):,} files of {source}")
    return chosen, format


def _raise(error: OSError) -> None:
    raise error


class ResultFolder:
    """The folder of the results, and which shards it has. With a `mark`, it is in their names."""

    def __init__(
        self, folder: str, index: int, array: str, state: str = "", mark: str = ""
    ) -> None:
        self.folder, self._index = folder, index
        self._ending = f".{mark}.jsonl" if mark else ".jsonl"
        self._own = state or os.path.join(folder, OWN_FOLDER)
        os.makedirs(folder, exist_ok=True)
        self._claims = os.path.join(self._own, "claims", array)
        os.makedirs(self._claims, exist_ok=True)
        self._tag = f"{array}.{index}"
        for left in glob.glob(os.path.join(glob.escape(self._own), f"*.part.{self._tag}.*")):
            with suppress(OSError):
                os.unlink(left)

    def keep_plan(self, about: dict[str, Any]) -> None:
        """Write what the results are of, or compare it with what they are of. Raises WrongInput."""
        path = os.path.join(self._own, "plan.json")
        # In this order: another job may write the plan and results meanwhile.
        parts = glob.glob(os.path.join(glob.escape(self.folder), "part-*.jsonl"))
        if parts and not os.path.exists(path):
            raise WrongInput(
                f"{self.folder} has results of an unknown batch, because {path} is missing; "
                "choose another output, or remove the results"
            )
        self.put(path, (json.dumps(about, sort_keys=True) + "\n").encode())
        try:
            with open(path, encoding="utf-8") as file:
                earlier = dict(json.load(file))
        except (ValueError, TypeError) as error:
            raise WrongInput(f"{path} is damaged: {error}; remove it with the results") from error
        changed = [each for each in about if earlier.get(each) != about[each]]
        if changed:
            told = ", ".join(f"{each} was {str(earlier.get(each))[:60]}" for each in changed)
            raise WrongInput(
                f"{self.folder} has results of another batch: {told}; choose another output, or "
                "remove the results"
            )

    def name(self, number: int) -> str:
        return f"part-{number:06d}{self._ending}"

    def has(self, number: int) -> bool:
        return os.path.exists(os.path.join(self.folder, self.name(number)))

    def count_before(self, shards: Mapping[int, int]) -> int:
        """Return how many rows had results when the first job of this array began."""
        path = os.path.join(self._claims, "before")
        self.put(path, str(self.count(shards)).encode())
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read().strip()
        return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0

    def count(self, shards: Mapping[int, int]) -> int:
        """Return the number of rows whose results exist. `shards` has the rows of each shard."""
        known = set(os.listdir(self.folder))
        return sum(rows for number, rows in shards.items() if self.name(number) in known)

    def claim(self, number: int, count: int) -> bool:
        """Return whether the shard belongs to this job, one of `count`."""
        path = os.path.join(self._claims, str(number))
        try:
            # A link that leads nowhere is created with its owner in one step.
            os.symlink(str(self._index), path)
        except FileExistsError:
            owner = os.readlink(path)
            # If two jobs take the shard of an owner that is gone, the first result stays.
            return not owner.isdigit() or int(owner) == self._index or int(owner) >= count
        return True

    def commit(self, number: int, data: bytes) -> bool:
        """Give the results of a shard their name, unless there are results already. Returns whether
        these are the results now. Raises OSError."""
        return self.put(os.path.join(self.folder, self.name(number)), data)

    def put(self, path: str, data: bytes) -> bool:
        """Write a whole file on the disk under its name, unless the name is taken."""
        if os.path.exists(path):
            return False
        # The process IDs of two containers may be equal.
        name = f"{os.path.basename(path)}.part.{self._tag}.{os.getpid()}.{secrets.token_hex(4)}"
        part = os.path.join(self._own, name)
        with open(part, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(part, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without links, such as those of some mounted buckets
            if os.path.exists(path):
                return False
            os.rename(part, path)
            return True
        finally:
            with suppress(OSError):
                os.unlink(part)
        return True


def tell(text: str) -> None:
    sys.stderr.write(text + "\n")


def encode(value: Any) -> Any:
    """Return a JSON value for what JSON lacks: bytes in base64, arrays of NumPy and PyTorch as
    lists. Raises TypeError."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(bytes(value)).decode()
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise TypeError(f"a result of type {type(value).__name__} is no JSON value")


# One encoder for all rows: `json.dumps` would make a new one for each.
_ENCODER = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, default=encode, separators=(",", ":")
)


def write_rows(rows: Iterable[Any]) -> tuple[bytes, int]:
    """Return lines of JSON, and their number. Raises TypeError; ValueError for NaN."""
    lines = [_ENCODER.encode(each) + "\n" for each in rows]
    # The only characters that UTF-8 lacks, lone surrogates, become escapes of JSON.
    return "".join(lines).encode("utf-8", "backslashreplace"), len(lines)


def find_function(name: str) -> Work:
    """Return the function MODULE:FUNCTION of the working folder. Raises WrongInput."""
    module, _, attribute = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for each in attribute.split("."):
            found = getattr(found, each)
    except (ImportError, AttributeError) as error:
        raise WrongInput(f"the function {name} cannot be imported: {error}") from error
    except SystemExit as error:
        hint = 'put what is no function below `if __name__ == "__main__":`'
        raise WrongInput(f"{module} ends the program ({error!r}) when imported; {hint}") from error
    if not callable(found):
        raise WrongInput(f"{name} is not a function")
    work: Work = found
    return work


def make_command(command: str) -> Work:
    """Return a function that runs a command for a shard. The command reads rows as lines of JSON,
    and writes a line for each."""

    def run(rows: Sequence[Row]) -> Iterable[Any]:
        given, _ = write_rows(rows)
        done = subprocess.run(["sh", "-c", command], input=given, stdout=subprocess.PIPE)
        if done.returncode:
            raise ValueError(f"the command ended with exit code {done.returncode}")
        return [json.loads(line) for line in done.stdout.splitlines() if line.strip()]

    return run


class BatchWorker:
    """One job of a batch: takes shards until none is left."""

    def __init__(
        self,
        plan: BatchPlan,
        results: ResultFolder,
        work: Work,
        index: int,
        count: int,
        *,
        striped: bool,
    ) -> None:
        self._plan, self._results, self._work = plan, results, work
        self._index, self._count, self._striped = index, count, striped
        rows = [count for count, _ in plan.shards]
        own = range(index, len(rows), count) if striped else range(len(rows))
        self._shards = {number: rows[number] for number in own}  # with their rows
        self._before = results.count_before(self._shards)
        self._failed = self._in_a_row = 0  # shards
        self._rows = 0  # whose results this attempt has written
        self._began = time.monotonic()
        self._told = 0.0
        self._file = os.environ.get("CAVVY_PROGRESS_FILE", "")

    def run(self) -> int:
        """Take shards until none is left, and return how many have failed. The next shard is read
        while the work is at the one before it, which may leave a GPU no pause.
        """
        self._report()
        ready: tuple[int, Future[list[Row]]] | None = None
        with ThreadPoolExecutor(1) as reader:
            for number in (*self._list_order(), None):
                if number is not None and not self._takes(number):
                    continue
                done, ready = ready, None
                if number is not None:
                    ready = number, reader.submit(self._plan.read, number)
                if done is not None and not self._try(*done):
                    break
        self._report()
        return self._failed

    def _try(self, number: int, reading: Future[list[Row]]) -> bool:
        """Process a shard. Returns whether to go on, which is useless if each shard fails."""
        try:
            self._do(number, reading.result())
            self._in_a_row = 0
        except WrongInput:
            raise
        except Exception:  # noqa: BLE001  # the user's function may raise anything
            self._failed, self._in_a_row = self._failed + 1, self._in_a_row + 1
            tell(f"{self._plan.describe(number)} failed:")
            traceback.print_exc()
            if self._in_a_row == FAILURES:
                tell(f"{FAILURES} shards in a row failed, so this job ends")
                return False
        if time.monotonic() - self._told >= REPORT_S:
            self._report()
        return True

    def _list_order(self) -> Iterable[int]:
        """Return the shards in the order in which this job takes them. Jobs that share them begin
        at different places, so that they read different parts of the input."""
        numbers = list(self._shards)
        begin = 0 if self._striped else self._index * len(numbers) // self._count
        return numbers[begin:] + numbers[:begin]

    def _takes(self, number: int) -> bool:
        if self._results.has(number):
            return False
        return self._striped or self._results.claim(number, self._count)

    def _do(self, number: int, rows: Sequence[Row]) -> None:
        wanted = self._plan.shards[number][0]
        if len(rows) != wanted:
            raise ValueError(f"the input has {len(rows)} rows instead of {wanted}: it has changed")
        try:
            found = self._work(rows)
            if isinstance(found, (str, bytes, dict)) or not hasattr(found, "__iter__"):
                raise ValueError(f"expected a list of results, not a {type(found).__name__}")
            data, count = write_rows(found)
        except SystemExit as error:
            # An exit code has 8 bits. With 0, the job would be done.
            if error.code is None or (isinstance(error.code, int) and not error.code % 256):
                raise ValueError("the function ended the program") from error
            raise
        if count != wanted:
            raise ValueError(f"{count} results for {wanted} rows; each row needs one result")
        if self._results.commit(number, data):
            self._rows += wanted

    def _report(self) -> None:
        """Report how many rows are done: of the whole batch, or of this job's own shards if other
        jobs' results cannot be seen."""
        self._told = time.monotonic()
        done, total = self._results.count(self._shards), sum(self._shards.values())
        line = {
            "done": done,
            "total": total,
            "unit": "rows",
            "batch_rows": self._plan.rows,
            "before_rows": self._before,
            "own_rows": self._rows,
            "rows_per_s": round(self._rows / max(1e-3, self._told - self._began), 3),
            "complete": done == total,
        }
        if self._file:
            with suppress(OSError):  # a full disk does not end the work
                with open(self._file + ".new", "w") as file:
                    file.write(json.dumps(line) + "\n")
                os.replace(self._file + ".new", self._file)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--input", required=True, help="a file or a folder")
    parser.add_argument("--output", required=True, help="the folder of the results")
    parser.add_argument("--format", default="", choices=["", *FORMATS])
    parser.add_argument("--rows", type=int, required=True, help="maximum rows of a shard")
    parser.add_argument("--state", default="", help="a folder for what is no result")
    parser.add_argument(
        "--striped",
        action="store_true",
        help="take every N-th shard; the names of results have a mark of the plan",
    )
    work = parser.add_mutually_exclusive_group(required=True)
    work.add_argument("--function", metavar="MODULE:FUNCTION")
    work.add_argument("--command")
    given = parser.parse_args(arguments)
    nodes = int(os.environ.get("NNODES", "1"))  # each node of a job takes shards
    index = int(os.environ.get("CAVVY_ARRAY_INDEX", "0")) * nodes
    index += int(os.environ.get("NODE_RANK", "0"))
    count = int(os.environ.get("CAVVY_ARRAY_COUNT", "1")) * nodes
    array = os.environ.get("CAVVY_JOB", "batch.0").rpartition(".")[0]
    # The work may change the current folder.
    source, output = os.path.abspath(given.input), os.path.abspath(given.output)
    state = os.path.abspath(given.state) if given.state else ""
    try:
        plan = BatchPlan(source, given.format, given.rows)
        about = {"rows": given.rows, "format": plan.format, "input": plan.digest}
        about["run"] = given.function or given.command
        mark = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:8]
        mark = mark if given.striped else ""
        results = ResultFolder(output, index, array, state, mark)
        results.keep_plan(about)
        run = find_function(given.function) if given.function else make_command(given.command)
        worker = BatchWorker(plan, results, run, index, count, striped=given.striped)
        failed = worker.run()
    except (WrongInput, OSError) as error:
        tell(f"batch: {error}")
        return 2
    if failed:
        shards = "1 shard" if failed == 1 else f"{failed} shards"
        tell(f"batch: {shards} failed; a retry, or the changed task, runs only what is left")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
