"""Links that work puts in place lead the agent to no files outside of the allowed folders."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cavvy.agent.access.files import answer
from cavvy.agent.allowed_folders import (
    AllowedFolders,
    LeadsOutside,
    open_below,
    raise_error,
    raise_unless_vanished,
    walk_below,
)


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A job's folder `job`, its volume `volume`, and files of others in `other`."""
    for name in ("job/sub/deep", "volume", "other", "job2"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("job/sub/file", "job/sub/deep/file", "volume/file", "other/file", "job2/file"):
        (tmp_path / name).write_text(name)
    return tmp_path


def read(folders: AllowedFolders, path: object) -> str:
    with open(folders.open_file(str(path))) as file:
        return file.read()


LINKS: list[tuple[Callable[[Path], str], str]] = [
    (lambda top: "sub/file", "job/sub/file"),
    (lambda top: f"{top}/job/sub/file", "job/sub/file"),
    (lambda top: "sub/deep/../file", "job/sub/file"),
    (lambda top: "../volume/file", "volume/file"),
    (lambda top: f"{top}/volume/../job/sub/file", "job/sub/file"),
    (lambda top: f"../../{top.name}/volume/file", "volume/file"),
    (lambda top: f"../../{top.name}/other/file", ""),
    (lambda top: f"{top}/other/file", ""),
    (lambda top: "../other/file", ""),
    (lambda top: "../job2/file", ""),
    (lambda top: "sub/../../other/file", ""),
    (lambda top: f"{top}/job/../other/file", ""),
    (lambda top: "/etc/passwd", ""),
]


@pytest.mark.parametrize(("leads_to", "found"), LINKS)
def test_a_link_is_followed_within_the_jobs_folders_only(
    top: Path, leads_to: Callable[[Path], str], found: str
) -> None:
    folders = AllowedFolders([f"{top}/job"], [f"{top}/volume"])
    link = top / "job/link"
    link.symlink_to(leads_to(top))
    (top / "job/folder").symlink_to(os.path.dirname(leads_to(top)))
    for path in (link, top / "job/folder" / "file"):
        if found:
            assert read(folders, path) == found
        else:
            with pytest.raises(LeadsOutside, match="leads out of the job's folders, to"):
                folders.open_file(str(path))
    folder, name = folders.find(str(link), follow=False)
    assert os.readlink(name, dir_fd=folder) == leads_to(top)
    os.close(folder)


def test_a_folder_that_became_a_link_is_not_followed(top: Path) -> None:
    folders = AllowedFolders([f"{top}/job"])
    (top / "job").rename(top / "moved")
    (top / "job").symlink_to("other")
    for path in ("job/file", "job/new", "job"):
        with pytest.raises(OSError):
            os.close(folders.open(f"{top}/{path}", os.O_RDWR | os.O_CREAT, make=True))
    assert os.listdir(top / "other") == ["file"]
    with pytest.raises(OSError):
        AllowedFolders([f"{top}/job"]).open_file(f"{top}/job/file")


def test_an_allowed_path_may_be_a_file(top: Path) -> None:
    (top / "link").symlink_to("other")
    folders = AllowedFolders([f"{top}/job"], [f"{top}/link/file"])
    for path in (f"{top}/link/file", f"{top}/other/file"):
        assert read(folders, path) == "other/file"
        assert folders.stat(path).st_size == len("other/file")
    for path in ("other", "other/file/below", "job/sub/file/below"):
        with pytest.raises(OSError):
            folders.stat(f"{top}/{path}")
    (top / "job/link").symlink_to("../other/file")
    assert read(folders, top / "job/link") == "other/file"


@pytest.mark.parametrize(
    ("leads_to", "allowed"),
    [
        ("secret", False),
        ("../other/secret", False),
        ("/etc/passwd", False),
        ("file", False),
        ("../job/sub/file", True),
        ("../x/../job/sub/file", False),
    ],
)
def test_an_allowed_file_that_became_a_link_leads_only_to_allowed_files(
    top: Path, leads_to: str, allowed: bool
) -> None:
    folders = AllowedFolders([f"{top}/job"], [f"{top}/other/file"])
    (top / "other/file").unlink()
    (top / "other/secret").write_text("secret")
    (top / "other/file").symlink_to(leads_to)
    if allowed:
        assert read(folders, f"{top}/other/file") == "job/sub/file"
    else:
        with pytest.raises(OSError):
            folders.open_file(f"{top}/other/file")


def test_links_that_lead_to_each_other_end_in_an_error(top: Path) -> None:
    (top / "job/a").symlink_to("b")
    (top / "job/b").symlink_to("a")
    with pytest.raises(OSError, match="Too many levels"):
        AllowedFolders([f"{top}/job"]).stat(f"{top}/job/a")


def test_files_are_created_only_in_the_allowed_folder(top: Path) -> None:
    folders = AllowedFolders([f"{top}/job"])
    (top / "job/out").symlink_to("../other")
    (top / "job/dangling").symlink_to("../other/new")
    for path in ("out/new", "out/below/new", "dangling"):
        with pytest.raises(LeadsOutside):
            folders.open(f"{top}/job/{path}", os.O_WRONLY | os.O_CREAT, make=True)
    assert os.listdir(top / "other") == ["file"]
    os.close(folders.open(f"{top}/job/made/below/new", os.O_WRONLY | os.O_CREAT, make=True))
    assert (top / "job/made/below/new").exists()


def test_a_pipe_is_no_file_and_does_not_block(top: Path) -> None:
    os.mkfifo(top / "job/pipe")
    with pytest.raises(OSError, match="not a regular file"):
        AllowedFolders([f"{top}/job"]).open_file(f"{top}/job/pipe")


def test_a_walk_tells_of_folders_that_it_cannot_list(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, plain = os.open(top / "job", os.O_RDONLY), os.open
    told: list[OSError] = []

    def refuse(path: str, *more: Any, error: OSError, **named: Any) -> int:
        if path == "deep":
            raise error
        return plain(path, *more, **named)

    for error in (PermissionError(13, "Permission denied"), FileNotFoundError(2, "No such file")):
        monkeypatch.setattr(os, "open", partial(refuse, error=error))
        paths = sorted(path for path, _, _ in walk_below(folder, on_error=told.append))
        assert paths == ["sub", "sub/deep", "sub/file"]
        assert paths == sorted(path for path, _, _ in walk_below(folder))
    assert [(type(each), each.filename) for each in told] == [
        (PermissionError, "sub/deep"),
        (FileNotFoundError, "sub/deep"),
    ]
    list(walk_below(folder, on_error=raise_unless_vanished))
    with pytest.raises(FileNotFoundError):
        list(walk_below(folder, on_error=raise_error))
    monkeypatch.setattr(os, "open", partial(refuse, error=told[0]))
    with pytest.raises(PermissionError):
        list(walk_below(folder, on_error=raise_unless_vanished))
    os.close(folder)


def test_a_walk_follows_no_links(top: Path) -> None:
    (top / "job/link").symlink_to(top / "other")
    folder = os.open(top / "job", os.O_RDONLY)
    found = {path: entry.is_symlink() for path, entry, _ in walk_below(folder)}
    assert found == {
        "link": True,
        "sub": False,
        "sub/file": False,
        "sub/deep": False,
        "sub/deep/file": False,
    }
    for path in ("link", "link/file", "missing"):
        with pytest.raises(OSError):
            open_below(folder, path, os.O_RDONLY)
    os.close(open_below(folder, "sub/deep/file", os.O_RDONLY))
    os.close(folder)


def test_no_file_stays_open(top: Path) -> None:
    before = os.listdir("/proc/self/fd")
    folders = AllowedFolders([f"{top}/job"])
    (top / "job/link").symlink_to(f"{top}/job/sub/deep/../../sub")
    folders.stat(f"{top}/job/link/deep/file")
    for path in ("job/link/none/file", "job/../other", "job/none"):
        with pytest.raises(OSError):
            folders.open_file(f"{top}/{path}")
    assert len(os.listdir("/proc/self/fd")) == len(before)


# Files of a container, which the user's file calls reach through its root folder


def call(
    root: Path, op: str, data: bytes = b"", **fields: object
) -> tuple[dict[str, object], bytes]:
    payload = json.dumps({"op": op, **fields}).encode() + b"\n" + data
    line, _, given = answer(lambda: str(root), payload).partition(b"\n")
    return json.loads(line), given


@pytest.fixture
def root(top: Path) -> Path:
    """A container's root folder with links that name files of the machine."""
    root = top / "root"
    (root / "data").mkdir(parents=True)
    (root / str(top).lstrip("/") / "other").mkdir(parents=True)
    (root / str(top).lstrip("/") / "other/file").write_text("inside")
    for name, target in (
        ("file", top / "other/file"),
        ("folder", top / "other"),
        ("up", "../../other"),
    ):
        (root / "data" / name).symlink_to(target)
    return root


def test_absolute_links_of_a_container_start_at_its_root(root: Path, top: Path) -> None:
    for path in ("/data/file", "/data/folder/file", "/../data/file"):
        opened, _ = call(root, "open", path=path)
        assert call(root, "read", handle=opened["handle"], offset=0, size=99)[1] == b"inside"
        call(root, "close", handle=opened["handle"])
        assert call(root, "stat", path=path)[0]["size"] == 6
        assert call(root, "hash", path=path, size=99)[0]["size"] == 6
    assert call(root, "resolve", path="/data/file")[0] == {"path": f"{top}/other/file"}
    assert call(root, "list", path="/data/folder")[1].count(b"file") == 1
    assert json.loads(call(root, "walk", path="/data/folder")[1])[0][0] == "file"
    assert "error" in call(root, "stat", path="/data/up/file")[0]
    assert call(root, "readlink", path="/data/up")[0] == {"target": "../../other"}


def test_nothing_is_written_through_a_link_of_a_container(root: Path, top: Path) -> None:
    (top / "other/file").chmod(0o640)
    opened, _ = call(root, "open", path="/data/file", mode="write", create=True, truncate=True)
    call(root, "write", b"changed", handle=opened["handle"], offset=0)
    call(root, "close", handle=opened["handle"])
    call(root, "set", path="/data/file", mode=0o600, mtime=5, size=3)
    call(root, "mkdir", path="/data/folder/a/b", parents=True)
    call(root, "mkdir", path="/data/folder/a/b", parents=True)
    call(root, "rename", path="/data/folder/a", target="/data/folder/c")
    call(root, "link", path="/data/folder/hard", target="/data/folder/file", hard=True)
    call(root, "link", path="/data/folder/soft", target="/etc")
    inside = root / str(top).lstrip("/") / "other"
    assert sorted(os.listdir(inside)) == ["c", "file", "hard", "soft"]
    assert (inside / "file").read_text() == "cha"
    assert (inside / "file").stat().st_mode & 0o777 == 0o600
    assert os.listdir(inside / "c") == ["b"]
    assert (top / "other/file").read_text() == "other/file"
    assert (top / "other/file").stat().st_mode & 0o777 == 0o640
    call(root, "remove", path="/data/folder/file")
    call(root, "rmdir", path="/data/folder/c/b")
    assert os.listdir(top / "other") == ["file"]
    assert sorted(os.listdir(inside)) == ["c", "hard", "soft"]


def test_a_deep_tree_is_walked_step_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each folder from its parent, not all the way from the top: a job can make 3,000 levels."""
    depth = 300
    (tmp_path / "/".join(["d"] * depth)).mkdir(parents=True)
    (tmp_path / "d/d/last").write_text("x")
    opened = []
    real = os.open

    def count(path: Any, *words: Any, **more: Any) -> int:
        opened.append(path)
        return real(path, *words, **more)

    folder = real(tmp_path, os.O_RDONLY)
    try:
        monkeypatch.setattr(os, "open", count)
        found = [path for path, _, _ in walk_below(folder)]
    finally:
        os.close(folder)
    assert sorted(found) == sorted(
        ["d/d/last", *("/".join(["d"] * n) for n in range(1, depth + 1))]
    )
    assert len(opened) < 3 * depth
