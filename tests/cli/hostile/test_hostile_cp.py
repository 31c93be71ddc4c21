"""`cavvy cp` from a node that lies: nothing outside the target changes, and the user is told."""

import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.hostile.lying_node import Fields, LyingNode, lying_node, reply

from cavvy.cli.main import cli

FILE, FOLDER, LINK = stat.S_IFREG | 0o644, stat.S_IFDIR | 0o755, stat.S_IFLNK | 0o777
EVIL = b"evil"
REPLACE = ["--replace"]  # the user agrees to what arrives


def facts(mode: int, size: object = len(EVIL), **more: object) -> Fields:
    return {"size": size, "mode": mode, "mtime": 1e9, "uid": 0, "gid": 0, "atime": 1e9, **more}


def file(name: str, **more: object) -> tuple[str, Fields]:
    return name, {**facts(FILE), **more}


def folder(name: str, **more: object) -> tuple[str, Fields]:
    return name, {**facts(FOLDER), **more}


def link(name: str, target: str, **more: object) -> tuple[str, Fields]:
    return name, {**facts(LINK), "link": target, **more}


Listing = list[tuple[str, Fields]]

REFUSED: dict[str, Listing] = {
    "up": [file("../victim")],
    "up twice": [file("../../home/.bashrc")],
    "up in the middle": [folder("a"), file("a/../../victim")],
    "up at the end": [folder("a"), folder("a/..")],
    "absolute": [file("{outside}/victim")],
    "absolute folder": [folder("{outside}/made")],
    "two slashes": [file("//victim")],
    "nothing": [file("")],
    "a dot": [folder(".")],
    "dots": [folder("..")],
    "empty part": [folder("a"), file("a//b")],
    "a slash at the end": [folder("a/")],
    "NUL": [file("a\0b")],
    "NUL in a link": [link("a", "b\0c")],
    "half a character": [file("a\ud800")],
    "below a link": [link("a", "b"), file("a/victim")],
    "below a link out": [link("a", "{outside}"), file("a/victim")],
    "below a file": [file("a"), file("a/b")],
    "below nothing": [file("a/b/victim")],
    "twice": [file("a"), file("a")],
    "a link, then a file": [link("a", "{outside}/victim"), file("a")],
    "a file, then a link": [file("a"), link("a", "{outside}")],
    "a link, then a folder": [link("a", "{outside}"), folder("a"), file("a/victim")],
    "a folder that is a link": [("a", facts(FOLDER, link="{outside}")), file("a/victim")],
    "a file that is a link": [("a", facts(FILE, link="{outside}/victim"))],
    "a link to nothing": [("a", facts(LINK))],
    "no size": [("a", {"mode": FILE, "mtime": 0.0})],
    "size below nothing": [file("a", size=-1)],
    "size beyond numbers": [file("a", size=1 << 70)],
    "size in words": [file("a", size="4 or more")],
    "mode below nothing": [file("a", mode=-1)],
    "mode in words": [file("a", mode="0644")],
    "no time": [file("a", mtime=float("nan"))],
    "time without end": [file("a", mtime=float("inf"))],
    "far time": [file("a", mtime=1e300)],
    "clear the screen": [file("../\x1b[2J\x1b]0;title\x07")],
    "no pair": [("a",)],  # type: ignore[list-item]
    "a number as name": [(7, facts(FILE))],  # type: ignore[list-item]
}

LEFT_OUT = {  # links: everything else is copied
    "absolute": ("a", "{outside}"),
    "up": ("a", "../x"),
    "up from below": ("sub/a", "../../x"),
    "up and down again": ("a", "../out/x"),
    "through a name": ("a", "sub/../../x"),
    "through another link": ("a", "sub/../x"),
    "nowhere": ("a", ""),
}


def fill(listing: Listing, outside: Path) -> Listing:
    return json.loads(json.dumps(listing).replace("{outside}", str(outside)))  # type: ignore[no-any-return]


