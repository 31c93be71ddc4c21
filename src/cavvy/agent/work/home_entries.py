"""Moves the files that jobs created in a home folder from the project's folder to the home folder,
when the last of the project's jobs on this machine has ended.

While jobs run, new entries of home folders are in a folder of the project (`protect`), because the
user's shell would obey a new `~/.zshenv`. Only entries whose names nothing is known to obey are
moved: visible folders, and files whose names end as those of data do. An entry is moved in two
steps, first to a folder that no job sees, so that no process of the work can exchange it after it
was examined. Nothing in the home folder is replaced, and no link is followed.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import sys
import time
from contextlib import suppress
from glob import escape, glob

from ..disk import open_private
from .mounts import contains
from .protect import (
    CACHES,
    LAYERED,
    PRIVATE,
    find_kept,
    is_empty,
    join_names,
    list_homes,
    list_obeyed_paths,
)
from .trees import FOLDER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MOST, MOST_CHOSEN = 1000, 100  # entries of one folder that are looked at, and that are moved
# Files with other endings stay: tools obey files such as `Makefile`, `conftest.py`, `package.json`
# and `pyproject.toml` in the folder in which the user works, and in the folders above it.
DATA = frozenset({
    ".arrow", ".bin", ".bmp", ".bz2", ".ckpt", ".csv", ".err", ".feather", ".flac", ".gguf", ".gif",
    ".gz", ".h5", ".hdf5", ".jpeg", ".jpg", ".jsonl", ".log", ".mat", ".mp3", ".mp4", ".nc", ".npy",
    ".npz", ".onnx", ".out", ".parquet", ".pdf", ".pickle", ".pkl", ".png", ".pt", ".pth",
    ".safetensors", ".svg", ".tar", ".tfrecord", ".tgz", ".tif", ".tiff", ".tsv", ".txt", ".wav",
    ".webp", ".xz", ".zip", ".zst",
})  # fmt: skip
# Names of JSON files that no tool looks for.
RESULTS = re.compile(
    r"(eval|history|logs?|losses|metrics|outputs?|predictions|results?|scores?|stats|summary)"
    r"([-_]\d+)*\.json"
)
BUILD_FILES = re.compile(r"cmakelists.*|requirements.*|constraints.*|.*config.*", re.DOTALL)
# Folders from which shells, servers, desktops, mail programs or languages run or load files. git
# takes a folder that has `HEAD`, `objects` and `refs` for a repository, whose settings name
# programs.
OBEYED_FOLDERS = frozenset({
    "android", "applications", "arduino", "autostart", "bin", "bin64", "branches", "cgi-bin",
    "common-lisp", "cvs", "desktop", "documents", "emsdk", "env", "envs", "etc", "flutter", "ftp",
    "gensim-data", "gnustep", "go", "google-cloud-sdk", "hooks", "include", "info", "init",
    "init.d", "lib", "lib32", "lib64", "libexec", "library", "local", "mail", "maildir", "matlab",
    "mne_data", "modulefiles", "modules", "news", "nilearn_data", "nltk_data", "node_modules",
    "objects", "octave", "openfoam", "opt", "packages", "perl5", "privatemodules", "public",
    "public_html", "public_www", "r", "refs", "sbin", "scikit_learn_data", "scripts", "share",
    "sites", "snap", "spack", "stanza_resources", "templates", "tensorflow_datasets", "texmf",
    "tmp", "usr", "venv", "virtualenvs", "worktrees", "www",
})  # fmt: skip
INSTALLATIONS = re.compile(r".*(conda|mamba|miniforge|python|pypy|site-packages).*", re.DOTALL)
# Python imports such a folder in place of the module if the user runs Python in the home folder.
# With an empty entry in `PYTHONPATH`, every Python imports the customizations.
MODULES = frozenset({
    "accelerate", "attr", "certifi", "cv2", "datasets", "distutils", "google", "ipykernel",
    "ipython", "jax", "jinja2", "jupyter", "lightning", "matplotlib", "numpy", "packaging",
    "pandas", "pil", "pip", "pkg_resources", "pydantic", "pytest", "ray", "requests", "scipy",
    "setuptools", "sitecustomize", "six", "sklearn", "tensorboard", "tensorflow", "torch", "tqdm",
    "transformers", "urllib3", "usercustomize", "wandb", "wheel", "yaml",
})  # fmt: skip
# Where a home folder and the system name files that they obey. Shells' records of earlier commands
# do not count.
READERS = (
    *(".*", ".config/*", ".config/systemd/user/*", ".config/systemd/user/*/*"),
    *(".ssh/*", ".local/bin/*", ".local/share/systemd/user/*"),
)
SYSTEMS_READERS = (
    *("/etc/profile", "/etc/profile.d/*", "/etc/environment", "/etc/bash.bashrc", "/etc/zsh/*"),
    *("/etc/crontab", "/etc/cron.d/*", "/etc/systemd/system/*", "/etc/systemd/system/*/*"),
    *("/var/spool/cron/crontabs/*", "/var/spool/cron/*", "/etc/ld.so.conf.d/*"),
)
ESCAPED_SPACE, QUOTES = re.compile(r"\\x20|\\040|%20"), re.compile(r"[\"']|\\(?=\W)")
RECORDS = re.compile(r".*(history|_hst|lesshst|viminfo|hsts|xauthority|authority).*", re.IGNORECASE)
SETTLED_S = 2.5  # longer than a step of the clock of any file system
MOST_READ, LONGEST = 500, 1 << 18  # files, and bytes of a file


class HomeEntries:
    """The new entries of home folders below `kept`, which the work of one project on this machine
    shares. `obeyed` lists what the server obeys."""

    def __init__(self, kept: str, obeyed: list[str]) -> None:
        self._kept, self._obeyed = kept, obeyed
        self._homes = [(home, find_kept(kept, home)) for home in list_homes()]
        self._known: set[str] = set()
        self._empty: dict[str, int] = {}  # path of an empty place -> when it changed last, in ns
        self._waits = False  # whether other work of the project still uses the entries
        os.makedirs(kept, mode=0o700, exist_ok=True)
        self._used = open_private(kept + "/used")

    def begin(self) -> str:
        """Mark the entries as used until this process ends, after moving those that an agent could
        not move because it was killed. Return a sentence about them, or ""."""
        found = self._bring()
        fcntl.flock(self._used, fcntl.LOCK_SH)
        self._known = set(self._list_left())
        return found

    def resume(self, started: float) -> None:
        """Continue for an agent that was killed and had called `begin` at the time `started`."""
        self._known = {each for each in self._list_left() if _changed_at(each) < started}

    def finish(self) -> tuple[str, str]:
        """Move what can be moved. Return a sentence about the moved entries, and one that says
        where the other new entries are; each is "" if there are none."""
        try:
            brought = self._bring()
            left = [each for each in self._list_left() if each not in self._known]
            return brought, self._describe(left)
        finally:
            os.close(self._used)

    def _bring(self) -> str:
        try:
            fcntl.flock(self._used, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._waits = True
            return ""
        self._waits = False
        said = []
        for home, kept in self._homes:
            with suppress(OSError):  # there is nothing to move
                if moved := self._bring_to(home, kept):
                    said.append(f"new in the home folder {home}: {join_names(moved)}")
        return "; ".join(said)

    def _bring_to(self, home: str, kept: str) -> list[str]:
        """Move entries from the folder `kept` to the home folder. Return their names."""
        here, moved = os.open(kept, FOLDER), []
        opened = [here]
        try:
            stage = kept + ".moving"
            with suppress(FileExistsError):
                os.mkdir(stage, 0o700)
            opened += [os.open(stage, FOLDER), os.open(home, FOLDER)]
            _, between, there = opened
            if os.fstat(there).st_uid != os.geteuid():
                return []
            for name in os.listdir(between):  # left by a killed agent
                _put_back(between, name, here)
            names = self._list(kept, lambda name: not _exists(there, name))
            for name in self._choose(home, names):
                with suppress(OSError):  # such as a folder that its owner may not write to
                    if not _is_movable(here, name):
                        continue
                    os.rename(name, name, src_dir_fd=here, dst_dir_fd=between)
                    if _is_movable(between, name) and _move(between, name, there):
                        moved.append(name)
                    else:
                        _put_back(between, name, here)
        finally:
            for each in opened:
                os.close(each)
        return moved

    def _choose(self, home: str, names: list[str]) -> Iterator[str]:
        """Yield the names of entries that nothing obeys in the home folder."""
        text, named, packages = None, [], None
        for name in [each for each in names if is_data(each)][:MOST_CHOSEN]:
            path = f"{home}/{name}"
            packages = _list_packages(home) if packages is None else packages
            if _is_module(name, packages):
                continue
            if text is None:
                text, named = _read_readers(home, self._obeyed), list_obeyed_paths(self._obeyed)
            if any(
                contains(path, each) or (contains(each, path) and each != home) for each in named
            ):
                continue
            if not is_named(name, text):
                yield name

    def _list_left(self) -> Iterator[str]:
        """Yield the paths of new entries that are not in home folders."""
        for home, kept in self._homes:
            yield from self._list_new(home, kept, "")

    def _list_new(self, home: str, kept: str, below: str) -> Iterator[str]:
        """Yield the new entries as `kept//name`, except caches, records of earlier commands, and
        links to places outside the home folder, which hold nothing themselves."""

        def counts(name: str) -> bool:
            name = os.path.join(below, name)
            return not (name in CACHES or name in PRIVATE or RECORDS.fullmatch(name))

        for entry in self._list(os.path.join(kept, below), counts):
            name = os.path.join(below, entry)
            path = f"{kept}/{name}"
            if name in LAYERED and not os.path.islink(path):
                yield from self._list_new(home, kept, name)
                continue
            seen = os.path.islink(path) and (
                os.path.lexists(f"{home}/{name}") or _leads_out(home, path)
            )
            if not seen:
                yield f"{kept}//{name}"

    def _list(self, folder: str, counts: Callable[[str], bool]) -> list[str]:
        """Return the names of the entries that count, except the empty places on which entries of
        the home folder are mounted (`protect.mark_place`)."""
        found = []
        with suppress(OSError), os.scandir(folder) as entries:
            for _, entry in zip(range(MOST), entries, strict=False):
                with suppress(OSError):
                    if counts(entry.name) and not self._is_place(entry):
                        found.append(entry.name)
        return sorted(found)

    def _is_place(self, entry: os.DirEntry[str]) -> bool:
        """Return whether an entry is an empty place. One that has not changed is not opened again;
        what changed just now could change again at the same time of the file system's clock."""
        status = entry.stat(follow_symlinks=False)
        if status.st_mtime:
            return False
        if self._empty.get(entry.path) == status.st_ctime_ns:
            return True
        empty = is_empty(entry)
        if empty and time.time() - status.st_ctime > SETTLED_S:
            self._empty[entry.path] = status.st_ctime_ns
        return empty

    def _describe(self, left: list[str]) -> str:
        if not left:
            return ""
        folders = list(dict.fromkeys(each.partition("//")[0] for each in left))
        names = [each.partition("//")[2] for each in left]
        if self._waits:
            return (
                f"new in the home folder: {join_names(names)}, in {' and '.join(folders)}; what "
                "can be moved to the home folder is moved when this project's other jobs on this "
                "machine have ended"
            )
        return (
            f"new in the home folder only for jobs of this project: {join_names(names)}, in "
            f"{' and '.join(folders)} (docs/guides/isolation.md gives the reason)"
        )


