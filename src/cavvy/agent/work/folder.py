"""Builds the working folder from the snapshot of the user's folder or from a Git commit, and links
the checkpoints."""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress

from ..allowed_folders import AllowedFolders, LeadsOutside, open_below, walk_below
from ..config import AgentConfig
from ..disk import name_part
from ..documents import CheckpointConfig, WorkConfig
from ..http_client import TransferFailed
from .blobs import SMALL, BlobCache
from .hide import is_hidden
from .mounts import contains
from .protect import holds_obeyed, is_obeyed
from .reaper import exit_code
from .trees import copy_below, copy_open, copy_tree, remove_below, remove_tree
from .view import make_view

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .view import WorkView


class CannotBuild(Exception):
    """Raised if the working folder or the image cannot be created as the task requires. The message
    gives the reason for the failure."""


def build_folder(
    config: AgentConfig,
    work: WorkConfig,
    folder: str,
    env: dict[str, str],
    only: list[str] | None = None,
) -> None:
    """Create the working folder `folder` after deleting any existing folder. If `only` is given,
    the new folder contains only the files and folders in `only`. Raises CannotBuild, OSError.
    """
    remove_tree(folder)
    os.makedirs(folder)
    if work.workdir is not None:
        try:
            unpack(BlobCache(config), work.workdir.snapshot, folder, only)
        except TransferFailed as error:
            raise CannotBuild(str(error)) from error
    elif work.git is not None:
        clone(work.git.url, work.git.commit, folder, env, make_view(config))
        if only is not None:
            reduce(folder, only)
    for use in only or ():
        if not os.path.lexists(os.path.join(folder, use)):
            raise CannotBuild(f"the setup uses {use}, which is not in the working folder")


def unpack(blobs: BlobCache, snapshot: str, folder: str, only: list[str] | None = None) -> None:
    """Copy the files of the snapshot's manifest into the folder. Raises TransferFailed,
    CannotBuild, OSError.
    """
    manifest = f"{folder}.snapshot"
    remove_tree(manifest)
    blobs.copy(snapshot, manifest, 0o600)
    with open(manifest, encoding="utf-8") as file:
        try:
            entries = json.load(file)["files"]
        except (ValueError, KeyError, TypeError) as error:
            raise CannotBuild(
                f"the snapshot {snapshot} of the working folder is damaged: {error}"
            ) from error
        finally:
            os.unlink(manifest)
    if only is not None:
        entries = [entry for entry in entries if is_used(entry["path"], only)]
    blobs.bring(
        entry["sha256"]
        for entry in entries
        if "link" not in entry and int(entry.get("size") or 0) <= SMALL
    )
    for entry in entries:
        path = inside(folder, entry["path"])
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if "link" in entry:
            os.symlink(entry["link"], path)
        else:
            blobs.copy(entry["sha256"], path, int(entry.get("mode") or 0o644) & 0o777)


def reduce(folder: str, only: list[str]) -> None:
    """Remove every file that is neither in `only` nor in a folder of `only`. Raises OSError."""
    for parent, folders, files in os.walk(folder, topdown=False):
        for name in files + [
            name for name in folders if os.path.islink(os.path.join(parent, name))
        ]:
            path = os.path.join(parent, name)
            if not is_used(os.path.relpath(path, folder), only):
                os.unlink(path)
        if parent != folder and not os.listdir(parent):
            os.rmdir(parent)


def is_used(path: str, uses: list[str]) -> bool:
    """Return whether `path` is in `uses` or in a folder of `uses`. The control plane uses the same
    rule to choose the files from which it computes the setup's key.
    """
    return any(path == use or path.startswith(use + "/") for use in uses)


