"""The fields `after` and `group`: the jobs that must end before the job starts, and the jobs with
which it starts together.
"""

import re
from datetime import timedelta

from cavvy.domain.tasks import JobDependency, JobGroup, StartCondition
from cavvy.domain.values import Struct
from cavvy.spec.fields.kinds import (
    FLAG,
    NAME,
    EitherKind,
    FieldSpec,
    ListKind,
    MapKind,
    ScalarKind,
    Schema,
    SectionReader,
    WrongValue,
    either,
    read_text,
    section,
)
from cavvy.spec.fields.times import length_kind
from cavvy.spec.problems import ProblemNotes, listed, nearest, shown
from cavvy.spec.tree import Node

LONGEST_LINGER = timedelta(hours=24)
_JOB = re.compile(r"[a-z0-9]([a-z0-9.-]{0,78}[a-z0-9])?")
_NAMES = [each.value for each in StartCondition]
_WORDS = f"a job's name or ID, or JOB:CONDITION with {listed(_NAMES)}"
# how other tools name these conditions
_OTHERS = {
    **dict.fromkeys(("ok", "afterok", "succeeded", "done", "completed"), StartCondition.SUCCESS),
    **dict.fromkeys(("notok", "afternotok", "failed", "error"), StartCondition.FAILURE),
    **dict.fromkeys(("afterany", "always", "all", "finished", "ended"), StartCondition.ANY),
}


def read_dependency(text: str) -> JobDependency:
    """Read JOB or JOB:CONDITION. Raises WrongValue."""
    job, colon, condition = text.strip().partition(":")
    if colon and job.lower() in _OTHERS and _JOB.fullmatch(condition):
        meant = f"{condition}:{_OTHERS[job.lower()]}"
        raise WrongValue(
            f"{shown(text)} has its parts in another order", suggestion=f"write {meant}"
        )
    on = read_condition(condition) if colon else StartCondition.SUCCESS
    return JobDependency(check_job(job.strip()), on)


def check_job(name: str) -> str:
    if not _JOB.fullmatch(name):
        raise WrongValue(f"{shown(name)} cannot be the name or ID of a job")
    return name


def read_condition(text: str) -> StartCondition:
    word = text.strip().lower()
    if word in _NAMES:
        return StartCondition(word)
    close = _OTHERS.get(word) or nearest(word, _NAMES)
    raise WrongValue(
        f"{shown(text)} is not a condition",
        expected=listed(_NAMES),
        suggestion=f"did you mean `{close}`?" if close else "",
    )


class _TableKind(Struct, frozen=True):
    """Jobs with their conditions, such as `{prepare: failure}`, as a tuple."""

    table: MapKind

    @property
    def words(self) -> str:
        return self.table.words

    @property
    def schema(self) -> Schema:
        return self.table.schema

    def takes(self, node: Node) -> bool:
        return self.table.takes(node)

    def read(self, node: Node, notes: ProblemNotes) -> tuple[JobDependency, ...] | None:
        found = self.table.read(node, notes)
        return None if found is None else tuple(JobDependency(job, on) for job, on in found.items())


def check_after(table: SectionReader) -> None:
    """Add a problem for each job that is named twice or is the task itself."""
    jobs = [each.job for each in table.get("after", ())]
    for job in dict.fromkeys(job for job in jobs if jobs.count(job) > 1):
        table.wrong("after", f"{job} is in the list twice", suggestion="keep one condition")
    if table.get("name") in jobs:
        message = "a job cannot wait for itself"
        table.wrong("after", message, suggestion="name an earlier job of the same name by its ID")
    schedule = table.get("schedule")
    if jobs and schedule is not None and schedule.cron is not None:
        message = "a job that repeats cannot wait for other jobs"
        table.wrong("after", message, suggestion="delete `after` or the cron line of `schedule`")


def check_group(table: SectionReader) -> None:
    """Add a problem for each key that a job of a group cannot have."""
    if not table.has("group"):
        return
    keys = ("array", "sweep", "machine", "pool", "service", "session", "schedule", "window")
    table.reject_beside("group", keys)
    group: JobGroup | None = table.get("group")
    if group is not None and group.name == table.get("name"):
        hint = "choose another name for the group"
        table.wrong("group", f"{group.name} is the name of the job itself", suggestion=hint)


def _build_group(table: SectionReader) -> JobGroup | None:
    if table.has("linger") and not table.get("helper", False):
        message = "only a helper is stopped after other jobs, so `linger` has no effect"
        table.wrong("linger", message, suggestion="add `helper: true`, or delete `linger`")
    return table.make(JobGroup)


_LINE = ScalarKind(_WORDS, lambda node: (read_dependency(read_text(node)),))
_CONDITION = ScalarKind(
    listed(_NAMES), lambda node: read_condition(read_text(node)), {"enum": _NAMES}
)
_TABLE = _TableKind(MapKind("names of jobs, each with its condition", check_job, _CONDITION))
AFTER = ListKind(EitherKind((_LINE, _TABLE)), single=True, flat=True)
GROUP = either(
    NAME,
    lambda name: JobGroup(name=name),
    section(
        "group",
        _build_group,
        name=FieldSpec(NAME, required=True),
        helper=FLAG,
        linger=length_kind(timedelta(0), LONGEST_LINGER),
    ),
)
