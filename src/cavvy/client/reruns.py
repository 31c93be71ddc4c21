"""Earlier runs: runs a job again, unchanged or changed, and tells how two runs differ; `cavvy
rerun`, `cavvy diff` and the console use it.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256

from msgspec import Struct
from msgspec.json import decode
from msgspec.structs import replace

from cavvy.client.wire import JobDetail
from cavvy.domain.arrays import is_array
from cavvy.domain.jobs import RunOrigin
from cavvy.domain.services import is_replica
from cavvy.domain.tasks import TaskSpec

# Variables of arrays, as Cavvy and other tools name them, that differ if one job is run alone: of
# all arrays, and of a sweep, whose indices begin at 0.
_PLACES = r"(?<!\w)(?:CAVVY_ARRAY|SLURM_ARRAY_TASK)_(?:COUNT|MIN|MAX|STEP"
_NUMBERS = re.compile(rf"{_PLACES})\b")
_INDICES = re.compile(rf"{_PLACES}|INDEX|ID)\b|(?<!\w)PBS_ARRAY_I(?:NDEX|D)\b")
_STRIPES = re.compile(r"/batch\.py .*--striped ")  # written by `spec.batch_section`


class NotRepeatable(Exception):
    """Raised if a job cannot be run again alone. The text says why, `hint` what to do instead."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.hint = hint


class EarlierRun(Struct, frozen=True, kw_only=True):
    """What a job was submitted with: the text of its file, the parameters as options give them,
    except those of a sweep, the copy of its working folder in `origin`, and the name. `only` is
    what of an array is run again, such as "lr 0.1", or "".
    """

    text: str
    params: Mapping[str, str]
    origin: RunOrigin
    name: str
    task: TaskSpec
    only: str = ""


def read_run(job: JobDetail, rerun_of: str, *, is_whole_array: bool = False) -> EarlierRun:
    """Return what the job was submitted with. `rerun_of` is the ID that the new run names. A job of
    an array becomes an array with this job alone, unless the whole array is run again. Raises
    NotRepeatable for a job whose values a search chose or that would do other work alone, for a
    replica of a service, and for a job that was not submitted from a file.
    """
    origin = decode(job.origin, type=RunOrigin)
    task = decode(job.task, type=TaskSpec)
    only: dict[str, object] = {}
    if not is_whole_array:
        only = _find_own_values(job.name, task)
        _check_names(job.name, task, f"{origin.task_text}\n{origin.overrides}")
    if not origin.task_text:
        reason = f"{job.name} was not submitted from a file and cannot be run again"
        raise NotRepeatable(reason, "submit its task again")
    swept = {each.name for each in task.sweep}
    return EarlierRun(
        text=origin.task_text,
        params={key: show_param(value) for key, value in task.params.items() if key not in swept},
        origin=replace(origin, rerun_of=rerun_of, overrides=_add(only, origin.overrides)),
        name=task.name,
        task=task,
        only=_describe(only),
    )


