"""Frozen folders: what belongs to one, its hash, its cache and its refusals."""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.spec.unit.test_spec_origin import git

from cavvy.spec.ignore import IgnoreRules, list_files
from cavvy.spec.repository import capture
from cavvy.spec.workdir import FolderSnapshot, FreezeError, FrozenFile, combine, freeze


def write(folder: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


def paths(snapshot: FolderSnapshot) -> list[str]:
    return [entry.path for entry in snapshot.entries]


FILES = {
    ".gitignore": "*.log\n/build/\n!keep.log\n",
    "train.py": "print(1)",
    "a.log": "x",
    "keep.log": "x",
    "build/out": "x",
    "sub/build/in": "x",
    "sub/.gitignore": "!a.log\n*.tmp\n",
    "sub/a.log": "x",
    "sub/b.tmp": "x",
    "sub/deep/b.tmp": "x",
    "data/big.bin": "x" * 1000,
    ".cavvyignore": "data/\n",
    ".venv/bin/python": "x",
    "sub/__pycache__/a.pyc": "x",
    "ünïcode name.txt": "x",
}
KEPT = [
    ".cavvyignore",
    ".gitignore",
    "keep.log",
    "sub/.gitignore",
    "sub/a.log",
    "sub/build/in",
    "train.py",
    "ünïcode name.txt",
]


@pytest.mark.parametrize("repository", [False, True])
def test_ignore_files_are_honoured_with_git_and_without(tmp_path: Path, repository: bool) -> None:
    write(tmp_path, FILES)
    if repository:
        git(tmp_path, "init")
    assert paths(freeze(tmp_path)) == KEPT


def test_a_tracked_file_belongs_although_ignored_and_a_deleted_one_does_not(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            ".gitignore": "*.log\n",
            "a.log": "x",
            "gone": "x",
            "own": "x",
            ".git/info/exclude": "private\n",
        },
    )
    git(tmp_path, "init")
    git(tmp_path, "add", "-f", "a.log", "gone", "own")
    write(tmp_path, {".cavvyignore": "own\n", "private": "x"})
    (tmp_path / "gone").unlink()
    assert paths(freeze(tmp_path)) == [".cavvyignore", ".gitignore", "a.log"]


def test_a_repository_within_and_a_folder_of_one(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "outer.txt": "x",
            "lib/.gitignore": "*.o\n",
            "lib/a.c": "x",
            "lib/a.o": "x",
            "lib/sub/b.c": "x",
        },
    )
    git(tmp_path, "init")
    git(tmp_path / "lib", "init")
    assert paths(freeze(tmp_path)) == ["lib/.gitignore", "lib/a.c", "lib/sub/b.c", "outer.txt"]
    assert paths(freeze(tmp_path / "lib" / "sub")) == ["b.c"]


@pytest.mark.parametrize("files", [{}, {"sub/b": "x", "sub/c/d": "x", "sub/.gitignore": "c\n"}])
def test_a_submodule_that_is_not_checked_out(tmp_path: Path, files: dict[str, str]) -> None:
    """After `git clone`, the folder is empty. In `git worktree add`, too."""
    write(tmp_path, {"other/a": "x", "main/a": "x"})
    for name in ("other", "main"):
        git(tmp_path / name, "init")
        git(tmp_path / name, "add", ".")
        git(tmp_path / name, "commit", "-m", "a")
    allowed = ("-c", "protocol.file.allow=always")
    git(tmp_path / "main", *allowed, "submodule", "add", str(tmp_path / "other"), "sub")
    git(tmp_path / "main", "commit", "-m", "sub")
    git(tmp_path / "main", "worktree", "add", str(tmp_path / "tree"))
    write(tmp_path / "tree", files)
    inside = [".gitignore", "b"] if files else []
    assert list_files(tmp_path / "tree/sub") == inside
    assert list_files(tmp_path / "tree") == [
        ".gitmodules",
        "a",
        *(f"sub/{path}" for path in inside),
    ]
    assert list_files(tmp_path / "main") == [".gitmodules", "a", "sub/a"]


