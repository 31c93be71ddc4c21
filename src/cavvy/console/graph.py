"""Places jobs that wait for each other: a column for each step, and an arrow from each job to those
that wait for it. Positions are pixels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_BOX_PX, _ROW_PX = (176, 30), 40
_COLUMN_PX = 236
_LONGEST = 20  # characters of a name that fit into a box


@dataclass(frozen=True)
class GraphJob:
    """A job or an array, the path of its page or "", and what it waits for: IDs with conditions."""

    id: str
    name: str
    phase: str
    path: str = ""
    after: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class GraphBox:
    """A job as it is drawn. `label` is its name, which may be shortened."""

    job: GraphJob
    label: str
    x: int
    y: int


@dataclass(frozen=True)
class GraphArrow:
    """An SVG path, and the condition under which the later job starts."""

    path: str
    on: str


@dataclass(frozen=True)
class Graph:
    """Boxes of the size `box`, arrows, and for readers who cannot see them `waits`: each job with
    the names and conditions of the jobs that it waits for.
    """

    width: int
    height: int
    box: tuple[int, int]
    boxes: Sequence[GraphBox]
    arrows: Sequence[GraphArrow]
    waits: Sequence[tuple[str, str]]


def place(jobs: Mapping[str, GraphJob]) -> Graph | None:
    """Return the graph of the jobs, or None if none of them waits for another one."""
    edges = [
        (before, each.id, on)
        for each in jobs.values()
        for before, on in each.after
        if before in jobs
    ]
    if not edges:
        return None
    steps = _find_steps(jobs)
    rows: dict[int, int] = {}
    boxes = {}
    for each in jobs.values():
        step = steps[each.id]
        row = rows[step] = rows.get(step, -1) + 1
        short = each.name if len(each.name) <= _LONGEST else f"{each.name[: _LONGEST - 1]}…"
        boxes[each.id] = GraphBox(each, short, step * _COLUMN_PX + 2, row * _ROW_PX + 2)
    names = {before: jobs[before].name for before, _, _ in edges}
    waits = [
        (
            each.name,
            ", ".join(f"{names[before]} ({on})" for before, on in each.after if before in names),
        )
        for each in jobs.values()
        if any(before in names for before, _ in each.after)
    ]
    return Graph(
        width=(max(rows) + 1) * _COLUMN_PX - (_COLUMN_PX - _BOX_PX[0]) + 4,
        height=(max(rows.values()) + 1) * _ROW_PX,
        box=_BOX_PX,
        boxes=list(boxes.values()),
        arrows=[GraphArrow(_join(boxes[before], boxes[after]), on) for before, after, on in edges],
        waits=waits,
    )


def _find_steps(jobs: Mapping[str, GraphJob]) -> Mapping[str, int]:
    """Return the length of the longest chain of jobs before each job. Jobs never wait in a circle;
    if an answer of the server says so, the number of rounds is bounded.
    """
    steps = dict.fromkeys(jobs, 0)
    for _ in jobs:
        later = {
            each.id: max(
                (steps[before] + 1 for before, _ in each.after if before in jobs), default=0
            )
            for each in jobs.values()
        }
        if later == steps:
            break
        steps = {name: min(step, len(jobs) - 1) for name, step in later.items()}
    return steps


def _join(before: GraphBox, after: GraphBox) -> str:
    width, height = _BOX_PX
    x, y = before.x + width, before.y + height // 2
    to_x, to_y = after.x - 6, after.y + height // 2
    middle = (x + to_x) // 2
    return f"M{x} {y}C{middle} {y} {middle} {to_y} {to_x} {to_y}"
