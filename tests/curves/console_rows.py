"""What curves have on the console: see `tests/console/system/test_console_matrix.py`."""

from collections.abc import Mapping

from cavvy.store.sql import Store

# An address for each page, and for each action its address and the fields of its form.
PAGES = {"/runs": "/runs?project=vision"}
CHANGES: Mapping[str, tuple[str, Mapping[str, str]]] = {}
OF_PROJECT = {"/runs"}  # pages whose address names a project as a field
DATA = {  # of charts, and pictures and the like
    "/jobs/{project}/{name}/curves",
    "/jobs/{project}/{name}/examples",
    "/jobs/{project}/{name}/examples/{example}",
    "/groups/{project}/{name}/curves",
}


async def fill(store: Store) -> None:
    """The jobs that are there are runs."""
