"""Reads the event files of TensorBoard that the work writes, and finds the files of W&B runs, so
that their values become curves. It needs neither TensorBoard nor protobuf.

An event file is a list of records (TFRecord): the length, its checksum, the data, its checksum. The
data is a message `Event` (tensorflow/core/util/event.proto and framework/summary.proto), whose
fields are read by their numbers. Scalars are numbers (`simple_value`) or tensors with one element.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import time
from array import array
from collections import deque
from functools import lru_cache
from sys import byteorder

from ..allowed_folders import AllowedFolders, check_regular, open_below
from .artifact_files import SETTLED_S, ArtifactReader, is_picture
from .examples import read_value
from .protobuf import read_fields, read_varint
from .run_events import GrowingFile, RunEvent, RunFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .wandb_files import WandbRecords

    Found = Callable[[dict[str, float], float, float], object]

MARK = "tfevents"  # is part of the name of each event file
WANDB_END = ".wandb"  # is the end of the name of the file of a W&B run
MOST_FILES = 64
DEEPEST = 7  # folders in folders
MOST_ENTRIES = 20_000  # that a search looks at, those that lie less deep first
SEARCH_S = 5.0  # between two searches
SPARED = 200  # times the duration of a search until the next one
MOST_RECORDS = 1000  # that are read at a time, so that the agent uses little CPU
MOST_AT_END = 200_000  # when the work has ended
END_S = 5.0
TICK_S = 0.05  # that reading takes at a time, since the agent's loop waits for it
# bytes of a record whose checksum is computed, which takes 20 ms; of larger ones, only pictures and
# the like are taken, and the largest ones are left out
LARGEST = 64 << 10
LARGEST_EXAMPLE = (1 << 20) + 4096
LONGEST = 1 << 31  # bytes of a record in a file that is not broken
LATE_S = 5.0  # by which the clock of an event may lie before the begin of the work
MOST_TAGS = 1000  # of a file
MOST_PARAMS = 256
PHASES = ("train", "training", "val", "valid", "validation", "dev", "test", "eval", "evaluation")
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_HPARAMS = b"hparams"
_SCALARS = b"scalars"


class EventFileReader:
    """Finds event files and files of W&B runs below folders, and reads what is new in them.
    `described` takes settings (hparams), and `shown` what is no number: its name, kind, bytes, step
    and age in seconds.
    """

    def __init__(
        self,
        folders: Sequence[str],
        described: Callable[[dict[str, str]], object],
        *,
        shown: Callable[[str, str, bytes, float, float], object] | None = None,
        allowed: AllowedFolders | None = None,
        host: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folders, self._described, self._shown = folders, described, shown
        # the work can replace a folder by a link, which is followed into these alone
        self._allowed = AllowedFolders([*folders]) if allowed is None else allowed
        self._host = host  # only files of this host are read, if it is not ""
        self._artifacts = None if shown is None else ArtifactReader(shown)
        self._clock = clock
        self._began = clock() - LATE_S
        self._files: dict[tuple[int, int], RunFile] = {}
        self._name = _RunNames().name
        self._search_at = 0.0
        self._turn = 0  # the file that is read first

    def read(self, found: Found, *, last: bool = False) -> None:
        """Read what is new; to be called about once a second. `found` takes the values of a step,
        the step, and their age in seconds. With `last`, the work has ended: read all of it.
        """
        now = time.monotonic()
        if last or now >= self._search_at:
            self._search(last=last)
            spent = time.monotonic() - now
            self._search_at = now + max(SEARCH_S, SPARED * spent)
        until = now + END_S if last else time.monotonic() + TICK_S
        left = MOST_AT_END if last else MOST_RECORDS
        while left > 0:
            count = self._read(found, min(left, MOST_RECORDS), until)
            left -= count
            if not count or time.monotonic() >= until:
                break
        if last:
            for each in self._files.values():
                each.close()

    def _read(self, found: Found, most: int, until: float) -> int:
        """Read up to `most` records of all files, until a time of the monotonic clock. Return how
        many there were. The next call begins with the file after the one that was read last.
        """
        count, now = 0, self._clock()
        files, first = [*self._files.values()], self._turn
        for number in range(len(files)):
            file = files[(first + number) % len(files)]
            for event in file.read(most - count):
                count += 1
                self._take(file, event, now, found)
                if count >= most or time.monotonic() >= until:
                    self._turn = (first + number + 1) % len(files)
                    return count
        return count

    def _take(self, file: RunFile, event: RunEvent, now: float, found: Found) -> None:
        if not self._began <= event.at <= now + 3600:
            return  # written by an earlier run, or not a time
        if event.values:
            named = {self._name(file.folder, tag): value for tag, value in event.values.items()}
            found(named, float(event.step), max(0.0, now - event.at))
        if event.params:
            self._described(event.params)
        if self._shown is not None:
            for tag, kind, data in event.examples:
                name = self._name(file.folder, tag)
                self._shown(name, kind, data, float(event.step), max(0.0, now - event.at))

    def _search(self, *, last: bool) -> None:
        if self._artifacts is not None:
            self._artifacts.begin()
        now = self._clock() + (SETTLED_S if last else 0.0)
        for folder, here, name in self._list_files():
            try:
                if is_picture(folder, name):
                    if self._artifacts is not None:
                        self._artifacts.look(folder, here, name, self._began, now)
                    continue
                status = os.stat(name, dir_fd=here, follow_symlinks=False)
                key = (status.st_dev, status.st_ino)
                if (
                    key in self._files
                    or status.st_mtime < self._began
                    or not stat.S_ISREG(status.st_mode)
                ):
                    continue
                if len(self._files) >= MOST_FILES:
                    continue
                file = check_regular(os.open(name, _READ, dir_fd=here), name)
            except OSError:
                continue
            self._files[key] = self._make_file(folder, file, name)

    def _make_file(self, folder: str, fd: int, name: str) -> RunFile:
        file = GrowingFile(fd)
        records: _EventRecords | WandbRecords = _EventRecords(file)
        if name.endswith(WANDB_END):
            from .wandb_files import WandbRecords

            records = WandbRecords(file, self._host)
        return RunFile(folder, file, records.take, records.parse)

    def _list_files(self) -> Iterator[tuple[str, int, str]]:
        """Yield the folder of each event file, the folder's descriptor, and the file's name."""
        waiting = deque((folder, "", 0) for folder in dict.fromkeys(self._folders))
        left = MOST_ENTRIES
        while waiting and left > 0:
            top, below, depth = waiting.popleft()
            try:
                here = self._open_folder(top, below)
            except OSError:
                continue
            try:
                with os.scandir(here) as entries:
                    for entry in entries:
                        left -= 1
                        if left <= 0:
                            break
                        if entry.is_dir(follow_symlinks=False):
                            if depth < DEEPEST and not entry.name.startswith("."):
                                waiting.append((top, os.path.join(below, entry.name), depth + 1))
                            continue
                        folder = os.path.join(top, below) if below else top
                        is_events = MARK in entry.name and self._host in entry.name
                        if (
                            is_events
                            or entry.name.endswith(WANDB_END)
                            or is_picture(folder, entry.name)
                        ):
                            yield folder, here, entry.name
            except OSError:
                continue
            finally:
                os.close(here)

    def _open_folder(self, top: str, below: str) -> int:
        """Open a folder below one of `folders`. Raises OSError."""
        opened = self._allowed.open_folder(top)
        if not below:
            return opened
        try:
            return open_below(opened, below, os.O_RDONLY | os.O_DIRECTORY)
        finally:
            os.close(opened)


class _RunNames:
    """Names curves. TensorBoard has a run for each folder; most jobs have one run. The first folder
    with a tag has its plain name, others the folder's name before it.
    """

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}  # the folder that had a tag first
        self._known: dict[tuple[str, str], str] = {}

    def name(self, folder: str, tag: str) -> str:
        name = self._known.get((folder, tag))
        if name is None:
            name = self._make(folder, tag)
            if len(self._known) < MOST_TAGS:
                self._known[folder, tag] = name
        return name

    def _make(self, folder: str, tag: str) -> str:
        last = os.path.basename(folder)
        if last.lower() not in PHASES and self._owners.setdefault(tag, folder) == folder:
            return tag
        return tag if tag.startswith(last + "/") else f"{last}/{tag}"


class _EventRecords:
    """The records of an event file."""

    def __init__(self, file: GrowingFile) -> None:
        self._file = file
        self._plugins: dict[bytes, bytes] = {}  # of tags, which their first event alone names
        self._is_large = False  # whether the checksum of the record is not known

    def take(self) -> bytes | None:
        file = self._file
        if not file.fill(12):
            return None
        head = file.data[file.at : file.at + 8]
        length, crc = struct.unpack_from("<QI", file.data, file.at)
        if length > LONGEST or _head_crc(head) != crc:
            file.give_up()
            return None
        whole = 12 + length + 4
        self._is_large = length > LARGEST
        if length > LARGEST_EXAMPLE:
            if file.size() < file.place() + whole:
                return None
            file.skip(whole)
            return b""
        if not file.fill(whole):
            return None
        begin, end = file.at + 12, file.at + 12 + length
        data, (crc,) = file.data[begin:end], struct.unpack_from("<I", file.data, end)
        file.skip(whole)
        return data if self._is_large or masked_crc(data) == crc else b""

    def parse(self, record: bytes) -> RunEvent:
        event = RunEvent()
        scalar = _SCALAR.match(record)
        if scalar is not None and _fits(record, scalar):
            event.at, (event.values[scalar[3].decode("utf-8", "replace")],) = (
                struct.unpack("<d", scalar[1])[0],
                struct.unpack("<f", scalar[4]),
            )
            step, _ = read_varint(scalar[2], 0)
            event.step = step - (1 << 64) if step >> 63 else step
            return event
        try:
            for number, value in read_fields(record):
                if number == 1 and isinstance(value, bytes):
                    (event.at,) = struct.unpack("<d", value)
                elif number == 2 and isinstance(value, int):
                    event.step = value - (1 << 64) if value >> 63 else value
                elif number == 5 and isinstance(value, bytes):
                    for inner, part in read_fields(value):
                        if inner == 1 and isinstance(part, bytes):
                            self._parse_value(part, event)
        except (ValueError, struct.error, IndexError):
            return RunEvent()
        return event

    def _parse_value(self, data: bytes, event: RunEvent) -> None:
        fields = dict(read_fields(data))
        tag, plain, tensor = fields.get(1), fields.get(2), fields.get(8)
        plugin, content = _read_plugin(fields.get(9))
        if plugin == _HPARAMS and content and not self._is_large:
            event.params.update(read_params(content))
            return
        if not isinstance(tag, bytes) or not tag:
            return
        if plugin and len(self._plugins) < MOST_TAGS:
            self._plugins.setdefault(tag, plugin)
        plugin, name = self._plugins.get(tag, plugin), tag.decode("utf-8", "replace")
        value: float | None = None
        if isinstance(plain, bytes) and len(plain) == 4:
            (value,) = struct.unpack("<f", plain)
        elif isinstance(tensor, bytes) and plugin == _SCALARS:
            value = read_tensor(tensor)
        else:
            event.examples += read_value(name, fields, plugin)
        if value is not None and not self._is_large:
            event.values[name] = value


# An event with one number, as most are: the time, the step, and a summary of one value, of a tag
# and a `simple_value`, the lengths of which have one byte.
_SCALAR = re.compile(
    rb"\x09(.{8})\x10([\x80-\xff]{0,9}[\x00-\x7f])\x2a[\x00-\x7f]\x0a[\x00-\x7f]\x0a[\x01-\x7f]"
    rb"(.+)\x15(.{4})\Z",
    re.DOTALL,
)


def _fits(record: bytes, scalar: re.Match[bytes]) -> bool:
    """Return whether the lengths of a record are those of an event with one number."""
    begin, end = scalar.span(3)
    tag, size = end - begin, len(record)
    return (record[begin - 1], record[begin - 3], record[begin - 5]) == (
        tag,
        size - begin + 2,
        size - begin + 4,
    )


def _read_plugin(metadata: object) -> tuple[bytes, bytes]:
    """Return the name of a summary's plugin, and its content."""
    plugin = dict(read_fields(metadata)).get(1) if isinstance(metadata, bytes) else None
    if not isinstance(plugin, bytes):
        return b"", b""
    fields = dict(read_fields(plugin))
    name, content = fields.get(1, b""), fields.get(2, b"")
    return (name if isinstance(name, bytes) else b""), (
        content if isinstance(content, bytes) else b""
    )


