"""The part of `cavvy simulate fleet` that fills a recorded cluster with recorded jobs."""

from collections.abc import Iterable
from pathlib import Path

from cavvy.cli.view.simulation import print_packing


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
    print_packing(results, known, output)
