"""Creates a snapshot of a working folder: a manifest that lists each file with the hash of its
content. The hash of the manifest is the name of the snapshot.

Errors:

* FreezeError    no snapshot of the folder can be made; the user must change the folder
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from cavvy.domain.values import Struct, replace
from cavvy.spec.ignore import OWN_FILE, mark_files

# A larger folder is nearly always a mistake: it contains data or an environment that should be
# listed in an ignore file.
MOST_BYTES = 10 << 30
MOST_FILES = 200_000
# of a home folder, and of folders that are submitted without `workdir`
MOST_OWN_BYTES = 1 << 30
MOST_OWN_FILES = 20_000
OWN_FOLDER = "move the task file and the files that the work needs into a folder of their own"
# A cached hash is used only if, when the cache was written, the file had not changed for this long.
# A file with a more recent change may have changed again within the same clock tick.
_SETTLE_NS = 2_000_000_000
_CACHE_FORMAT = 2
# A private key as text (RFC 7468, section 10; OpenSSH and PGP use the same form), also inside of
# JSON. Keys have less than 20 KB.
_KEY = re.compile(rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----(?:\r?\n|\\n)")
_KEY_BYTES = 64 << 10
_NAMED = 3
# A function that is called with the number of bytes read so far and the total number of bytes.
Progress = Callable[[int, int], None]


class FreezeError(Exception):
    """Raised if no snapshot of the folder can be made. The message names the file and suggests a
    fix."""

    code: ClassVar[str] = "workdir_refused"
    status: ClassVar[int] = 422

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.hint = hint


class FolderEntry(Struct, frozen=True, kw_only=True):
    """One file of a snapshot, or one link with its target. `path` is relative to the folder and
    uses slashes.
    """

    path: str
    size: int = 0
    mode: int = 0o644  # 0o755 if the owner may execute the file
    sha256: str = ""
    link: str | None = None
    # These two are facts of this machine, and no part of the manifest.
    is_tracked: bool | None = None  # by git; None where there is no git to say so
    has_key: bool = False  # whether the file begins with, or soon has, a private key as text


class FrozenFile(Struct, frozen=True):
    """The content of a file in a snapshot: its first `size` bytes, because a program may append to
    the file later."""

    path: Path
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSnapshot:
    """A snapshot of a folder. `hash` is the SHA-256 of `manifest`. Equal folders have equal hashes
    on all machines.
    """

    folder: Path
    entries: tuple[FolderEntry, ...]
    manifest: bytes = field(repr=False)
    hash: str
    notes: tuple[str, ...] = ()  # messages for the user, for example about files that are left out
    parts: tuple["FolderSnapshot", ...] = ()  # the snapshots from which this one was merged
    single: bool = False  # whether this is the snapshot of one file instead of a folder

    @property
    def size(self) -> int:
        """The total size of all files in bytes."""
        return sum(entry.size for entry in self.entries)

    def blobs(self) -> dict[str, bytes | FrozenFile]:
        """Return all content to upload, by SHA-256: the manifest and the contents of the files.
        Equal contents appear only once.
        """
        files: dict[str, bytes | FrozenFile] = {
            entry.sha256: FrozenFile(part.folder / entry.path, entry.size)
            for part in self.parts or (self,)
            for entry in part.entries
            if entry.link is None
        }
        return {**files, self.hash: self.manifest}


Found = tuple[FolderEntry, os.stat_result]


def freeze(
    folder: Path,
    *,
    progress: Progress | None = None,
    cache: Path | None = None,
    state: Path | None = None,
    only: str | None = None,
    most_bytes: int = MOST_BYTES,
    most_files: int = MOST_FILES,
) -> FolderSnapshot:
    """Create a snapshot of a folder. `cache` is a folder that stores the hashes of unchanged files.

    `state` is Cavvy's own folder, which contains keys and is never part of a snapshot. Files that
    `.gitignore` or `.cavvyignore` excludes are left out. In a repository, git itself applies
    `.gitignore`. Of the user's home folder, hidden files and folders are left out, since programs
    keep keys in them, and it may have at most MOST_OWN_BYTES and MOST_OWN_FILES. If `only` is
    given, the snapshot contains only that file. Raises FreezeError.
    """
    folder = Path(os.path.abspath(folder))
    found, notes = list_folder(
        folder, state=state, only=only, most_bytes=most_bytes, most_files=most_files
    )
    entries = _hash_all(folder, found, _Cache(cache, folder), progress)
    manifest = encode_manifest(entries)
    return FolderSnapshot(
        folder=folder,
        entries=entries,
        manifest=manifest,
        hash=hashlib.sha256(manifest).hexdigest(),
        notes=tuple(notes),
        single=only is not None,
    )


def list_folder(
    folder: Path,
    *,
    state: Path | None = None,
    only: str | None = None,
    most_bytes: int = MOST_BYTES,
    most_files: int = MOST_FILES,
) -> tuple[list[Found], list[str]]:
    """Return the files that a snapshot of the folder would contain, without their hashes, and
    messages for the user. The arguments are the same as for `freeze`. Raises FreezeError.
    """
    if only is None:
        check_folder(folder)
    is_home = only is None and folder.resolve() == Path.home().resolve()
    if is_home:
        most_bytes, most_files = min(most_bytes, MOST_OWN_BYTES), min(most_files, MOST_OWN_FILES)
    try:
        marks = mark_files(folder, hidden=not is_home) if only is None else {only: None}
    except OSError as error:
        raise FreezeError(
            f"cannot read {error.filename or folder}: {error.strerror}",
            f"make it readable, or list it in {OWN_FILE}",
        ) from error
    paths, left_out = _without_state(folder, list(marks), state)
    if is_home:
        left_out.append(f"{folder} is your home folder: its hidden files and folders stay here")
    if len(paths) > most_files:
        raise FreezeError(
            f"{folder} has {len(paths):,} files, which is more than the limit of {most_files:,}",
            OWN_FOLDER if is_home else _ignore_hint(paths),
        )
    found, notes = _look(folder, {path: marks[path] for path in paths})
    _check_size(folder, found, most_bytes)
    return found, left_out + notes + _name_untracked(folder, found)


def _name_untracked(folder: Path, found: Sequence[Found]) -> list[str]:
    """Return a message about the files that git does not track and that no ignore file names: of
    these alone, no one has said yet whether others may have them. What its owner has closed to
    other users is named first, and then what is hidden.
    """
    untracked = [
        (bool(seen.st_mode & 0o044) or not folder.stat().st_mode & 0o044, entry.path)
        for entry, seen in found
        if entry.is_tracked is False and entry.link is None
    ]
    if not untracked:
        return []
    untracked.sort(key=lambda each: (each[0], not f"/{each[1]}".count("/."), each[1]))
    names, more = [path for _, path in untracked[:_NAMED]], len(untracked) - _NAMED
    told = f"{', '.join(names)}{f' and {more:,} more' if more > 0 else ''}"
    return [f"git does not track {told}, sent too; what must stay here belongs into {OWN_FILE}"]


def combine(snapshots: Mapping[str, FolderSnapshot]) -> FolderSnapshot:
    """Merge several snapshots into one. Each key is a path in the result, and "" is the top of the
    result. The files of a snapshot are placed below its key, but a single file is placed exactly at
    its key. If several files have the same path, the last file is used.
    """
    found: dict[str, FolderEntry] = {}
    for below, part in snapshots.items():
        for entry in part.entries:
            path = f"{below}/{entry.path}" if below else entry.path
            path = below if part.single else path
            found[path] = replace(entry, path=path)
    entries = tuple(found[path] for path in sorted(found))
    manifest = encode_manifest(entries)
    return FolderSnapshot(
        folder=next(iter(snapshots.values())).folder,
        entries=entries,
        manifest=manifest,
        hash=hashlib.sha256(manifest).hexdigest(),
        notes=tuple(note for part in snapshots.values() for note in part.notes),
        parts=tuple(snapshots.values()),
    )


def check_folder(folder: Path) -> None:
    """Raise FreezeError if this folder cannot be a working folder."""
    folder = Path(os.path.abspath(folder))
    if not folder.exists():
        raise FreezeError(
            f"the working folder {folder} does not exist", "change `workdir` in the task file"
        )
    if not folder.is_dir():
        raise FreezeError(
            f"the working folder {folder} is a file", "use the folder that contains the file"
        )
    if folder.resolve() == Path("/"):
        raise FreezeError(
            f"{folder} contains your home folder, which cannot be submitted", OWN_FOLDER
        )


def _look(folder: Path, paths: Mapping[str, bool | None]) -> tuple[list[Found], list[str]]:
    """For each path, return an entry without a hash; also return messages for the user. Files that
    no longer exist are left out.
    """
    found: list[Found] = []
    notes: list[str] = []
    for path, tracked in paths.items():
        full = folder / path
        try:
            path.encode()
            seen = full.lstat()
            if stat.S_ISLNK(seen.st_mode):
                found.append((_link(folder, path, notes), seen))
            elif stat.S_ISREG(seen.st_mode):
                mode = 0o755 if seen.st_mode & stat.S_IXUSR else 0o644
                entry = FolderEntry(path=path, size=seen.st_size, mode=mode, is_tracked=tracked)
                found.append((entry, seen))
            else:
                notes.append(f"{path} is left out because it is a {_sort_of(seen.st_mode)}")
        except FileNotFoundError:
            continue
        except UnicodeEncodeError as error:
            raise FreezeError(f"the name of {path!r} is not UTF-8", "rename the file") from error
        except OSError as error:
            raise FreezeError(
                f"cannot read {path}: {error.strerror}",
                f"make it readable, or list it in {OWN_FILE}",
            ) from error
    return found, notes


def _without_state(
    folder: Path, paths: list[str], state: Path | None
) -> tuple[list[str], list[str]]:
    """Return the paths that are not inside Cavvy's state folder, and a message if any path is
    inside the state folder.
    """
    inside = (
        ".."
        if state is None
        else os.path.relpath(os.path.realpath(state), os.path.realpath(folder))
    )
    if inside.split("/")[0] == "..":
        return paths, []
    if inside == ".":
        raise FreezeError(
            f"{folder} is Cavvy's own folder for state and keys", "run from another folder"
        )
    kept = [path for path in paths if not path.startswith(f"{inside}/")]
    return kept, [f"{inside} is left out because it contains Cavvy's own state"] if len(kept) < len(
        paths
    ) else []


def _link(folder: Path, path: str, notes: list[str]) -> FolderEntry:
    target = os.readlink(folder / path)
    try:
        target.encode()
    except UnicodeEncodeError as error:
        raise FreezeError(
            f"the target of the link {path} is not UTF-8",
            f"change the link, or list it in {OWN_FILE}",
        ) from error
    landing = os.path.normpath(os.path.join(os.path.dirname(folder / path), target))
    if os.path.isabs(target) or os.path.commonpath([landing, folder]) != str(folder):
        notes.append(
            f"{path} is a link to {target} outside of the folder: the link is kept, but its target "
            "is not included"
        )
    return FolderEntry(path=path, mode=0o777, link=target)


def _sort_of(mode: int) -> str:
    tests = ((stat.S_ISSOCK, "socket"), (stat.S_ISFIFO, "named pipe"), (stat.S_ISBLK, "device"))
    return next(
        (name for test, name in tests if test(mode)),
        "device" if stat.S_ISCHR(mode) else "special file",
    )


def _check_size(folder: Path, found: Sequence[Found], most_bytes: int) -> None:
    total = sum(entry.size for entry, _ in found)
    if total > most_bytes:
        biggest = sorted(found, key=lambda item: -item[0].size)[:3]
        names = ", ".join(f"{entry.path} ({_size_words(entry.size)})" for entry, _ in biggest)
        raise FreezeError(
            f"{folder} contains {_size_words(total)}, which is more than the limit of "
            f"{_size_words(most_bytes)}; the largest files are {names}",
            f"list unneeded files in {OWN_FILE}, and keep data outside of the working folder",
        )


def _ignore_hint(paths: Sequence[str]) -> str:
    counts: dict[str, int] = {}
    for path in paths:
        top = path.split("/", 1)[0]
        counts[top] = counts.get(top, 0) + 1
    top, count = max(counts.items(), key=lambda item: item[1])
    return (
        f"{count:,} of the files are in {top}; if the work does not need them, list {top} in "
        f"{OWN_FILE}, or {OWN_FOLDER}"
    )


def _size_words(size: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size = size / 1024  # type: ignore[assignment] # only printed
    return f"{size:.1f} GiB"


def _hash_all(
    folder: Path, found: Sequence[Found], cache: "_Cache", progress: Progress | None
) -> tuple[FolderEntry, ...]:
    total, done = sum(entry.size for entry, _ in found), 0
    entries: list[FolderEntry] = []
    for entry, seen in found:
        if entry.link is None:
            known = cache.get(entry.path, seen)
            read = (seen.st_size, *known) if known else _hash(folder, entry.path, cache)
            if read is not None:
                size, digest, has_key = read
                entries.append(replace(entry, size=size, sha256=digest, has_key=has_key))
            done += entry.size
            if progress is not None:
                progress(done, total)
        else:
            entries.append(entry)
    cache.write()
    return tuple(entries)


def _hash(folder: Path, path: str, cache: "_Cache") -> tuple[int, str, bool] | None:
    """Return the size and SHA-256 of a file, and whether it has a private key; or None if the file
    no longer exists. If the file changes while it is read, it is read again, up to three times in
    total. Raises FreezeError.
    """
    for _ in range(3):
        try:
            with open(folder / path, "rb") as stream:
                before = os.fstat(stream.fileno())
                has_key = _KEY.search(stream.read(_KEY_BYTES)) is not None
                stream.seek(0)
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
                after = os.fstat(stream.fileno())
        except FileNotFoundError:
            return None
        except OSError as error:
            hint = f"make it readable, or list it in {OWN_FILE}"
            raise FreezeError(f"cannot read {path}: {error.strerror}", hint) from error
        if _identity(before) == _identity(after):
            cache.put(path, after, digest, has_key)
            return after.st_size, digest, has_key
    raise FreezeError(
        f"{path} keeps changing",
        f"stop the program that writes the file, or list the file in {OWN_FILE}",
    )


def _identity(seen: os.stat_result) -> tuple[int, int, int, int]:
    return seen.st_mtime_ns, seen.st_ctime_ns, seen.st_size, seen.st_ino


def encode_manifest(entries: Sequence[FolderEntry]) -> bytes:
    """Return the manifest of a folder with these entries, which are sorted by path."""
    files = [
        {"path": entry.path, "link": entry.link}
        if entry.link is not None
        else {"path": entry.path, "sha256": entry.sha256, "mode": entry.mode, "size": entry.size}
        for entry in entries
    ]
    return json.dumps(
        {"files": files}, separators=(",", ":"), ensure_ascii=False, sort_keys=True
    ).encode()


class _Cache:
    """Caches the hashes of unchanged files by path, times, size and inode. Without the cache, all
    files are hashed again.
    """

    def __init__(self, root: Path | None, folder: Path) -> None:
        name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:32]
        self._file = root / f"{name}.json" if root else None
        self._known: dict[str, list[object]] = {}
        self._fresh: dict[str, list[object]] = {}
        self._written_ns = 0
        if self._file is not None:
            self._read(self._file)

    def _read(self, file: Path) -> None:
        try:
            self._written_ns = file.stat().st_mtime_ns
            content = json.loads(file.read_bytes())
        except (OSError, ValueError):
            return
        files = (
            content.get("files")
            if isinstance(content, dict) and content.get("format") == _CACHE_FORMAT
            else None
        )
        if isinstance(files, dict):
            self._known = files

    def get(self, path: str, seen: os.stat_result) -> tuple[str, bool] | None:
        row = self._known.get(path)
        if not isinstance(row, list) or len(row) != 6 or row[:4] != list(_identity(seen)):
            return None
        # A file can change twice within one clock tick, and its times then do not show the second
        # change. Git calls such entries racy.
        if max(seen.st_mtime_ns, seen.st_ctime_ns) > self._written_ns - _SETTLE_NS:
            return None
        digest, has_key = row[4:]
        if not isinstance(digest, str) or len(digest) != 64 or not isinstance(has_key, bool):
            return None
        self._fresh[path] = row
        return digest, has_key

    def put(self, path: str, seen: os.stat_result, digest: str, has_key: bool) -> None:
        self._fresh[path] = [*_identity(seen), digest, has_key]

    def write(self) -> None:
        if self._file is None:
            return
        whole = json.dumps({"format": _CACHE_FORMAT, "files": self._fresh}, separators=(",", ":"))
        partial = self._file.with_suffix(f".{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            partial.write_text(whole)
            partial.replace(self._file)
        except OSError:
            partial.unlink(missing_ok=True)
