"""The CPU time of the console's pages of apps: what the server and the console use for one page.

The state has many apps, whose calls of the last 12 hours were counted in each minute, and calls
that the server keeps. Each page is requested whole, and as its script does for an update. Ends with
1 if a bar is missed.

    python benchmarks/app_pages.py [--apps 50] [--calls 20000] [--requests 60]
"""

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from measure import process_cpu_s, record, table
from msgspec import Raw
from msgspec.json import encode

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.system.server_state import PYTHON, home_at
from tests.waits import wait_until

from cavvy.capabilities.functions import wire
from cavvy.capabilities.functions.counts.rows import CountRows
from cavvy.capabilities.functions.counts.wire import CountsAsk, DirectCall, FunctionMinute
from cavvy.capabilities.functions.rows import CallRows, FunctionCallRow, FunctionRows, StoredPart
from cavvy.client import connect
from cavvy.client.paths import make_keys
from cavvy.client.state import read_server
from cavvy.store.open import open_store

FUNCTIONS = ("embed", "score", "nightly")
MINUTES = 720
BAR_MS = 15.0


def make_part(app: str, now: datetime) -> StoredPart:
    """Return the row of a deployed app."""
    schema = {"type": "object", "properties": {"texts": {"type": "array"}}}
    ask = wire.AppPartAsk(
        text="run: 'true'",
        origin=Raw(b"{}"),
        snapshot="",
        meet="",
        functions=[
            wire.DeployedFunction(name=each, arguments=Raw(encode(schema))) for each in FUNCTIONS
        ],
    )
    return StoredPart(
        project="default",
        app=app,
        part=0,
        revision="1",
        snapshot="",
        document=encode(ask).decode(),
        job="",
        user="ada",
        updated_at=now,
    )


def make_report(now: datetime, minutes: int) -> CountsAsk:
    """Return what a broker tells of this many minutes."""
    at = int(now.timestamp() // 60) * 60
    failed = DirectCall(
        state="failed", ended_s=at, ran_s=0.1, took_s=0.2, type="ValueError", trace="x" * 2000
    )
    found = [
        FunctionMinute(
            function=function,
            minute=at - 60 * number,
            done=100,
            failed=1,
            ran={str(each): 5 for each in range(40, 60)},
            took={str(each): 5 for each in range(45, 65)},
            recent=[failed] * 5,
        )
        for function in FUNCTIONS
        for number in range(minutes)
    ]
    return CountsAsk(workers=4, gauges=dict.fromkeys(FUNCTIONS, (1, 1, 0)), minutes=found)


async def fill(home: Path, apps: int, calls: int) -> None:
    """Write the rows: one app has whole 12 hours, the others one."""
    store = open_store(f"sqlite:///{home / 'cavvy.db'}")
    await store.open()
    now = datetime.now(UTC)
    end = wire.CallEnd(kind="error", type="ValueError", text="no", trace="x" * 2000, ran_s=0.1)
    for number in range(apps):
        app = f"app-{number}"
        await FunctionRows(*store.database).put("default", app, [make_part(app, now)])
        report = make_report(now, 60 if number else MINUTES)
        await CountRows(*store.database).put("default", app, f"job-{number}", report, now)
    rows = [
        FunctionCallRow(
            id=key,
            project="default",
            app=f"app-{number % apps}",
            function="embed",
            once_key=key,
            state="failed" if number % 10 == 0 else "done",
            head="{}",
            body=b"",
            answer=encode(end if number % 10 == 0 else wire.CallEnd(ran_s=0.1)).decode(),
            result=b"",
            account=None,
            user="ada",
            consent=0,
            created_at=now - timedelta(minutes=5),
            ended_at=now - timedelta(minutes=4),
        )
        for number, key in enumerate(make_keys(calls))
    ]
    for begin in range(0, calls, 1000):
        await CallRows(*store.database).add(rows[begin : begin + 1000])
    await store.close()


def measure(address: str, requests: int, pids: dict[str, int]) -> list[tuple[str, str, float]]:
    """Return the milliseconds of CPU of each process for each kind of request."""
    site = f"http://{urlsplit(address).netloc}"
    update = {"sec-fetch-dest": "empty", "sec-fetch-site": "same-origin"}
    rows = []
    with httpx.Client(base_url=site, timeout=60) as client:
        client.get(address)
        for path in ("/apps", "/apps/default/app-0"):
            for what, headers in (("page", {}), ("update", update)):
                assert client.get(path, headers=headers).status_code == 200
                before = {name: process_cpu_s(pid) for name, pid in pids.items()}
                for _ in range(requests):
                    client.get(path, headers=headers)
                    time.sleep(0.01)
                for name, pid in pids.items():
                    used = process_cpu_s(pid) - before[name]
                    rows.append((f"{what} {path}", name, 1000 * used / requests))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--apps", type=int, default=50)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--requests", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, home_at(Path(folder) / "home") as home:
        with connect():
            pass
        asyncio.run(fill(home, options.apps, options.calls))
        said = Path(folder) / "said"
        argv = [PYTHON, "-m", "cavvy", "console", "--no-browser", "--port", "0"]
        with said.open("wb") as output, subprocess.Popen(argv, stdout=output) as process:
            wait_until(lambda: re.search(r"http://\S+\n", said.read_text()))
            address = re.findall(r"http://\S+", said.read_text())[0]
            server = read_server(str(home))
            assert server is not None
            pids = {"server": server.pid, "console": process.pid}
            found = measure(address, options.requests, pids)
            process.terminate()
    rows = [
        (what, name, figure, BAR_MS, record(f"{what}, {name}", figure, BAR_MS, "ms"))
        for what, name, figure in found
    ]
    title = f"{options.apps} apps, {options.calls} kept calls: CPU of a request, in ms"
    table(title, ("request", "process", "ms", "bar", ""), rows)
    return 0 if all(row[-1] == "ok" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
