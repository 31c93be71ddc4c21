"""The SQL of a search of jobs, sorted and in pages by number."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum

import msgspec

from cavvy.domain.arrays import StoredArray
from cavvy.domain.jobs import JobPhase
from cavvy.domain.values import Struct
from cavvy.store.accounts import in_projects
from cavvy.store.base import JobSummary, ProjectFilter
from cavvy.store.documents import to_micros


class JobOrder(StrEnum):
    """The columns by which found jobs can be sorted."""

    SUBMITTED = "submitted"
    NAME = "name"
    PROJECT = "project"
    USER = "user"
    PHASE = "phase"
    DURATION = "duration"  # from the submission to the end or until now
    COST = "cost"


class JobSearch(Struct, frozen=True, kw_only=True):
    """The wanted jobs. Empty conditions are none. `text` is a part of the name, the ID or a tag;
    `jobs` are names or IDs; `tag` is a tag's name or NAME=VALUE; `accelerators` are the names of
    those that the newest attempt has, or that a job without an attempt asks for; the period is that
    of the submission. With `arrays`, the newest found member stands for its array or group.
    """

    projects: ProjectFilter = None
    phases: Sequence[JobPhase] = ()
    user: str = ""
    text: str = ""
    jobs: Sequence[str] = ()
    provider: str = ""
    accelerators: Sequence[str] = ()
    tag: str = ""
    since: datetime | None = None
    until: datetime | None = None
    order: JobOrder = JobOrder.SUBMITTED
    ascending: bool = False
    offset: int = 0
    limit: int = 50
    arrays: bool = False


class FoundJobs(Struct, frozen=True, kw_only=True):
    """One page of the jobs that a search found, and the number of all of them. `arrays` are those
    for which jobs stand, by the jobs' IDs."""

    jobs: Sequence[JobSummary]
    total: int
    arrays: Mapping[str, StoredArray] = {}


def find_condition(search: JobSearch) -> tuple[str, tuple[object, ...]]:
    """Return the SQL condition on rows of `jobs`, and its values."""
    own, projects = in_projects("project", search.projects)
    conditions: list[str] = ["removed IS NULL", own]
    values: list[object] = [*projects]

    def add(condition: str, *given: object) -> None:
        conditions.append(condition)
        values.extend(given)

    if search.phases:
        add(f"phase IN ({_marks(search.phases)})", *map(str, search.phases))
    if search.user:
        add("user_name = ?", search.user)
    if search.text:
        part = f"%{_escape(search.text.lower())}%"
        name, equals, value = search.text.lower().partition("=")
        inner = _in_json(name)[1:-1], _in_json(value)[1:-1]
        tag = f'{inner[0]}":"{inner[1]}' if equals else inner[0]
        like = "LIKE ? ESCAPE '!'"
        add(
            f"(LOWER(name) {like} OR LOWER(id) {like} OR LOWER(tags) {like})",
            part,
            part,
            f"%{_escape(tag)}%",
        )
    if search.jobs:
        marks = _marks(search.jobs)
        add(f"(id IN ({marks}) OR name IN ({marks}))", *search.jobs, *search.jobs)
    if search.tag:
        name, equals, value = search.tag.partition("=")
        wanted = f"{_in_json(name)}:{_in_json(value) if equals else ''}"
        add("tags LIKE ? ESCAPE '!'", f"%{_escape(wanted)}%")
    if search.provider:
        begin = _escape(search.provider)
        add("(place LIKE ? ESCAPE '!' OR place LIKE ? ESCAPE '!')", f"{begin}/%", f"{begin}@%")
    if search.accelerators:
        condition, given = _on_accelerators(search.accelerators)
        add(condition, *given)
    if search.since is not None:
        add("submitted_at >= ?", to_micros(search.since))
    if search.until is not None:
        add("submitted_at < ?", to_micros(search.until))
    found = " AND ".join(conditions)
    if search.arrays:
        one = f"SELECT MAX(id) FROM jobs WHERE {found} GROUP BY COALESCE(array_id, id)"
        found = f"id IN ({one})"
    return found, tuple(values)


def find_order(search: JobSearch, now: datetime) -> str:
    """Return the SQL order of the found jobs. Newer jobs come first among equal ones."""
    column = {
        JobOrder.SUBMITTED: "id",
        JobOrder.NAME: "name",
        JobOrder.PROJECT: "project",
        JobOrder.USER: "user_name",
        JobOrder.PHASE: "phase",
        JobOrder.DURATION: f"COALESCE(ended_at, {to_micros(now)}) - submitted_at",
        JobOrder.COST: "spent",
    }[search.order]
    way = "ASC" if search.ascending else "DESC"
    return f"ORDER BY {column} {way}" + ("" if column == "id" else ", id DESC")


def _on_accelerators(names: Sequence[str]) -> tuple[str, Sequence[str]]:
    had = " OR ".join(["a.document LIKE ? ESCAPE '!'"] * len(names))
    asked = " OR ".join(["d.task LIKE ? ESCAPE '!'"] * len(names))
    condition = (
        "(EXISTS (SELECT 1 FROM attempts a WHERE a.job_id = jobs.id AND a.number = jobs.attempt "
        f"AND ({had})) OR jobs.attempt = 0 AND EXISTS (SELECT 1 FROM documents d "
        f"WHERE d.job_id = jobs.id AND ({asked})))"
    )
    quoted = [_escape(_in_json(name)) for name in names]
    keys = ("accelerator", "name")
    return condition, [f'%"{key}":{name}%' for key in keys for name in quoted]


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))


def _in_json(text: str) -> str:
    """Return the text with its quotes, as documents contain it."""
    return msgspec.json.encode(text).decode()


def _escape(text: str) -> str:
    """Return the text as a pattern that matches only itself."""
    return text.replace("!", "!!").replace("%", "!%").replace("_", "!_")