@pytest.mark.parametrize(
    "name", ["../secret", "/tmp/none", "./secret", "aa//secret", "link/secret"]
)
def test_an_index_names_nothing_outside_of_the_folder(tmp_path: Path, name: str) -> None:
    """A program other than git can write any name into an index."""
    folder = tmp_path / "folder"
    write(tmp_path, {"secret": "mine", "folder/a": "x", "beside/secret": "mine"})
    (folder / "link").symlink_to("../beside")
    real = os.path.join(str(tmp_path), "secret") if name == "/tmp/none" else name
    plain = real.replace(".", "x").replace("/", "y")
    git(folder, "init")
    git(folder, "add", "a")
    git(folder, "commit", "-m", "x")
    git(folder, "update-index", "--add", "--cacheinfo", f"100644,{'0' * 39}1,{plain}")
    index = folder / ".git/index"
    content = index.read_bytes()[:-20].replace(plain.encode(), real.encode())
    index.write_bytes(content + hashlib.sha1(content, usedforsecurity=False).digest())
    assert list_files(folder) == ["a", "link"]
    assert "mine" not in (capture(folder).diff or ""), capture(folder).diff
    (folder / "a").write_text("y")
    assert "mine" not in (capture(folder).diff or ""), capture(folder).diff


def test_a_folder_that_the_repository_around_it_ignores(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            ".gitignore": "*\n",
            "work/train.py": "x",
            "work/.gitignore": "*.log\n",
            "work/a.log": "x",
        },
    )
    git(tmp_path, "init")
    assert paths(freeze(tmp_path / "work")) == [".gitignore", "train.py"]


# Texts that are or look like parts of patterns, more often than letters.
_WORDS = st.sampled_from(
    [
        *("a", "b", "A", "\u00e9", " ", "#", "!", ".", "-", "]", "\t", "\\", "*", "**", "?", "/"),
        *("//", "**/", "/**", "\\/", "[a/b]", "[/]", "[!/]", "[!a]", "[^/b]", "[.-0]", "[a-", "["),
        *("[[:alpha:]]", "[[:alpha:]/]", "[[:x:]]", "[[:space:]]", "[]a]", "[\\]]", "[b-a]", "[:a"),
    ]
)
LINES = st.lists(_WORDS, min_size=1, max_size=6).map("".join)
_PART = st.sampled_from(
    [*("a", "b", "ab", "A", "\u00e9", " ", "#", "!", "-", "]", "[", "\\", "*", ":")]
)
_ENTRY = st.lists(_PART, min_size=1, max_size=2).map("".join)
DEEP = st.lists(_ENTRY, min_size=1, max_size=4).map("/".join)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.lists(LINES, max_size=2), st.sets(DEEP, max_size=8)), max_size=30))
@example([(["[a/b]"], {"a", "b", "a/b"}), (["//a", "a//b"], {"a", "a/b"})])
@example([(["x[!/]"], {"xa", "a/xa"}), (["/?"], {"\u00e9", "a"}), (["a**/b"], {"ab", "a/c/b"})])
@example([(["a\\/**/"], {"a/b", "a/b/c"}), (["**\\/a"], {"a", "b/a"}), (["/a**"], {"ab/c/d"})])
def test_patterns_match_as_in_git(
    tmp_path_factory: pytest.TempPathFactory, cases: list[tuple[list[str], set[str]]]
) -> None:
    """One run of git judges all cases, each of which is a folder with an ignore file."""
    top, asked = tmp_path_factory.mktemp("patterns"), list[tuple[str, bool]]()
    git(top, "init")
    for number, (lines, paths) in enumerate(cases):
        write(top / str(number), {".gitignore": "\n".join(lines)})
        rules = IgnoreRules(top / str(number), git_rules=True)
        asked += [(f"{number}/{path}", rules.ignores(path)) for path in sorted(paths)]
    told = subprocess.run(
        ["git", "-C", top, "check-ignore", "--no-index", "-z", "-v", "-n", "--stdin"],
        input="".join(f"{path}\0" for path, _ in asked).encode(),
        capture_output=True,
        check=False,
    ).stdout.split(b"\0")
    rows = zip(told[2::4], told[3::4], strict=False)
    judged = {path.decode(): bool(line) and not line.startswith(b"!") for line, path in rows}
    assert dict(asked) == judged


