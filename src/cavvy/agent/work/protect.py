"""Protects what this machine, its user and Cavvy's server obey from the work: settings, programs,
start files of shells, units, cron tables and settings of the kernel.

In the work's mount namespace, the folders of the system, the files in `PATH`, Cavvy's program and
its settings are read-only. In a home folder, the entries whose names begin with a dot are read-only
except caches, and so is `bin`; the user's other files stay writable. New entries of a home folder
go to a folder of the project, because the user's shell would read a new `~/.zshenv`; those that
nothing obeys are moved to the home folder later (`home_entries`). Sockets of programs that act for
the user, such as container engines and systemd, are hidden, and so are disks.

The functions of this module change the mount namespace of the calling process, which must be its
own.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import sys
from contextlib import contextmanager, suppress
from fnmatch import translate
from functools import lru_cache

from . import mounts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# Folders of the system. Everything in them is read-only, except WRITABLE_PLACES.
SYSTEM = (
    *("/bin", "/boot", "/efi", "/etc", "/gnu", "/home", "/lib", "/lib32", "/lib64", "/libx32"),
    *("/nix", "/opt", "/root", "/run", "/sbin", "/snap", "/sys", "/usr", "/var"),
)
WRITABLE_PLACES = ("/var/tmp",)
# Folders that other users than root may own parts of, so that only root's work loses them.
ROOTS_OWN = ("/home", "/opt", "/var")
ALWAYS_SYSTEM = (
    *(each for each in SYSTEM if each not in ROOTS_OWN and each != "/root"),
    "/var/spool",
)
# Entries of a home folder whose names begin with a dot, and that the work may write.
CACHES = frozenset({
    ".cache", ".conda", ".cupy", ".EasyOCR", ".huggingface", ".insightface", ".keras", ".nv",
    ".paddleocr", ".torch", ".triton", ".u2net", ".config/matplotlib", ".config/Ultralytics",
    ".config/wandb", ".config/yolov5",
})  # fmt: skip
# Entries of a home folder that the work does not see, because it gets its own.
PRIVATE = frozenset({".cursor-server", ".local/share/jupyter/runtime", ".vscode-server"})
# Folders in a home folder that are treated like the home folder itself.
LAYERED = frozenset({".config", ".local", ".local/share", ".local/share/jupyter"})
NAMED = 3  # entries that a sentence names
MOST_HOMES = 16  # with more homes, those of other users are read-only
# Files of /proc by which root changes the kernel, and that no capability protects.
KERNEL = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi", "asound", "kcore", "mtrr")
# Sockets of programs that act for a user or for root, whether or not they listen now.
ENGINES = (
    *("/run/docker.sock", "/run/podman/podman.sock", "/run/containerd/containerd.sock"),
    *("/run/crio/crio.sock", "/run/systemd/private", "/run/dbus/system_bus_socket"),
    *("/run/snapd.socket", "/run/libvirt/libvirt-sock", "/run/buildkit/buildkitd.sock"),
)
# Folders with sockets that programs need to look up names and users, and to use a GPU.
NEEDED = ("nscd", "sss", "systemd/resolve", "systemd/userdb", "munge", "mps", "mps[-_]*", "nvidia*")
# Characters devices by which root reaches memory, disks or keyboards.
DEVICES = (
    *("mem", "kmem", "port", "raw*", "raw/*", "sg*", "bsg/*", "nvme*", "mapper/control", "uinput"),
    *("loop-control", "btrfs-control", "input/*", "cpu/*/msr", "mtd*", "vport*", "ipmi*", "tpm*"),
    *("tty[0-9]*", "console", "vcs*", "hvc*", "watchdog*", "autofs", "cuse", "snapshot", "mcelog"),
)


class Protection:
    """What the work may not change: what every system and user obeys, and besides the files and
    folders in `obeyed`. New entries of home folders go to folders below `kept`; if `kept` is "",
    home folders get no new entries. With `own_caches`, the caches of home folders are also there,
    because the work of another project could have written to those of the user.
    """

    def __init__(self, obeyed: list[str], kept: str, *, own_caches: bool = False) -> None:
        self._obeyed, self._kept = obeyed, kept
        self._private = PRIVATE | CACHES if own_caches and kept else PRIVATE
        self._bound: set[str] = set()
        self._places: list[str] = []

    def begin(self, homes: list[str] | None = None) -> None:
        """Protect the home folders `homes`, by default all, and single files. Folders that are
        mounted afterwards are not affected. Raises OSError."""
        paths = [each for each in list_named(self._obeyed) if os.path.exists(each)]
        homes = list_homes() if homes is None else homes
        for home in homes:
            paths += _find_linked(home)
        known: dict[str, str] = {}
        followed = [_follow(each, known) for each in paths]
        named = {real for real, _ in followed}
        links = {link for _, found in followed for link in found}
        if not mounts.is_root():
            named = {each for each in named if _is_writable(each)}
        self._places = [*_list_places(homes), *homes]
        for home in homes:
            with suppress(OSError):
                os.makedirs(home + "/.cache", mode=0o700, exist_ok=True)
        kept = {home: self._open_kept(home) for home in homes}
        for place in self._places:
            if place not in homes:
                with _missing_is_safe(place):
                    self._bind(place)
        for home in homes:
            self.pin(home)
            _layer(
                home, f"/proc/self/fd/{kept[home]}" if kept[home] >= 0 else "", "", self._private
            )
            self._bound.add(home)
        for opened in kept.values():
            if opened >= 0:
                os.close(opened)
        for path in sorted(named, key=len):
            if path != "/" and path not in self._bound:
                with _missing_is_safe(path):
                    self.pin(path)
                    self._bind(path)
                    mounts.make_read_only(path)
        self._keep_links(links, homes)

    def finish(self, hidden: str) -> None:
        """Make the system's folders read-only and hide sockets and devices, except in the folder
        `hidden`, which was mounted after `begin`. Raises OSError."""
        _protect_system([*self._places, hidden])
        protect_proc()
        self._hide_runtime(hidden)
        _hide_sockets(hidden)
        _hide_devices()

    def _keep_links(self, links: set[str], homes: list[str]) -> None:
        """Keep the work from replacing the links, except those of home folders, which it sees as
        copies."""
        for link in sorted(links, key=len):
            above = os.path.dirname(link)
            if above not in homes and any(mounts.contains(each, above) for each in self._places):
                with suppress(OSError):  # in a hidden folder, or a kernel that mounts no links
                    self.pin(link)
                    mounts.bind_link(link)

    def _hide_runtime(self, hidden: str) -> None:
        """Hide where Cavvy's server puts its socket if its folder is unsuitable. A job could put
        its own socket there, and the user's commands would send it their token."""
        folder = os.path.realpath(os.environ.get("XDG_RUNTIME_DIR") or "/run") + "/cavvy"
        if mounts.contains("/run", folder) or mounts.contains(folder, hidden):
            return
        with suppress(OSError):  # a job could also create the folders
            os.makedirs(folder, 0o700, exist_ok=True)
        if os.path.isdir(folder) and not os.path.islink(folder):
            self.pin(folder)
            mounts.mount("tmpfs", folder, "tmpfs", mounts.MS_NOSUID | mounts.MS_NODEV)

    def pin(self, path: str) -> None:
        """Keep the work from renaming the folders above `path`, which must have no links."""
        parts = path.split("/")[1:-1]
        for count in range(1, len(parts) + 1):
            self._bind("/" + "/".join(parts[:count]))

    def _bind(self, path: str) -> None:
        if path not in self._bound:
            mounts.bind_itself(path)
            self._bound.add(path)

    def _open_kept(self, home: str) -> int:
        if not self._kept:
            return -1
        kept = find_kept(self._kept, home)
        os.makedirs(kept, mode=0o700, exist_ok=True)
        return os.open(kept, os.O_RDONLY | os.O_DIRECTORY)