def state_of(folder: Path) -> dict[str, tuple[int, int, bytes | str]]:
    """Everything in a folder: inode, mode, content."""
    found: dict[str, tuple[int, int, bytes | str]] = {}
    for path in sorted([folder, *folder.rglob("*")]):
        seen = path.lstat()
        content = (
            os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        )
        found[str(path)] = (seen.st_ino, seen.st_mode, content)
    return found


class Scene:
    """A user's folder `here` beside others that no copy may change."""

    def __init__(self, root: Path, node: LyingNode) -> None:
        self.root, self.node = root, node
        self.outside, self.here = root / "node_endpoint", root / "user/here"
        self.outside.mkdir()
        (self.outside / "victim").write_text("mine")
        self.here.mkdir(parents=True)
        (root / "victim").write_text("mine")
        (root / "user/victim").write_text("mine")
        (node.folder / "sent").mkdir()
        node.lies["open"] = lambda asked: reply({"handle": 7})
        node.lies["close"] = lambda asked: reply({})
        node.lies["read"] = lambda asked: reply({}, EVIL)

    def tells(self, listing: Listing) -> None:
        said = json.dumps(fill(listing, self.outside)).encode()
        self.node.lies["walk"] = lambda asked: reply({}, said)

    def copy(
        self,
        source: str = "box:sent",
        target: str = "",
        options: Sequence[str] = (),
        entered: str = "",
    ) -> Result:
        before = self._others()
        result = CliRunner().invoke(
            cli, ["cp", *options, source, target or str(self.here)], input=entered
        )
        assert self._others() == before, "something beside the target has changed"
        assert result.exception is None or isinstance(result.exception, SystemExit), result
        assert not {*result.output} & {chr(code) for code in (7, 8, 27, 0x9B)}
        return result

    def _others(self) -> dict[str, tuple[int, int, bytes | str]]:
        own = str(self.here)
        found = state_of(self.root)
        return {
            path: seen
            for path, seen in found.items()
            if not path.startswith((own, str(self.node.folder), str(self.root / "state")))
        }


@pytest.fixture
def uow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path / "state"))
    (tmp_path / "far").mkdir()
    with lying_node(tmp_path / "state", tmp_path / "far") as node:
        yield Scene(tmp_path, node)


@pytest.mark.parametrize("attack", REFUSED)
def test_a_list_that_leads_elsewhere_is_refused_before_anything_is_written(
    uow: Scene, attack: str
) -> None:
    uow.tells([file("first"), *REFUSED[attack]])
    result = uow.copy()
    assert result.exit_code == 1, result.output
    assert "refused" in result.output or "sent an invalid" in result.output
    assert not list(uow.here.iterdir())


@pytest.mark.parametrize("attack", LEFT_OUT)
def test_links_that_lead_out_are_left_out_and_named(uow: Scene, attack: str) -> None:
    name, target = LEFT_OUT[attack]
    uow.tells([folder("sub"), file("first"), link(name, target), link("good", "./sub/x")])
    result = uow.copy()
    assert (result.exit_code, f"were skipped: {name} -> " in result.output) == (1, True), (
        result.output
    )
    assert (uow.here / "sent/first").read_bytes() == EVIL
    assert os.readlink(uow.here / "sent/good") == "./sub/x"
    assert not os.path.lexists(uow.here / "sent" / name)


def test_folders_that_the_node_cannot_list_are_named(uow: Scene) -> None:
    said = json.dumps([folder("locked"), file("first")]).encode()
    unlisted = [["locked", "Permission denied"], ["a\x1b[2J", "Input/output error"]]
    uow.node.lies["walk"] = lambda asked: reply({"unlisted": unlisted}, said)
    result = uow.copy()
    assert (result.exit_code, uow.here.joinpath("sent/first").read_bytes()) == (1, EVIL)
    assert (
        "the files of these folders were not copied: locked (Permission denied), "
        r"a\x1b[2J (Input/output error)" in result.output
    )