def test_classes_have_the_characters_that_they_have_in_git(tmp_path: Path) -> None:
    names = (
        *("alnum", "alpha", "blank", "cntrl", "digit", "graph"),
        *("lower", "print", "punct", "space", "upper", "xdigit"),
    )
    bodies = [bytes([code]) for code in range(1, 256) if code not in b"/."]
    for name in names:
        folder = tmp_path / name
        folder.mkdir()
        for body in bodies:
            (folder / os.fsdecode(body)).touch()
        (folder / ".gitignore").write_text(f"[[:{name}:]]\n")
    own = list_files(tmp_path)
    git(tmp_path, "init")
    assert own == list_files(tmp_path)


NAMES = st.sampled_from(["a", "b", "c.log", "d"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
PATTERNS = st.builds(
    lambda bang, slash, body, end: bang + slash + body + end,
    st.sampled_from(["", "", "!"]),
    st.sampled_from(["", "", "/"]),
    st.sampled_from(
        [
            *("a", "b", "*.log", "d", "a/b", "**/d", "a/**", "*", "b/c.log", "[ab]", "?", "**"),
            *(
                "a/**/d",
                "**/a/**/b",
                "*/d",
                "a/*/*",
                "**a/*g",
                "[!a]",
                "[^a-c]",
                "[]a]",
                "[[:alpha:]]",
            ),
            *("\\a", "a\\/b", "c?l*g", "*.*o*", "[a", "[b-", "a**b", "a/**/**/b", "/**/d", "a "),
        ]
    ),
    st.sampled_from(["", "", "/"]),
)
TREES = st.dictionaries(PATHS, st.just("x"), min_size=1, max_size=8)


@settings(max_examples=80, deadline=None)
@given(TREES, st.lists(PATTERNS, max_size=4), st.lists(PATTERNS, max_size=3))
@example(
    {"a/c.log/a": "x"}, ["*.log", "!a"], []
)  # what a pattern brings back does not bring back what is in it
@example(
    {"a/b": "x", "a/d": "x"}, ["a/**", "!a/b"], []
)  # all that is in a folder is not the folder
def test_without_git_the_rules_are_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    tree: dict[str, str],
    outer: list[str],
    inner: list[str],
) -> None:
    folder = tmp_path_factory.mktemp("same")
    for path in tree:
        try:
            write(folder, {path: "x"})
        except (FileExistsError, IsADirectoryError, NotADirectoryError):
            continue  # a name that is a folder of another path
    (folder / ".gitignore").write_text("\n".join(outer))
    if (folder / "a").is_dir():
        (folder / "a" / ".gitignore").write_text("\n".join(inner))
    walked = list_files(folder)
    git(folder, "init")
    assert walked == list_files(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"a\\\nb\n",  # the backslash escapes nothing
        b"[z-a]\nb\n",  # an empty range
        b"\xef\xbb\xbfa\nb\n",  # Windows editors begin a file with a byte order mark
        b"a\r\nb\r\n",
        b"a\x0cb\n",  # a form feed ends no line
        "a\u2028b\n".encode(),  # nor does the line separator of Unicode
        b"\xffa\nb\n",
    ],
)
def test_bytes_of_an_ignore_file_are_read_as_git_reads_them(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, {"a": "x", "b": "x", "c": "x"})
    (tmp_path / ".cavvyignore").write_bytes(content)
    own = list_files(tmp_path)
    git(tmp_path, "init")
    assert own == list_files(tmp_path)
    (tmp_path / ".cavvyignore").rename(tmp_path / ".gitignore")
    assert [path.replace(".git", ".cavvy") for path in list_files(tmp_path)] == own