def show_param(value: object) -> str:
    """Return the text of a parameter's value, as a user would write it after --param."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _find_own_values(name: str, task: TaskSpec) -> dict[str, object]:
    """Return the keys of a task file that make an array of this job alone, if it is a job of an
    array. Raises NotRepeatable.
    """
    if task.search is not None:
        raise NotRepeatable(
            f"the values of {name} were chosen by a search, so it cannot be run again alone",
            f"`cavvy retry {name}` queues it again after a failure; "
            f"`cavvy rerun {name.rpartition('.')[0]}` runs the whole array again",
        )
    if task.sweep:
        return {"sweep": {each.name: [task.params[each.name]] for each in task.sweep}}
    if is_array(task):
        index = name.rpartition(".")[2]
        return {"array": f"{index}-{index}"}
    if is_replica(name):
        raise NotRepeatable(
            f"{name} is a replica of a service, not a job that can be run again",
            "`cavvy serve FILE` starts the service's replicas",
        )
    return {}


def _check_names(name: str, task: TaskSpec, text: str) -> None:
    """Raise NotRepeatable if a job of an array would do other work alone: its file names how many
    jobs there are, or indices that it would not have then. What its programs read is not known.
    """
    if not is_array(task):
        return
    array, why = name.rpartition(".")[0], ""
    if found := (_INDICES if task.sweep else _NUMBERS).search(text):
        why = f"the task of {name} names {found[0]}, which would have another value"
    elif _STRIPES.search(task.run):
        why = f"{name} does a part of a batch, which would be another one"
    if why:
        raise NotRepeatable(
            f"{why} in an array of this job alone, so {name} might do other work",
            f"`cavvy rerun {array}` runs the whole array again; "
            f"`cavvy retry {name}` queues this job again after a failure",
        )


def _add(only: Mapping[str, object], overrides: str) -> str:
    """Return the overrides of a task file, and those of a part of an array."""
    if not only:
        return overrides
    import yaml

    return json.dumps({**(yaml.safe_load(overrides) if overrides else {}), **only})


def _describe(only: Mapping[str, object]) -> str:
    match only:
        case {"sweep": dict(values)}:
            return ", ".join(f"{name} {show_param(value)}" for name, (value,) in values.items())
        case {"array": str(indices)}:
            return f"index {indices.partition('-')[0]}"
    return ""


_TEXTS = frozenset(
    {"origin.task_text", "origin.diff"}
)  # These values are too long for a table cell, so their size and hash are shown.


def compare_jobs(first: JobDetail, second: JobDetail) -> list[tuple[str, object, object]]:
    """Return the dotted names of the properties that differ, sorted, with both values; None if a
    run lacks the property. Texts of several lines are given by their size and hash.
    """
    return [(name, one, two) for name, (one, two) in compare_all([first, second])]


def compare_all(jobs: Sequence[JobDetail]) -> list[tuple[str, Sequence[object]]]:
    """Return the same of several jobs: the names of what is not equal in all, with the values."""
    facts = [dict(_list_facts(job)) for job in jobs]
    found: list[tuple[str, Sequence[object]]] = []
    for name in sorted({name for each in facts for name in each}):
        values = [each.get(name) for each in facts]
        if any(value != values[0] for value in values):
            found.append((name, [_shorten(name, value) for value in values]))
    return found


def find_replica(first: JobDetail, second: JobDetail) -> str:
    """Return the name of the job that is a replica of a service if the other one is none, so that
    they cannot be compared, or "".
    """
    replicas = [job.name for job in (first, second) if _is_replica(job)]
    return replicas[0] if len(replicas) == 1 and first.name != second.name else ""


def _is_replica(job: JobDetail) -> bool:
    """Return whether the job is a replica; jobs of arrays have the same form of names."""
    return is_replica(job.name) and not is_array(decode(job.task, type=TaskSpec))


def _list_facts(job: JobDetail) -> Iterator[tuple[str, object]]:
    """Yield the dotted name and the value of every property of a run."""
    yield from _flatten("task", decode(job.task))
    origin = decode(job.origin) or {}
    origin.pop("rerun_of", None)
    origin.pop("path", None)  # differs between terminals
    yield from _flatten("origin", origin)
    yield "result.phase", job.phase
    yield "result.exit_code", job.exit_code
    yield "result.attempts", job.attempt
    yield "result.spent_usd", job.spent_micros / 1_000_000
    if job.attempts:
        yield from _flatten("offer", decode(job.attempts[-1].offer))
        for node in job.attempts[-1].nodes[:1]:
            yield from _flatten("result.progress", node.progress)


def _flatten(name: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flatten(f"{name}.{key}", inner)
    else:
        yield name, value


def _shorten(name: str, value: object) -> object:
    if name not in _TEXTS or not isinstance(value, str):
        return value
    count = len(value.splitlines())
    digest = sha256(value.encode()).hexdigest()[:12]
    return f"{count} line{'s' if count != 1 else ''}, sha256 {digest}"


def show_value(name: str, value: object) -> object:
    """Return a value as a table shows it: as in a task file, money with six digits."""
    if isinstance(value, bool):
        return str(value).lower()
    if name == "result.spent_usd" and isinstance(value, float):
        return f"{value:.6f}"
    return value