def test_names_cannot_write_to_the_terminal(uow: Scene) -> None:
    uow.tells([link("\x1b[2Ja\x9b", "/etc\x1b]0;x\x07")])
    result = uow.copy()
    assert r"\x1b[2Ja\x9b -> /etc\x1b]0;x\x07" in result.output
    uow.node.lies["stat"] = lambda asked: reply({"error": "no\x1b[2J\x9b", "errno": 2})
    assert r"no\x1b[2J\x9b" in uow.copy().output


def test_special_bits_are_dropped(uow: Scene) -> None:
    uow.tells([file("tool", mode=stat.S_IFREG | 0o6755), folder("d", mode=stat.S_IFDIR | 0o7777)])
    assert uow.copy().exit_code == 0
    assert stat.S_IMODE((uow.here / "sent/tool").stat().st_mode) == 0o755
    assert stat.S_IMODE((uow.here / "sent/d").stat().st_mode) == 0o777


@pytest.mark.parametrize(
    ("name", "sent"),
    [("a", file("a")), ("a.cavvy-part", file("a")), ("a", folder("a")), ("a", link("a", "b"))],
    ids=["a file", "its part", "a folder", "a link"],
)
@pytest.mark.parametrize("leads_to", ["victim", ""], ids=["to a file", "to a folder"])
def test_a_link_that_is_here_already_is_not_written_through(
    uow: Scene, name: str, sent: tuple[str, Fields], leads_to: str
) -> None:
    (uow.here / "sent").mkdir()
    (uow.here / "sent" / name).symlink_to(uow.outside / leads_to)
    uow.tells([sent, *([file("a/victim")] if sent[1]["mode"] == FOLDER else [])])
    result = uow.copy(options=REPLACE)
    replaced = name == "a" and sent[1]["mode"] != FOLDER
    assert (result.exit_code == 0) == replaced, result.output
    assert replaced or str(uow.here / "sent/a") in result.output.replace("\n", "")


def test_the_folder_itself_may_not_be_a_link_in_the_target(uow: Scene) -> None:
    (uow.here / "sent").symlink_to(uow.outside)
    uow.tells([file("victim")])
    assert (uow.copy().exit_code, uow.copy(options=REPLACE).exit_code) == (2, 1)


def test_kinds_that_collide_with_what_is_here_are_told(uow: Scene) -> None:
    (uow.here / "sent/a").mkdir(parents=True)
    for sent in (file("a"), link("a", "b")):
        uow.tells([sent])
        result = uow.copy(options=REPLACE)
        assert (result.exit_code, "sent/a: " in result.output) == (1, True), result.output
    (uow.here / "sent/b").write_text("mine")
    uow.tells([folder("b")])
    assert uow.copy(options=REPLACE).exit_code == 1


@pytest.mark.parametrize("path", [".", "..", "/", "~", "out/..", "../.."])
def test_the_node_does_not_choose_what_a_copy_is_called(uow: Scene, path: str) -> None:
    uow.node.lies["stat"] = lambda asked: reply(facts(FOLDER))
    for name in ("..", "/home/.ssh", "/a/.."):
        uow.node.lies["resolve"] = lambda asked, name=name: reply({"path": name})  # type: ignore[misc]
        uow.tells([file("victim")])
        assert uow.copy(f"box:{path}").exit_code == 0
        assert [each.name for each in uow.here.iterdir()] == ["box"]


@pytest.mark.parametrize("source", ["box:weights", "box:../weights", "box:~/weights"])
def test_a_file_is_called_as_the_user_called_it(uow: Scene, source: str) -> None:
    uow.node.lies["stat"] = lambda asked: reply(facts(FILE))
    uow.node.lies["resolve"] = lambda asked: reply({"path": "/root/.bashrc"})
    assert uow.copy(source).exit_code == 0
    assert [each.name for each in uow.here.iterdir()] == ["weights"]


