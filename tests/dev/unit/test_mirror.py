"""A folder here and a folder of a session are kept equal, and no edit is lost."""

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.waits import patience

from cavvy.agent.access.files import answer
from cavvy.agent.access.folder_watch import FolderWatch
from cavvy.capabilities.dev import mirror as mirrors
from cavvy.capabilities.dev.mirror import FolderMirror, MirrorCount
from cavvy.cli.view.failure import CommandFailure
from cavvy.client.tunnel import RemoteError


class FolderTunnel:
    """Answers calls with the agent's own code, in this process. `before` is called with each call,
    as programs of the node may change files at any time.
    """

    def __init__(self) -> None:
        self.before: dict[str, Any] = {}
        self.calls: list[str] = []

    async def call(self, op: str, data: bytes = b"", **fields: object) -> tuple[Any, bytes]:
        self.calls.append(op)
        if act := self.before.pop(op, None):
            act()
        made = answer(lambda: "", json.dumps({"op": op, **fields}).encode() + b"\n" + data)
        line, _, given = made.partition(b"\n")
        said = json.loads(line)
        if "error" in said:
            raise RemoteError(said["errno"], said["error"])
        return said, given


class Pair:
    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CAVVY_HOME", str(root / "state"))
        self.here, self.there = root / "here", root / "there"
        for each in (self.here, self.there):
            each.mkdir()
        self.tunnel = FolderTunnel()

    def sync(self, name: str = "dev", *, take_new: bool = True) -> MirrorCount:
        """Make passes with a new mirror, as a command that is started again."""
        mirror = FolderMirror(self.here, str(self.there), name, take_new=take_new)
        said: list[str] = []
        return asyncio.run(mirror.settle(self.tunnel, said.append))  # type: ignore[arg-type]

    def once(self) -> MirrorCount:
        mirror = FolderMirror(self.here, str(self.there), "dev", take_new=True)
        return asyncio.run(mirror.run(self.tunnel))  # type: ignore[arg-type]

    def equal(self) -> dict[str, str]:
        own, other = read_tree(self.here), read_tree(self.there)
        assert own == other
        return own


