"""What the tests of who may see what know of a project's sandboxes."""

from datetime import datetime

from tests.sandboxes.rig import make_report

from cavvy.capabilities.sandboxes.rows import SandboxRows
from cavvy.store.sql import Store


async def add_rows(store: Store, project: str, now: datetime) -> str:
    """Add a sandbox."""
    title = f"sandbox-of-{project}-mark"
    report = make_report(now, title=title)
    await SandboxRows(*store.database).put(project, f"host-of-{project}", [report], now)
    return title