def clone(
    url: str, commit: str, folder: str, env: dict[str, str], view: WorkView | None = None
) -> None:
    """Check out one commit; fetch only that commit if the server allows this. Raises
    CannotBuild.

    The task's variables can make git run any program, so git sees only what the work sees.
    """
    env = dict(env, GIT_TERMINAL_PROMPT="0")
    git = ["git", "-C", folder, "-c", "advice.detachedHead=false"]
    if run([*git, "init", "-q"], env, view):
        raise CannotBuild(
            "git is not installed on this node, and the working folder is a Git repository"
        )
    shallow = run([*git, "fetch", "-q", "--depth", "1", url, commit], env, view) == 0
    every = "+refs/*:refs/remotes/origin/*"
    if not shallow and run([*git, "fetch", "-q", url, every], env, view):
        raise CannotBuild(f"git could not fetch {url}; the reason is in the log")
    point = "FETCH_HEAD" if shallow else commit
    if run([*git, "checkout", "-q", "--detach", point], env, view):
        raise CannotBuild(
            f"{url} has no commit {commit}; push this commit, or choose a commit that exists there"
        )


def check_seen(config: AgentConfig, path: str, *, follow: bool = True) -> None:
    """Raise CannotBuild if the path is in or above a folder that is hidden from the work. With
    `follow`, a link at `path` itself is resolved first."""
    if config.hides and is_hidden(config.hides, config.shown, path, follow=follow):
        raise CannotBuild(
            f"{os.path.realpath(path)} is in Cavvy's folder or contains it; "
            "that folder is hidden from jobs on this machine"
        )
    if config.separates:
        from .separate import list_covers

        for cover in list_covers(config.hides, os.geteuid()):
            if is_hidden(cover, config.shown, path, follow=follow):
                raise CannotBuild(
                    f"{os.path.realpath(path)} is in {cover} or contains it; that folder is hidden "
                    "from jobs on this machine, because the machine separates the jobs of projects"
                )


def check_kept(config: AgentConfig, path: str, *, follow: bool = True, whole: bool = True) -> None:
    """Raise CannotBuild if the work must not see the path (`check_seen`), or if the machine, its
    user or Cavvy obeys what is at the path: the agent is not in the namespaces of the work, which
    cannot change it. With `whole`, nothing below the path may be obeyed either."""
    check_seen(config, path, follow=follow)
    check_free(config, path, follow=follow, whole=whole)


def check_free(config: AgentConfig, path: str, *, follow: bool = True, whole: bool = True) -> None:
    """Raise CannotBuild if the machine, its user or Cavvy obeys what is at the path or, with
    `whole`, below it."""
    if not config.hides:
        return
    above, name = os.path.split(path)
    real = os.path.realpath(path) if follow else os.path.join(os.path.realpath(above), name)
    if any(contains(os.path.realpath(each), real) for each in config.shown):
        return
    if is_obeyed(real, config.obeys) or (whole and holds_obeyed(real, config.obeys)):
        raise CannotBuild(
            f"jobs cannot write {real}, or what is below it: this machine, its user or Cavvy obeys "
            "the files there (docs/guides/isolation.md lists them); choose another path"
        )


