"""The report of `big_day.py`: a page with pictures of the day."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from day_books import Findings
from day_world import BROKEN, CLOUDS, OWN, DayTimes

from cavvy.capabilities.choose.drawing import ChartPoint, draw_points
from cavvy.capabilities.choose.report import ReportSection, ReportTable, make_page, write_report

if TYPE_CHECKING:
    from big_day import DayResult, Sample

_SCALES = ("from-zero", "from-zero")


def write_day(path: Path, result: "DayResult", found: Findings) -> None:
    """Write the page, as HTML or PDF by the ending of its name."""
    plan = result.plan
    sections = [
        ReportSection(
            title="What must hold",
            texts=(
                f"{found.jobs:,} jobs ended on {found.gangs:,} gangs. Each job that a user had "
                "submitted was looked for, and each bill was computed anew from the books of the "
                "clouds.",
            ),
            table=_list_checks(found),
        ),
        ReportSection(
            title="The day",
            texts=(_tell_events(plan.times),),
            pictures=[
                _draw("Nodes in use, by place", "nodes", result.samples, _nodes_of),
                _draw("Jobs", "jobs", result.samples, _jobs_of),
                _draw_costs(result.samples),
            ],
            table=ReportTable(
                heads=("place", "USD"),
                rows=[(name, found.billed_by_place[name] / 1e6) for name in (*CLOUDS, OWN)],
            ),
        ),
    ]
    title = f"A day with {plan.nodes:,} nodes and {plan.jobs:,} jobs"
    write_report(path, make_page(title, sections, ()))


def _list_checks(found: Findings) -> ReportTable:
    rows = (
        ("jobs that are lost or ended wrongly", found.lost),
        ("gangs bought twice", found.bought_twice),
        ("machines that nobody ordered, or that still run", found.stray),
        ("devices or hosts held twice", found.held_twice),
        ("bills that differ from the clouds' books", found.wrong_bills),
    )
    return ReportTable(heads=("what", "how many"), rows=[(what, len(each)) for what, each in rows])


def _tell_events(times: DayTimes) -> str:
    restarts = ", ".join(f"{at_s / 3600:.3g}" for at_s in times.restarts_s)
    return (
        f"After {times.outage.at_s / 3600:.3g} h, {BROKEN} lost machines and answered nothing for "
        f"{times.outage.for_s / 3600:.3g} h. The server was killed after {restarts} h, and the "
        f"database failed over after {times.failover_s / 3600:.3g} h."
    )


def _nodes_of(sample: "Sample") -> dict[str, float]:
    return {name: float(count) for name, count in sample.nodes.items()}


def _jobs_of(sample: "Sample") -> dict[str, float]:
    return {"wait": float(sample.waiting), "run": float(sample.running)}


def _draw(
    title: str,
    unit: str,
    samples: Sequence["Sample"],
    read: Callable[["Sample"], dict[str, float]],
) -> str:
    points = [
        ChartPoint(each.at_s / 3600, figure, "", name)
        for each in samples
        for name, figure in read(each).items()
    ]
    points.sort(key=lambda each: each.group)
    return draw_points(title, points, "hours", unit, scales=_SCALES, lines=True)


def _draw_costs(samples: Sequence["Sample"]) -> str:
    points = [
        ChartPoint(
            after.at_s / 3600,
            100 * (after.cpu_s - before.cpu_s) / (after.at_s - before.at_s),
            "",
            "CPU",
        )
        for before, after in pairwise(samples)
        if after.at_s > before.at_s
    ]
    return draw_points(
        "CPU time of the server with the simulated world, as a part of the time of the day",
        points,
        "hours",
        "% of a core",
        scales=_SCALES,
        lines=True,
    )