def is_data(name: str) -> bool:
    """Return whether an entry of a home folder has a name that nothing is known to obey. The name
    of a folder has no ending, or any; a file needs the ending of data (`_is_movable`)."""
    if not (name[:1].isalnum() and all(each.isalnum() or each in " ._+=@,-" for each in name)):
        return False
    low = name.lower()
    return low not in OBEYED_FOLDERS and not INSTALLATIONS.fullmatch(low)


def is_named(name: str, text: str) -> bool:
    """Return whether a start file or unit with this text could name the entry of a home folder."""
    if name not in text:
        return False
    part = re.escape(name)
    source = rf"(?:^|[\s;&|`(])(?:source|\.)\s+[\"']?{part}"
    pattern = rf"(?:/{part}|{source})(?![\w.-])|(?<![\w./-]){part}/"
    return re.search(pattern, text, re.MULTILINE) is not None


def _is_movable(folder: int, name: str) -> bool:
    """Return whether an entry is this user's folder, or data in a file with one name."""
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if found.st_uid != os.geteuid():
        return False
    if stat.S_ISDIR(found.st_mode):
        return True
    low = name.lower()
    is_one = stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and not found.st_mode & 0o6000
    is_known = os.path.splitext(low)[1] in DATA and not BUILD_FILES.fullmatch(low)
    return is_one and (is_known or RESULTS.fullmatch(low) is not None)