def find_kept(kept: str, home: str) -> str:
    """Return the folder below `kept` that takes the new entries of a home folder."""
    name = hashlib.sha256(home.encode()).hexdigest()[:8] + "-" + os.path.basename(home)
    return f"{kept}/{name}"


def list_homes() -> list[str]:
    """Return the home folders that the work could write to, outer folders first."""
    found = {os.environ.get("HOME", "")}
    with suppress(KeyError):  # not remembered: the table may be a server that does not answer now
        found.add(_read_home(os.geteuid()))
    if mounts.is_root():
        others = [
            each
            for each in _list_entries("/home")
            if os.path.isdir(each) and not each.startswith("/home/.")
        ]
        found |= set(others) if len(others) <= MOST_HOMES else set()
    real = {os.path.realpath(each) for each in found if each.startswith("/")}
    usable = [each for each in real if each.count("/") > 1 or each == "/root"]
    return sorted((each for each in usable if os.path.isdir(each)), key=lambda at: at.count("/"))


@lru_cache(maxsize=None)  # noqa: UP033  agents also run on Python 3.8
def _read_home(user: int) -> str:
    """Return the home folder of a user in the system's table of users. Raises KeyError."""
    import pwd

    return pwd.getpwuid(user).pw_dir


def list_named(obeyed: list[str]) -> list[str]:
    """Return the files and folders that this machine obeys besides those of systems and of home
    folders: those in `obeyed`, Cavvy's program and Python, and the folders in `PATH`."""
    own = mounts.list_programs()
    paths = [each for each in os.environ.get("PATH", "").split(":") if each.startswith("/")]
    linked = [link for each in paths for link in _find_links_in(each)]
    sources = [source for each in own for source in _list_sources(each)]
    # Python also reads a `sitecustomize` from the folder that contains an editable package.
    above = [os.path.dirname(each) for each in own if os.path.exists(each + "/agent/main.py")]
    # Links may lead to these folders.
    python = [each for each in (sys.executable, sys.prefix, sys.base_prefix) if each != "/usr"]
    return [*obeyed, *own, *above, *paths, *linked, *sources, *python]