def read_tree(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if name == ".cavvy-mirror":
            continue
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        else:
            found[name] = "/" if path.is_dir() else path.read_text()
    return found


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    return Pair(tmp_path, monkeypatch)


def test_files_folders_links_and_modes_go_both_ways(pair: Pair) -> None:
    (pair.here / "a" / "deep").mkdir(parents=True)
    (pair.here / "a" / "deep" / "run.sh").write_text("#!/bin/sh\n")
    (pair.here / "a" / "deep" / "run.sh").chmod(0o755)
    (pair.here / "a" / "link").symlink_to("deep/run.sh")
    (pair.here / "large").write_bytes(b"x" * 3_000_000)
    (pair.there / "out").mkdir()
    (pair.there / "out" / "log").write_text("step 1")
    (pair.there / "weights").write_bytes(b"w" * 3_000_000)
    count = pair.sync()
    assert (count.sent, count.fetched) == (3, 2)
    assert pair.equal().keys() >= {"a/deep/run.sh", "a/link", "large", "out/log", "weights"}
    assert os.access(pair.there / "a" / "deep" / "run.sh", os.X_OK)
    assert os.stat(pair.there / "large").st_mtime == os.stat(pair.here / "large").st_mtime
    pair.tunnel.calls.clear()
    pair.sync()
    assert pair.tunnel.calls == ["walk", "get"], "nothing is copied twice"


def test_names_that_are_not_utf_8_are_mirrored(pair: Pair) -> None:
    Path(os.fsdecode(os.fsencode(pair.here) + b"/here\xff")).write_text("here")
    Path(os.fsdecode(os.fsencode(pair.there) + b"/there\xff")).write_text("there")
    assert pair.sync().sent == 1
    assert pair.equal() == {"here\udcff": "here", "there\udcff": "there"}
    pair.tunnel.calls.clear()
    pair.sync()
    assert pair.tunnel.calls == ["walk", "get"], "the state has the names"


def test_changes_and_deletions_follow_from_both_sides(pair: Pair) -> None:
    for name in ("one", "two", "three", "four"):
        (pair.here / name).write_text(name)
    (pair.here / "folder").mkdir()
    (pair.here / "folder" / "inner").write_text("inner")
    pair.sync()
    (pair.here / "one").write_text("one, edited here")
    (pair.there / "two").write_text("two, edited there")
    (pair.here / "three").unlink()
    (pair.there / "four").unlink()
    (pair.there / "folder" / "inner").unlink()
    (pair.there / "folder").rmdir()
    pair.sync()
    assert pair.equal() == {"one": "one, edited here", "two": "two, edited there"}


def test_what_both_changed_is_kept_twice(pair: Pair) -> None:
    (pair.here / "both").write_text("first")
    (pair.here / "same").write_text("first")
    (pair.here / "edited").write_text("first")
    pair.sync()
    for folder, text in ((pair.here, "here"), (pair.there, "there")):
        (folder / "both").write_text(f"changed {text}")
        (folder / "same").write_text("changed alike")
    (pair.here / "both.conflict").write_text("an older one")
    (pair.here / "edited").unlink()
    (pair.there / "edited").write_text("edited after all")
    pair.sync()
    assert pair.equal() == {
        "both": "changed here",
        "both.conflict": "an older one",
        "both.conflict-2": "changed there",
        "same": "changed alike",
        "edited": "edited after all",
    }


def test_a_new_node_and_an_empty_folder_delete_nothing(pair: Pair) -> None:
    (pair.here / "kept").write_text("kept")
    pair.sync()
    for path in (pair.there / "kept", pair.there / ".cavvy-mirror"):
        path.unlink()
    (pair.there / "new").write_text("new")
    pair.sync()  # the session runs on another node
    assert pair.equal() == {"kept": "kept", "new": "new"}
    for path in (pair.here / "kept", pair.here / "new"):
        path.unlink()
    pair.sync()
    assert pair.equal() == {"kept": "kept", "new": "new"}
    for path in (pair.there / "kept", pair.there / "new"):
        path.unlink()  # as `rm -r *` in the shell of the session, which leaves hidden files
    assert pair.sync().removed == 0
    assert pair.equal() == {"kept": "kept", "new": "new"}


@pytest.mark.parametrize("op", ["put", "drop", "get"])
def test_an_edit_on_the_node_during_a_pass_is_not_lost(pair: Pair, op: str) -> None:
    (pair.here / "file").write_text("first")
    pair.sync()
    if op == "put":
        (pair.here / "file").write_text("edited here")
    elif op == "drop":
        (pair.here / "file").unlink()
    else:
        (pair.there / "file").write_text("edited there")
    (pair.here / "other").write_text("so that the folder is not empty")
    pair.tunnel.before["hashes" if op == "get" else op] = lambda: (pair.there / "file").write_text(
        "late"
    )
    if op == "get":
        pair.tunnel.before = {}
    pair.sync()
    found = pair.equal()
    lost = {"put": {"edited here", "late"}, "drop": {"late"}, "get": {"edited there"}}[op]
    assert lost <= set(found.values())


def test_what_a_program_puts_in_the_place_of_a_draft_is_not_written_to(pair: Pair) -> None:
    """A pipe without a reader would stop the session, and a link would lose what it leads to."""
    (pair.there / "precious").write_text("precious")
    os.link(pair.there / "precious", pair.there / "linked.cavvy-part")
    os.mkfifo(pair.there / "piped.cavvy-part")
    reader = os.open(pair.there / "piped.cavvy-part", os.O_RDWR | os.O_NONBLOCK)
    for name in ("linked", "piped"):
        (pair.here / name).write_text("new")
    pair.sync()
    os.close(reader)
    assert (pair.there / "piped").is_file()
    assert pair.equal() == {"precious": "precious", "linked": "new", "piped": "new"}


def test_an_edit_here_during_a_pass_is_not_lost(pair: Pair) -> None:
    (pair.here / "file").write_text("first")
    pair.sync()
    (pair.there / "file").write_text("edited there")
    real = FolderTunnel.call

    async def late(tunnel: FolderTunnel, op: str, data: bytes = b"", **fields: Any) -> Any:
        made = await real(tunnel, op, data, **fields)
        if op == "get" and fields["files"] == ["file"]:
            (pair.here / "file").write_text("late")
        return made

    FolderTunnel.call = late  # type: ignore[method-assign]
    try:
        assert pair.once().left == 1
    finally:
        FolderTunnel.call = real  # type: ignore[method-assign]
    pair.sync()
    assert set(pair.equal().values()) == {"late", "edited there"}


def test_ignored_files_and_files_of_git_stay_where_they_are(pair: Pair) -> None:
    (pair.here / ".gitignore").write_text("*.log\nbuild/\n")
    (pair.here / "a.log").write_text("log")
    for folder in (
        pair.here / ".git",
        pair.there / "build",
        pair.there / ".git",
        pair.there / ".venv",
    ):
        folder.mkdir()
        (folder / "config").write_text(str(folder))
    (pair.there / "b.log").write_text("log")
    (pair.there / "out").symlink_to("/etc/passwd")
    pair.sync()
    assert sorted(os.listdir(pair.here)) == [".git", ".gitignore", "a.log"]
    assert (pair.here / ".git" / "config").read_text() == str(pair.here / ".git")
    assert not (pair.there / "a.log").exists()


@pytest.mark.parametrize(
    "name",
    [
        *(".gitignore", ".cavvyignore", "sub/.gitignore", ".GitIgnore", ".gitattributes"),
        *("cavvy.yaml", ".devcontainer/devcontainer.json", ".vscode/tasks.json", ".envrc"),
    ],
)
def test_a_node_changes_no_file_that_is_obeyed_here(pair: Pair, name: str) -> None:
    (pair.here / ".gitignore").write_text(".env\nsecrets\nlocal\n")
    (pair.here / ".env").write_text("secret")
    (pair.here / "sub").mkdir()
    (pair.here / "sub" / "a.py").write_text("a")
    pair.sync()
    before, target = read_tree(pair.here), pair.there / name
    for act in ("write", "link", "folder", "remove"):
        if target.is_dir() and not target.is_symlink():
            (target / "x").unlink()
            target.rmdir()
        else:
            target.unlink(missing_ok=True)
        target.parent.mkdir(exist_ok=True)
        if act == "write":
            target.write_text("!.env\n")
        elif act == "link":
            target.symlink_to("a.py")
        elif act == "folder":
            target.mkdir()
            (target / "x").write_text("x")
        count = pair.sync()
        assert (count.fetched, count.removed, count.sent) == (0, 0, 0), act
        assert read_tree(pair.here) == before, act
    assert not (pair.there / ".env").exists()


def test_a_node_changes_nothing_through_links_and_folders_of_ignore_files(pair: Pair) -> None:
    (pair.here / "config").mkdir()
    (pair.here / "config" / "ignored").write_text(".env\n")
    (pair.here / ".cavvyignore").symlink_to("config/ignored")
    (pair.here / "sub").mkdir()
    (pair.here / "sub" / ".gitignore").write_text("token\n")
    for path in (".env", "sub/token"):
        (pair.here / path).write_text("secret")
    pair.sync()
    before = read_tree(pair.here)
    (pair.there / "config" / "ignored").write_text("")
    (pair.there / "sub" / ".gitignore").unlink()
    (pair.there / "sub").rmdir()
    (pair.there / "sub").symlink_to("config")
    said: list[str] = []
    mirror = FolderMirror(pair.here, str(pair.there), "dev")
    for _ in range(2):
        asyncio.run(mirror.settle(pair.tunnel, said.append))  # type: ignore[arg-type]
    assert read_tree(pair.here) == before
    assert not {".env", "token"} & {each.name for each in pair.there.rglob("*")}
    assert len(said) == 1, "told once"
    assert "config/ignored" in said[0]
    assert "sub/.gitignore" in said[0]


def test_a_link_out_of_the_folder_on_the_node_removes_nothing_here(pair: Pair) -> None:
    """Such as a folder of data that the session has moved to a larger disk."""
    (pair.here / "data").mkdir()
    for name in ("data/one", "data/two", "main.py", "log", "other"):
        (pair.here / name).write_text(name)
    pair.sync()
    (pair.there / "data").rename(pair.there.parent / "disk")
    (pair.there / "data").symlink_to(pair.there.parent / "disk")
    (pair.there / "main.py").unlink()
    (pair.there / "main.py").symlink_to("/etc/passwd")
    (pair.there / "log").unlink()
    os.mkfifo(pair.there / "log")
    mirror = FolderMirror(pair.here, str(pair.there), "dev", take_new=True)
    said: list[str] = []
    for _ in range(2):
        count = asyncio.run(mirror.settle(pair.tunnel, said.append))  # type: ignore[arg-type]
        assert count.removed == 0
    assert read_tree(pair.here) == {
        "data": "/",
        **{name: name for name in ("data/one", "data/two", "log", "main.py", "other")},
    }
    assert [each for each in said if "links that lead out" in each] == [
        "on the node, links that lead out of the folder, or pipes, are in the place of data, log, "
        "main.py: yours stay as they are"
    ]
    (pair.there / "main.py").unlink()
    (pair.there / "main.py").write_text("new")
    pair.sync()
    assert (pair.here / "main.py").read_text() == "new"


def test_a_folder_beside_a_file_is_left_to_the_user(pair: Pair) -> None:
    (pair.here / "x").mkdir()
    (pair.here / "x" / "inner").write_text("inner")
    (pair.there / "x").write_text("file")
    said: list[str] = []
    mirror = FolderMirror(pair.here, str(pair.there), "dev")
    asyncio.run(mirror.settle(pair.tunnel, said.append))  # type: ignore[arg-type]
    assert said == ["x is a folder on one side and a file on the other; rename one"]
    assert (pair.there / "x").read_text() == "file"
    assert (pair.here / "x" / "inner").read_text() == "inner"


def test_a_file_can_become_a_folder_and_a_folder_a_file(pair: Pair) -> None:
    (pair.here / "file").write_text("file")
    (pair.here / "folder").mkdir()
    (pair.here / "folder" / "inner").write_text("inner")
    pair.sync()
    (pair.here / "file").unlink()
    (pair.here / "file").mkdir()
    (pair.here / "file" / "inner").write_text("new")
    (pair.there / "folder" / "inner").unlink()
    (pair.there / "folder").rmdir()
    (pair.there / "folder").write_text("now a file")
    pair.sync()
    assert pair.equal() == {"file": "/", "file/inner": "new", "folder": "now a file"}


EDITS = st.lists(
    st.tuples(
        st.sampled_from(["here", "there"]),
        st.sampled_from(["a", "b", "d/a", "d/b", "d/e/a"]),
        st.sampled_from(["write", "write", "delete"]),
    ),
    max_size=8,
)


@given(st.lists(EDITS, min_size=1, max_size=4))
@settings(deadline=None, max_examples=60)
def test_the_folders_become_equal_and_the_newest_texts_stay(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[list[tuple[str, str, str]]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        pair, number = Pair(tmp_path_factory.mktemp("pair"), patch), 0
        for edits in rounds:
            newest: dict[tuple[str, str], str] = {}
            for side, name, what in edits:
                path = (pair.here if side == "here" else pair.there) / name
                if what == "delete":
                    path.unlink(missing_ok=True)
                    newest.pop((side, name), None)
                    continue
                number += 1
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f"text {number}")
                newest[side, name] = f"text {number}"
            pair.sync()
            assert set(newest.values()) <= set(pair.equal().values())


def test_a_hostile_node_writes_nothing_elsewhere(pair: Pair) -> None:
    async def call(op: str, data: bytes = b"", **fields: Any) -> Any:
        entry = {"size": 1, "mode": 0o100644, "mtime": 1.0}
        if op == "walk":
            return {}, json.dumps([["../evil", entry]]).encode()
        raise AssertionError(op)

    pair.tunnel.call = call  # type: ignore[method-assign]
    with pytest.raises(CommandFailure, match="is refused"):
        pair.sync()

    async def lies(op: str, data: bytes = b"", **fields: Any) -> Any:
        entry = {"size": 1, "mode": 0o100644, "mtime": 1.0}
        if op == "walk":
            return {}, json.dumps([["file", entry]]).encode()
        if op == "get":
            return {"got": [[5, 1.0], [9, 2.0], [1, 1.0]]}, b"xx"
        return {"wrote": [], "handle": 1}, b""

    (pair.here / "keep").write_text("mine")
    pair.tunnel.call = lies  # type: ignore[method-assign]
    assert pair.once().left >= 1
    assert read_tree(pair.here) == {"keep": "mine"}


async def test_a_watch_tells_of_changes_in_new_folders_only_outside_of_skipped_ones(
    tmp_path: Path,
) -> None:
    (tmp_path / ".venv").mkdir()
    watch = FolderWatch(str(tmp_path), (".venv",))
    changed = asyncio.Event()
    asyncio.get_running_loop().add_reader(watch.fileno(), lambda: watch.read() and changed.set())
    try:
        (tmp_path / ".venv" / "file").touch()
        assert not watch.read()
        for make in (
            lambda: (tmp_path / "new" / "inner").mkdir(parents=True),
            lambda: (tmp_path / "new" / "inner" / "file").write_text("x"),
            lambda: (tmp_path / "new" / "inner" / "file").unlink(),
        ):
            changed.clear()
            make()
            async with patience():
                await changed.wait()
            while watch.read():
                pass
    finally:
        asyncio.get_running_loop().remove_reader(watch.fileno())
        watch.close()


def test_batches_hold_the_limits() -> None:
    sizes = [mirrors._BATCH_BYTES, 1, 1, mirrors._BATCH_BYTES - 1, *[0] * 1000]
    batches = list(mirrors._split(map(str, range(len(sizes))), lambda path: sizes[int(path)]))
    assert [len(each) for each in batches][:3] == [1, 2, 400]
    assert sum(map(len, batches)) == len(sizes)


def test_what_was_ignored_stays_here_until_the_user_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(tmp_path, monkeypatch)
    (pair.here / ".gitignore").write_text(".env\nsecrets/\n*.key\n")
    (pair.here / ".env").write_text("TOKEN=1")
    (pair.here / "secrets").mkdir()
    (pair.here / "secrets/id").write_text("12345")
    pair.sync()
    (pair.here / ".gitignore").write_text("*.log\n")  # a program here, or the user, changes it
    (pair.there / "secrets").mkdir()
    (pair.there / "secrets/id").write_text("of the node")
    (pair.here / "a.py").write_text("x")
    mirror = FolderMirror(pair.here, str(pair.there), "dev")
    said: list[str] = []
    asyncio.run(mirror.settle(pair.tunnel, said.append))  # type: ignore[arg-type]
    assert [each for each in said if ".env, secrets/ were ignored when the session began" in each]
    assert (pair.here / "secrets/id").read_text() == "12345"
    assert (pair.there / "secrets/id").read_text() == "of the node"
    assert {".gitignore", "a.py"} <= read_tree(pair.there).keys()
    assert ".env" not in read_tree(pair.there)
    mirror = FolderMirror(pair.here, str(pair.there), "dev")
    assert mirror.find_released() == {".env": 7, "secrets/": 5}
    mirror.release([".env"])
    pair.sync()
    assert (pair.there / ".env").read_text() == "TOKEN=1"
    assert (pair.there / "secrets/id").read_text() == "of the node"


def test_ignore_files_outside_of_the_folder_apply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Git reads them for a folder of a repository: those of the folders above, `info/exclude` and
    the user's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    pair = Pair(tmp_path, monkeypatch)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "config/git").mkdir(parents=True)
    (tmp_path / "config/git/ignore").write_text("global\n")
    (tmp_path / ".gitignore").write_text("above\n/here/rooted\n/rooted2\n!own\n")
    (tmp_path / ".git/info/exclude").write_text("excluded\n")
    (pair.here / ".gitignore").write_text("own\n")
    for name in ("above", "rooted", "rooted2", "excluded", "global", "own", "sent"):
        (pair.here / name).write_text("x")
    pair.sync()
    assert read_tree(pair.there).keys() == {".gitignore", "rooted2", "sent"}


def test_names_that_are_new_beside_the_users_files_arrive_after_a_question(pair: Pair) -> None:
    """Any name may be one that a later command here obeys."""
    (pair.here / "src").mkdir()
    (pair.here / "src" / "a.py").write_text("a")
    pair.sync(take_new=False)
    before = read_tree(pair.here)
    for name in ("Makefile", "src/json.py", "out/1/log", "out/conftest.py"):
        (pair.there / name).parent.mkdir(parents=True, exist_ok=True)
        (pair.there / name).write_text("of the node")
    (pair.there / "link").symlink_to("src/a.py")
    said: list[str] = []
    mirror = FolderMirror(pair.here, str(pair.there), "dev")
    for _ in range(2):
        asyncio.run(mirror.settle(pair.tunnel, said.append))  # type: ignore[arg-type]
    assert read_tree(pair.here) == before
    assert [each for each in said if "Makefile, link, out, src/json.py; they stay there" in each]
    assert len(said) == 1, "told once"
    mirror = FolderMirror(pair.here, str(pair.there), "dev")
    assert mirror.list_waiting() == ["Makefile", "link", "out", "src/json.py"]
    mirror.take(["out", "src/json.py"])
    assert pair.sync(take_new=False).fetched == 3
    (pair.there / "out" / "2").mkdir()
    (pair.there / "out" / "2" / "log").write_text("below a folder that the user took")
    (pair.there / "src" / "a.py").write_text("edited there")
    (pair.there / "Makefile").write_text("again")
    pair.sync(take_new=False)
    now = read_tree(pair.here)
    assert not {"Makefile", "link"} & now.keys()
    assert now["out/2/log"] == "below a folder that the user took"
    assert now["src/a.py"] == "edited there"
    assert FolderMirror(pair.here, str(pair.there), "dev").list_waiting() == ["Makefile", "link"]
    (pair.here / "Makefile").write_text("of the user")
    pair.sync(take_new=False)
    assert read_tree(pair.there)["Makefile"] == "of the user"


def test_a_folder_that_was_empty_takes_what_the_session_makes(pair: Pair) -> None:
    (pair.there / "log").write_text("1")
    pair.sync(take_new=False)
    (pair.here / "mine").write_text("m")
    (pair.there / "Makefile").write_text("x")
    pair.sync(take_new=False)
    assert pair.equal().keys() == {"log", "mine", "Makefile"}


def test_a_file_in_a_repository_that_is_new_by_a_new_node_is_asked_for(pair: Pair) -> None:
    (pair.here / "a").write_text("a")
    pair.sync(take_new=False)
    (pair.there / ".cavvy-mirror").unlink()
    (pair.there / "b").write_text("b")
    pair.sync(take_new=False)
    assert read_tree(pair.here).keys() == {"a"}
