"""Arrays: many jobs of one task, which differ in their index or in the values of parameters.

An array is stored with one task for all its members. `make_member` fills in what differs.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain
from math import prod

from cavvy.domain.tasks import SweptParam, TaskSpec
from cavvy.domain.values import Struct, replace

MOST_MEMBERS = 10_000
_ORDER = ("running", "starting", "stopping", "queued", "done", "failed", "stopped")
_EXPRESSION = re.compile(r"\$\$\{\{|\$\{\{\s*params\.([A-Za-z_][A-Za-z0-9_-]*)\s*\}\}")


class StoredArray(Struct, frozen=True, kw_only=True):
    """An array or a group as it is stored, with the number of its members in each phase."""

    id: str
    project: str
    name: str
    user: str
    priority: int
    submitted_at: datetime
    parallel: int | None
    counts: dict[str, int]
    since: datetime  # when the phase of a member last changed
    spent_micros: int
    tags: dict[str, str]
    # for a group of jobs: whether its jobs have started together
    started: bool | None = None


def name_member(array: str, index: int) -> str:
    """Return the name of a member's job. Names of other jobs contain no dot, except those of
    replicas."""
    return f"{array}.{index}"


def is_array(task: TaskSpec) -> bool:
    return bool(task.array or task.sweep)


def count_members(task: TaskSpec) -> int:
    """Return the number of members without listing them, because there may be very many."""
    if task.sweep:
        return count_combinations(task) if task.search is None else task.trials or 0
    return sum(len(each.indices) for each in task.array)


def count_combinations(task: TaskSpec) -> int:
    """Return the number of combinations of the values of a sweep."""
    return prod(len(each.values) for each in task.sweep)


def list_indices(task: TaskSpec) -> Sequence[int]:
    """Return the indices of the members, in the order of their start."""
    if task.sweep:
        return range(count_members(task))
    return [*chain.from_iterable(each.indices for each in task.array)]


def choose_values(sweep: Sequence[SweptParam], point: int) -> Iterator[tuple[SweptParam, int]]:
    """Yield each parameter of a sweep with the place of its value in the combination `point`. The
    last parameter changes fastest, as in nested loops."""
    places = []
    for each in reversed(sweep):
        point, place = divmod(point, len(each.values))
        places.append(place)
    return zip(sweep, reversed(places), strict=True)


def make_member(task: TaskSpec, index: int, point: int | None = None) -> TaskSpec:
    """Return the task of one member: its parameters, commands and variables. `point` is the
    combination of values that a search has chosen. Before that, the parameters have no values."""
    place = index if task.search is None else point
    chosen = [] if place is None else list(choose_values(task.sweep, place))
    texts = {each.name: each.texts[place] for each, place in chosen}
    values = {each.name: each.values[place] for each, place in chosen}
    indices = list_indices(task) if task.sweep else task.array
    ends = (
        (0, len(indices) - 1)
        if task.sweep
        else (
            min(each.first for each in task.array),
            max(each.indices[-1] for each in task.array),
        )
    )
    own = {
        "CAVVY_ARRAY_INDEX": str(index),
        "CAVVY_ARRAY_COUNT": str(count_members(task)),
        "CAVVY_ARRAY_MIN": str(ends[0]),
        "CAVVY_ARRAY_MAX": str(ends[1]),
    }
    if not task.sweep:
        return replace(task, env=task.env | own)
    env = {name: _fill(text, texts) for name, text in task.env.items()}
    swept = {each.name for each in task.sweep}
    settled = {name: value for name, value in task.params.items() if name not in swept}
    return replace(task, run=_fill(task.run, texts), env=env | own, params=settled | values)


def _fill(text: str, texts: Mapping[str, str]) -> str:
    """Insert the values of parameters. The reader of the task file has left only expressions of
    swept parameters, and `$${{` for a literal `${{`."""

    def fill(found: "re.Match[str]") -> str:
        return "${{" if found[1] is None else texts.get(found[1], found[0])

    return _EXPRESSION.sub(fill, text) if "${{" in text else text


def find_phase(counts: Mapping[str, int]) -> str:
    """Return the phase of the array as a whole: that of the first member that has not ended or,
    if all have ended, failed or stopped if any member is."""
    for phase in ("running", "starting", "stopping", "queued", "failed", "stopped"):
        if counts.get(phase):
            return phase
    return "done"


def describe_counts(counts: Mapping[str, int]) -> str:
    """Return, for example, "3 running, 90 queued, 7 done"."""
    found = Counter(counts)
    return ", ".join(f"{found[phase]} {phase}" for phase in _ORDER if found[phase])