def is_obeyed(path: str, obeyed: list[str]) -> bool:
    """Return whether the machine, its user or Cavvy would obey a file that Cavvy writes at `path`
    for the work. `path` has no links."""
    if path == "/" or any(mounts.contains(each, path) for each in ALWAYS_SYSTEM):
        return True
    if any(mounts.contains(each, path) for each in _resolve(list_named(obeyed))):
        return True
    homes = [each for each in list_homes() if mounts.contains(each, path) and each != path]
    return bool(homes) and not is_free(os.path.relpath(path, homes[-1]))


def list_obeyed_paths(obeyed: list[str]) -> list[str]:
    """Return the paths at, in or above which a new entry of a home folder would be obeyed."""
    return [each for each in _resolve([*list_homes(), *list_named(obeyed)]) if each != "/"]


def holds_obeyed(path: str, obeyed: list[str]) -> bool:
    """Return whether the folder `path`, which has no links, contains something that `is_obeyed`."""
    named = _resolve([*list_homes(), *ALWAYS_SYSTEM, *list_named(obeyed)])
    return any(mounts.contains(path, each) for each in named)


def is_free(name: str) -> bool:
    """Return whether the work may write the entry `name` of a home folder. `name` is a path
    relative to the home folder."""
    parts = name.split("/")
    if not name.startswith("."):
        return parts[0] != "bin"
    return any("/".join(parts[:count]) in CACHES for count in (1, 2))


def join_names(names: list[str]) -> str:
    """Join names for a sentence; a name that could change a terminal is written with escapes."""
    shown = [each if each.isprintable() else ascii(each)[1:-1] for each in names[:NAMED]]
    more = [f"{len(names) - NAMED} more"] if len(names) > NAMED else []
    *first, last = shown + more
    return f"{', '.join(first)} and {last}" if first else last


def mark_place(path: str) -> None:
    """Mark an empty entry as a place on which an entry of the home folder is mounted, or as a copy
    of a link. What the work creates has another time."""
    with suppress(OSError):
        os.utime(path, (0, 0), follow_symlinks=False)