def test_the_hash_depends_on_content_and_nothing_else(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / name, {"b.sh": "echo", "a/x": "1"})
    os.utime(tmp_path / "two" / "b.sh", (1, 1))
    os.chmod(tmp_path / "two" / "b.sh", 0o600)
    one, two = freeze(tmp_path / "one"), freeze(tmp_path / "two")
    assert one.hash == two.hash
    os.chmod(tmp_path / "two" / "b.sh", 0o755)
    runnable = freeze(tmp_path / "two")
    assert runnable.hash != one.hash
    (tmp_path / "two" / "a" / "x").write_text("2")
    assert freeze(tmp_path / "two").hash != runnable.hash


def test_the_manifest_is_what_an_agent_reads(tmp_path: Path) -> None:
    write(tmp_path, {"a.sh": "echo"})
    os.chmod(tmp_path / "a.sh", 0o700)
    (tmp_path / "link").symlink_to("a.sh")
    snapshot = freeze(tmp_path)
    digest = hashlib.sha256(b"echo").hexdigest()
    assert json.loads(snapshot.manifest) == {
        "files": [
            {"path": "a.sh", "sha256": digest, "mode": 0o755, "size": 4},
            {"path": "link", "link": "a.sh"},
        ]
    }
    assert snapshot.hash == hashlib.sha256(snapshot.manifest).hexdigest()
    assert snapshot.blobs() == {
        digest: FrozenFile(tmp_path / "a.sh", 4),
        snapshot.hash: snapshot.manifest,
    }
    assert snapshot.size == 4
    assert snapshot.notes == ()


def test_several_folders_and_files_are_one_snapshot(tmp_path: Path) -> None:
    write(tmp_path / "work", {"a": "1", "conf/x": "old"})
    write(tmp_path / "set", {"b/c": "2"})
    write(tmp_path, {"x": "new"})
    snapshot = combine(
        {
            "": freeze(tmp_path / "work"),
            ".mounts/0-set": freeze(tmp_path / "set"),
            "conf/x": freeze(tmp_path, only="x"),
        }
    )
    assert paths(snapshot) == [".mounts/0-set/b/c", "a", "conf/x"]
    sent = {
        blob.path.read_text() for blob in snapshot.blobs().values() if isinstance(blob, FrozenFile)
    }
    assert {"1", "2", "new"} <= sent
    files = json.loads(snapshot.manifest)["files"]
    assert [each["sha256"] in snapshot.blobs() for each in files] == [True] * 3
    assert files[2]["sha256"] == hashlib.sha256(b"new").hexdigest()


def test_links_out_of_the_folder_and_special_files_are_noted(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    write(folder, {"a": "x"})
    (folder / "out").symlink_to("/etc/hosts")
    (folder / "up").symlink_to("../other")
    (folder / "in").symlink_to("a")
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "sock"))
        snapshot = freeze(folder)
    assert paths(snapshot) == ["a", "in", "out", "up"]
    assert len(snapshot.notes) == 4
    assert any("pipe is left out because it is a named pipe" in note for note in snapshot.notes)
    assert any("sock is left out because it is a socket" in note for note in snapshot.notes)
    assert any("up is a link to" in note for note in snapshot.notes)


def test_a_linked_folder_is_a_link(tmp_path: Path) -> None:
    write(tmp_path, {"real/a": "x"})
    (tmp_path / "again").symlink_to("real")
    (tmp_path / "loop").symlink_to(".")
    assert paths(freeze(tmp_path)) == ["again", "loop", "real/a"]


@pytest.mark.parametrize(
    ("limit", "words"),
    [({"most_bytes": 10}, "big.bin"), ({"most_files": 2}, "3 of the files are in data")],
)
def test_an_absurd_folder_is_refused_by_name(
    tmp_path: Path, limit: dict[str, int], words: str
) -> None:
    write(tmp_path, {"data/big.bin": "x" * 100, "data/b": "", "data/c": "", "a": "x"})
    with pytest.raises(FreezeError) as caught:
        freeze(tmp_path, **limit)  # type: ignore[arg-type]
    assert words in str(caught.value)
    assert ".cavvyignore" in caught.value.hint