@pytest.mark.parametrize(
    "lie",
    [
        lambda asked: reply({}),
        lambda asked: reply({}, b"evi"),
        lambda asked: reply({}, b"evil and more"),
        lambda asked: reply({}, bytes(1 << 20)),
    ],
    ids=["nothing", "less", "more", "much more"],
)
def test_a_file_of_another_size_than_was_said_does_not_appear(
    uow: Scene, lie: Callable[[Fields], bytes]
) -> None:
    uow.node.lies["read"] = lie
    uow.tells([file("a")])
    result = uow.copy()
    assert (result.exit_code, "changed while it was copied" in result.output) == (1, True)
    assert not (uow.here / "sent/a").exists()
    assert (uow.here / "sent/a.cavvy-part").stat().st_size <= len(EVIL)


def test_a_file_larger_than_the_disk_is_refused_at_once(uow: Scene) -> None:
    uow.tells([file("a", size=1 << 62)])
    result = uow.copy()
    assert (result.exit_code, "not enough disk space" in result.output) == (1, True), result.output
    assert "read" not in [asked["op"] for asked in uow.node.asked]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]\n",
        b"7\n",
        b'"error"\n',
        b"{\n",
        b"[" * 100_000 + b"\n",
        b'{"size": ' + b"9" * 100_000 + b"}\n",
        bytes(3 << 20),
    ],
    ids=["empty", "list", "number", "text", "half", "deep", "digits", "large"],
)
@pytest.mark.parametrize("call", ["stat", "walk", "open", "read"])
def test_answers_that_mean_nothing_end_the_copy(uow: Scene, call: str, answer: bytes) -> None:
    uow.tells([file("a")])
    uow.node.lies[call] = lambda asked: answer
    if call == "walk" and len(answer) == 3 << 20:
        answer = b"{}\n" + answer
    result = uow.copy()
    assert result.exit_code in (1, 255), result.output
    assert not (uow.here / "sent/a").exists()


@pytest.mark.parametrize(
    "said",
    [{}, {"size": -1}, {"size": 1 << 80}, {"size": "x"}, {"mode": "x"}],
    ids=["nothing", "below", "beyond", "words", "no mode"],
)
def test_lies_about_a_file_that_is_sent_are_told(uow: Scene, said: Fields) -> None:
    (uow.here / "mine").write_bytes(b"content")
    uow.node.lies["stat"] = lambda asked: reply({**facts(FILE), **said} if said else {})
    result = uow.copy(str(uow.here / "mine"), "box:x")
    assert (result.exit_code, "sent an invalid" in result.output) == (1, True), result.output


def test_an_honest_node_is_copied_from_as_it_is(uow: Scene) -> None:
    uow.node.lies.clear()
    sent = uow.node.folder / "sent"
    (sent / "in/ner").mkdir(parents=True)
    (sent / "in/ner/größe").write_bytes(os.urandom(700_000))
    (sent / "run.sh").write_text("#!/bin/sh\n")
    (sent / "run.sh").chmod(0o750)
    (sent / "in/link").symlink_to("../run.sh")
    (sent / os.fsdecode(b"\xff")).write_text("no UTF-8")
    os.mkfifo(sent / "pipe")
    (sent / "in").chmod(0o700)
    os.utime(sent / "in", (5e8, 5e8))
    result = uow.copy()
    assert result.exit_code == 0, result.output
    assert "note: these pipes, sockets or devices were skipped: pipe\n" in result.output
    got = uow.here / "sent"
    assert (got / "in/ner/größe").read_bytes() == (sent / "in/ner/größe").read_bytes()
    assert os.readlink(got / "in/link") == "../run.sh"
    assert (got / os.fsdecode(b"\xff")).read_text() == "no UTF-8"
    assert stat.S_IMODE((got / "run.sh").stat().st_mode) == 0o750
    assert (stat.S_IMODE((got / "in").stat().st_mode), (got / "in").stat().st_mtime) == (0o700, 5e8)
    assert not (got / "pipe").exists()