def is_empty(entry: os.DirEntry[str]) -> bool:
    if entry.is_dir(follow_symlinks=False):
        with os.scandir(entry.path) as below:
            return next(below, None) is None
    return not entry.is_symlink() and not entry.stat(follow_symlinks=False).st_size


def protect_proc() -> None:
    """Make the files of /proc read-only by which root changes the kernel."""
    for name in KERNEL:
        path = "/proc/" + name
        if os.path.exists(path) and mounts.is_root():
            mounts.bind_itself(path)
            mounts.make_read_only(path)


def _list_places(homes: list[str]) -> list[str]:
    """Return the folders outside homes that the work may write, except single files in them."""
    top = [f"/{name}" for name in os.listdir("/")]
    found = [each for each in top if os.path.isdir(each) and not os.path.islink(each)]
    system = set(SYSTEM) - (set() if mounts.is_root() else set(ROOTS_OWN)) | {"/proc"}
    places = [each for each in found if each not in system]
    places += [each for each in WRITABLE_PLACES if os.path.isdir(each)]
    return [each for each in places if each not in homes]


def _layer(folder: str, kept: str, below: str, private: frozenset[str]) -> None:
    """Let the work write only the caches and the user's own files in a home folder, or in the part
    `below` of it. The folder `kept` takes new entries, and those in `private`."""
    source = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        entries = list(os.scandir(source))
        if kept:
            os.makedirs(kept, mode=0o700, exist_ok=True)
            mounts.bind(kept, folder)
            _clear(kept, {entry.name for entry in entries})
        else:
            mounts.bind_itself(folder)
        for entry in entries:
            with suppress(OSError):  # the entry stays hidden or read-only
                origin = f"/proc/self/fd/{source}/{entry.name}"
                _place(entry, origin, folder, kept, below, private)
        if not kept:
            mounts.make_read_only(folder, recursive=False)
    finally:
        os.close(source)


def _place(
    entry: os.DirEntry[str],
    source: str,
    folder: str,
    kept: str,
    below: str,
    private: frozenset[str],
) -> None:
    name, path = os.path.join(below, entry.name), f"{folder}/{entry.name}"
    if entry.is_symlink():
        if kept and not os.path.lexists(path):
            os.symlink(os.readlink(source), path)
            mark_place(path)
        return
    is_folder = entry.is_dir(follow_symlinks=False)
    if not is_folder and not entry.is_file(follow_symlinks=False):
        return  # a pipe or socket, which stays hidden
    if kept:
        _make_place(path, is_folder=is_folder)
    if name in private:
        return
    place = os.open(path, os.O_PATH | os.O_NOFOLLOW)
    try:
        mounts.mount(source, f"/proc/self/fd/{place}", None, mounts.MS_BIND | mounts.MS_REC)
    finally:
        os.close(place)
    if is_folder and name in LAYERED:
        _layer(path, f"{kept}/{entry.name}" if kept else "", name, private)
    elif not is_free(name):
        mounts.make_read_only(path)
    elif is_folder and os.path.isdir(f"{path}/condabin"):
        _protect_conda(path)


def _protect_conda(folder: str) -> None:
    """Protect an installation of conda, which a shell's start file runs, except environments."""
    mounts.make_read_only(folder)
    for name in ("envs", "pkgs"):
        if os.path.isdir(f"{folder}/{name}"):
            mounts.bind_itself(f"{folder}/{name}")
            mounts.make_writable(f"{folder}/{name}")


def _make_place(path: str, *, is_folder: bool) -> None:
    """Create the folder or file on which an entry is mounted. The work may have left another
    entry there, which is moved away."""
    with suppress(FileNotFoundError):
        found = os.lstat(path)
        if stat.S_ISDIR(found.st_mode) if is_folder else stat.S_ISREG(found.st_mode):
            if found.st_mtime and not (os.listdir(path) if is_folder else found.st_size):
                mark_place(path)
            return
        os.rename(path, f"{path}.replaced-{os.getpid()}")
    with suppress(FileExistsError):
        if is_folder:
            os.mkdir(path, 0o700)
        else:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    mark_place(path)


