"""Describes the part of the machine that the work sees and may change. The folder `config.hides` is
hidden from the work, and the work cannot change what the machine, its user and Cavvy's server obey.
If the machine separates projects, the view also hides the folders through which processes
communicate.

Finds the folder with the results of a setup, for the agent and the agent's child programs. The
module `prepare` describes the contents of a setup's folder.
"""

from __future__ import annotations

import hashlib
import json
import os

from . import hide, separate
from .protect import Protection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..config import AgentConfig
    from ..documents import VolumeConfig, WorkConfig
    from .own_volumes import MountedVolume


BUCKETS = "buckets"  # the folder of all mounted buckets, in the machine's folder of caches


class WorkView:
    """The part of the machine that the programs of one rank see. `folder` is hidden, except the
    folders in `shown`, and the programs cannot change what `protection` protects. If `alone` is
    set, the programs have their own process namespace. If `separated` is set, the work is separated
    by `separate.separate`, and the device files in `devices` are hidden. The programs see `volumes`
    at their paths.
    """

    def __init__(
        self,
        folder: str,
        shown: list[str],
        protection: Protection,
        *,
        alone: bool = False,
        separated: bool = False,
        devices: list[str],
        volumes: Sequence[MountedVolume] = (),
    ) -> None:
        self._folder, self._shown, self._protection = folder, shown, protection
        self._alone, self._separated, self._devices = alone, separated, devices
        self._volumes = volumes

    def take(self) -> None:
        """Hide everything outside the view from this process. The process must have only one
        thread. Raises OSError."""
        if self._separated:
            separate.separate(
                self._folder, self._shown, self._devices, self._protection, self._volumes
            )
        else:
            hide.hide(
                self._folder,
                self._shown,
                self._protection,
                alone=self._alone,
                volumes=self._volumes,
            )

    def join(self, find: Callable[[], list[int]]) -> None:
        """Give this process the same view as the first process with this view among those whose
        IDs `find` returns. Raises OSError."""
        if self._separated:
            separate.enter(self._folder, find)
        else:
            hide.enter(self._folder, find, alone=self._alone)


def make_view(config: AgentConfig, volumes: Sequence[MountedVolume] = ()) -> WorkView | None:
    """Return the view of a rank's programs, or None if the programs see everything. The programs
    see `volumes` at their paths."""
    if not config.covers:
        return None
    devices = separate.list_other_gpus(config.devices) if config.separates else []
    return WorkView(
        config.hides,
        config.shown,
        Protection(config.obeys, config.kept, own_caches=bool(config.own_cache)),
        alone=config.alone,
        separated=config.separates,
        devices=devices,
        volumes=volumes,
    )


def list_shown(config: AgentConfig, work: WorkConfig) -> list[str]:
    """Return the folders below `config.hides` that the work sees: its setup, checkpoints and
    volumes, and the folders of all ranks of its gang on this machine. The folders of other ranks
    are included because a rank can use links to another rank's files.
    """
    gang = os.path.dirname(config.home)
    # Show each rank's home folder separately, because the work cannot replace a mounted folder with
    # a link.
    ranks = [f"{gang}/{name}" for name in sorted(os.listdir(gang)) if name.isdigit()]
    shown = [gang, *ranks]
    if any(each.kind == "nfs" for each in work.volumes):
        shown += [find_mount(config, each) for each in work.volumes if each.kind == "nfs"]
    shown += [find_bucket(config, at) for at in work.mounted]
    if work.setup is not None:  # do not show `tree`, because the agent copies from it later
        shown += [f"{find_setup(config, work)}/{name}" for name in ("dir", "venv")]
    if work.checkpoint is not None and work.checkpoint.storage is not None:
        shown.append(work.checkpoint.storage)
    return shown


def find_mount(config: AgentConfig, volume: VolumeConfig) -> str:
    """Return the folder where the agent mounts an NFS export."""
    import hashlib  # only agents that mount volumes need this module

    name = hashlib.sha256(f"{volume.source} {volume.options}".encode()).hexdigest()[:16]
    return os.path.join(config.caches, "mounts", name)


def find_bucket(config: AgentConfig, index: int) -> str:
    """Return the folder at which the bucket of an input is mounted. It is not in the rank's home,
    so that nothing that removes the home can reach the bucket."""
    return f"{config.caches}/{BUCKETS}/{config.gang}-{config.rank}-{index}"


def find_setup(config: AgentConfig, work: WorkConfig) -> str:
    """Return the folder that contains the work's setup. The folder's name contains the host's name:
    several hosts can share the cache, but each of them needs its own run of the setup, because a
    setup can install files outside the folder.
    """
    folder = work.workdir.snapshot if work.workdir else work.git.commit if work.git else None
    key = work.setup_key or hashlib.sha256(json.dumps([work.setup, folder]).encode()).hexdigest()
    name = f"{key}@{os.uname().nodename}"
    return os.path.join(
        config.cache, "setups", "".join(c if c.isalnum() or c in "-_.@" else "_" for c in name)
    )
