"""Writes an archive of a whole server (`cavvy server backup`), and unpacks it with a check of every
byte.

The archive is a tar file. The archive contains `cavvy.db`, the keys, and the other files of the
state folder or of `server.files`, which may be a bucket. The last file is `manifest.json`, with the
SHA-256 of every file and of the rows of every table. An archive without `manifest.json` is
incomplete. The database is copied first, so that all files to which the database's rows refer exist
when the files are read. A PostgreSQL database is copied from one snapshot into a SQLite file, so an
archive can be restored into PostgreSQL or SQLite.

The server may run during the backup.

The functions that list and copy the files of a state folder also serve moves and restores, as do
the temporary folders inside a state folder for copies of the database with all secrets.
"""

import fcntl
import io
import os
import shutil
import sqlite3
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from errno import EEXIST, EISDIR, ENAMETOOLONG, ENOTDIR
from hashlib import file_digest, sha256
from itertools import chain
from pathlib import Path
from tempfile import mkdtemp
from typing import IO, BinaryIO

from msgspec import MsgspecError
from msgspec.json import decode, encode, format

from cavvy import __version__
from cavvy.client.state import host_name
from cavvy.domain.values import Struct
from cavvy.server.database import choose_bucket, choose_database, choose_files
from cavvy.server.state_dir import StateDir, StateDirError
from cavvy.server.stored_files import IN_BUCKET
from cavvy.settings import Settings
from cavvy.store.base import StoreError, StoreUnusable
from cavvy.store.bucket_folder import BucketFolder
from cavvy.store.drivers import DatabaseDriver, make_driver, translating
from cavvy.store.encrypted_files.data_keys import SERVER_KEY
from cavvy.store.migrate import HEAD, prepare
from cavvy.store.own_tables import list_sealed_tables
from cavvy.store.table_copy import TableDigest, copy_rows, digest_rows, read_revision
from cavvy.trees import walk_tree

MANIFEST = "manifest.json"
DATABASE = "cavvy.db"
FORMAT = 1
# tables of the core with values that the key of secrets encrypts
_SEALED = ("secrets", "provider_credentials")

# Folders whose files a comparison with the providers does not need.
_LARGE = ("folders/", "logs/", "storage/")
_CHUNK = 1 << 20
_MANIFEST_BYTES = 1 << 30
# Errors that names in an archive can cause: a file that is also a folder, or a name that is too
# long.
_OF_NAMES = (EEXIST, ENOTDIR, EISDIR, ENAMETOOLONG)


class ArchiveManifest(Struct, frozen=True, kw_only=True):
    """The last file of an archive, which describes the other files. `files` contains the SHA-256 of
    each file.
    """

    format: int = FORMAT
    cavvy: str
    revision: str
    installation: str
    made_at: datetime
    host: str
    folder: str
    tables: Sequence[TableDigest]
    files: Mapping[str, str]


def back_up(home: StateDir, settings: Settings, target: BinaryIO) -> ArchiveManifest:
    """Write the archive of the server of this state folder. Raises StateDirError, StoreError,
    OSError.
    """
    url, root, bucket = _find_database(home, settings)
    with work_folder(Path(home.path), "backup") as folder:
        copy = folder / DATABASE
        tables, installation = _copy_database(url, copy)
        _check_keys(root, tables, settings)
        with tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            files = {DATABASE: _add(archive, copy, DATABASE)}
            names = list_files(root) if bucket is None else ()
            for name in chain(list_keys(root), names):  # listed while they are copied
                if digest := _add(archive, root / name, str(name)):
                    files[str(name)] = digest
            if bucket is not None:
                files |= _add_objects(archive, bucket, folder / "object")
            manifest = ArchiveManifest(
                cavvy=__version__,
                revision=HEAD,
                installation=installation,
                made_at=datetime.now(UTC),
                host=host_name(),
                folder=str(root) if bucket is None else bucket.url,
                tables=tables,
                files=files,
            )
            _add_bytes(archive, MANIFEST, format(encode(manifest)))
    return manifest