def _clear(kept: str, names: set[str]) -> None:
    """Remove the empty places, and the copies of links, that the home folder no longer has."""
    for entry in os.scandir(kept):
        if entry.name in names:
            continue
        with suppress(OSError):
            if entry.stat(follow_symlinks=False).st_mtime:
                continue
            if entry.is_dir(follow_symlinks=False):
                os.rmdir(entry.path)
            elif entry.is_symlink() or is_empty(entry):
                os.unlink(entry.path)


def _resolve(paths: list[str]) -> Iterator[str]:
    """Yield each path without links, and the links that lead there."""
    known: dict[str, str] = {}
    for path in paths:
        real, links = _follow(path, known)
        yield real
        yield from links


def _follow(path: str, known: dict[str, str]) -> tuple[str, list[str]]:
    """Return the absolute path without links, and the symbolic links through which it leads. A
    process that replaces one of them replaces what is at the path. The folders above each of them
    have no links. `known` keeps the target of each link, and "" for other paths."""
    at, links, todo = "", [], path.split("/")[::-1]
    for _ in range(1000):  # links may form a circle
        if not todo:
            break
        part = todo.pop()
        if part in ("", "."):
            continue
        if part == "..":
            at = at.rpartition("/")[0]
            continue
        at += "/" + part
        if at not in known:
            known[at] = _read_link(at)
        if target := known[at]:
            links.append(at)
            todo += target.split("/")[::-1]
            at = "" if target.startswith("/") else at.rpartition("/")[0]
    return at or "/", links


def _read_link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _find_links_in(folder: str) -> Iterator[str]:
    """Yield the links in a folder of `PATH` that is none of the system's."""
    real = os.path.realpath(folder)
    if not any(mounts.contains(each, real) for each in ALWAYS_SYSTEM):
        with suppress(OSError):
            yield from (each.path for each in os.scandir(folder) if each.is_symlink())


def _find_linked(home: str) -> Iterator[str]:
    """Yield where protected links of a home folder lead, such as to a folder of dotfiles."""
    todo = [""]
    seen = 0
    while todo and seen < 2000:
        below = todo.pop()
        try:
            entries = list(os.scandir(os.path.join(home, below)))
        except OSError:
            continue
        for entry in entries:
            name = os.path.join(below, entry.name)
            seen += 1
            if is_free(name) or (name in PRIVATE):
                continue
            if entry.is_symlink():
                if os.path.exists(entry.path):
                    yield entry.path
            elif entry.is_dir() and (name in LAYERED or _holds_start_files(name)):
                todo.append(name)


def _holds_start_files(name: str) -> bool:
    return name.startswith((".config/", ".ssh", ".local/bin", "bin")) and name.count("/") < 4


def _list_sources(program: str) -> list[str]:
    """Return the folders of editable packages that `.pth` files of a Python name."""
    found = []
    for library in _list_entries(program + "/lib", start="python3"):
        for path in _list_entries(library + "/site-packages", end=".pth"):
            with suppress(OSError, UnicodeDecodeError), open(path, encoding="utf-8") as file:
                found += [line.strip() for line in file if line.startswith("/")]
    return found


def _list_entries(folder: str, start: str = "", end: str = "") -> list[str]:
    """Return the paths of a folder's entries whose names begin and end so, without the time that
    `glob` needs to compile a pattern."""
    with suppress(OSError):
        names = os.listdir(folder)
        return [
            f"{folder}/{each}" for each in names if each.startswith(start) and each.endswith(end)
        ]
    return []


