"""Unpacks an archive of `cavvy server backup` and checks every byte of it."""

import os
import sqlite3
import tarfile
from collections.abc import Sequence
from contextlib import closing
from errno import EEXIST, EISDIR, ENAMETOOLONG, ENOTDIR
from hashlib import sha256
from pathlib import Path
from typing import IO, BinaryIO

from msgspec import MsgspecError
from msgspec.json import decode

from cavvy import __version__
from cavvy.server.backup import DATABASE, FORMAT, MANIFEST, ArchiveManifest
from cavvy.server.folder_copy import make_private
from cavvy.server.state_dir import StateDirError
from cavvy.store.base import StoreError
from cavvy.store.drivers import make_driver
from cavvy.store.migrate import HEAD
from cavvy.store.table_copy import digest_rows, read_revision

# Folders whose files a comparison with the providers does not need.
_LARGE = ("folders/", "logs/", "storage/")
_CHUNK = 1 << 20
_MANIFEST_BYTES = 1 << 30
# Errors that names in an archive can cause: a file that is also a folder, or a name that is too
# long.
_OF_NAMES = (EEXIST, ENOTDIR, EISDIR, ENAMETOOLONG)


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
