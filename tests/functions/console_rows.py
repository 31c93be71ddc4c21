"""What apps have on the console: see `tests/console/system/test_console_matrix.py`."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from msgspec.json import encode

from cavvy.capabilities.functions import wire
from cavvy.capabilities.functions.counts.rows import CountRows
from cavvy.capabilities.functions.counts.wire import CountsAsk, DirectCall, FunctionMinute
from cavvy.capabilities.functions.rows import (
    FAILED,
    CallRows,
    FunctionCallRow,
    FunctionRows,
    StoredPart,
)
from cavvy.store.sql import Store

_APP, _CALL = "/apps/vision/zebra-app", "zebra-call"
# An address for each page, and for each action its address and the fields of its form.
PAGES = {
    "/apps": "/apps",
    "/apps/{project}/{name}": _APP,
    "/apps/{project}/{name}/calls/{call}": f"{_APP}/calls/{_CALL}",
}
CHANGES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "/apps/{project}/{name}/calls/{call}/cancel": (f"{_APP}/calls/{_CALL}/cancel", {}),
}
OF_PROJECT: set[str] = set()  # pages whose address names a project as a field
DATA: set[str] = set()  # of charts


def make_minute(now: datetime, **fields: object) -> FunctionMinute:
    usual = {
        "function": "zebra_stripes",
        "minute": int(now.timestamp() // 60) * 60 - 120,
        "done": 3,
        "failed": 1,
        "ran": {"40": 3, "60": 1},
        "took": {"50": 3, "70": 1},
        "recent": [
            DirectCall(
                state="failed",
                ended_s=now.timestamp() - 90,
                ran_s=0.1,
                took_s=0.2,
                type="ValueError",
                text="a stripe\nis no zebra",
                trace="Traceback\n  zebra.py, line 1",
            )
        ],
    }
    return FunctionMinute(**usual | fields)  # type: ignore[arg-type]


async def fill(store: Store) -> None:
    """Write a deployed app with a function, what its broker has told, and a call that failed."""
    now = datetime.now(UTC)
    arguments = {"type": "object", "properties": {"count": {"type": "integer"}}}
    function = wire.DeployedFunction(name="zebra_stripes", arguments=encode(arguments))  # type: ignore[arg-type]
    document = wire.AppPartAsk(
        text="run: 'true'",
        origin=encode({}),  # type: ignore[arg-type]
        snapshot="",
        meet="",
        functions=[function],
    )
    part = StoredPart(
        project="vision",
        app="zebra-app",
        part=0,
        revision="1",
        snapshot="",
        document=encode(document).decode(),
        job="",
        user="ada",
        updated_at=now,
    )
    await FunctionRows(*store.database).put("vision", "zebra-app", [part])
    end = wire.CallEnd(kind="error", type="ValueError", text="zebra", trace="zebra.py", ran_s=0.2)
    call = FunctionCallRow(
        id=_CALL,
        project="vision",
        app="zebra-app",
        function="zebra_stripes",
        once_key=None,
        state=FAILED,
        head="{}",
        body=b"",
        answer=encode(end).decode(),
        result=b"",
        account="ada",
        user="ada",
        consent=0,
        created_at=now - timedelta(minutes=1),
        ended_at=now,
    )
    await CallRows(*store.database).add([call])
    told = CountsAsk(workers=2, gauges={"zebra_stripes": (1, 1, 0)}, minutes=[make_minute(now)])
    await CountRows(*store.database).put("vision", "zebra-app", "zebra-job", told, now)
