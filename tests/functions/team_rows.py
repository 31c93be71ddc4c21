"""What the tests of who may see what know of a project's apps."""

from datetime import datetime

from msgspec import Raw
from msgspec.json import encode

from cavvy.capabilities.functions.counts.rows import CountRows
from cavvy.capabilities.functions.counts.wire import CountsAsk
from cavvy.capabilities.functions.rows import FunctionRows, StoredPart
from cavvy.capabilities.functions.wire import AppPartAsk
from cavvy.store.sql import Store


async def add_rows(store: Store, project: str, now: datetime) -> str:
    """Add a deployed app that runs."""
    name = f"app-of-{project}-mark"
    ask = AppPartAsk(text="", origin=Raw(b"{}"), snapshot="", meet="", functions=[])
    part = StoredPart(
        project=project,
        app=name,
        part=0,
        revision="1",
        snapshot="",
        document=encode(ask).decode(),
        job="",
        user="",
        updated_at=now,
    )
    await FunctionRows(*store.database).put(project, name, [part])
    told = CountsAsk(workers=1, gauges={}, minutes=[])
    await CountRows(*store.database).put(project, name, name, told, now)
    return name
