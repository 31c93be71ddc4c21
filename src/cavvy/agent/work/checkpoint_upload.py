"""Uploads the files of the checkpoint folder to the control plane. May block."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from functools import partial

from ..allowed_folders import AllowedFolders, open_below
from ..disk import open_own, read_known, read_text, write_whole
from ..http_client import (
    CHUNK,
    FAULTS,
    BlockingClient,
)
from ..outbox import time_text
from .checkpoint_choice import FILLED_S, LookResult, choose_files
from .checkpoint_files import (
    NEWEST_NS,
    FileEntry,
    born_ns,
    check_names,
    list_checkpoint,
    newest,
    read_rows,
    split_names,
    write_rows,
)
from .database_copies import DATABASE, JOURNALS, DatabaseCopies
from .open_files import find_open
from .sparse_files import find_extents, map_stored
from .trees import copy_open, remove_tree
from .unsafe_files import OPEN, REWRITTEN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..config import AgentConfig

    Tell = Callable[[str], None]

# Errors that opening a listed file raises if the work has removed it, or replaced it with a link or
# another file.
REPLACED = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO)
FULL = 507
MISMATCH = 422
# If a file changed less than this many ns before it was read, it may change again without getting a
# different time.
RACY_NS = 2_000_000_000
# tries of a commit; before each retry, files that the control plane has lost are sent again
COMMITS = 5
LISTS = 5  # maximum tries to list the folder twice with the same result
PART = 16 * 1024 * 1024  # maximum bytes of one request; some transports allow at most 64 MiB


class FileChanged(Exception):
    """Raised if a file changed while the upload read it."""


def copies_of(config: AgentConfig) -> str:
    """Return the folder that holds copies of files during the upload."""
    return config.private + "/copies"


def tell_waiting(text: str) -> None:
    """Print a line that reports what the upload is waiting for."""
    os.write(1, (json.dumps({"state": "waits", "reason": text}) + "\n").encode())


class CheckpointUpload:
    """Uploads the files `entries` of the checkpoint folder. Keeps the files open, so that this
    process can read their content even after the work has replaced or removed them. If `may_vanish`
    is set, files that the work removed before they were opened are left out by `choose`. If `packs`
    is set, sparse files are stored without their holes.
    """

    def __init__(
        self,
        config: AgentConfig,
        folder: str,
        entries: list[FileEntry],
        tell: Tell | None = None,
        *,
        given: list[str] | None = None,
        may_vanish: bool = False,
        packs: bool = False,
    ) -> None:
        self._config = config
        self._tell = tell
        self._top = AllowedFolders([config.folder], given).open_folder(folder)
        self._line = BlockingClient(config)
        self._entries = entries
        self._open: dict[str, int] = {}
        self._names: dict[str, str] = {}
        self._databases: dict[str, FileEntry] = {}
        self._packs, self._extents = packs, dict[str, list[list[int]]]()
        self._known_path = config.private + "/hashes.json"
        self._known = read_known(self._known_path)  # path -> [size, time, inode, hash, extents]
        self._copies = copies_of(config)
        self._growing: frozenset[str] = frozenset()
        self._kept: list[dict[str, object]] = []
        self._lost: set[str] = set()  # files that the work removed before they were opened
        self._folder, self._given = folder, given
        self.listed, self.unnamed, self.all_entries, self.is_all = entries, "", entries, True
        self.unsafe: dict[str, str] = {}  # files that no checkpoint has yet -> why
        check_names(entries)
        for entry in entries:
            try:
                if not entry.link:
                    self._open[entry.path] = self._open_entry(entry)
            except FileChanged:
                if not may_vanish:
                    raise
                self._lost.add(entry.path)
            except OSError:
                # This process may open no more files. The remaining files are opened and checked
                # when they are read.
                break

    @classmethod
    def look(
        cls, config: AgentConfig, folder: str, given: list[str] | None, *, quiet: bool
    ) -> CheckpointUpload:
        """List the folder and open its files, without those whose names cannot be stored. Raises
        OSError."""
        listed = list_checkpoint(config, folder, given)
        for _ in range(LISTS):
            # two equal lists show that all the files existed at one moment
            before, listed = listed, list_checkpoint(config, folder, given)
            if _list_names(before) == _list_names(listed):
                break
        entries, unnamed = split_names(listed)
        tell = None if quiet else tell_waiting
        found = cls(config, folder, entries, tell, given=given, may_vanish=True, packs=True)
        found.listed, found.unnamed = listed, unnamed
        found.copy_databases()
        return found

    def copy_databases(self) -> None:
        """Copy the databases that the work has open, and read the copies from now on. Raises
        OSError."""
        os.makedirs(self._copies, exist_ok=True)
        copies = DatabaseCopies(self._top, self._copies)
        open_files = {
            each.inode: self._open[each.path] for each in self._entries if each.path in self._open
        }
        writers = find_open(open_files)[0]
        for entry in self._entries:
            if entry.inode in writers and entry.path in self._open:
                copies.copy(entry, self._open[entry.path])
        self._databases = copies.entries
        for path, file in copies.files.items():
            if path in self._open:
                os.close(self._open[path])
            self._open[path] = file
        self._entries = self._with_databases(self._entries)

    def _with_databases(self, entries: list[FileEntry]) -> list[FileEntry]:
        """Return the list with the copied databases and their journals as they were copied."""
        names = {path + each for path in self._databases for each in ("", *JOURNALS)}
        others = [entry for entry in entries if entry.path not in names]
        return sorted([*others, *self._databases.values()])

    def close(self) -> None:
        """Close the files."""
        for file in self._open.values():
            os.close(file)
        self._open.clear()
        os.close(self._top)

    @property
    def entries(self) -> list[FileEntry]:
        """The files of the folder that are uploaded."""
        return self._entries

    @property
    def count(self) -> int:
        """The number of the checkpoint's files."""
        return len(self._entries) + len(self._kept)

    @property
    def size(self) -> int:
        """The size of the checkpoint's files."""
        kept = sum(int(str(row.get("size", 0))) for row in self._kept)
        return kept + sum(int(entry.size) for entry in self._entries)

    def choose(
        self,
        *,
        since: list[FileEntry] | None = None,
        restless: frozenset[str] = frozenset(),
        filled_s: float = FILLED_S,
        ended: bool = False,
        cut_ns: int = 0,
        torn: frozenset[int] = frozenset(),
    ) -> frozenset[str]:
        """Restrict the upload to the files that are whole, as a second list of the folder shows.
        Return the files of the newest checkpoint that the work is changing. Raises OSError."""
        writers, unknown = find_open(
            {
                entry.inode: self._open[entry.path]
                for entry in self._entries
                if entry.path in self._open
            }
        )
        second = split_names(list_checkpoint(self._config, self._folder, self._given))[0]
        look = LookResult(
            self._entries,
            self._with_databases(second),
            find_status=self._find_status,
            writers=writers,
            unknown=unknown,
            before=read_rows(self._config),
            extends=self._extends,
            read_start=self._read_start,
            since=since,
            restless=restless,
            find_birth=lambda path: born_ns(os.path.join(self._folder, path)),
            filled_s=filled_s,
            ended=ended,
            cut_ns=cut_ns,
            torn=torn,
        )
        choice = choose_files(look)
        self._entries, self._growing, self._kept = choice.taken, choice.growing, choice.kept
        self.is_all = choice.is_all and second == self._entries
        written = {entry.path for entry in self.all_entries if entry.inode in writers}
        self.unsafe = {
            path: OPEN if path in written else REWRITTEN for path in sorted(choice.unsafe)
        }
        return choice.busy

    def _find_status(self, entry: FileEntry) -> os.stat_result | None:
        if entry.path in self._lost:
            return None
        try:
            return os.fstat(self.get_file(entry))
        except FileChanged:
            return None

    def _read_start(self, entry: FileEntry) -> bytes:
        try:
            return os.pread(self.get_file(entry), len(DATABASE), 0)
        except FileChanged:
            return b""

    def _extends(self, entry: FileEntry, row: dict[str, object]) -> bool:
        """Return whether the file begins with its version `row` of the newest checkpoint."""
        size = int(str(row["size"]))
        if not 0 < size <= entry.size or row.get("data") is not None:
            return False
        found, reader = hashlib.sha256(), UploadBody(self, entry, 0, size)
        try:
            while data := reader.read(CHUNK):
                found.update(data)
        except FileChanged:
            return False
        return found.hexdigest() == row["sha256"]

    def is_same(self) -> bool:
        """Return whether the files are those of the newest checkpoint, or none."""
        rows = self._list_rows()
        return not rows or rows == read_rows(self._config)

    def remember(self) -> None:
        """Store the list of files of the checkpoint that was committed just now."""
        write_rows(self._config, self._list_rows())

    def copy(self) -> None:
        """Copy the files that the server might lack, so that the upload reads the copies instead of
        the original files."""
        remove_tree(self._copies)
        os.makedirs(self._copies)
        folder = open_own(self._copies, os.O_RDONLY | os.O_DIRECTORY)
        for count, entry in enumerate(self._entries):
            if entry.link or self._get_known(entry):
                continue
            copy_open(self.get_file(entry), str(count), folder=folder)
            self._check(entry)
            if entry.path in self._growing:
                os.truncate(f"{self._copies}/{count}", entry.size)
                os.utime(f"{self._copies}/{count}", ns=(entry.mtime_ns,) * 2)
            os.close(self._open[entry.path])
            self._open[entry.path] = open_below(folder, str(count), os.O_RDONLY)
        os.close(folder)

    def hash(self) -> None:
        """Hash every file's content."""
        kept: dict[str, list[object]] = {}
        for entry in self._entries:
            if entry.link:
                continue
            name = self._get_known(entry)
            extents = self._find_extents(entry, is_known=name is not None)
            if extents is not None:
                self._extents[entry.path] = extents
            name = name or self._hash(entry)
            self._names[entry.path] = name
            if entry.mtime_ns < time.time_ns() - RACY_NS and entry.path not in self._growing:
                kept[entry.path] = [*entry[1:4], name, extents]
        try:
            write_whole(self._known_path, json.dumps(kept))
        except OSError:
            return  # without the stored hashes, the next upload reads all files again

    def send(self) -> tuple[int, int]:
        """Send the missing files and commit the checkpoint. Returns the checkpoint's number and the
        bytes sent. Raises FileChanged, TransferFailed.
        """
        sent = 0
        names = sorted(set(self._names.values()))
        for _ in range(COMMITS):
            asked = json.dumps({"blobs": names}).encode()
            answer = json.loads(self._line.read("POST", "blobs/missing", asked, self._tell))
            missing, direct = set(answer["missing"]), bool(answer.get("direct"))
            for entry in self._entries:
                name = self._names.get(entry.path)
                if name is not None and name in missing:
                    missing.discard(name)
                    (self._send_direct if direct else self._send)(entry, name)
                    sent += self.get_stored_size(entry)
            number = json.loads(self._line.read("POST", "checkpoints", self._commit(), self._tell))[
                "number"
            ]
            if isinstance(number, int):
                return number, sent
        raise FileChanged("the files on the control plane")

    def _send_direct(self, entry: FileEntry, name: str) -> None:
        """Send one file to the job's bucket. Raises FileChanged, TransferFailed."""
        from ..data.transfer import send_file

        read = partial(self._read_at, entry)
        send_file(self._config, name, self.get_stored_size(entry), read, self._tell)

    def _read_at(self, entry: FileEntry, offset: int, length: int) -> bytes:
        data = self.read(entry, offset, length)
        self._check(entry)
        if len(data) != length:
            raise FileChanged(entry.path)
        return data

    def read(self, entry: FileEntry, offset: int, length: int) -> bytes:
        """Return bytes of the file's stored content. Raises FileChanged."""
        file, extents = self.get_file(entry), self._extents.get(entry.path)
        if extents is None:
            return os.pread(file, length, offset)
        return b"".join(os.pread(file, n, at) for at, n in map_stored(extents, offset, length))

    def get_stored_size(self, entry: FileEntry) -> int:
        """Return the size in bytes of the file's stored content."""
        extents = self._extents.get(entry.path)
        return int(entry.size) if extents is None else sum(length for _, length in extents)

    def _find_extents(self, entry: FileEntry, *, is_known: bool) -> list[list[int]] | None:
        if not self._packs or entry.path in self._growing:
            return None
        if is_known:
            known = self._known[entry.path][4:]
            return known[0] if known else None
        return find_extents(self.get_file(entry), entry.size)

    def _send(self, entry: FileEntry, name: str) -> None:
        """Send one file to the control plane. After a failure, continue after the last byte that
        the control plane has received.
        """
        offset, size = 0, self.get_stored_size(entry)
        while True:
            query = f"&offset={offset}&size={size}" if size > PART else ""
            part = UploadBody(self, entry, offset if query else 0, min(offset + PART, size))
            try:
                reply = self._line.ask("PUT", f"blobs/{name}", part, query)
                data = reply.read()
            except FAULTS:
                self._check(entry)
                self._line.wait()
                continue
            if reply.status == 200:
                offset = json.loads(data)["offset"]
                if offset >= size:
                    return
                continue
            if reply.status == MISMATCH:
                raise FileChanged(entry.path)
            self._line.check(reply.status, "a checkpoint", data)
            told = (
                '{"state": "full"}'
                if reply.status == FULL
                else f"{name[:12]}: status {reply.status}"
            )
            os.write(1, f"{told}\n".encode())
            self._line.wait()

    def list_contents(self) -> dict[str, tuple[FileEntry, Callable[[int, int], bytes]]]:
        """Map each content hash to a file with this content and a function that reads the file."""
        found: dict[str, tuple[FileEntry, Callable[[int, int], bytes]]] = {}
        for entry in self._entries:
            if entry.path in self._names:
                found[self._names[entry.path]] = entry, partial(self._read_at, entry)
        return found

    def describe(self) -> dict[str, object]:
        """Return the body of a commit request: the hashed files and the time of the newest file."""
        made_at = time_text(newest(self._entries) / 1e9 if self._entries else time.time())
        return {"made_at": made_at, "files": self._list_rows()}

    def _list_rows(self) -> list[dict[str, object]]:
        files: list[dict[str, object]] = [*self._kept]
        for path, size, mtime, _, mode, link in self._entries:
            if link:
                files.append({"path": path, "link": link})
            else:
                name = self._names[path]
                mtime = max(-NEWEST_NS, min(mtime, NEWEST_NS))
                files.append(
                    {"path": path, "sha256": name, "size": size, "mode": mode, "mtime_ns": mtime}
                )
                if path in self._extents:
                    files[-1]["data"] = self._extents[path]
        return sorted(files, key=lambda row: str(row["path"]))

    def _commit(self) -> bytes:
        nonce = read_text(self._config.private + "/claim")
        who = {"gang": self._config.gang, "rank": self._config.rank, "nonce": nonce}
        return json.dumps(dict(who, **self.describe())).encode()

    def _hash(self, entry: FileEntry) -> str:
        found = hashlib.sha256()
        reader = UploadBody(self, entry)
        while True:
            data = reader.read(CHUNK)
            if not data:
                break
            found.update(data)
        self._check(entry)
        return found.hexdigest()

    def _get_known(self, entry: FileEntry) -> str | None:
        known = self._known.get(entry.path)
        return str(known[3]) if known and known[:3] == list(entry[1:4]) else None

    def get_file(self, entry: FileEntry) -> int:
        """Return a descriptor of the listed file; open the file if necessary. Raises FileChanged if
        the work has replaced the file.
        """
        if entry.path not in self._open:
            opened = self._open_entry(entry)
            if len(self._open) > 100:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[entry.path] = opened
            self._check(entry)
        return self._open[entry.path]

    def _open_entry(self, entry: FileEntry) -> int:
        """Open a file of the listing. Raises FileChanged if another file now has the listed file's
        path. Raises OSError."""
        try:
            file = open_below(self._top, entry.path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in REPLACED:
                raise FileChanged(entry.path) from error
            raise
        if os.fstat(file).st_ino != entry.inode:
            os.close(file)
            raise FileChanged(entry.path)
        return file

    def _check(self, entry: FileEntry) -> None:
        """Raise FileChanged if the open file differs from its entry in the listing."""
        if entry.path in self._open:
            seen = os.fstat(self._open[entry.path])
            if entry.path in self._growing and seen.st_size >= entry.size:
                return
            if (seen.st_size, seen.st_mtime_ns) != (entry.size, entry.mtime_ns):
                raise FileChanged(entry.path)


class UploadBody:
    """A request body for http.client that contains one file or a part of the file."""

    def __init__(
        self, saving: CheckpointUpload, entry: FileEntry, start: int = 0, end: int | None = None
    ) -> None:
        self._saving = saving
        self._entry = entry
        self._at = start
        self._end = saving.get_stored_size(entry) if end is None else end
        self.size = self._end - start

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes of the file. Raises FileChanged if the file has become shorter."""
        left = self._end - self._at
        data = self._saving.read(self._entry, self._at, min(left, size if size > 0 else CHUNK))
        if left and not data:
            raise FileChanged(self._entry.path)
        self._at += len(data)
        return data


def _list_names(entries: list[FileEntry]) -> list[tuple[str, int, str]]:
    return [(entry.path, entry.inode, entry.link) for entry in entries]