def test_folders_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path, words in (
        (tmp_path / "no", "does not exist"),
        (tmp_path / "file", "is a file"),
        (Path("/"), "contains your home folder.* into a folder of their own"),
    ):
        with pytest.raises(FreezeError, match=words):
            freeze(path)


@pytest.mark.parametrize("is_repository", [False, True])
def test_hidden_files_of_a_home_folder_stay(
    is_repository: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In containers and on machines of clouds, people often work in the home folder itself."""
    write(tmp_path, {"train.py": "x", "lib/.hidden": "x", ".netrc": "k", ".ssh/id_rsa": "k"})
    monkeypatch.setenv("HOME", str(tmp_path))
    if is_repository:
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    found = freeze(tmp_path)
    assert [each.path for each in found.entries] == ["lib/.hidden", "train.py"]
    assert "its hidden files and folders stay here" in found.notes[0]
    with pytest.raises(FreezeError, match="more than the limit of 1; move"):
        freeze(tmp_path, most_files=1)


def test_a_folder_that_has_a_home_folder_in_it_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests and containers often set HOME to a folder beside the work."""
    write(tmp_path, {"train.py": "x", "home/b": "x"})
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert [each.path for each in freeze(tmp_path).entries] == ["home/b", "train.py"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"secret": "x"})
    (tmp_path / "secret").chmod(0)
    with pytest.raises(FreezeError, match="cannot read secret"):
        freeze(tmp_path)


def test_an_unreadable_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"a": "x", "locked/b": "x"})
    locked, plain_scan, plain_read = tmp_path / "locked", os.scandir, Path.read_bytes

    def scan(path: Path) -> object:
        if path == locked:
            raise PermissionError(13, "Permission denied", str(path))
        return plain_scan(path)

    def read(path: Path) -> bytes:
        if path.parent == locked:
            raise PermissionError(13, "Permission denied", str(path))
        return plain_read(path)

    monkeypatch.setattr(os, "scandir", scan)
    monkeypatch.setattr(Path, "read_bytes", read)
    with pytest.raises(FreezeError) as caught:
        freeze(tmp_path)
    assert str(caught.value) == (
        f"cannot read {locked}: Permission denied; make it readable, or list it in .cavvyignore"
    )


def test_files_and_folders_that_vanish_meanwhile_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"a": "x", "folder/b": "x", "c": "x"})
    plain_scan, plain_stat = os.scandir, Path.lstat

    def scan(path: Path) -> object:
        if path == tmp_path / "folder":
            shutil.rmtree(path)
        return plain_scan(path)

    def look(path: Path) -> os.stat_result:
        seen = plain_stat(path)
        if path.name == "c":
            path.unlink()
        return seen

    monkeypatch.setattr(os, "scandir", scan)
    monkeypatch.setattr(Path, "lstat", look)
    assert paths(freeze(tmp_path)) == ["a"]


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    name = tmp_path / os.fsdecode(b"a\xff")
    name.write_text("x")
    with pytest.raises(FreezeError, match=r"the name of 'a.udcff' is not UTF-8"):
        freeze(tmp_path)
    name.rename(tmp_path / "a")
    (tmp_path / "b").symlink_to(name)
    with pytest.raises(FreezeError, match="the target of the link b is not UTF-8"):
        freeze(tmp_path)


def test_the_cache_saves_reading_and_never_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = tmp_path / "work", tmp_path / "cache"
    write(folder, {"a": "1", "b": "2"})
    first = freeze(folder, cache=cache)
    # The clock of the cache's file decides what is settled; move it on.
    (entry,) = cache.iterdir()
    later = entry.stat().st_mtime_ns + 10**10
    os.utime(entry, ns=(later, later))
    reads: list[str] = []
    digest = hashlib.file_digest

    def counted(stream: object, name: str) -> object:
        reads.append(str(getattr(stream, "name", "")))
        return digest(stream, name)  # type: ignore[arg-type]

    monkeypatch.setattr(hashlib, "file_digest", counted)
    assert freeze(folder, cache=cache).hash == first.hash
    assert reads == []
    os.utime(entry, ns=(later, later))
    (folder / "b").write_text("3")
    assert freeze(folder, cache=cache).hash != first.hash
    assert [Path(name).name for name in reads] == ["b"]


