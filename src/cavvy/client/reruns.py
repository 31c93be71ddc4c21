"""Runs a job again, unchanged or changed; `cavvy rerun` and the console use it."""

from collections.abc import Mapping

from msgspec import Struct
from msgspec.json import decode
from msgspec.structs import replace

from cavvy.client.wire import JobDetail
from cavvy.domain.arrays import is_array
from cavvy.domain.jobs import RunOrigin
from cavvy.domain.services import is_replica
from cavvy.domain.tasks import TaskSpec


class NotRepeatable(Exception):
    """Raised if a job cannot be run again alone. The text says why, `hint` what to do instead."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.hint = hint


class EarlierRun(Struct, frozen=True, kw_only=True):
    """What a job was submitted with: the text of its file, the parameters as options give them,
    except those of a sweep, the copy of its working folder in `origin`, and the name.
    """

    text: str
    params: Mapping[str, str]
    origin: RunOrigin
    name: str
    task: TaskSpec


def read_run(job: JobDetail, rerun_of: str, *, is_whole_array: bool = False) -> EarlierRun:
    """Return what the job was submitted with. `rerun_of` is the ID that the new run names. Raises
    NotRepeatable for a job that is part of an array, unless the whole array is run again, for a
    replica of a service, and for a job that was not submitted from a file.
    """
    origin = decode(job.origin, type=RunOrigin)
    task = decode(job.task, type=TaskSpec)
    if not is_whole_array:
        _check_single(job.name, task)
    if not origin.task_text:
        reason = f"{job.name} was not submitted from a file and cannot be run again"
        raise NotRepeatable(reason, "submit its task again")
    swept = {each.name for each in task.sweep}
    return EarlierRun(
        text=origin.task_text,
        params={key: show_value(value) for key, value in task.params.items() if key not in swept},
        origin=replace(origin, rerun_of=rerun_of),
        name=task.name,
        task=task,
    )


def show_value(value: object) -> str:
    """Return the text of a parameter's value, as a user would write it after --param."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_single(name: str, task: TaskSpec) -> None:
    """Raises NotRepeatable."""
    if is_array(task):
        raise NotRepeatable(
            f"{name} is a job of an array, which cannot be run again alone",
            f"`cavvy retry {name}` queues it again after a failure; "
            f"`cavvy rerun {name.rpartition('.')[0]}` runs the whole array again",
        )
    if is_replica(name):
        raise NotRepeatable(
            f"{name} is a replica of a service, not a job that can be run again",
            "`cavvy serve FILE` starts the service's replicas",
        )