def _find_database(home: StateDir, settings: Settings) -> tuple[str, Path, BucketFolder | None]:
    """Return the URL of the server's database, and the folder and bucket that contain the server's
    files."""
    if os.path.exists(home.file(DATABASE)):
        return f"sqlite:///{home.file(DATABASE)}", Path(home.path), None
    url = choose_database(home, settings)
    if url is None:
        raise StateDirError(
            "nothing-to-back-up",
            f"no server has used the state folder {home.path}",
            "CAVVY_HOME names the state folder of a server; run this command as the server's user",
        )
    files = choose_files(home, settings, url)
    return url, Path(files.path), choose_bucket(home, settings, url)


def _check_keys(root: Path, tables: Sequence[TableDigest], settings: Settings) -> None:
    """Raise StateDirError if the folder lacks a key that the server of these tables has used."""
    rows = {each.table: each.rows for each in tables}
    needed = {"agents.key": rows["attempts"]}
    if not settings.text("secrets.key"):
        needed["key"] = sum(rows[name] for name in (*_SEALED, *list_sealed_tables()))
        if settings.text("files.key") == SERVER_KEY:
            needed["key"] += sum(1 for _ in (root / "file-keys").glob("*/*"))
    for name, uses in needed.items():
        if uses and not (root / name).is_file():
            raise StateDirError(
                "key-missing",
                f"the folder {root} has no {name}, and a server that is restored without this file "
                "cannot work",
                "run this command with the same settings as the server (above all server.files "
                "and secrets.key), or restore the missing file",
            )


def _copy_database(url: str, copy: Path) -> tuple[Sequence[TableDigest], str]:
    """Copy a consistent snapshot of the database to a new SQLite file. Returns the digests of the
    copied tables, and the installation's ID.
    """
    driver = make_driver(url, journal="auto")
    with translating(driver):
        target = make_driver(f"sqlite:///{copy}", journal="delete")
        if driver.path is not None:
            with (
                closing(sqlite3.connect(f"file:{driver.path}?mode=ro", uri=True)) as one,
                closing(sqlite3.connect(copy)) as two,
            ):
                one.backup(two)
                two.execute("PRAGMA journal_mode=DELETE")
            tables = _digest(target)
        else:
            prepare(target, lambda: "")
            tables = _copy_snapshot(driver, target)
    with closing(sqlite3.connect(copy)) as session:
        (installation,) = session.execute(
            "SELECT value FROM meta WHERE key = 'installation'"
        ).fetchone()
    return tables, str(installation)


def _digest(driver: DatabaseDriver) -> Sequence[TableDigest]:
    with closing(driver.connect()) as session:
        _check_revision(read_revision(session))
        return digest_rows(session)


