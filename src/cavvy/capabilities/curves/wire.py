"""What the command, the page and the route of curves send each other."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from msgspec import field

from cavvy.client import ApiClient
from cavvy.client.paths import job_path, project_path, query
from cavvy.client.wire import Answer
from cavvy.domain.units import format_number

MOST_JOBS = 100  # whose curves are read at once
MOST_POINTS = 20_000  # values of a curve in an answer


class Gap(Answer, frozen=True, kw_only=True):
    """Where a value was no finite number: `nan`, `inf` or `-inf`."""

    step: float
    time_ms: int
    value: str


class Curve(Answer, frozen=True, kw_only=True):
    """The values that a rank of an attempt reported under one name. There are `count`; of many, the
    lowest and highest of each stretch are returned. `steps` are those that the program named, else
    the values are counted from 0. `times_ms` are milliseconds since 1970. Values that are no finite
    numbers are not among them, but are `gaps`: of many, some.
    """

    name: str
    job: str = ""  # the job's name, if several were asked for
    attempt: int
    rank: int
    process: int = 0  # of the rank's processes, which reported it
    count: int
    steps: list[float]
    times_ms: list[int]
    values: list[float]
    low: float | None
    high: float | None
    last: float | None
    gaps: list[Gap] = field(default_factory=list)
    gap_count: int = 0


def say_gaps(curve: Curve) -> str:
    """Say how many values are no finite numbers, and where the first is."""
    if not curve.gaps:
        return ""
    kinds = "/".join(dict.fromkeys(each.value for each in curve.gaps))
    return f"{curve.gap_count} {kinds} from step {format_number(curve.gaps[0].step)}"


class CurveNames(Answer, frozen=True, kw_only=True):
    """The names of a job's curves, sorted."""

    names: list[str]


class RunParams(Answer, frozen=True, kw_only=True):
    """The parameters of a job: of its task, and those that its program reported."""

    id: str  # of the job
    params: dict[str, str]


class ParamsOfJobs(Answer, frozen=True, kw_only=True):
    """The parameters of several jobs."""

    jobs: list[RunParams]


class Example(Answer, frozen=True, kw_only=True):
    """What a program reported beside numbers, such as a picture. `kind` is `image`, `audio`,
    `text`, `table` or `histogram`. `time_ms` is in milliseconds since 1970.
    """

    id: str
    name: str
    kind: str
    attempt: int
    rank: int
    process: int = 0
    step: float | None = None
    time_ms: int
    bytes: int


class JobExamples(Answer, frozen=True, kw_only=True):
    """The examples of a job, in the order in which they were reported."""

    examples: list[Example]


class Window(NamedTuple):
    """A part of the horizontal axis: steps, or milliseconds since 1970."""

    by: str = "step"  # step or time
    begin: float | None = None
    end: float | None = None

    @property
    def is_part(self) -> bool:
        """Whether something is left out."""
        return self.begin is not None or self.end is not None


WHOLE = Window()


class JobCurves(Answer, frozen=True, kw_only=True):
    """The curves of a job, sorted by name, attempt and rank."""

    curves: list[Curve]


def read_curves(
    client: ApiClient,
    project: str,
    job: str,
    *,
    names: Collection[str] = (),
    ranks: Collection[int] = (),
    attempt: int | None = None,
    points: int = 500,
    window: Window = WHOLE,
) -> JobCurves:
    """Return the curves of a job. Raises ApiError."""
    asked = query(attempt=attempt, rank=ranks, curve=names, points=points, **_asked(window))
    return client.ask(f"{job_path(project, job)}/curves{asked}", JobCurves)


def read_curves_of_jobs(
    client: ApiClient,
    project: str,
    jobs: Collection[str],
    *,
    names: Collection[str] = (),
    points: int = 300,
    window: Window = WHOLE,
) -> JobCurves:
    """Return the curves of the first ranks of at most MOST_JOBS jobs, each of which has the values
    of all its attempts. Jobs that are gone are left out. Raises ApiError.
    """
    asked = query(job=jobs, curve=names, points=points, **_asked(window))
    return client.ask(f"{project_path(project)}/curves{asked}", JobCurves)


def read_examples(client: ApiClient, project: str, job: str) -> Sequence[Example]:
    """Return the examples of a job, without their bytes. Raises ApiError."""
    return client.ask(f"{job_path(project, job)}/examples", JobExamples).examples


def read_example(client: ApiClient, project: str, job: str, example: str) -> tuple[str, bytes]:
    """Return the media type and the bytes of an example. Raises ApiError."""
    answer = client.call("GET", f"{job_path(project, job)}/examples/{quote(example, safe='')}")
    return answer.headers.get("content-type", ""), answer.body


def read_curve_names(client: ApiClient, project: str, job: str) -> CurveNames:
    """Return the names of the curves of a job. Raises ApiError."""
    return client.ask(f"{job_path(project, job)}/curve-names", CurveNames)


def read_params_of_jobs(
    client: ApiClient, project: str, jobs: Collection[str]
) -> dict[str, dict[str, str]]:
    """Return the parameters of at most MOST_JOBS jobs by the jobs' IDs. Raises ApiError."""
    found = client.ask(f"{project_path(project)}/curve-params{query(job=jobs)}", ParamsOfJobs)
    return {each.id: each.params for each in found.jobs}


def _asked(window: Window) -> dict[str, Any]:
    bounds = {"from": window.begin, "to": window.end}
    known = {name: value for name, value in bounds.items() if value is not None}
    return {"by": window.by, **known} if known else {}