# how `tensor_content` holds a number, by the tensor's type (tensorflow/core/framework/types.proto)
_FORMATS = {1: "<f", 2: "<d", 3: "<i", 4: "<B", 5: "<h", 6: "<b", 9: "<q", 10: "<?", 19: "<e"}
_FLOATS, _DOUBLES, _WHOLE = 5, 6, (7, 10, 11, 16, 17)  # fields with the values


def read_tensor(data: bytes) -> float | None:
    """Return the number of a tensor with one element, or None."""
    fields = dict(read_fields(data))
    kind, content = fields.get(1), fields.get(4)
    if isinstance(content, bytes) and content and isinstance(kind, int):
        if kind == 14 and len(content) == 2:  # bfloat16: the upper half of a float
            return float(struct.unpack("<f", b"\0\0" + content)[0])
        form = _FORMATS.get(kind, "")
        if form and len(content) == struct.calcsize(form):
            return float(struct.unpack(form, content)[0])
        return None
    for number, form in ((_FLOATS, "<f"), (_DOUBLES, "<d")):
        packed = fields.get(number)
        if isinstance(packed, bytes) and len(packed) == struct.calcsize(form):
            return float(struct.unpack(form, packed)[0])
    for number in _WHOLE:
        packed = fields.get(number)
        if isinstance(packed, bytes) and packed:
            packed, _ = read_varint(packed, 0)
        if isinstance(packed, int):
            return float(packed - (1 << 64) if packed >> 63 else packed)
    return None


