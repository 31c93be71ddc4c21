"""Makes the task's volumes visible to the work: volumes that the provider has mounted, folders of
the node, and NFS exports.

Without a container, a volume's path becomes a link to the volume's files; in a container, the files
are bind-mounted. Named volumes of this machine itself are mounted in the namespace of the work
(`work.own_volumes`), if this machine offers namespaces.
"""

from __future__ import annotations

import fcntl
import filecmp
import glob
import hashlib
import os
import subprocess
from contextlib import contextmanager

from ..allowed_folders import AllowedFolders, LeadsOutside
from ..config import AgentConfig
from ..disk import open_own
from ..documents import VolumeConfig, WorkConfig
from ..work.folder import CannotBuild, check_free, check_kept, check_seen, inside
from ..work.hide import is_hidden
from ..work.own_volumes import MountedVolume
from ..work.view import BUCKETS, find_bucket, find_mount

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

MOUNT_S = 60.0
BESIDE = "/cavvy/volumes"  # where the provider mounts volumes with a relative path


def find_volumes(
    config: AgentConfig, work: WorkConfig, folder: str
) -> list[tuple[VolumeConfig, str]]:
    """Return each volume with the path of its files on this node. Raises CannotBuild, OSError."""
    return [(volume, find_source(config, volume, folder)) for volume in work.volumes]


def find_source(config: AgentConfig, volume: VolumeConfig, folder: str) -> str:
    """Return the path of the volume's files on this node; mount an NFS export if necessary. Raises
    CannotBuild, OSError.
    """
    if is_own(config, volume):
        return _make_own(config, volume)
    if volume.kind == "folder":
        source = folder if volume.source == "." else inside(folder, volume.source)
        try:
            AllowedFolders([folder]).stat(source)
        except FileNotFoundError as error:
            raise CannotBuild(
                f"the volume at {volume.path} is missing: the working folder has no {volume.source}"
            ) from error
        except LeadsOutside as error:
            raise CannotBuild(f"the volume at {volume.path}: {error}") from error
        return source
    if os.path.isabs(volume.path):
        made = volume.path
    else:
        made = f"{BESIDE}/{hashlib.sha256(volume.path.encode()).hexdigest()[:12]}"
    if os.path.ismount(made):
        return made  # already mounted by the provider
    if volume.kind == "host":
        if not os.path.isdir(volume.source):
            raise CannotBuild(f"the volume {volume.source} is not a folder on this node")
        return volume.source
    if volume.kind == "nfs":
        return find_mounted(volume.source) or mount_nfs(config, volume)
    raise CannotBuild(f"the volume {volume.source} is not mounted under {volume.path} on this node")


def is_own(config: AgentConfig, volume: VolumeConfig) -> bool:
    """Return whether the volume is a folder that Cavvy keeps on this machine."""
    return volume.kind == "named" and bool(config.volumes)


def _make_own(config: AgentConfig, volume: VolumeConfig) -> str:
    """Return the folder of a volume of this machine; create it if it is missing. Nothing above the
    folder can be changed by the work. Raises CannotBuild, OSError."""
    if volume.source != os.path.basename(volume.source) or volume.source.startswith("."):
        raise CannotBuild(f"{volume.source!r} cannot be the name of a volume on this machine")
    kept = config.volumes if volume.keep else f"{os.path.dirname(config.private)}/volumes"
    os.makedirs(kept, mode=0o700, exist_ok=True)
    path = f"{kept}/{volume.source}"
    os.makedirs(path, mode=0o755, exist_ok=True)
    return path


def list_mounted(config: AgentConfig, work: WorkConfig) -> list[MountedVolume]:
    """Return the volumes that are mounted in the namespace of work without a container. Raises
    CannotBuild, OSError."""
    return [
        MountedVolume(_make_own(config, each), each.path, read_only=each.read_only)
        for each in work.volumes
        if _is_mounted(config, work, each)
    ]


def _is_mounted(config: AgentConfig, work: WorkConfig, volume: VolumeConfig) -> bool:
    """Return whether the volume is mounted in the namespace of the work."""
    return is_own(config, volume) and bool(config.covers) and work.image is None


