"""The SQL of a search of jobs, sorted and in pages by number."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any

import msgspec

from cavvy.domain.arrays import StoredArray
from cavvy.domain.jobs import JobPhase
from cavvy.domain.services import SERVICE_TAG
from cavvy.domain.values import Struct
from cavvy.store.accounts import in_projects
from cavvy.store.base import JobSummary, ProjectFilter
from cavvy.store.documents import to_micros, to_time

_DIGITS = "0123456789"
# A replica is named SERVICE.NUMBER, as no other job is but members of arrays.
_SERVICE = (
    f"CASE WHEN RTRIM(name, '{_DIGITS}') <> RTRIM(name, '.{_DIGITS}') "
    f"AND REPLACE(tags, '\"{SERVICE_TAG}\":', '') <> tags "
    f"THEN project || '/' || RTRIM(name, '{_DIGITS}') END"
)


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
    of the submission. With `arrays`, the newest found member stands for its array or group, and the
    newest found replica for its service.
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


class MatchedService(Struct, frozen=True, kw_only=True):
    """The found replicas of a service: how many are in each phase, when the first one was
    submitted, when the phase of one last changed, and what they have cost."""

    name: str
    counts: dict[str, int]
    submitted_at: datetime
    since: datetime
    spent_micros: int


class FoundJobs(Struct, frozen=True, kw_only=True):
    """One page of the jobs that a search found, and the number of all of them. `arrays` are those
    for which jobs stand, by the jobs' IDs, and so are `services`."""

    jobs: Sequence[JobSummary]
    total: int
    arrays: Mapping[str, StoredArray] = {}
    services: Mapping[str, MatchedService] = {}


def find_condition(search: JobSearch) -> tuple[str, tuple[object, ...]]:
    """Return the SQL condition on rows of `jobs`, and its values."""
    found, values = _find_matches(search)
    if search.arrays:
        one = f"SELECT MAX(id) FROM jobs WHERE {found} GROUP BY COALESCE(array_id, {_SERVICE}, id)"
        found = f"id IN ({one})"
    return found, values


def count_replicas(search: JobSearch, shown: Sequence[JobSummary]) -> tuple[str, Sequence[object]]:
    """Return the SQL, and its values, that counts the found replicas of the services for which
    jobs stand: each row has a service's project and name, a phase, and what replicas of this phase
    have together. The SQL is empty if no job stands for a service."""
    keys = [
        f"{each.project}/{each.name.rstrip(_DIGITS)}"
        for each in shown
        if "." in each.name and SERVICE_TAG in each.tags
    ]
    if not keys:
        return "", ()
    found, values = _find_matches(search)
    sql = (
        f"SELECT {_SERVICE} AS service, phase, COUNT(*), MIN(submitted_at), MAX(since), SUM(spent) "
        f"FROM jobs WHERE {found} AND array_id IS NULL AND {_SERVICE} IN ({_marks(keys)}) "
        "GROUP BY service, phase"
    )
    return sql, (*values, *keys)


def add_replicas(
    shown: Sequence[JobSummary], rows: Sequence[Sequence[Any]]
) -> dict[str, MatchedService]:
    """Return the services for which jobs stand, by the jobs' IDs, from the rows of
    `count_replicas`."""
    found: dict[str, MatchedService] = {}
    for job in shown:
        key = f"{job.project}/{job.name.rstrip(_DIGITS)}"
        own = [each for each in rows if each[0] == key]
        if own:
            found[job.id] = MatchedService(
                name=job.tags[SERVICE_TAG],
                counts={phase: count for _, phase, count, *_ in own},
                submitted_at=to_time(min(each[3] for each in own)),
                since=to_time(max(each[4] for each in own)),
                spent_micros=int(sum(each[5] for each in own)),
            )
    return found


def _find_matches(search: JobSearch) -> tuple[str, tuple[object, ...]]:
    """Return the condition on each job."""
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
    return " AND ".join(conditions), tuple(values)


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
