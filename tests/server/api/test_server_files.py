"""Backups, restores and moves take the files of `server.files` along, which several servers share,
and keep servers away meanwhile.
"""

import asyncio
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.contract.store_suite import NOW, begin, make_store, store_url, submit
from tests.memory_bucket import MemoryBucket

from cavvy import settings
from cavvy.api.tokens import GangTokens
from cavvy.cli.main import cli
from cavvy.cli.server import backup as backup_command
from cavvy.control.restored import count_access
from cavvy.domain.accounts import Account, AccountToken
from cavvy.domain.values import replace
from cavvy.server import backup, stored_files
from cavvy.server.adopt import MOVED, adopt
from cavvy.server.backup import back_up
from cavvy.server.database import choose_bucket, choose_files, hold_alone, join_servers
from cavvy.server.open_state import make_dependencies
from cavvy.server.restore import restore
from cavvy.server.state_dir import StateDir, StateDirError
from cavvy.server.stored_files import FilesPlace, bind_bucket, join_bucket, open_stored_files
from cavvy.settings import Settings
from cavvy.store.base import SealedSecret, StoreUnusable
from cavvy.store.blobs import BlobStore
from cavvy.store.bucket_folder import BucketFolder
from cavvy.store.bucket_logs import BucketLogs
from cavvy.store.keys import KeyRing
from cavvy.store.objects.locations import OWN_FILES, ObjectLocation, merge_keys
from cavvy.store.open import open_store
from cavvy.store.secrets import SecretSealer
from cavvy.store.sql import Store

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


@pytest.mark.parametrize("place", ["agents.key", "folders/"])
def test_an_archive_has_a_blob_that_is_divided_while_files_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    url, root = store_url("postgres", tmp_path), tmp_path / "old"
    home, given = name_home(root, url)
    fill(open_store(url), root)
    data, archive, add = b"1" * 100 + b"2" * 100, io.BytesIO(), backup._add
    name = sha256(data).hexdigest()
    blobs = BlobStore(root / "folders" / "p")
    blobs.put(name, [data])

    def divide_first(target: tarfile.TarFile, path: Path, known_as: str) -> str:
        if known_as.startswith(place):
            assert blobs.split(name, lambda _: [100])
        return add(target, path, known_as)

    monkeypatch.setattr(backup, "_add", divide_first)
    back_up(home, given, archive)
    archive.seek(0)
    with tarfile.open(fileobj=archive) as packed:
        packed.extractall(tmp_path / "new", filter="data")
    with BlobStore(tmp_path / "new" / "folders" / "p").open(name) as file:
        assert file.read() == data


def add_access(url: str) -> None:
    async def write() -> None:
        store = open_store(url)
        await store.open()
        await store.add_account(Account(name="ada", created_at=NOW))
        for name in ("t1", "t2"):
            await store.add_token(AccountToken(id=name, account="ada", created_at=NOW), name)
        await store.close()

    asyncio.run(write())