def list_checkpoint_volumes(config: AgentConfig, work: WorkConfig) -> list[str]:
    """If the checkpoint's path is in a volume, return a list with the folder of this node that
    contains the checkpoints; otherwise return an empty list."""
    if work.checkpoint is None:
        return []
    try:
        return [
            find_source(config, each, config.folder)
            for each in work.volumes
            if each.kind != "folder" and each.path == work.checkpoint.path
        ]
    except (CannotBuild, OSError):
        return []  # the folder then cannot be read


def find_mounted(export: str) -> str | None:
    """Return the first path where an NFS export is already mounted, or None."""
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            device, where, kind = line.split(" ")[:3]
            if kind.startswith("nfs") and _decode(device).rstrip("/") == export.rstrip("/"):
                return _decode(where)
    return None


def mount_nfs(config: AgentConfig, volume: VolumeConfig) -> str:
    """Mount the export below the folder that all agents of this machine share. Raises CannotBuild,
    OSError."""
    if os.getuid():
        raise CannotBuild(
            f"the NFS export {volume.source} is not mounted on this node, and only root can mount "
            "it: mount it on the node first, or set the volume's `host` to a folder of the node"
        )
    folder = find_mount(config, volume)
    os.makedirs(folder, exist_ok=True)
    if os.path.ismount(folder):
        return folder
    options = ["-o", volume.options] if volume.options else []
    argv = ["mount", "-t", "nfs", *options, volume.source, folder]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=MOUNT_S, check=False
        )
    except FileNotFoundError as error:
        raise CannotBuild(
            f"the NFS export {volume.source} cannot be mounted: this node has no `mount` command"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise CannotBuild(
            f"the NFS export {volume.source} did not answer within {MOUNT_S:.0f} s"
        ) from error
    if done.returncode and not os.path.ismount(folder):
        reason = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise CannotBuild(
            f"the NFS export {volume.source} cannot be mounted: "
            f"{reason[-1] if reason else 'no reason'}"
        )
    return folder


def link_volumes(config: AgentConfig, work: WorkConfig, folder: str) -> None:
    """Link each volume's path to the volume's files, for work without a container. Raises
    CannotBuild, OSError.
    """
    for volume, source in find_volumes(config, work, folder):
        if _is_mounted(config, work, volume):
            _check_place(config, work, volume)
            continue
        if volume.read_only and os.access(source, os.W_OK) and not _is_read_only(source):
            raise CannotBuild(
                f"the volume {volume.source} cannot be made read-only on this node without a "
                "container; "
                "add an `image`, or leave `read_only` out"
            )
        path = find_path(volume, folder)
        used = is_own(config, volume) and os.path.islink(path)  # until the last job has ended
        if used or os.path.realpath(path) != os.path.realpath(source):
            link(config, source, path)


def _check_place(config: AgentConfig, work: WorkConfig, volume: VolumeConfig) -> None:
    """Raise CannotBuild if the volume cannot be mounted at its path."""
    # The folders that separated work has in place of the user's can have volumes.
    if is_hidden(config.hides, [], volume.path):
        check_seen(config, volume.path)
    check_free(config, volume.path)
    if os.path.lexists(volume.path) and not os.path.isdir(volume.path):
        raise CannotBuild(f"{volume.path} is already in use on this node, and is not a folder")
    for each in work.inputs:
        if each.target.startswith(volume.path + "/"):
            raise CannotBuild(
                f"the input {each.target} is in the volume {volume.source}, whose files it cannot "
                "join: choose another `target`"
            )


def list_binds(config: AgentConfig, work: WorkConfig, folder: str) -> list[str]:
    """Return the volumes as `--volume` arguments of podman and docker. Raises CannotBuild,
    OSError."""
    binds = []
    for volume, source in find_volumes(config, work, folder):
        if volume.path.startswith("~/"):
            if volume.kind != "folder":
                raise CannotBuild(
                    f"{volume.path} is in the node's home folder, but work in an image has "
                    "a different home folder"
                )
            continue  # a link within the container; see `list_home_links`
        if not is_own(config, volume):
            (check_seen if volume.read_only else check_kept)(config, source)
        path = find_path(volume, folder)
        if not os.path.isabs(volume.path):
            os.makedirs(path, exist_ok=True)
        binds.append(f"{source}:{path}:ro" if volume.read_only else f"{source}:{path}")
    return binds


def list_home_links(config: AgentConfig, work: WorkConfig) -> list[tuple[str, str]]:
    """Return the inputs and volumes that the work sees in its home folder, as (source, path
    relative to the home folder). An image has its own home folder, so the work's container
    itself creates the links to the inputs and volumes. Raises CannotBuild, OSError.
    """
    inputs = [
        (
            find_bucket(config, index)
            if index in work.mounted
            else f"{config.home}/inputs/{index}",
            each.target,
        )
        for index, each in enumerate(work.inputs)
    ]
    parts = [volume for volume in work.volumes if volume.kind == "folder"]
    shown = [
        (find_source(config, volume, config.folder), volume.path)
        for volume in parts
        if volume.path.startswith("~/")
    ]
    return [(source, path[2:]) for source, path in (*inputs, *shown) if path.startswith("~/")]


def find_path(volume: VolumeConfig, folder: str) -> str:
    """Return the path where the work sees the volume. Raises CannotBuild."""
    if volume.path.startswith("~/"):
        return os.path.expanduser(volume.path)
    return volume.path if os.path.isabs(volume.path) else inside(folder, volume.path)


def link(config: AgentConfig, source: str, path: str) -> None:
    """Link `path` to `source`; `remove_links` removes the link. If several ranks of a gang run on
    one machine, the first rank creates the link and the other ranks use it. Raises CannotBuild if
    another file exists at `path`, if `path` is in a folder that is hidden from the work, or if this
    user has no permission to create the link.
    """
    check_kept(config, path, follow=False)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _link_in(config, source, path, folder)
        finally:
            os.close(folder)
    except FileExistsError as error:
        raise CannotBuild(f"{path} is already in use on this node") from error
    except PermissionError as error:
        raise CannotBuild(
            f"{source} cannot be linked at {path}: this node's user has no permission to create "
            "the link; choose a path within the working folder, or add an `image`"
        ) from error


def _link_in(config: AgentConfig, source: str, path: str, folder: int) -> None:
    """Link `path` to `source`; `folder` is the open folder that contains `path`. Raises
    CannotBuild, OSError."""
    place = path
    if config.hides:  # the setup may have left a program that changes the links above `path`
        place = f"/proc/self/fd/{folder}/{os.path.basename(path)}"
        check_kept(config, place, follow=False)
    listed = f"{config.private}/links"
    with _lock_links(config):
        with open(listed, "a", encoding="utf-8", errors="surrogateescape", opener=open_own) as file:
            file.write(path + "\n")
        if _is_linked(config, source, place):
            return
        if os.path.islink(place) and (
            not os.path.exists(place)  # left over from an attempt whose home folder is gone
            or _is_left(config, path, os.readlink(place))
        ):
            os.unlink(place)
    if os.path.isdir(place) and not os.path.islink(place) and not os.listdir(place):
        os.rmdir(place)
    if os.path.lexists(place):
        if _is_bucket(source):  # files that the work writes at `path` must reach the bucket
            raise CannotBuild(
                f"a bucket cannot be mounted at {path}, where this node already has files: choose "
                "another `target`, or leave the files out of `workdir`"
            )
        # What the work writes must reach its volume, and no volume of others.
        volumes = any(_is_volume(config, each) for each in (source, os.path.realpath(place)))
        if not volumes and _is_equal(source, place):
            return  # on the user's own machine, `path` may already hold the same files
        raise CannotBuild(
            f"{source} cannot be linked at {path}: the path is already in use on this node"
        )
    try:
        os.symlink(source, place)
    except FileExistsError:  # another rank has created the link meanwhile
        if not _is_linked(config, source, place):
            raise


def remove_links(config: AgentConfig) -> None:
    """Remove the links that the ended work used, if the links' targets belong to the gang, or are
    volumes of this machine and no other gang uses the links. If several ranks of a gang run on this
    machine, only the rank that ends last removes links.
    """
    gang = os.path.dirname(config.home)
    try:
        others = [name for name in os.listdir(gang) if name.isdigit()]
        paths = _read_links(config.private)
    except OSError:  # no links were made
        return
    records = os.path.dirname(config.private)
    if not all(os.path.exists(f"{records}/{name}/exit.json") for name in others):
        return
    own = (gang + "/", f"{config.caches}/{BUCKETS}/{config.gang}-")
    for path in paths:
        try:
            with _lock_links(config):
                target = os.readlink(path) if os.path.islink(path) else ""
                if target.startswith(own) or _is_left(config, path, target):
                    os.unlink(path)
        except OSError:  # the link stays; the next work that needs its path replaces it
            continue


def _read_links(private: str) -> list[str]:
    """Return the paths where the rank with this private folder uses links. Raises OSError."""
    listed = f"{private}/links"
    with open(listed, encoding="utf-8", errors="surrogateescape", opener=open_own) as file:
        return file.read().splitlines()


@contextmanager
def _lock_links(config: AgentConfig) -> Iterator[None]:
    """Wait until no other agent decides who uses the links to the volumes of this machine."""
    volumes = os.path.dirname(config.volumes)
    if not os.path.isdir(volumes):  # no link leads there
        yield
        return
    lock = os.open(volumes, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _is_left(config: AgentConfig, path: str, target: str) -> bool:
    """Return whether the link at `path` leads to a volume of this machine, and no other gang with
    running work uses the link."""
    if not _is_volume(config, target):
        return False
    own = os.path.dirname(config.private)
    for listed in glob.iglob(f"{glob.escape(os.path.dirname(own))}/*/*/links"):
        private = os.path.dirname(listed)
        if os.path.dirname(private) == own or os.path.exists(private + "/exit.json"):
            continue
        try:
            if path in _read_links(private):
                return False
        except OSError:  # the gang was removed meanwhile
            continue
    return True


def _is_volume(config: AgentConfig, path: str) -> bool:
    """Return whether the path is in a volume of this machine, of any project or gang."""
    folders = (os.path.dirname(config.volumes), os.path.dirname(os.path.dirname(config.private)))
    return bool(config.volumes) and path.startswith(
        tuple(f"{each}/" for folder in folders for each in (folder, os.path.realpath(folder)))
    )


def _is_linked(config: AgentConfig, source: str, path: str) -> bool:
    """Return whether `path` is a link to `source`, or another rank's link to the same."""
    return os.path.islink(path) and (
        os.path.realpath(path) == os.path.realpath(source) or _is_shared(config, source, path)
    )


def _is_shared(config: AgentConfig, source: str, path: str) -> bool:
    """Return whether `path` is a link to the same relative path as `source` in another rank's
    home, or to another rank's mount of the same bucket."""
    if _is_bucket(source):
        return os.readlink(path).rsplit("-", 2)[::2] == source.rsplit("-", 2)[::2]
    gang = os.path.dirname(config.home)
    rank, _, rest = os.path.relpath(os.path.realpath(path), os.path.realpath(gang)).partition("/")
    return rank.isdigit() and rest == os.path.relpath(source, config.home)


def _is_bucket(source: str) -> bool:
    return os.path.basename(os.path.dirname(source)) == BUCKETS


def _is_equal(source: str, path: str) -> bool:
    """Return whether two files, or all files of two folders, have the same content."""
    if not os.path.isdir(source):
        return os.path.isfile(path) and filecmp.cmp(source, path, shallow=False)
    if not os.path.isdir(path):
        return False
    found = filecmp.dircmp(source, path, ignore=[])
    names = [*found.common_files, *found.common_dirs]
    return not (found.left_only or found.right_only or found.common_funny) and all(
        _is_equal(os.path.join(source, name), os.path.join(path, name)) for name in names
    )


def _is_read_only(path: str) -> bool:
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def _decode(text: str) -> str:
    """Decode a path from /proc/self/mounts, where the kernel writes blanks and backslashes as octal
    codes."""
    for octal, plain in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(octal, plain)
    return text
