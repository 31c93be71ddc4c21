"""Runs git on a folder with settings of ours only, and records the origin of a run (commit,
uncommitted changes and versions), so that the run can be repeated and compared.

A folder is data: another person or a node may have written it, with settings, attributes and hooks
that name programs. Therefore git never opens the `.git` of a folder. Git gets a temporary git
folder with links to the index, the references and the objects, and with the few settings that
change what git reports. Programs that the user's own settings name do not run either, because
attributes in the folder choose among them, and because their paths may lead into the folder.
"""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from cavvy.domain.jobs import RunOrigin

_GIT_TIMEOUT_S = 120
_LONGEST_POINTER = 4096  # bytes; `.git` as a file, `commondir` and `HEAD` contain one path or name
# Settings that are passed on. None of them names a program or a path.
_PASSED = (
    "core.autocrlf",
    "core.bare",
    "core.checkstat",
    "core.eol",
    "core.filemode",
    "core.ignorecase",
    "core.precomposeunicode",
    "core.sparsecheckout",
    "core.sparsecheckoutcone",
    "core.symlinks",
    "core.trustctime",
    "extensions.objectformat",
    "extensions.refstorage",
)
_WORD = re.compile(r"[A-Za-z0-9]+")


@dataclass(frozen=True, slots=True)
class GitFolder:
    """A folder in a repository, with the temporary git folder for git's runs on it."""

    _folder: Path
    _top: Path | None  # None for a repository without a working tree
    _objects: Path
    _private: Path
    _excludes: str

    def run(self, *arguments: str) -> subprocess.CompletedProcess[bytes] | None:
        """Run git in the folder. Returns None if git cannot run or takes too long."""
        where = {"GIT_OBJECT_DIRECTORY": os.fspath(self._objects)}
        if self._top is not None:
            where["GIT_WORK_TREE"] = os.fspath(self._top)
        own = {
            # git finds no settings of the user or of this machine
            "HOME": os.fspath(self._private),
            "XDG_CONFIG_HOME": os.fspath(self._private),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_ATTR_NOSYSTEM": "1",
            # git fetches no missing objects
            "GIT_NO_LAZY_FETCH": "1",
            "GIT_ALLOW_PROTOCOL": "none",
        }
        command = ["-c", f"core.excludesFile={self._excludes}", *arguments]
        return _run(command, self._folder, self._private, {**own, **where})


@contextmanager
def open_repository(folder: Path) -> Iterator[GitFolder | None]:
    """Find the repository that contains `folder`, as git does. Yields None if there is none, or if
    git is not installed. The result can be used until the context ends.
    """
    with ExitStack() as stack:
        try:
            found = _prepare(folder, stack)
        except OSError:
            found = None
        yield found


def find_top(folder: Path) -> Path:
    """Return the top folder of the repository that contains `folder`, or `folder` itself if there
    is none. A repository of the whole home folder is none: it has all that is in it.
    """
    folder = folder.resolve()
    try:
        found = _find(folder)
    except OSError:
        found = None
    homes = (Path.home().resolve(), *Path.home().resolve().parents)
    return folder if found is None or found[0] in homes else found[0]


def find_ignore_files(folder: Path) -> list[tuple[Path, Path]]:
    """Return the files outside of `folder` by which git ignores what is in it, each with the folder
    to which its patterns belong, the weakest first: the user's own, the repository's `info/exclude`
    and the `.gitignore` of each folder above. Without a repository, there are none.
    """
    folder = folder.resolve()
    try:
        found = _find(folder)
        if found is None:
            return []
        top, own = found
        common = _common_folder(own)
        with TemporaryDirectory(prefix="cavvy-git-") as private:
            settings = _read_settings(own, common, Path(private))
    except OSError:
        return []
    above = [each for each in (folder, *folder.parents) if each.is_relative_to(top)][:0:-1]
    wide = [top / _find_excludes(settings), common / "info" / "exclude"]
    return [*((each, top) for each in wide), *((each / ".gitignore", each) for each in above)]


def _find_excludes(settings: Mapping[str, str]) -> str:
    """Return the path of the user's own ignore file."""
    usual = os.path.join(os.environ.get("XDG_CONFIG_HOME") or "~/.config", "git/ignore")
    return os.path.expanduser(settings.get("core.excludesfile") or usual)


def run_apart(*arguments: str) -> subprocess.CompletedProcess[bytes] | None:
    """Run git with the user's own settings and outside of all repositories, for example to ask
    another machine. Returns None if git cannot run or takes too long. Raises OSError.
    """
    with TemporaryDirectory(prefix="cavvy-git-") as private:
        return _run(arguments, Path(private), Path(private))


def _prepare(folder: Path, stack: ExitStack) -> GitFolder | None:
    found = _find(folder.resolve())
    if found is None:
        return None
    top, own = found
    common = _common_folder(own)
    private = Path(stack.enter_context(TemporaryDirectory(prefix="cavvy-git-")))
    settings = _read_settings(own, common, private)
    bare = own == common and settings.get("core.bare") == "true"
    (private / "HEAD").write_bytes(_read_head(own))
    (private / "config").write_text(_write_config({**settings, "core.bare": str(bare).lower()}))
    links = [common / name for name in ("refs", "packed-refs", "reftable", "info")]
    # git keeps the index in one file, or divides it between two
    for path in (*links, own / "index", *own.glob("sharedindex.*")):
        if path.is_file() or path.is_dir():  # git would wait for the writer of a pipe
            (private / path.name).symlink_to(path)
    excludes = _find_excludes(settings)
    return GitFolder(
        folder.resolve(),
        None if bare else top,
        common / "objects",
        private,
        excludes if os.path.isfile(os.path.join(top, excludes)) else os.devnull,
    )