@pytest.mark.parametrize("as_link", [False, True])
def test_a_pipe_or_device_is_not_replaced_with_a_file(uow: Scene, as_link: bool) -> None:
    uow.node.lies.clear()
    (uow.node.folder / "sent/a").write_text("text")
    os.mkfifo(uow.here / "pipe")
    (uow.here / "link").symlink_to("pipe")
    name = "link" if as_link else "pipe"
    result = uow.copy("box:sent/a", str(uow.here / name))
    assert (result.exit_code, f"{name} is not a file or folder" in result.output) == (1, True)
    assert stat.S_ISFIFO((uow.here / name).stat().st_mode)
    os.mkfifo(uow.node.folder / "there")
    (uow.here / "mine").write_text("text")
    result = uow.copy(str(uow.here / "mine"), "box:there")
    assert (result.exit_code, "is not a file or folder on the node" in result.output) == (1, True)
    assert stat.S_ISFIFO((uow.node.folder / "there").stat().st_mode)


def test_a_pipe_or_device_is_not_copied(uow: Scene) -> None:
    os.mkfifo(uow.here / "pipe")
    result = uow.copy(str(uow.here / "pipe"), "box:x")
    assert (result.exit_code, "pipe is not a file or folder" in result.output) == (1, True)


def test_a_file_of_proc_is_not_copied_as_an_empty_file(uow: Scene) -> None:
    uow.node.lies.clear()
    result = uow.copy("box:/proc/meminfo", str(uow.here / "info"))
    assert (result.exit_code, "states the size 0 but has content" in result.output) == (1, True)
    assert not (uow.here / "info").exists()


@pytest.mark.parametrize(
    "name", [".git", ".GIT", ".g\u200cit", ".git. ", "git~1", ".envrc", ".vscode"]
)
def test_files_that_other_programs_obey_are_named(uow: Scene, name: str) -> None:
    uow.tells([folder("a"), folder(f"a/{name}"), file(f"a/{name}/config")])
    result = uow.copy()
    assert result.exit_code == 0, result.output
    assert f"a/{name.encode('unicode_escape').decode()}; Cavvy's own commands run none" in (
        result.output
    )
    assert (uow.here / "sent/a" / name / "config").read_bytes() == EVIL


def test_a_repository_without_a_git_folder_is_named(uow: Scene) -> None:
    uow.tells([folder("a"), file("a/HEAD"), folder("a/objects"), folder("a/refs"), file("config")])
    result = uow.copy()
    assert result.exit_code == 0, result.output
    assert "may run programs that these name: a; " in result.output


@pytest.mark.parametrize("own", [folder(".git"), file(".git"), link(".git", "other")])
def test_a_repository_here_is_not_changed(uow: Scene, own: tuple[str, Fields]) -> None:
    (uow.here / "sent/.git").mkdir(parents=True)
    (uow.here / "sent/.git/config").write_text("mine")
    listing = [own, folder("other"), file("other/config"), file("z")]
    if own[1]["mode"] == FOLDER:  # not beside its folder, as a node may order its list
        listing += [folder(".git/hooks"), file(".git/config"), file(".git/hooks/pre-commit")]
    uow.tells(listing)
    result = uow.copy(options=REPLACE)
    assert result.exit_code == 1
    assert "exist here and were not replaced: .git;" in result.output
    assert (uow.here / "sent/.git/config").read_text() == "mine"
    assert [path.name for path in (uow.here / "sent/.git").iterdir()] == ["config"]
    assert (uow.here / "sent/z").read_bytes() == EVIL


def test_a_repository_that_the_user_names_is_not_changed(uow: Scene) -> None:
    (uow.node.folder / ".git").mkdir()
    (uow.here / ".git").mkdir()
    uow.tells([file("config")])
    result = uow.copy("box:.git")
    assert (result.exit_code, list((uow.here / ".git").iterdir())) == (1, [])


@pytest.mark.parametrize("own", [".git", "repo.git", ".git/modules/sub"])
@pytest.mark.parametrize("target", ["hooks", "config", "new", "link/hooks"])
def test_nothing_is_copied_into_a_git_folder(uow: Scene, own: str, target: str) -> None:
    uow.node.lies.clear()
    (uow.node.folder / "sent/a").write_text("evil")
    for name in ("hooks", "objects", "refs"):
        (uow.here / own / name).mkdir(parents=True)
    for name in ("HEAD", "config"):
        (uow.here / own / name).write_text("mine")
    (uow.here / own / "link").symlink_to(".")
    result = uow.copy("box:sent/a", str(uow.here / own / target))
    assert (result.exit_code, "is in a git folder" in result.output) == (1, True)
    assert (uow.here / own / "config").read_text() == "mine"
    assert not list((uow.here / own / "hooks").iterdir())


