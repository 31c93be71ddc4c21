"""Archives of `cavvy server backup` that another program has written or changed."""

import io
import json
import tarfile
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import pytest

from cavvy.server.backup import unpack
from cavvy.server.state_dir import StateDirError
from cavvy.store.drivers import make_driver
from cavvy.store.migrate import HEAD, prepare
from cavvy.store.table_copy import digest_rows
from cavvy.trees import remove_tree

Member = tuple[str, bytes]


def make_database(folder: Path) -> tuple[bytes, Sequence[object]]:
    driver = make_driver(f"sqlite:///{folder / 'source.db'}", journal="delete")
    prepare(driver, lambda: "test")
    with closing(driver.connect()) as session:
        tables = [
            {name: getattr(each, name) for name in each.__struct_fields__}
            for each in digest_rows(session)
        ]
    return (folder / "source.db").read_bytes(), tables


def make_archive(
    members: Sequence[Member], tables: Sequence[object], revision: str = HEAD
) -> io.BytesIO:
    manifest = {
        "format": 1,
        "cavvy": "7.0.0",
        "revision": revision,
        "installation": "test",
        "made_at": datetime.now(UTC).isoformat(),
        "host": "h",
        "folder": "/srv/cavvy",
        "tables": tables,
        "files": {name: sha256(data).hexdigest() for name, data in members},
    }
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for name, data in (*members, ("manifest.json", json.dumps(manifest).encode())):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return io.BytesIO(target.getvalue())


def refusal(archive: io.BytesIO, folder: Path) -> StateDirError:
    (folder / "new").mkdir()
    with pytest.raises(StateDirError) as refused:
        unpack(archive, folder / "new", whole=True)
    return refused.value


def test_an_intact_archive_is_unpacked(tmp_path: Path) -> None:
    database, tables = make_database(tmp_path)
    (tmp_path / "new").mkdir()
    unpack(make_archive([("cavvy.db", database)], tables), tmp_path / "new", whole=True)
    assert (tmp_path / "new" / "cavvy.db").read_bytes() == database


def test_an_archive_of_a_newer_version_names_that_version(tmp_path: Path) -> None:
    database, tables = make_database(tmp_path)
    refused = refusal(make_archive([("cavvy.db", database)], tables, "9001"), tmp_path)
    assert refused.code == "archive-too-new"
    assert "cavvy 7.0.0" in refused.message
    assert "cavvy 7.0.0" in refused.hint


@pytest.mark.parametrize(
    ("database", "told"),
    [
        (None, "cavvy.db cannot be read"),
        (b"no database" * 500, "cavvy.db cannot be read"),
    ],
)
def test_an_archive_without_a_database_is_damaged(
    database: bytes | None, told: str, tmp_path: Path
) -> None:
    members = [] if database is None else [("cavvy.db", database)]
    refused = refusal(make_archive(members, []), tmp_path)
    assert refused.code == "archive-damaged"
    assert told in refused.message


@pytest.mark.parametrize(
    "names",
    [
        ("key", "key"),
        ("logs/a/b", "logs/a"),
        ("logs/" + "a" * 300,),
        ("logs/" + "a/" * 3000 + "b",),
    ],
)
def test_an_archive_with_impossible_names_is_damaged(names: Sequence[str], tmp_path: Path) -> None:
    database, tables = make_database(tmp_path)
    members = [("cavvy.db", database), *((name, b"x") for name in names)]
    refused = refusal(make_archive(members, tables), tmp_path)
    assert refused.code == "archive-damaged"
    assert "nothing was changed" in refused.hint
    remove_tree(tmp_path / "new")  # pytest could not