def _find(folder: Path) -> tuple[Path, Path] | None:
    """Return the top folder of the working tree that contains `folder`, and its git folder. As in
    git, both are on the same file system. A repository without a `.git`, such as a copy of a bare
    repository, is an ordinary folder.
    """
    device = folder.stat().st_dev
    for top in (folder, *folder.parents):
        if top.name == ".git" or top.stat().st_dev != device:
            return None
        own = top / ".git"
        if own.is_file():
            pointer = _read_start(own)
            if not pointer.startswith(b"gitdir: "):
                return None
            own = top / os.fsdecode(pointer.removeprefix(b"gitdir: ").rstrip(b"\r\n"))
            return (top, own.resolve()) if _is_git_folder(own) else None
        if _is_git_folder(own):
            return top, own.resolve()
    return None


def _is_git_folder(path: Path) -> bool:
    head = path / "HEAD"
    if not (head.is_file() or head.is_symlink()):
        return False
    common = _common_folder(path)
    return (common / "objects").is_dir() and (common / "refs").is_dir()


def _common_folder(own: Path) -> Path:
    """Return the git folder that the working trees of a repository share."""
    pointer = own / "commondir"
    if not pointer.is_file():
        return own
    return (own / os.fsdecode(_read_start(pointer).rstrip(b"\r\n"))).resolve()


def _read_head(own: Path) -> bytes:
    head = own / "HEAD"
    # old versions of git made a link
    return b"ref: " + os.fsencode(os.readlink(head)) if head.is_symlink() else _read_start(head)


def _read_start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_LONGEST_POINTER)


def _read_settings(own: Path, common: Path, private: Path) -> dict[str, str]:
    """Return the settings of the user and of the repository, the latter without files that they
    include. Git runs no program when it lists settings.
    """
    files = [path for path in (common / "config", own / "config.worktree") if path.is_file()]
    found: dict[str, str] = {}
    for source in ([], *(["--file", os.fspath(path), "--no-includes"] for path in files)):
        done = _run(["config", "--null", "--list", *source], private, private)
        for each in os.fsdecode(done.stdout).split("\0") if done else ():
            name, newline, value = each.partition("\n")
            found[name] = value if newline else "true"  # a name without a value is a true value
    return found


def _write_config(settings: Mapping[str, str]) -> str:
    passed = {name: settings[name] for name in _PASSED if name in settings}
    lines = ["[core]", "repositoryformatversion = 1"]
    for name, value in passed.items():
        section, _, key = name.partition(".")
        if _WORD.fullmatch(value):
            lines += [f"[{section}]", f"{key} = {value}"]
    return "\n".join(lines) + "\n"


def _run(
    arguments: "list[str] | tuple[str, ...]",
    folder: Path,
    private: Path,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes] | None:
    """Run git in `folder` with the git folder `private`. No variable of the caller's environment
    can make git use another folder; git takes no optional locks and asks for no input.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # A program in the current folder is not git.
    path = os.pathsep.join(
        each for each in kept.get("PATH", os.defpath).split(os.pathsep) if os.path.isabs(each)
    )
    program = shutil.which("git", path=path)
    if program is None:
        return None
    fixed = {
        "PATH": path,
        "GIT_DIR": os.fspath(private),
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C",
    }
    try:
        return subprocess.run(
            [program, *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
            env={**kept, **fixed, **(variables or {})},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


MOST_DIFF_BYTES = 1 << 20
# a name that is absolute or contains `.` or `..`, in a list in which a NUL precedes each name
_OUTSIDE = re.compile(rb"[\0/]\.{0,2}/")


def capture(folder: Path, *, task_text: str = "", snapshot: str | None = None) -> RunOrigin:
    """Return the origin of a run whose working folder is `folder`. The folder need not be in a
    repository.
    """
    from cavvy import __version__

    with open_repository(folder) as repository:
        commit = _ask(repository, "rev-parse", "--verify", "HEAD") if repository else None
        diff = _diff(repository) if repository and commit else None
    return RunOrigin(
        task_text=task_text,
        commit=commit.decode().strip() if commit else None,
        diff=diff,
        snapshot=snapshot,
        versions={
            "cavvy": __version__,
            "python": platform.python_version(),
            "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
    )


def _diff(repository: GitFolder) -> str | None:
    """Return the uncommitted changes of tracked files in and below the folder, or None if there are
    none. A long diff is truncated.
    """
    # For uncommitted changes in a submodule, git would run itself there with settings of the
    # submodule.
    options = ("--no-color", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty")
    diff = _ask(repository, "diff", *options, "--relative", "--find-renames", "HEAD", "--", ".")
    if not diff:
        return None
    names = _ask(repository, "ls-files", "-z", "--cached", "--full-name")
    if names is None or _OUTSIDE.search(b"\0" + names):
        # another program than git has written the index
        return "# left out by Cavvy: the repository's index names files outside of the repository\n"
    if len(diff) <= MOST_DIFF_BYTES:
        return diff.decode(errors="replace")
    kept = diff[: diff.rfind(b"\n", 0, MOST_DIFF_BYTES) + 1]
    note = f"# cut here by Cavvy: {len(diff):,} bytes of changes, of which {len(kept):,} are kept\n"
    return kept.decode(errors="replace") + note


def _ask(repository: GitFolder, *arguments: str) -> bytes | None:
    """Return the output of git, or None if git fails or takes too long."""
    done = repository.run(*arguments)
    return done.stdout if done is not None and done.returncode == 0 else None
