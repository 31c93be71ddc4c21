"""Makes an HTML page from simulated fleets: for each list of jobs a plot of the allocated against
the requested accelerators, for a shared pool a plot of the jobs' times, and tables with the
results. Requires matplotlib.
"""

from collections.abc import Mapping, Sequence
from html import escape
from io import StringIO
from itertools import groupby

import matplotlib
from matplotlib.figure import Figure

from cavvy.sim.traces.packing import DEMAND, PackedList
from cavvy.sim.traces.time_sharing import SharedResult

_POINTS = 500  # of a line of the plot of the times

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Simulated fleet</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; color: #222 }}
table {{ border-collapse: collapse; margin: 1rem 0 2rem }}
th, td {{ padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: right }}
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) {{ text-align: left }}
figure {{ display: inline-block; margin: 0 1rem 1rem 0 }}
</style></head><body>
<h1>Simulated fleet</h1>
{parts}
</body></html>
"""
_PACKING = """<h2>Allocated accelerators</h2>
<p>Accelerators that jobs get if jobs that request {demand:.0%} of the cluster's accelerators arrive
and none ends. Each result is the mean of {runs} random orders of the jobs.</p>
{table}
{plots}"""
_SHARING = """<h2>Times of jobs</h2>
<p>One pool of GPUs, which several projects share. {left_out} jobs are larger than the pool or have
no known project, and are left out.</p>
{table}
{plot}"""


def make_page(
    packed: Sequence[PackedList],
    published: Mapping[str, Mapping[str, float]],
    shared: Sequence[SharedResult],
) -> str:
    """Return the page. `published` contains results to compare with, by list and policy."""
    parts = [
        *([_show_packing(packed, published)] if packed else []),
        *([_show_sharing(shared)] if shared else []),
    ]
    return _PAGE.format(parts="\n".join(parts))


def _show_packing(
    results: Sequence[PackedList], published: Mapping[str, Mapping[str, float]]
) -> str:
    plots = [
        _draw(name, list(group)) for name, group in groupby(results, key=lambda each: each.jobs)
    ]
    rows = []
    for each in results:
        known = published.get(each.jobs, {}).get(each.policy)
        rows.append(
            (
                each.jobs,
                each.policy,
                f"{each.percent:.2f}",
                "" if known is None else f"{known:.2f}",
                "" if known is None else f"{each.percent - known:+.2f}",
            )
        )
    heads = ("list of jobs", "policy", "allocated, %", "published, %", "difference")
    return _PACKING.format(
        demand=DEMAND,
        runs=len(results[0].percents),
        table=_table(heads, rows),
        plots="\n".join(plots),
    )


def _show_sharing(results: Sequence[SharedResult]) -> str:
    rows = [
        (
            each.policy,
            str(len(each.times_h)),
            f"{each.mean_h:.2f}",
            str(each.preemptions),
            "" if each.below_share is None else str(each.below_share),
        )
        for each in results
    ]
    figure = Figure(figsize=(5.4, 3.8), layout="constrained")
    panel = figure.subplots()
    for each in results:
        times = sorted(each.times_h)
        kept = range(0, len(times), max(1, len(times) // _POINTS))
        panel.plot(
            [times[at] for at in kept], [100 * at / len(times) for at in kept], label=each.policy
        )
    panel.set_xscale("log")
    panel.set_xlabel("hours from submission to end")
    panel.set_ylabel("jobs, %")
    panel.grid(alpha=0.3)
    panel.legend()
    heads = ("policy", "jobs", "mean time, h", "preemptions", "waits below the share")
    return _SHARING.format(
        left_out=results[0].left_out,
        table=_table(heads, rows),
        plot=f"<figure>{draw_inline(figure, 'times')}</figure>",
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [
        "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
        for row, tag in zip([heads, *rows], ["th", *["td"] * len(rows)], strict=True)
    ]
    return f"<table>{''.join(f'<tr>{each}</tr>' for each in cells)}</table>"


def _draw(name: str, results: Sequence[PackedList]) -> str:
    figure = Figure(figsize=(5.4, 3.8), layout="constrained")
    panel = figure.subplots()
    for each in results:
        asked, given = zip(*each.curve, strict=True)
        panel.plot(asked, given, label=each.policy)
    panel.set_xlabel("requested, % of the cluster's accelerators")
    panel.set_ylabel("allocated, %")
    panel.set_xlim(left=70)
    panel.set_ylim(bottom=65)
    panel.grid(alpha=0.3)
    panel.legend()
    panel.set_title(name)
    return f"<figure>{draw_inline(figure, name)}</figure>"


def draw_inline(figure: Figure, name: str) -> str:
    """Return the plot as an SVG element. Equal plots give the same text; `name` keeps the names of
    its parts apart from those of other plots on the page."""
    with matplotlib.rc_context({"svg.hashsalt": name}):
        file = StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue().partition("<svg")[2].join(("<svg", ""))