def test_a_repository_without_a_git_folder_is_not_changed(uow: Scene) -> None:
    for name in ("objects", "refs"):
        (uow.here / "sent/repo" / name).mkdir(parents=True)
    (uow.here / "sent/repo/HEAD").write_text("mine")
    uow.tells([folder("repo"), file("repo/config"), file("z")])
    result = uow.copy(options=REPLACE)
    assert result.exit_code == 1
    assert "exist here and were not replaced: repo;" in result.output
    assert not (uow.here / "sent/repo/config").exists()
    assert (uow.here / "sent/z").read_bytes() == EVIL


@pytest.mark.parametrize("name", ["Makefile", "sub/conftest.py", ".envrc", "new", "mine"])
def test_nothing_arrives_among_files_of_the_user_without_a_question(uow: Scene, name: str) -> None:
    (uow.here / "sent").mkdir()
    (uow.here / "sent/mine").write_text("mine")
    inner = [folder("sub")] if name.startswith("sub/") else []
    uow.tells([*inner, file("z"), file(name)])
    result = uow.copy()
    assert result.exit_code == 2
    assert f"{'replaced' if name == 'mine' else 'new in it'}: " in result.output
    assert name in result.output.replace("\n", "")
    assert [path.name for path in (uow.here / "sent").iterdir()] == ["mine"]
    assert (uow.here / "sent/mine").read_text() == "mine"
    assert uow.copy(options=REPLACE).exit_code == 0
    assert (uow.here / "sent" / name).read_bytes() == EVIL


def test_a_folder_that_was_copied_is_copied_again_without_a_question(uow: Scene) -> None:
    uow.tells([file("a")])
    assert uow.copy().exit_code == 0
    (uow.here / "sent/own").write_text("mine")
    uow.node.lies["read"] = lambda asked: reply({}, b"more")
    uow.tells([file("a"), file("b")])
    assert uow.copy().exit_code == 0
    assert (uow.here / "sent/a").read_bytes() == (uow.here / "sent/b").read_bytes() == b"more"
    uow.tells([file("a"), file("own")])
    assert "replaced: own; nothing was written" in uow.copy().output.replace("\n", " ")
    (uow.here / "sent/a").write_text("mine too")
    uow.tells([file("a")])
    assert uow.copy().exit_code == 2
    assert (uow.here / "sent/a").read_text() == "mine too"


def test_the_question_shows_what_differs(uow: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cavvy.cli.reach.received._may_ask", lambda: True)
    (uow.here / "sent").mkdir()
    (uow.here / "sent/a").write_text("mine\n")
    uow.tells([file("a", size=9)])
    uow.node.lies["read"] = lambda asked: reply({}, b"evil\x1b[2J\n")
    for answer in ("", "n\n"):
        result = uow.copy(entered=answer)
        assert (result.exit_code, "-mine\n+evil\\x1b[2J\n" in result.output) == (1, True)
    assert (uow.here / "sent/a").read_text() == "mine\n"
    assert uow.copy(entered="y\n").exit_code == 0
    assert (uow.here / "sent/a").read_bytes() == b"evil\x1b[2J\n"


def test_a_node_that_lies_about_a_hash_replaces_nothing(uow: Scene) -> None:
    (uow.here / "sent").mkdir()
    (uow.here / "sent/a").write_text("mine")
    mine = sha256(b"mine").hexdigest()
    uow.node.lies["hash"] = lambda asked: reply({"sha256": mine})
    uow.tells([file("a")])
    assert uow.copy().exit_code == 0
    assert (uow.here / "sent/a").read_text() == "mine"
