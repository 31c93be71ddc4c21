"""Selects the snapshot that the program uses, and installs a newer snapshot.

The snapshot in the state folder is used if it is valid and at least as new as the snapshot shipped
with Cavvy; otherwise the shipped snapshot is used. A new snapshot is checked completely, and then
replaces the old snapshot in a single step, so that a crash cannot leave a damaged snapshot.
"""

import os
import sqlite3
from pathlib import Path

from cavvy.store.snapshot.layout import SCHEMA_VERSION, SnapshotError

SHIPPED = Path(__file__).parents[2] / "catalog" / "snapshot.db"
_REMEDY = "; delete it or run `cavvy catalog refresh`"
# a new snapshot is rejected if it has fewer rows than this share of the current rows
_COLLAPSED = 0.5


def refreshed_path() -> Path:
    """Return the path of the snapshot that `cavvy catalog refresh` writes: `catalog.db` in the
    state folder.
    """
    from cavvy.settings import home

    return home() / "catalog.db"


def path_in_use() -> Path:
    """Return the path of the snapshot in use: the refreshed snapshot if it is usable and not older
    than the shipped snapshot, otherwise the shipped snapshot.
    """
    refreshed = refreshed_path()
    if not refreshed.exists():
        return SHIPPED
    try:
        newer = _as_of(refreshed) >= _as_of(SHIPPED)
    except SnapshotError:
        return SHIPPED  # `cavvy catalog info` reports the problem; listing offers must still work
    return refreshed if newer else SHIPPED


def problem_of_refreshed() -> str | None:
    """Return why the snapshot in the state folder is not in use, or None if it is in use or does
    not exist.
    """
    refreshed = refreshed_path()
    if not refreshed.exists():
        return None
    try:
        return (
            None
            if _as_of(refreshed) >= _as_of(SHIPPED)
            else "older than the snapshot shipped with Cavvy"
        )
    except SnapshotError as error:
        return str(error)


def connect(path: Path) -> sqlite3.Connection:
    """Open a snapshot for reading, without locks: the file is never changed, only replaced. Raises
    SnapshotError.
    """
    if not path.is_file():
        raise SnapshotError(f"no catalog exists at {path}; create one with `cavvy catalog refresh`")
    connection = sqlite3.connect(
        f"file:{_quote(path)}?mode=ro&immutable=1", uri=True, isolation_level=None
    )
    try:
        found = connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
    except sqlite3.DatabaseError as error:
        connection.close()
        raise unusable(path, error) from error
    if found is None or found[0] != str(SCHEMA_VERSION):
        connection.close()
        version = found[0] if found else "none"
        raise SnapshotError(
            f"{path} has catalog format {version}, but this program reads {SCHEMA_VERSION}; "
            "use a snapshot made for this version, or upgrade"
        )
    return connection


def unusable(path: Path, error: sqlite3.DatabaseError) -> SnapshotError:
    return SnapshotError(f"{path} is not a usable catalog ({error})", _REMEDY)


def check(path: Path, against: Path) -> None:
    """Raise SnapshotError if `path` is not a complete, valid snapshot, or has far fewer rows than
    `against`.
    """
    connection = connect(path)
    try:
        (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if verdict != "ok":
            raise SnapshotError(f"{path} is damaged ({verdict})")
        (orphans,) = connection.execute(
            "SELECT COUNT(*) FROM offer WHERE rate <= 0 OR shape NOT IN (SELECT id FROM shape) "
            "OR place NOT IN (SELECT id FROM place) OR source NOT IN (SELECT id FROM source)"
        ).fetchone()
        if orphans:
            raise SnapshotError(
                f"{path} is inconsistent: {orphans} offers have no instance type, location or "
                "source"
            )
        rows = _row_counts(connection)
        stated = tuple(
            int(value)
            for (value,) in connection.execute(
                "SELECT value FROM meta WHERE key IN ('rows', 'rows_with_accelerator') ORDER BY key"
            )
        )
    except sqlite3.DatabaseError as error:
        raise unusable(path, error) from error
    finally:
        connection.close()
    if stated != rows:
        raise SnapshotError(f"{path} is incomplete: it has {rows[0]} offers instead of {stated[0]}")
    _check_not_collapsed(rows, against)


def put_in_place(new: Path, target: Path, *, source: str) -> None:
    """Check the snapshot `new`, which must be in the same folder as `target`, and replace `target`
    with the new snapshot. If the check fails, the old snapshot is kept and SnapshotError is raised.

    `source` is the original file or URL, for messages.
    """
    try:
        check(new, path_in_use())
    except SnapshotError as error:
        why = error.args[0].replace(str(new), source)
        raise SnapshotError(f"{why}; the catalog in use was kept") from error
    with new.open("rb") as file:
        os.fsync(file.fileno())
    new.replace(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _check_not_collapsed(rows: tuple[int, int], against: Path) -> None:
    with_old = connect(against)
    try:
        old = _row_counts(with_old)
    finally:
        with_old.close()
    for what, now, before in zip(("offers", "offers with an accelerator"), rows, old, strict=True):
        if now < before * _COLLAPSED:
            raise SnapshotError(
                f"the new catalog has {now:,} {what}, the catalog in use has {before:,}; the new "
                "catalog looks incomplete and was not used"
            )


def _row_counts(connection: sqlite3.Connection) -> tuple[int, int]:
    (rows,) = connection.execute("SELECT COUNT(*) FROM offer").fetchone()
    (accelerated,) = connection.execute(
        "SELECT COUNT(*) FROM offer JOIN shape ON shape.id = offer.shape JOIN pack ON pack.id = "
        "shape.pack "
        "WHERE pack.accelerator IS NOT NULL"
    ).fetchone()
    return rows, accelerated


def _as_of(path: Path) -> str:
    connection = connect(path)
    try:
        found = connection.execute("SELECT value FROM meta WHERE key = 'as_of'").fetchone()
    except sqlite3.DatabaseError as error:
        raise unusable(path, error) from error
    finally:
        connection.close()
    return str(found[0]) if found else ""


def _quote(path: Path) -> str:
    """Quote a path for an SQLite URI."""
    return str(path.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
