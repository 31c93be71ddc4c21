"""Determines where inputs and outputs are stored: in the working folder or, if the task gives an
absolute path, outside of the working folder.
"""

from __future__ import annotations

import json
import os

from ..allowed_folders import AllowedFolders
from ..config import AgentConfig
from ..disk import read_known, write_whole
from ..documents import TransferConfig, WorkConfig
from ..work.folder import CannotBuild, inside
from ..work.view import find_bucket
from .mounts import find_source, is_own, link


def is_full(path: str) -> bool:
    return path.startswith(("/", "~/"))


def find_input(config: AgentConfig, index: int, target: str) -> str:
    """Return the path to which an input is copied. Raises CannotBuild."""
    if not is_full(target):
        return inside(config.folder, target)
    os.makedirs(f"{config.home}/inputs", mode=0o700, exist_ok=True)
    return f"{config.home}/inputs/{index}"


def list_input_folders(config: AgentConfig) -> AllowedFolders:
    """Return the folders that contain all paths that `find_input` returns."""
    return AllowedFolders([config.folder, config.home + "/inputs"])


def link_mount(config: AgentConfig, index: int, target: str) -> None:
    """Make a mounted bucket visible at its path, for work without a container. Raises
    CannotBuild."""
    path = os.path.expanduser(target) if is_full(target) else inside(config.folder, target)
    source = find_bucket(config, index)
    link(config, source, path)
    if os.path.realpath(path) != os.path.realpath(source):
        raise CannotBuild(
            f"several ranks on this machine cannot share a mount at {path}: use a path in the "
            "working folder, or an `image`"
        )


def link_input(config: AgentConfig, path: str, target: str) -> None:
    """Make the input visible at its absolute path, for work without a container. Raises
    CannotBuild."""
    if is_full(target):
        link(config, path, os.path.expanduser(target))


def list_input_binds(config: AgentConfig, work: WorkConfig) -> list[str]:
    """Return the inputs with absolute paths and the mounted buckets, each as SOURCE:PATH, the form
    of the container engines' bind option. Raises CannotBuild, OSError."""
    found = [
        f"{config.home}/inputs/{index}:{each.target}"
        for index, each in enumerate(work.inputs)
        if each.target.startswith("/") and index not in work.mounted
    ]
    for index in work.mounted:
        target, point = work.inputs[index].target, find_bucket(config, index)
        if target.startswith("~/"):
            target = point  # the container links it; see `list_home_links`
        elif not is_full(target):
            target = inside(config.folder, target)
            os.makedirs(target, exist_ok=True)
        found.append(f"{point}:{target}")
    return found


def find_output(
    config: AgentConfig, work: WorkConfig, output: int
) -> tuple[str, dict[str, list[int]]]:
    """Return the path of an output on this node, and the files that the output's target already
    has, as path -> [size, mtime in ns]. Raises CannotBuild.
    """
    path, brought = _find_output(config, work, work.outputs[output])
    return path, {**brought, **read_known(f"{config.private}/sent-{output}.json")}


def _find_output(
    config: AgentConfig, work: WorkConfig, output: TransferConfig
) -> tuple[str, dict[str, list[int]]]:
    source, target = output.source, output.target
    for index, each in enumerate(work.inputs):
        if each.target == source and (is_full(source) or each.source == target):
            known = {}
            if each.source == target:
                known = read_known(f"{config.private}/brought-{index}.json")
            full = _find_full(config, index, source)
            return full if is_full(source) else inside(config.folder, source), known
    for volume in work.volumes:
        if volume.path == source:
            return find_source(config, volume, config.folder), {}
    if (kept := _find_in_volume(config, work, source)) is not None:
        return kept, {}
    return (os.path.expanduser(source) if is_full(source) else inside(config.folder, source)), {}


def _find_in_volume(config: AgentConfig, work: WorkConfig, path: str) -> str | None:
    """If the path is in a volume of this machine, return where its files are. They may not be at
    the path itself outside of the work's namespaces or container. Raises CannotBuild, OSError.
    """
    home = is_full(path) and work.image is None  # a container has a home folder of its own
    seen = os.path.normpath(os.path.expanduser(path) if home else path)
    volumes = [(os.path.normpath(each.path), each) for each in work.volumes]
    around = [pair for pair in volumes if f"{seen}/".startswith(pair[0] + "/")]
    if not around:
        return None
    where, volume = max(around, key=lambda pair: len(pair[0]))
    if not is_own(config, volume):
        return None
    return find_source(config, volume, config.folder) + seen[len(where) :]


def _find_full(config: AgentConfig, index: int, target: str) -> str:
    """For an input whose target is an absolute path, return the path of the input's files on this
    node."""
    return target if target in config.placed else f"{config.home}/inputs/{index}"


def _list_given(config: AgentConfig, work: WorkConfig) -> list[str]:
    """Return the paths of the outputs that the task names by absolute paths, and of the inputs that
    the provider has placed on this node. Raises CannotBuild, OSError."""
    elsewhere = {each.target for each in work.inputs} | {each.path for each in work.volumes}
    outputs = [
        os.path.expanduser(each.source)
        for each in work.outputs
        if is_full(each.source)
        and each.source not in elsewhere
        and _find_in_volume(config, work, each.source) is None
    ]
    return outputs + config.placed


def find_folders(config: AgentConfig, work: WorkConfig) -> AllowedFolders:
    """Return the folders into which a link in an output may lead. They are the working folder, the
    inputs, outputs with absolute paths, the checkpoints, the setup's folder and the volumes. Links
    may refer to inputs and volumes by the paths at which the work sees them. Raises CannotBuild,
    OSError.
    """
    seen = {
        os.path.expanduser(each.target): _find_full(config, index, each.target)
        for index, each in enumerate(work.inputs)
        if is_full(each.target)
    }
    given = _list_given(config, work)
    for each in work.volumes:
        if each.kind != "folder":
            source = find_source(config, each, config.folder)
            given.append(source)
            seen[os.path.join(config.folder, os.path.expanduser(each.path))] = source
        elif is_full(each.path):
            source = os.path.normpath(os.path.join(config.folder, each.source))
            seen[os.path.expanduser(each.path)] = source
    if work.checkpoint is not None and work.checkpoint.storage is not None:
        given.append(work.checkpoint.storage)
    if work.setup is not None and work.image is None:
        from ..work.view import find_setup

        given.append(find_setup(config, work) + "/dir")
    return AllowedFolders([config.folder, config.home + "/inputs"], given, seen)


def remember(config: AgentConfig, index: int, path: str) -> None:
    """Record the downloaded files of an input. A task can have an output with the input's URL. Then
    only files that the work has changed since they were recorded are sent.
    """
    found = {}
    for folder, _, names in os.walk(path):
        for name in names:
            seen = os.stat(os.path.join(folder, name))
            found[os.path.relpath(os.path.join(folder, name), path)] = [
                seen.st_size,
                seen.st_mtime_ns,
            ]
    write_whole(f"{config.private}/brought-{index}.json", json.dumps(found))


def remember_sent(config: AgentConfig, output: int, known: dict[str, list[int]]) -> None:
    """Record the files sent while the work runs, so that they are not sent again at the end."""
    write_whole(f"{config.private}/sent-{output}.json", json.dumps(known))