def test_a_file_changed_in_the_same_tick_is_read_again(tmp_path: Path) -> None:
    folder, cache = tmp_path / "work", tmp_path / "cache"
    write(folder, {"a": "1"})
    first = freeze(folder, cache=cache)
    seen = (folder / "a").stat()
    (folder / "a").write_text("2")
    os.utime(folder / "a", ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert freeze(folder, cache=cache).hash != first.hash


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format": 1, "files": []}', '{"format": 1}', '{"format": 9}']
)
def test_a_damaged_cache_costs_time_only(tmp_path: Path, content: str) -> None:
    folder, cache = tmp_path / "work", tmp_path / "cache"
    write(folder, {"a": "1"})
    first = freeze(folder, cache=cache)
    (entry,) = cache.iterdir()
    entry.write_text(content)
    assert freeze(folder, cache=cache).hash == first.hash


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    write(tmp_path, {"a": "12", "b": "345"})
    told: list[tuple[int, int]] = []
    freeze(tmp_path, progress=lambda done, total: told.append((done, total)))
    assert told == [(2, 5), (5, 5)]


def test_cavvys_own_state_is_never_part_of_a_folder(tmp_path: Path) -> None:
    write(tmp_path, {"train.py": "x", "home/key": "secret", "home/logs/a": "x", "homely": "x"})
    snapshot = freeze(tmp_path, state=tmp_path / "home")
    assert paths(snapshot) == ["homely", "train.py"]
    assert snapshot.notes == ("home is left out because it contains Cavvy's own state",)
    assert freeze(tmp_path / "home" / "logs", state=tmp_path / "home").notes == ()
    with pytest.raises(FreezeError, match="own folder for state"):
        freeze(tmp_path / "home", state=tmp_path / "home")


@pytest.mark.parametrize(
    "line",
    [
        *("*a" * 60 + "b", "a*" * 60 + "c", "[a-z]*" * 40 + "!", "*" * 4000 + "b", "?*" * 60 + "!"),
        *("**/a/" * 60 + "b", "a/**/" * 60 + "b", "**/*a*a*a*a/" * 30 + "b", "**/" * 900 + "b"),
        *("/**" * 900, "\\a*" * 60 + "b", "[" * 9000, "[a-" * 3000, "!" * 9000, "\\" * 9001),
        *("*a*a*a*a*a*a*a/**/*a*a*a*a*a*a*a/**/" * 9 + "b", "[[:alpha:]]*" * 60 + "1"),
    ],
)
def test_no_pattern_takes_long(tmp_path: Path, line: str) -> None:
    """A cloned folder may have any ignore file. The limit is one of CPU time, in a process of its
    own, and a thousand times what the walk needs."""
    deep = tmp_path / "/".join(["a"] * 100)
    deep.mkdir(parents=True)
    for path in (tmp_path / ("a" * 250), deep / ("a" * 250)):
        path.write_text("x")
    (tmp_path / ".cavvyignore").write_text(f"{line}\n")
    program = (
        "import resource, sys; from pathlib import Path; from cavvy.spec.ignore import IgnoreRules, list_files; "
        "resource.setrlimit(resource.RLIMIT_CPU, (60, 60)); list_files(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)


@pytest.mark.parametrize(
    "text", ["a\n" * 10_001, "#" * (1 << 20) + "x", "*a" * 50_001, "*a*b*\n" * 20_000]
)
def test_a_huge_ignore_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / ".cavvyignore").write_text(text)
    with pytest.raises(FreezeError, match=r"\.cavvyignore: it has more than"):
        freeze(tmp_path)
