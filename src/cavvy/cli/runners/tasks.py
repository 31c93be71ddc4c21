"""Reads the task files of runners."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cavvy.cli.task.load import read_task
from cavvy.cli.view.failure import CommandFailure

if TYPE_CHECKING:
    from cavvy.task_files import LoadedTask

# A configuration is valid once, and scripts of a CI job cannot go on elsewhere.
NO_RETRY = {"preemption": 0, "node": 0, "exit": 0}


def read_runner_task(
    file: str, params: Mapping[str, str], overrides: str = "", *, tells: bool = False
) -> "LoadedTask":
    """Return the task of a runner, which is one job on one node. Raises CommandFailure."""
    from cavvy.domain.arrays import is_array
    from cavvy.task_files import ReadOptions

    loaded = read_task(file, params, ReadOptions(overrides=overrides), tells=tells)
    task = loaded.task
    unfit = {
        "nodes": task.nodes > 1,
        "array": is_array(task),
        "schedule": task.schedule is not None,
        "after": bool(task.after),
        "group": task.group is not None,
    }
    if found := [name for name, given in unfit.items() if given]:
        hint = f"remove {' and '.join(f'`{name}`' for name in found)} from the file"
        raise CommandFailure(f"{file}: a runner is one job on one node", hint, exit_code=2)
    return loaded


def may_wait(loaded: "LoadedTask") -> bool:
    """Return whether the node of a runner may wait for another runner although the file does not
    ask for it. Without an image, what a CI job leaves on the node would reach the next one.
    """
    from cavvy.spec.tree import read_table

    task = loaded.task
    if not (task.image or task.image_build) or "keep" in (read_table(loaded.text) or {}):
        return False
    return not (task.pool or task.machine or task.volumes or task.limits.duration)
