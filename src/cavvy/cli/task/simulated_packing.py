"""The part of `cavvy simulate fleet` that fills a recorded cluster with recorded jobs."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cavvy.cli.view.output import TableColumn, json_out, rows_out

if TYPE_CHECKING:
    from cavvy.sim.traces.packing import PackedList

_COLUMNS = (
    TableColumn("jobs"),
    TableColumn("policy"),
    TableColumn("allocated_percent", "ALLOCATED", show=lambda value: f"{value:.2f}%"),
    TableColumn("published_percent", "PUBLISHED", show=lambda value: f"{value:.2f}%"),
    TableColumn("difference", show=lambda value: f"{value:+.2f}"),
)


def run_packing(
    pods: Iterable[Path],
    nodes: Path,
    published: Path | None,
    runs: int,
    processes: int,
    page: Path | None,
    output: str,
) -> None:
    """Fill the nodes with the jobs of each list, print the results, and write the page. Raises
    TraceError, and ModuleNotFoundError if the page needs a module that is not installed."""
    from cavvy.sim.traces.packing import find_lists, pack_lists, read_nodes, read_pods
    from cavvy.sim.traces.packing import read_published as read

    known = read(published) if published is not None else {}
    lists = {path.stem: read_pods(path) for path in find_lists(pods)}
    results = pack_lists(lists, read_nodes(nodes), range(runs), processes)
    if page is not None:
        from cavvy.sim.traces.packing_page import make_page

        page.write_text(make_page(results, known))
    _print(results, known, output)


def _print(
    results: "Sequence[PackedList]", published: Mapping[str, Mapping[str, float]], output: str
) -> None:
    rows = []
    for each in results:
        known = published.get(each.jobs, {}).get(each.policy)
        difference = None if known is None else each.percent - known
        rows.append((each.jobs, each.policy, each.percent, known, difference))
    if output == "json":
        names = [column.name for column in _COLUMNS]
        json_out([dict(zip(names, row, strict=True)) for row in rows])
    else:
        rows_out(_COLUMNS, rows, output)
