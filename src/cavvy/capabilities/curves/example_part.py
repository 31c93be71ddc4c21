"""Shows pictures, sound, texts, tables and histograms of a job on its page: of each name the newest
one, and a slider over its steps.
"""

from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime

from msgspec.json import encode
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from cavvy.capabilities.curves.examples import MEDIA_TYPES
from cavvy.capabilities.curves.wire import Example, read_example, read_examples
from cavvy.client import ApiClient
from cavvy.client.wire import JobDetail
from cavvy.console.pages.page import UNFINISHED, PagePart, is_update, memory_of
from cavvy.domain.units import format_number
from cavvy.domain.values import Struct

_KEPT_S, _ENDED_KEPT_S = 2.0, 15.0
_MOST_NAMES = 200  # on a page
_TYPES = frozenset(MEDIA_TYPES.values())


class ExampleSeries(Struct, frozen=True):
    """What was reported under a name: the IDs, and where each lies."""

    name: str
    kind: str
    ids: Sequence[str]
    labels: Sequence[str]

    @property
    def ids_json(self) -> str:
        return encode(self.ids).decode()

    @property
    def labels_json(self) -> str:
        return encode(self.labels).decode()


def make(client: ApiClient, request: Request, job: JobDetail, now: datetime) -> PagePart | None:
    """Return the part with what the job's program reported beside numbers, or None if there is
    nothing. Raises ApiError."""
    if not job.attempts:
        return None
    live = job.phase in UNFINISHED
    found = memory_of(request).recall(
        ("examples", job.id),
        lambda: read_examples(client, job.project, job.id),
        _KEPT_S if live else _ENDED_KEPT_S,
    )
    if not found:
        return None
    # for updates it is enough that there is a part: its script asks for what is new
    values = {"series": () if is_update(request) else _describe(found), "is_live": live}
    return PagePart("cavvy.capabilities.curves:examples.html", values)


def make_list(client: ApiClient, request: Request, now: datetime) -> bytes:
    """Return what there is of a job, as JSON. Raises ApiError."""
    project, name = request.path_params["project"], request.path_params["name"]

    def read() -> bytes:
        return encode(_describe(read_examples(client, project, name)))

    return memory_of(request).recall(("example-list", project, name), read, _KEPT_S)


def send(client: ApiClient, request: Request, now: datetime) -> Response:
    """Return the bytes of an example: a browser runs none of the media types. Raises ApiError,
    HTTPException."""
    parts = request.path_params
    kind, data = read_example(client, parts["project"], parts["name"], parts["example"])
    if kind not in _TYPES:
        raise HTTPException(502, f"{kind!r} is no media type of an example")
    return Response(data, media_type=kind)


def _describe(found: Sequence[Example]) -> Sequence[ExampleSeries]:
    """Return the names in their order, each with its examples by attempt and step."""
    by_name = defaultdict[tuple[str, str, int, int], list[Example]](list)
    for each in sorted(found, key=_order_of):
        by_name[each.name, each.kind, each.rank, each.process].append(each)
    return [
        ExampleSeries(
            name=_name_of(name, rank, process),
            kind=kind,
            ids=[each.id for each in own],
            labels=[_label(each, has_attempts=own[-1].attempt > 1) for each in own],
        )
        for (name, kind, rank, process), own in sorted(by_name.items())[:_MOST_NAMES]
    ]


def _name_of(name: str, rank: int, process: int) -> str:
    return f"{name}{f', rank {rank}' if rank else ''}{f', process {process}' if process else ''}"


def _order_of(example: Example) -> tuple[int, float, int]:
    step = float(example.time_ms) if example.step is None else example.step
    return example.attempt, step, example.time_ms


def _label(example: Example, *, has_attempts: bool) -> str:
    attempt = f"attempt {example.attempt}, " if has_attempts else ""
    if example.step is not None:
        return f"{attempt}step {format_number(example.step)}"
    return f"{attempt}{datetime.fromtimestamp(example.time_ms / 1000, UTC):%H:%M:%S} UTC"