def _protect_system(kept: list[str]) -> None:
    """Make the mounts of the system's folders read-only, except those at or below `kept`."""
    own = set() if mounts.is_root() else set(ROOTS_OWN)
    system = tuple(each + "/" for each in SYSTEM if each not in own)
    left = tuple(each.rstrip("/") + "/" for each in (*kept, "/proc", "/dev", "/run/user"))
    for path in mounts.list_mounts():
        if f"{path}/".startswith(left):
            continue
        if path == "/" or f"{path}/".startswith(system):
            with _missing_is_safe(path):
                mounts.make_read_only(path, recursive=False)


def _hide_sockets(hidden: str) -> None:
    """Hide the sockets of programs that act for the user, except in the folder `hidden`, which
    shows the work's own."""
    runtime = f"/run/user/{os.geteuid()}"
    if os.path.isdir(runtime):
        _cover(runtime)
    own = [f"/tmp/{name}-{os.geteuid()}" for name in ("cavvy-ssh", "cavvy", "tmux")]
    for folder in own:  # programs may put their sockets there later
        with suppress(OSError):
            os.mkdir(folder, 0o700)
    for folder in (*own, "/tmp/.X11-unix", *_list_entries("/tmp", start="ssh-")):
        if os.path.isdir(folder) and not os.path.islink(folder):
            with _missing_is_safe(folder):
                _cover(folder)
    for path in {*ENGINES, *_list_sockets()}:
        real = os.path.realpath(path)
        if mounts.contains(hidden, real) or is_needed(real):
            continue
        if os.access(real, os.W_OK) and stat.S_ISSOCK(os.stat(real).st_mode):
            with _missing_is_safe(real):
                mounts.bind("/dev/null", real)


def _cover(folder: str) -> None:
    """Mount an empty folder with the same mode over a folder. tmux and others refuse a folder of
    sockets that other users may enter.
    """
    mode = stat.S_IMODE(os.stat(folder).st_mode)
    mounts.mount("tmpfs", folder, "tmpfs", mounts.MS_NOSUID | mounts.MS_NODEV)
    os.chmod(folder, mode)


def is_needed(path: str) -> bool:
    """Return whether programs need the socket at `path` to look up names, or to use a GPU. Only
    folders below those for sockets count, because a user's name or folder may be called alike."""
    name = os.path.dirname(path.removeprefix("/var"))
    if mounts.contains("/lib/sss", name):
        return True
    above, _, below = name.lstrip("/").partition("/")
    parts = below.split("/")
    names = ("/".join(parts[:count]) for count in (1, 2))
    return above in ("run", "tmp") and any(compile_names(NEEDED).match(each) for each in names)


@contextmanager
def _missing_is_safe(path: str) -> Iterator[None]:
    """Ignore errors if the path cannot be reached any more, such as a removed socket."""
    try:
        yield
    except OSError:
        if os.access(path, os.F_OK):
            raise


def _list_sockets() -> list[str]:
    with open("/proc/net/unix", errors="replace") as file:
        paths = [line.rstrip("\n").partition(" /")[2] for line in file]
    return ["/" + path for path in paths if path]


def _hide_devices() -> None:
    """Hide disks, memory and keyboards, which root's work could open."""
    named = compile_names(DEVICES)
    for path in list(_list_special("/dev")):
        with suppress(OSError):
            if not named.match(path[5:]) and not stat.S_ISBLK(os.lstat(path).st_mode):
                continue
            if mounts.is_root() or os.access(path, os.R_OK) or os.access(path, os.W_OK):
                mounts.bind("/dev/null", path)


def _list_special(folder: str) -> Iterator[str]:
    """Yield the paths of the devices, pipes and sockets below a folder."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _list_special(entry.path)
            elif not (entry.is_symlink() or entry.is_file(follow_symlinks=False)):
                yield entry.path


@lru_cache(maxsize=None)  # noqa: UP033  agents also run on Python 3.8
def compile_names(names: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that matches what any of these patterns of the shell matches."""
    return re.compile("|".join(map(translate, names)))


def _is_writable(path: str) -> bool:
    """Return whether this user could replace or change the file or folder."""
    while True:
        if os.access(path, os.W_OK) or os.stat(path).st_uid == os.geteuid():
            return True
        if path == "/":
            return False
        path = os.path.dirname(path)