def _move(source: int, name: str, target: int) -> bool:
    """Move an entry to another folder of the same file system unless its name is in use there.
    Return whether it was moved."""
    try:
        if stat.S_ISDIR(os.stat(name, dir_fd=source, follow_symlinks=False).st_mode):
            os.mkdir(name, 0o700, dir_fd=target)  # which replaces nothing
            try:
                os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)
            except OSError:
                os.rmdir(name, dir_fd=target)
                raise
        else:
            os.link(name, name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
            os.unlink(name, dir_fd=source)
    except OSError:
        return False
    return True


def _put_back(source: int, name: str, target: int) -> None:
    """Move an entry back. On a full disk, a folder must be renamed without making another."""
    with suppress(OSError):
        if stat.S_ISDIR(os.stat(name, dir_fd=source, follow_symlinks=False).st_mode):
            os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)  # replaces no files
            return
    if not _move(source, name, target):
        with suppress(OSError):
            os.rename(name, f"{name}.{os.urandom(4).hex()}", src_dir_fd=source, dst_dir_fd=target)


def _exists(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _leads_out(home: str, link: str) -> bool:
    try:
        target = os.readlink(link)
    except OSError:
        return False
    return os.path.isabs(target) and not contains(home, os.path.normpath(target))


def _changed_at(left: str) -> float:
    try:
        return os.lstat(left).st_ctime
    except OSError:
        return 0


def _is_module(name: str, packages: list[str]) -> bool:
    """Return whether Python could import the entry in place of an installed module when the user
    runs it in the home folder."""
    if name.lower() in MODULES or name in getattr(sys, "stdlib_module_names", ()):
        return True
    return any(os.path.lexists(f"{each}/{name}") for each in packages)


def _list_packages(home: str) -> list[str]:
    """Return the folders in which the machine's and the user's Pythons find packages."""
    installed = ("*conda*", "*forge*", "*conda*/envs/*", "*forge*/envs/*", ".conda/envs/*")
    managed = (".pyenv/versions/*", ".virtualenvs/*")
    found = [path for each in (*installed, *managed) for path in glob(f"{escape(home)}/{each}")]
    tops = [sys.prefix, "/usr", "/usr/local", f"{home}/.local", *glob("/opt/*"), *found]
    parts = ("python3*/site-packages", "python3*/dist-packages")
    return [path for top in tops for part in parts for path in glob(f"{escape(top)}/lib/{part}")]


def _read_readers(home: str, obeyed: list[str]) -> str:
    """Return the text of the files that name other files which the machine or its user obeys, and
    where the links among them lead."""
    patterns = [*SYSTEMS_READERS, *(f"{escape(home)}/{each}" for each in READERS)]
    # Work could fill caches with a million files, and exchange a file for a pipe.
    patterns += [
        f"{escape(each)}/*"
        for each in sorted(glob(f"{escape(home)}/.config/*"))
        if os.path.relpath(each, home) not in CACHES
    ]
    paths = obeyed + [path for each in patterns for path in sorted(glob(each))]
    texts = []
    for path in paths[:MOST_READ]:
        if RECORDS.fullmatch(os.path.basename(path)):
            continue
        with suppress(OSError):
            if os.path.islink(path):
                texts.append(os.path.realpath(path))
            if stat.S_ISREG(os.stat(path).st_mode):
                with open(path, "rb", opener=_open_at_once) as file:
                    data = file.read(LONGEST)
                texts += [] if b"\0" in data else [data.decode("utf-8", "replace")]
    text = "\n".join(texts)
    plain = QUOTES.sub("", ESCAPED_SPACE.sub(" ", text))
    return text if plain == text else f"{text}\n{plain}"


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; do not wait for a writer if it is a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)