def transfer(
    config: AgentConfig,
    sources: AllowedFolders,
    source: str,
    targets: AllowedFolders | None,
    target: str,
    what: str,
    refuse: Callable[[str], None] | None = None,
) -> None:
    """Copy one input or output; existing files are overwritten. The target must be in one of
    `targets`. If `targets` is None, the user has named the target, and the target's path may
    contain links.

    Links are copied as links. If `refuse` is given, links that lead out of `sources` are omitted,
    and `refuse` is called for each of them. Raises CannotBuild, LeadsOutside, OSError.
    """
    check_seen(config, source)
    check_kept(config, target, whole=False)
    if "://" in source or "://" in target:
        raise CannotBuild(
            f"the {what} {source} -> {target} is not between two paths of this node; the agent "
            "can copy only between local paths"
        )

    def takes_link(path: str) -> bool:
        try:
            sources.stat(os.path.join(source, path))
        except LeadsOutside as error:
            if refuse is not None:
                refuse(f"{path} of the {what} {os.path.basename(source)} was not copied: {error}")
            return refuse is None
        except OSError:
            return True  # the link leads to no file
        return True

    try:
        original = sources.open(source, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise CannotBuild(f"the {what} {source} does not exist") from error
    try:
        check_seen(config, f"/proc/self/fd/{original}")
        if stat.S_ISDIR(os.fstat(original).st_mode):
            _fill(config, original, targets, target, takes_link)
        else:
            _replace(config, original, targets, target)
    finally:
        os.close(original)


def _fill(
    config: AgentConfig,
    source: int,
    targets: AllowedFolders | None,
    target: str,
    takes_link: Callable[[str], bool],
) -> None:
    """Copy the entries of an open folder to the folder `target`."""
    if targets is None:
        os.makedirs(target, exist_ok=True)
        targets = AllowedFolders([], [target])
    folder, name = targets.find(target, make=True)
    try:
        if name != ".":
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=folder)
        made = open_below(folder, name, os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(folder)
    try:
        place = f"/proc/self/fd/{made}"
        check_kept(config, place, whole=False)
        if config.hides and holds_obeyed(os.path.realpath(place), config.obeys):
            for path, _, _ in walk_below(source):
                check_kept(config, os.path.join(os.path.realpath(place), path), whole=False)
        copy_below(source, made, takes_link=takes_link)
    finally:
        os.close(made)


def _replace(config: AgentConfig, source: int, targets: AllowedFolders | None, target: str) -> None:
    """Copy an open file to the file `target`."""
    if targets is None:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        targets = AllowedFolders([], [os.path.dirname(target)])
    if not stat.S_ISREG(os.fstat(source).st_mode):
        raise CannotBuild(f"the source of {target} is neither a file nor a folder")
    folder, name = targets.find(target, follow=False, make=True)
    try:
        check_kept(config, f"/proc/self/fd/{folder}/{name}", whole=False)
        part = name_part(name, ".cavvy-new")
        remove_below(folder, part)
        copy_open(source, part, folder=folder)
        os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(folder)


def link_checkpoint(checkpoint: CheckpointConfig, folder: str) -> str:
    """Link the checkpoint's path in the working folder to the checkpoint's storage folder, and
    return the storage folder. Raises CannotBuild, OSError.

    If the storage folder is empty, files that exist at the checkpoint's path in the working folder
    become the first checkpoint.
    """
    path = inside(folder, checkpoint.path)
    if os.path.isfile(path) and not os.path.islink(path):
        raise CannotBuild(
            f"the checkpoint folder {checkpoint.path} is a file of the working folder: name "
            "another folder in `checkpoint.path`, or rename the file"
        )
    if checkpoint.storage is None:
        os.makedirs(path, exist_ok=True)
        return path
    os.makedirs(checkpoint.storage, exist_ok=True)
    if os.path.isdir(path) and not os.path.islink(path):
        if not os.listdir(checkpoint.storage):
            copy_tree(path, checkpoint.storage)
        remove_tree(path)
    elif os.path.lexists(path):
        os.unlink(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.symlink(checkpoint.storage, path)
    return checkpoint.storage


def inside(folder: str, path: str) -> str:
    """Return the full path of `path`, which must be in the folder. Raises CannotBuild."""
    try:
        is_name = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise CannotBuild(f"{path!r} cannot be the name of a file on this node")
    found = os.path.normpath(path)
    if os.path.isabs(found) or found == ".." or found.startswith("../") or found == ".":
        raise CannotBuild(
            f"{path!r} is not in the working folder; use a path relative to that folder"
        )
    made = os.path.join(folder, found)
    parent = os.path.realpath(os.path.dirname(made))
    if parent != os.path.realpath(folder) and not parent.startswith(
        os.path.realpath(folder) + os.sep
    ):
        raise CannotBuild(f"{path!r} leads out of the working folder through a symbolic link")
    return made


def run(argv: list[str], env: dict[str, str], view: WorkView | None = None) -> int:
    """Run a program, wait until it ends, and return its exit code, or 127 if the program is
    missing. The program sees only what `view` shows.
    """
    try:
        pid = os.posix_spawnp(argv[0], argv, env) if view is None else _fork(argv, env, view)
    except FileNotFoundError:
        return 127
    return exit_code(os.waitpid(pid, 0)[1])


def _fork(argv: list[str], env: dict[str, str], view: WorkView) -> int:
    folder = os.getcwd()
    pid = os.fork()
    if pid == 0:
        try:
            view.take()
            os.chdir(folder)
            os.execvpe(argv[0], argv, env)
        except OSError as error:
            os.write(2, f"cavvy: cannot start {argv[0]}: {error}\n".encode())
        finally:
            os._exit(127)
    return pid
