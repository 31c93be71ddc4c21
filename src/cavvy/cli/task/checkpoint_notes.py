"""Says before a task is submitted why its checkpoints cannot work as the task file expects."""

from collections.abc import Mapping
from pathlib import Path

from cavvy.domain.tasks import SpotPolicy, TaskSpec
from cavvy.domain.units import format_duration, format_memory

# MiB per second that a node with a network of 10 Gbit/s can send at most
FASTEST_MIB_S = 1192


def list_checkpoint_notes(task: TaskSpec) -> list[str]:
    """Return notes about a task that saves nothing on spot capacity or when its size changes, or
    that saves more often than a node can send a checkpoint."""
    notes, policy = [], task.checkpoint
    only_spot = all(each.spot is SpotPolicy.ONLY for each in task.resources.choices)
    if policy is None and only_spot and task.service is None and not task.session:
        notes.append(
            "spot capacity can be taken back at any time, and without `checkpoint` the task then "
            "starts again from its beginning: add `checkpoint: {path: checkpoints}`, and let the "
            "program save there and resume from there"
        )
    if policy is None and task.elastic is not None:
        notes.append(
            f"without `checkpoint`, a job on {task.elastic} nodes starts again from its beginning "
            "whenever their number changes: add `checkpoint: {path: checkpoints}`, and let the "
            "program save there and resume from there"
        )
    if policy is not None and policy.size_mib and policy.every:
        needed = policy.size_mib / FASTEST_MIB_S
        if needed > policy.every.total_seconds():
            notes.append(
                f"a checkpoint of {format_memory(policy.size_mib)} every "
                f"{format_duration(policy.every)} cannot be uploaded: a network of 10 Gbit/s needs "
                f"{needed:.0f} s for one; state a longer `checkpoint.every`"
            )
    return notes


def object_to_checkpoint(task: TaskSpec, parts: Mapping[str, Path]) -> str:
    """Return why the checkpoint's path cannot be a folder of the working folder, or "". `parts` is
    the result of `find_parts`."""
    if task.checkpoint is None:
        return ""
    path = task.checkpoint.path
    for inside, local in parts.items():
        if inside and path != inside and not path.startswith(f"{inside}/"):
            continue
        found = local / path[len(inside) :].lstrip("/")
        for each in (found, *found.parents):
            if each == local and each.is_dir():
                break
            if each.is_file():
                return (
                    f"`checkpoint.path` is {path}, but {each} is a file: name a folder in which "
                    "the program saves its checkpoints, or rename the file"
                )
    return ""
