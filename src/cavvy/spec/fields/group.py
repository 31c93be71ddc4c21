"""The section `group`: the jobs with which a job starts together."""

from datetime import timedelta

from cavvy.domain.tasks import JobGroup
from cavvy.spec.fields.kinds import FLAG, NAME, FieldSpec, SectionReader, either, section
from cavvy.spec.fields.times import length_kind

LONGEST_LINGER = timedelta(hours=24)


def _build(table: SectionReader) -> JobGroup | None:
    if table.has("linger") and not table.get("helper", False):
        message = "only a helper is stopped after other jobs, so `linger` has no effect"
        table.wrong("linger", message, suggestion="add `helper: true`, or delete `linger`")
    return table.make(JobGroup)


GROUP = either(
    NAME,
    lambda name: JobGroup(name=name),
    section(
        "group",
        _build,
        name=FieldSpec(NAME, required=True),
        helper=FLAG,
        linger=length_kind(timedelta(0), LONGEST_LINGER),
    ),
)


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