def _copy_snapshot(source: DatabaseDriver, target: DatabaseDriver) -> Sequence[TableDigest]:
    with closing(source.connect()) as one, closing(target.connect()) as two:
        one.begin()
        one.run("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        _check_revision(read_revision(one))
        two.begin()
        tables = copy_rows(one, two)
        two.commit()
        one.rollback()
        return tables


def _check_revision(revision: str) -> None:
    if revision != HEAD:
        raise StoreUnusable(
            f"the database is at revision {revision}, but this program supports {HEAD}; back "
            "up the database with the version of Cavvy that uses this database"
        )


def _add(archive: tarfile.TarFile, path: Path, name: str) -> str:
    """Add a file to the archive with its current length. Return the file's hash, or "" if the file
    was removed meanwhile. Logs may grow during the copy; the new bytes are left out. Raises OSError
    if the file becomes shorter.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115
    except FileNotFoundError:
        return ""
    with file:
        info = _describe(name, os.fstat(file.fileno()).st_size)
        info.mtime = os.fstat(file.fileno()).st_mtime
        source = _HashingReader(file)
        archive.addfile(info, source)
        archive.members.clear()  # type: ignore[attr-defined]  # it would fill the memory
        return source.hash.hexdigest()


def _add_objects(archive: tarfile.TarFile, bucket: BucketFolder, part: Path) -> dict[str, str]:
    """Add the objects that belong to the database, and return their hashes."""
    hashes: dict[str, str] = {}
    for folder in IN_BUCKET:
        for each in bucket.list(f"{folder}/"):
            if bucket.save(each.key, part) and (digest := _add(archive, part, each.key)):
                hashes[each.key] = digest
    return hashes


def _add_bytes(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    archive.addfile(_describe(name, len(data)), io.BytesIO(data))


def _describe(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o600
    return info


class _HashingReader:
    """Reads a file for `tarfile`, and computes the hash of all bytes that were read. The hash is
    that of the file in the archive, because `tarfile` writes each byte that it reads to the
    archive.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.hash = sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.hash.update(data)
        return data


def unpack(archive: BinaryIO, target: Path, *, whole: bool) -> ArchiveManifest:
    """Unpack an archive into an empty folder, and compare the files with the archive's manifest.
    Unless `whole` is set, large files are verified but not written. Raises StateDirError, OSError.
    """
    found: dict[str, str] = {}
    manifest: ArchiveManifest | None = None
    try:
        with tarfile.open(fileobj=archive, mode="r|") as members:
            for member in members:
                file = members.extractfile(member) if member.isreg() else None
                if file is None or manifest is not None:
                    raise _damaged(f"it contains {member.name!r}")
                if member.name == MANIFEST:
                    manifest = decode(file.read(_MANIFEST_BYTES), type=ArchiveManifest)
                    continue
                path = None
                if whole or not member.name.startswith(_LARGE):
                    path = _place(target, member.name)
                found[member.name] = _write(file, path)
    except (tarfile.TarError, EOFError, MsgspecError) as error:
        raise _damaged(str(error)) from error
    except OSError as error:
        if error.errno not in _OF_NAMES:
            raise
        raise _damaged(f"{error.filename}: {error.strerror}") from error
    if manifest is None:
        raise _damaged("the end of the archive is missing")
    if manifest.format != FORMAT:
        raise _damaged(f"the archive has format {manifest.format}, but this program reads {FORMAT}")
    _compare(found, manifest)
    _check_database(target / DATABASE, manifest)
    _compare_rows(target / DATABASE, manifest)
    return manifest


def _place(target: Path, name: str) -> Path:
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts:
        raise _damaged(f"it contains {name!r}")
    path = target.joinpath(*parts)
    make_private(target, path.parent)
    return path


def _write(file: IO[bytes], path: Path | None) -> str:
    digest = sha256()
    out = None
    if path is not None:
        out = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")  # noqa: SIM115
    try:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            if out is not None:
                out.write(chunk)
        if out is not None:
            out.flush()
            os.fsync(out.fileno())
    finally:
        if out is not None:
            out.close()
    return digest.hexdigest()


def _compare(found: dict[str, str], manifest: ArchiveManifest) -> None:
    differing: Sequence[str] = sorted(
        name
        for name in found.keys() | manifest.files.keys()
        if found.get(name) != manifest.files.get(name)
    )
    if differing:
        raise _damaged(
            f"these files differ from the archive's manifest: {', '.join(differing[:3])}"
        )


def _check_database(database: Path, manifest: ArchiveManifest) -> None:
    if manifest.revision > HEAD:
        raise StateDirError(
            "archive-too-new",
            f"cavvy {manifest.cavvy}, which wrote the archive, is newer than this program (cavvy "
            f"{__version__}): the archive's database is at revision {manifest.revision}, but this "
            f"program supports {HEAD}",
            f"restore the archive with cavvy {manifest.cavvy}; nothing was changed",
        )
    try:
        with closing(make_driver(f"sqlite:///{database}", journal="delete").connect()) as session:
            found = read_revision(session)
    except (sqlite3.Error, StoreError) as error:
        raise _damaged(f"{DATABASE} cannot be read: {error}") from error
    if found != manifest.revision:
        raise _damaged(f"{DATABASE} is at revision {found}, not {manifest.revision}")


def _compare_rows(database: Path, manifest: ArchiveManifest) -> None:
    """Check that the archive's tables match the archive's manifest. The tables of an older revision
    are not compared; the hash of the database file was already checked.
    """
    if manifest.revision != HEAD:
        return
    with closing(make_driver(f"sqlite:///{database}", journal="delete").connect()) as session:
        if list(digest_rows(session)) != list(manifest.tables):
            raise _damaged("the rows of the archive's database differ from the manifest")


def _damaged(why: str) -> StateDirError:
    return StateDirError(
        "archive-damaged",
        f"the archive cannot be restored: {why}",
        "use another archive of `cavvy server backup`; nothing was changed",
    )


# Keys, and the certificate that nodes check. Without them, secrets cannot be decrypted and agents
# are refused.
KEYS = ("agents.key", "tls.pem", "key", "installation", "files.id")
_KEY_FORMS = "key.*"  # former keys of secrets
# Uploaded working folders, logs, checkpoints and results, and files of providers. The data keys of
# files come last, because a new file may have a new key.
_BLOBS = "folders"
FOLDERS = (_BLOBS, "logs", "storage", "providers", "file-keys")
# Processes of this machine, their folders and sockets: these files are useless on another machine.
LEFT_OUT = ("providers/local",)


def list_keys(root: Path) -> Iterator[Path]:
    """Yield the key files of a state folder, relative to that folder."""
    for path in [*(root / name for name in KEYS), *sorted(root.glob(_KEY_FORMS))]:
        if path.is_file() and not path.is_symlink():
            yield path.relative_to(root)


def list_files(root: Path) -> Iterator[Path]:
    """Yield the paths, relative to the state folder, of the files that belong to the database,
    except key files. Sockets, links and unfinished files are left out. A running server
    may replace a blob by chunks in folders that were listed before, so new blobs are listed again.
    """
    before: set[str] = set()
    for name in _list(root, _BLOBS):
        before.add(str(name))
        yield name
    yield from (name for name in _list(root, _BLOBS) if str(name) not in before)
    yield from _list(root, *(each for each in FOLDERS if each != _BLOBS))


def _list(root: Path, *folders: str) -> Iterator[Path]:
    for folder in folders:
        for where, inner, names in walk_tree(root / folder):
            here = Path(where).relative_to(root)
            inner[:] = sorted(name for name in inner if str(here / name) not in LEFT_OUT)
            for name in sorted(names):
                path = Path(where) / name
                if path.is_file() and not path.is_symlink() and not name.endswith(".part"):
                    yield here / name


def copy_files(source: Path, target: Path) -> int:
    """Copy a state folder's files to another state folder and compare the copies with the
    originals. Files that already exist in `target` with the same content are not copied. Returns
    the number of copied files. Raises OSError.
    """
    count = 0
    for name in [*list_keys(source), *list_files(source)]:
        if name.name == "files.id":
            continue  # the new folder belongs to another database
        wanted = hash_file(source / name)
        copy = target / name
        if copy.is_file() and hash_file(copy) == wanted:
            continue
        make_private(target, copy.parent)
        part = copy.with_name(copy.name + ".part")
        shutil.copy2(source / name, part)
        if hash_file(part) != wanted:
            raise OSError(f"{part} differs from {source / name} after it was copied")
        os.replace(part, copy)
        count += 1
    return count


def make_private(root: Path, folder: Path) -> None:
    """Create a folder below `root`, and create missing parent folders. Only this user can enter
    these folders."""
    for each in (*reversed(folder.relative_to(root).parents), folder.relative_to(root)):
        (root / each).mkdir(mode=0o700, exist_ok=True)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return file_digest(file, "sha256").hexdigest()


@contextmanager
def work_folder(home: Path, prefix: str) -> Iterator[Path]:
    """Yield a new folder below `home`, and delete it afterwards. Also delete the folders of earlier
    commands that were killed. Raises OSError.
    """
    for left in home.glob(f"{prefix}-*"):
        _delete_unused(left)
    folder = Path(mkdtemp(prefix=f"{prefix}-", dir=home))
    # the lock shows other commands that this command is running
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _delete_unused(folder: Path) -> None:
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # it is a file or a link, or was deleted meanwhile
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(lock)
