"""Makes an HTML page from simulated packings: a table with published results, and a plot of the
allocated against the requested accelerators for each list of jobs. Requires matplotlib.
"""

from collections.abc import Mapping, Sequence
from html import escape
from io import StringIO
from itertools import groupby

import matplotlib
from matplotlib.figure import Figure

from cavvy.sim.traces.packing import DEMAND, PackedList

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
<p>Accelerators that jobs get if jobs that request {demand:.0%} of the cluster's accelerators arrive
and none ends. Each result is the mean of {runs} random orders of the jobs.</p>
{table}
{plots}
</body></html>
"""


def make_page(results: Sequence[PackedList], published: Mapping[str, Mapping[str, float]]) -> str:
    """Return the page. `published` contains results to compare with, by list and policy."""
    plots = [
        _draw(name, list(group)) for name, group in groupby(results, key=lambda each: each.jobs)
    ]
    return _PAGE.format(
        demand=DEMAND,
        runs=len(results[0].percents),
        table=_table(results, published),
        plots="\n".join(plots),
    )


def _table(results: Sequence[PackedList], published: Mapping[str, Mapping[str, float]]) -> str:
    heads = ("list of jobs", "policy", "allocated, %", "published, %", "difference")
    rows = [heads]
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
    cells = [
        "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
        for row, tag in zip(rows, ["th", *["td"] * (len(rows) - 1)], strict=True)
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