def read_params(content: bytes) -> dict[str, str]:
    """Return the settings of a message of the plugin `hparams` (session_start_info)."""
    found: dict[str, str] = {}
    for number, started in read_fields(content):
        if number != 3 or not isinstance(started, bytes):
            continue
        for inner, entry in read_fields(started):
            if inner == 1 and isinstance(entry, bytes) and len(found) < MOST_PARAMS:
                pair = dict(read_fields(entry))
                name, value = pair.get(1), pair.get(2)
                if isinstance(name, bytes) and isinstance(value, bytes):
                    found[name.decode("utf-8", "replace")] = _read_setting(value)
    return found


def _read_setting(data: bytes) -> str:
    """Return a `google.protobuf.Value` as a text."""
    for number, value in read_fields(data):
        if number == 2 and isinstance(value, bytes):
            return f"{struct.unpack('<d', value)[0]:g}"
        if number == 3 and isinstance(value, bytes):
            return value.decode("utf-8", "replace")
        if number == 4:
            return "true" if value else "false"
    return ""


@lru_cache(maxsize=1)
def _tables() -> tuple[array[int], array[int], array[int]]:
    """Return the tables of CRC-32C for a byte, for two bytes at a time, and for the first two of
    four bytes at a time, with the polynomial of Castagnoli (RFC 3720, appendix B.4)."""
    one = array("I")
    for each in range(256):
        for _ in range(8):
            each = each >> 1 ^ (0x82F63B78 if each & 1 else 0)
        one.append(each)
    two = array("I")
    for each in range(65536):
        first = one[each & 255] ^ each >> 8
        two.append(one[first & 255] ^ first >> 8)
    four = array("I", [two[each & 65535] ^ each >> 16 for each in two])
    return one, two, four


def masked_crc(data: bytes) -> int:
    """Return the checksum of a record: CRC-32C, rotated by 15 bits, plus a constant
    (tensorflow/core/lib/hash/crc32c.h)."""
    one, two, four = _tables()
    crc, words = 0xFFFFFFFF, array("I", data[: len(data) & ~3])
    if byteorder == "big":
        words.byteswap()
    for word in words:
        crc ^= word
        crc = four[crc & 65535] ^ two[crc >> 16]
    for each in data[len(data) & ~3 :]:
        crc = one[(crc ^ each) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return (crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8 & 0xFFFFFFFF


_head_crc = lru_cache(maxsize=1024)(masked_crc)  # most records have one of few lengths