def read_access(url: str) -> tuple[int, list[object]]:
    """The number of valid tokens, and what the audit log says of the restore."""

    async def read() -> tuple[int, list[object]]:
        store = open_store(url)
        await store.open()
        found = await count_access(store, NOW)
        records = [json.loads(each.text) for each in await store.audit_records()]
        await store.close()
        return found.tokens, [each["after"]["tokens_and_keys"] for each in records]

    return asyncio.run(read())


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_restore_says_which_tokens_came_back_and_ends_them_on_request(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings name no files that servers share, so that SQLite can be used."""
    monkeypatch.setenv("CAVVY_CONFIG", str(tmp_path / "settings.toml"))
    (tmp_path / "settings.toml").write_text("[providers.local]\nenabled = false\n")

    def name_database(folder: str) -> str:
        monkeypatch.setenv("CAVVY_HOME", str(tmp_path / folder))
        (tmp_path / folder).mkdir(mode=0o700)
        url = store_url(kind, tmp_path / folder)
        monkeypatch.setenv("CAVVY_SERVER_DATABASE", url if kind == "postgres" else "")
        return url

    def run(*arguments: str) -> str:
        code = f"from cavvy.cli.main import cli; cli(['server', 'restore', *{arguments!r}])"
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert found.returncode == 0, found.stderr
        return found.stderr

    def run_in_terminal(answer: str) -> str:
        found = CliRunner().invoke(cli, ["server", "restore", str(archive)], input=answer)
        assert found.exit_code == 0, found.output
        return found.output

    url = name_database("old")
    asyncio.run(open_and_close(url))
    (tmp_path / "old" / "key").write_bytes(b"k" * 32)
    add_access(url)
    archive = tmp_path / "archive"
    given = settings.load()
    with archive.open("wb") as file:
        back_up(StateDir(str(given.home)), given, file)
    assert "contains 2 valid tokens, 0 valid keys of services, 1 account (0 disabled)" in run(
        str(archive), "--dry-run"
    )
    kept = name_database("kept")
    assert "the tokens and keys are kept" in run(str(archive))  # there is no terminal to ask in
    assert read_access(kept) == (2, ["kept"])
    assert "all these tokens and keys are ended" in run("--end-access")
    assert read_access(kept) == (0, ["kept", "ended"])
    ended = name_database("ended")
    assert "all these tokens and keys are ended" in run(str(archive), "--end-access")
    assert read_access(ended) == (0, ["ended"])
    monkeypatch.setattr(backup_command, "_may_ask", lambda report: True)
    for answer, left, said in (("n\n", 2, ["kept"]), ("y\n", 0, ["kept", "ended"])):
        asked = name_database(f"asked-{left}")
        assert "End all these tokens and keys? [y/N]" in run_in_terminal(answer)
        assert read_access(asked) == (left, said)


async def open_and_close(url: str) -> None:
    store = open_store(url)
    await store.open()
    await store.close()


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


async def test_a_server_that_starts_meanwhile_is_told_to_wait(tmp_path: Path) -> None:
    url = store_url("postgres", tmp_path)
    home, given = name_home(tmp_path, url)
    files = StateDir(str(tmp_path))
    async with hold_alone(url, home):
        with pytest.raises(
            StoreUnusable, match=r"server adopt` or .*; wait until the command has ended"
        ):
            async with join_servers(url, home, files, given, "unix:/nowhere"):
                pass
    async with join_servers(url, home, files, given, "unix:/nowhere"):
        pass


def test_an_archive_of_a_bucket_is_restored_into_another_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = MemoryBucket(NOW)

    def open_memory(url: str, *_: object) -> ObjectLocation:
        return ObjectLocation(place=storage, key=url.removeprefix("s3://data/"))

    monkeypatch.setattr(stored_files, "open_place", open_memory)
    (tmp_path / "key").write_bytes(b"k" * 32)
    (tmp_path / "key").chmod(0o600)

    def use(name: str) -> tuple[str, StateDir, Settings, BucketFolder]:
        url = store_url("postgres", tmp_path)
        home, given = name_home(tmp_path / name, url)
        named = {"server.files": f"s3://data/{name}", "secrets.key": f"file:{tmp_path}/key"}
        given = replace(given, values={**given.values, **named})
        bucket = choose_bucket(home, given, url)
        assert bucket is not None
        return url, home, given, bucket

    url, home, given, bucket = use("old")
    fill(open_store(url), Path(home.path))
    asyncio.run(join_bucket(bucket, url, home, given))
    logs = BucketLogs(bucket.below("logs"))
    logs.append("p", "j1", 1, 0, 0, b"a line\n")
    bucket.put("folders/p/ab/abcd", b"")
    archive = io.BytesIO()
    manifest = back_up(home, given, archive)
    assert {each for each in manifest.files if each.startswith(("folders", "logs"))} == {
        key.removeprefix("old/") for key in storage.objects if "/p/" in key
    }
    new_url, new_home, new_given, new_bucket = use("new")
    archive.seek(0)
    restore(new_home, new_given, archive, new_url, dry_run=False)
    assert BucketLogs(new_bucket.below("logs")).read("p", "j1", 1, 0).data == b"a line\n"
    assert new_bucket.get("folders/p/ab/abcd") == b""
    asyncio.run(join_bucket(new_bucket, new_url, new_home, new_given))
    keys = [Path(each.file("agents.key")).read_bytes() for each in (home, new_home)]
    assert keys[0] == keys[1]
    archive.seek(0)
    third_url = store_url("postgres", tmp_path)
    third = name_home(tmp_path / "third", third_url)
    with pytest.raises(StateDirError, match=r"server\.files names a folder"):
        restore(*third, archive, third_url, dry_run=False)


@pytest.mark.parametrize(
    ("settings_text", "told"),
    [
        ("[providers.local]\nenabled = false\n", "the key of secrets would be in the state folder"),
        ('[secrets]\nkey = "env:KEY"\n', "jobs on the server's own machine need a folder"),
        (
            '[providers.local]\nenabled = false\n[secrets]\nkey = "env:KEY"\n'
            '[server]\nresults_url = "s3://data/team/results"\n',
            "where nodes of all projects write, overlaps",
        ),
    ],
)
def test_a_bucket_needs_what_all_servers_can_have(
    tmp_path: Path, settings_text: str, told: str
) -> None:
    home, _ = name_home(tmp_path)
    (tmp_path / "settings.toml").write_text(settings_text)
    given = settings.load(
        {
            "CAVVY_HOME": home.path,
            "CAVVY_CONFIG": str(tmp_path / "settings.toml"),
            "CAVVY_SERVER_FILES": "s3://data/team",
        }
    )
    with pytest.raises(StateDirError, match=told):
        choose_files(home, given, "postgresql://x")
    with pytest.raises(StateDirError, match="the database is an SQLite file"):
        choose_files(home, given, None)


class BoundStore:
    """The facts of an installation."""

    def __init__(self) -> None:
        self.facts: dict[str, str] = {}

    async def bind(self, key: str, value: str) -> str:
        return self.facts.setdefault(key, value)


async def test_a_database_is_bound_to_one_bucket(tmp_path: Path) -> None:
    storage = MemoryBucket(NOW)

    def open_at(name: str) -> BucketFolder:
        return BucketFolder(storage, f"s3://data/{name}", f"{name}/", tmp_path, lambda: NOW)

    bound = BoundStore()
    await bind_bucket(bound, open_at("two"))
    await bind_bucket(bound, open_at("two"))
    slash = BucketFolder(storage, "s3://data/two/", "two/", tmp_path, lambda: NOW)
    await bind_bucket(bound, slash)  # the same place
    with pytest.raises(StateDirError, match="are in s3://data/two, not in s3://data/three"):
        await bind_bucket(bound, open_at("three"))
    storage.objects["copy/files.id"] = storage.objects["two/files.id"]
    with pytest.raises(StateDirError, match="are in s3://data/two, not in s3://data/copy"):
        await bind_bucket(bound, open_at("copy"))


async def test_a_bucket_has_the_files_of_one_database(tmp_path: Path) -> None:
    storage = MemoryBucket(NOW)

    def open_at(name: str) -> BucketFolder:
        return BucketFolder(storage, f"s3://data/{name}", f"{name}/", tmp_path, lambda: NOW)

    first, other = BoundStore(), BoundStore()
    await bind_bucket(first, open_at("one"))
    del storage.objects["one/files.database"]  # as after an earlier version
    await bind_bucket(first, open_at("one"))
    with pytest.raises(StateDirError, match=r"s3://data/one has the .* of another database"):
        await bind_bucket(other, open_at("one"))
    await bind_bucket(other, open_at("two"))  # the refusal has bound the database to nothing
    await bind_bucket(first, open_at("one"))


def test_the_control_plane_knows_the_servers_own_bucket(tmp_path: Path) -> None:
    bucket = BucketFolder(MemoryBucket(NOW), "s3://data/team", "team/", tmp_path, lambda: NOW)
    _, given = name_home(tmp_path)
    for place, url in (
        (FilesPlace(root=tmp_path, bucket=bucket, url="postgresql://x"), bucket.url),
        (
            FilesPlace(root=tmp_path),
            "",
        ),
    ):
        files = open_stored_files(given, place)
        made = make_dependencies(
            open_store(f"sqlite:///{tmp_path}/x.db"),
            SecretSealer(KeyRing(tmp_path / "key")),
            GangTokens(b"k" * 32),
            files,
            "",
            "",
        )
        assert merge_keys(made.environment, {}).get(OWN_FILES, "") == url
