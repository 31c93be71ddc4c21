"""Backups, restores and moves take the files of `server.files` along, which several servers share,
and keep servers away meanwhile.
"""

import asyncio
import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.contract.store_suite import NOW, begin, make_store, store_url, submit

from cavvy import settings
from cavvy.api.adopt import MOVED, adopt
from cavvy.api.backup import back_up
from cavvy.api.database import hold_alone, join_servers
from cavvy.api.restore import restore
from cavvy.api.state_dir import StateDir, StateDirError
from cavvy.settings import Settings
from cavvy.store.base import SealedSecret, Store, StoreUnusable
from cavvy.store.keys import KeyRing
from cavvy.store.open import open_store
from cavvy.store.secrets import SecretSealer

FILES = ("agents.key", "key", "logs/p/j1", "storage/p/j1/checkpoint")


def name_home(folder: Path, url: str = "") -> tuple[StateDir, Settings]:
    """The first of the servers that share the files in `folder`, as the guide names it."""
    (folder / "a").mkdir(mode=0o700, parents=True, exist_ok=True)
    config = folder / "settings.toml"
    config.write_text("[providers.local]\nenabled = false\n")
    given = settings.load(
        {
            "CAVVY_HOME": str(folder / "a"),
            "CAVVY_CONFIG": str(config),
            "CAVVY_SERVER_DATABASE": url,
            "CAVVY_SERVER_FILES": str(folder),
        }
    )
    return StateDir(str(given.home)), given


def fill(store: Store, folder: Path) -> None:
    """A job with an attempt, a secret, and the files of a server in `folder`."""
    for name in FILES:
        (folder / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / name).touch(0o600)
        (folder / name).write_bytes(name[:1].encode() * 32)
    sealed = SecretSealer(KeyRing(folder / "key")).seal("p", "S", "planted")

    async def write() -> None:
        await store.open()
        await begin(store, await submit(store, "j1"), phase="ended")
        await store.put_secret(SealedSecret(project="p", name="S", sealed=sealed, updated_at=NOW))
        await store.close()

    asyncio.run(write())


def read_secret(url: str, folder: Path) -> str:
    async def read() -> bytes:
        store = open_store(url)
        await store.open()
        (secret,) = await store.secrets("p")
        await store.close()
        return secret.sealed

    return SecretSealer(KeyRing(folder / "key")).unseal("p", "S", asyncio.run(read()))


def list_present(folder: Path) -> Sequence[str]:
    return [name for name in FILES if (folder / name).is_file()]


def test_an_archive_has_the_shared_files_and_restores_them_there(tmp_path: Path) -> None:
    url, new_url = store_url("postgres", tmp_path), store_url("postgres", tmp_path)
    old, new = tmp_path / "old", tmp_path / "new"
    home, given = name_home(old, url)
    fill(open_store(url), old)
    archive = io.BytesIO()
    manifest = back_up(home, given, archive)
    assert set(manifest.files) == {"cavvy.db", *FILES}
    assert manifest.folder == str(old)
    home, given = name_home(tmp_path / "tried", new_url)
    archive.seek(0)
    restore(home, given, archive, new_url, dry_run=True)
    assert not list_present(tmp_path / "tried")
    home, given = name_home(new, new_url)
    archive.seek(0)
    restore(home, given, archive, new_url, dry_run=False)
    assert list_present(new) == list(FILES)
    assert not list_present(new / "a")
    assert read_secret(new_url, new) == "planted"
    # a later server of this folder finds the files without the setting
    assert (new / "a" / "files").read_text() == str(new)


def test_files_of_another_server_are_not_replaced(tmp_path: Path) -> None:
    url = store_url("postgres", tmp_path)
    home, given = name_home(tmp_path / "old", url)
    fill(open_store(url), tmp_path / "old")
    archive = io.BytesIO()
    back_up(home, given, archive)
    (tmp_path / "new" / "servers").mkdir(parents=True)  # as after a start
    home, given = name_home(tmp_path / "new", url)
    archive.seek(0)
    with pytest.raises(StateDirError, match="belongs to a server"):
        restore(home, given, archive, url, dry_run=False)


@pytest.mark.parametrize("name", ["agents.key", "key"])
def test_a_backup_without_a_key_is_refused(tmp_path: Path, name: str) -> None:
    url = store_url("postgres", tmp_path)
    home, given = name_home(tmp_path, url)
    fill(open_store(url), tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(StateDirError, match=f"has no {name}"):
        back_up(home, given, io.BytesIO())


def test_a_move_copies_files_to_the_shared_folder(tmp_path: Path) -> None:
    url = store_url("postgres", tmp_path)
    home, given = name_home(tmp_path / "srv", url)
    fill(make_store("sqlite", Path(home.path)), Path(home.path))
    done = adopt(home, given, url)
    assert done.files == len(FILES)
    assert list_present(tmp_path / "srv") == list(FILES)
    assert read_secret(url, tmp_path / "srv") == "planted"
    assert Path(home.file(MOVED)).exists()


def test_files_that_are_in_the_shared_folder_stay_there(tmp_path: Path) -> None:
    url = store_url("postgres", tmp_path)
    home, given = name_home(tmp_path / "srv", url)
    fill(make_store("sqlite", tmp_path / "srv"), tmp_path / "srv")
    done = adopt(home, given, url, StateDir(str(tmp_path / "srv")))
    assert done.files == 0
    assert list_present(tmp_path / "srv") == list(FILES)
    assert not list_present(Path(home.path))
    assert Path(home.file("files")).read_text() == str(tmp_path / "srv")


@pytest.mark.anyio
async def test_a_server_that_starts_meanwhile_is_told_to_wait(
    tmp_path: Path, anyio_backend: str
) -> None:
    url = store_url("postgres", tmp_path)
    home, given = name_home(tmp_path, url)
    files = StateDir(str(tmp_path))
    async with hold_alone(url, home):
        with pytest.raises(StoreUnusable, match=r"server adopt` or .*; wait until it has ended"):
            async with join_servers(url, home, files, given, "unix:/nowhere"):
                pass
    async with join_servers(url, home, files, given, "unix:/nowhere"):
        pass
