"""What sandboxes have on the console: see `tests/console/system/test_console_matrix.py`."""

from collections.abc import Mapping
from datetime import UTC, datetime

from tests.sandboxes.rig import make_report

from cavvy.capabilities.sandboxes.rows import SandboxRows
from cavvy.store.sql import Store

# An address for each page, and for each action its address and the fields of its form.
PAGES = {"/sandboxes": "/sandboxes"}
CHANGES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "/sandboxes": ("/sandboxes", {"do": "end", "sandbox": "vision/sb-zebra-5a"}),
}
OF_PROJECT: set[str] = set()  # pages whose address names a project as a field
DATA: set[str] = set()  # of charts


async def fill(store: Store) -> None:
    """Write a sandbox whose host is gone."""
    now = datetime.now(UTC)
    await SandboxRows(*store.database).put("vision", "zebra-host", [make_report(now)], now)
