"""Which cache the work of a project uses on a host, and that no other work has changed its content."""

import fcntl
import hashlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cavvy.agent.work import blobs
from cavvy.agent.work.blobs import BlobCache
from cavvy.agent.work.cache import open_cache

CONTENT = b"echo ours\n"
NAME = hashlib.sha256(CONTENT).hexdigest()


def config(root: Path, covers: bool | None = False, fresh: str = "h-fresh") -> Any:
    (root / "cache").mkdir(exist_ok=True)
    caches = str(root / "cache")
    return SimpleNamespace(
        caches=caches,
        cache=caches,
        own_cache="h-own",
        fresh_cache=fresh,
        hides=str(root),
        covers=covers,
        home=str(root / "gangs/g/0"),
    )


def fill(root: Path, *names: str) -> None:
    for name in names:
        (root / "cache" / name / "setups").mkdir(parents=True)


def test_work_that_cannot_see_the_caches_keeps_all_of_them(tmp_path: Path) -> None:
    fill(tmp_path, "h-other", "i-other")
    given = config(tmp_path, covers=True)
    lock = open_cache(given)
    assert lock is not None
    os.close(lock)
    assert given.cache == f"{tmp_path}/cache/h-own"
    assert sorted(os.listdir(given.caches)) == ["h-other", "h-own", "i-other"]


def test_work_that_sees_the_caches_gets_a_fresh_one_and_those_of_earlier_work_go(
    tmp_path: Path,
) -> None:
    fill(tmp_path, "h-other", "h-own", "h-used", "i-other", "h-fresh", "mounts")
    (tmp_path / "cache/h-file").touch()
    (tmp_path / "cache/h-link").symlink_to(tmp_path)
    (tmp_path / "cache/h-odd").mkdir()
    (tmp_path / "cache/h-odd/used").symlink_to(tmp_path / "used")
    with open(tmp_path / "cache/h-used/used", "w") as used:
        fcntl.flock(used, fcntl.LOCK_SH)
        lock = open_cache(given := config(tmp_path))
        assert lock is not None
        os.close(lock)
    assert given.cache == f"{tmp_path}/cache/h-fresh"
    assert sorted(os.listdir(given.caches)) == ["h-fresh", "h-used", "i-other", "mounts"]
    assert os.listdir(tmp_path) == ["cache"]


def test_without_isolation_nothing_is_removed(tmp_path: Path) -> None:
    fill(tmp_path, "h-other")
    assert open_cache(given := config(tmp_path, fresh="")) is None
    assert given.cache == f"{tmp_path}/cache/h-own"
    assert sorted(os.listdir(given.caches)) == ["h-other", "h-own"]


def test_all_projects_share_a_cache_without_a_name(tmp_path: Path) -> None:
    given = config(tmp_path)
    given.own_cache = ""
    assert open_cache(given) is None
    assert given.cache == given.caches


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BlobCache:
    """A cache whose control plane sends the right content."""

    def fetch_to(line: object, digest: str, path: str) -> None:
        assert digest == NAME
        Path(path).write_bytes(CONTENT)

    monkeypatch.setattr(blobs, "fetch_to", fetch_to)
    monkeypatch.setattr(blobs, "BlockingClient", lambda config: None)
    return BlobCache(config(tmp_path))


def spoil(path: Path, how: str) -> None:
    match how:
        case "other content":
            path.write_bytes(b"echo theirs\n")
        case "link":
            (path.parent / "theirs").write_bytes(CONTENT)
            path.symlink_to("theirs")
        case "dead link":
            path.symlink_to("nothing")
        case "pipe":
            os.mkfifo(path)
        case "folder":
            (path / "inner").mkdir(parents=True)


@pytest.mark.parametrize("how", ["nothing", "other content", "link", "dead link", "pipe", "folder"])
def test_a_blob_is_fetched_again_if_it_is_not_what_its_name_says(
    cache: BlobCache, tmp_path: Path, how: str
) -> None:
    kept, target = tmp_path / "cache/blobs" / NAME, tmp_path / "target"
    spoil(kept, how)
    cache.copy(NAME, str(target), 0o640)
    assert target.read_bytes() == CONTENT
    assert target.stat().st_mode & 0o777 == 0o640
    assert kept.read_bytes() == CONTENT
    assert not kept.is_symlink()
