"""How fast the console's charts are in a real browser: the page of a job with 40 curves, a zoom,
and 100 runs over each other. Chromium runs headless on this machine; the values are written into
the database as the server stores them. Ends with 1 if a bar is missed.

    python benchmarks/curve_charts.py [--points 1000000] [--curves 40] [--runs 100] [--rounds 5]

Seconds of wall-clock time: other work on the machine slows them. The CPU time of the console and of
the server, and the time of the browser's scripts, are beside them.
"""

import argparse
import sqlite3
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from math import exp
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from measure import process_cpu_s, record, table

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.console.system.test_console_browser import console
from tests.system.chromium import Tab, chromium
from tests.system.server_state import home_with_jobs

from cavvy import Client, Task
from cavvy.capabilities.curves.briefs import shorten
from cavvy.capabilities.curves.packing import Columns, pack
from cavvy.client.state import read_server

PIECE = 16_384  # rows of a stored piece
FINAL = 9  # its level
BEGIN_MS = 1.8e12
# When a chart was drawn first, and when all charts on the screen were drawn again.
WATCH = """
window.drawnAt = [];
new PerformanceObserver((list) => {
  for (const each of list.getEntries()) window.drawnAt.push(each.startTime);
}).observe({ type: "mark", buffered: true });
"""
# Notes when the button was released.
RELEASE = """
drawnAt = [];
const note = (event) => (window.releasedAt = event.timeStamp);
addEventListener("mouseup", note, { capture: true, once: true });
"""
BOX = "document.querySelector('.u-over').getBoundingClientRect().{}"
SENT = "performance.getEntries().reduce((sum, each) => sum + (each.transferSize || 0), 0)"


class Cost(NamedTuple):
    """What a step took: milliseconds until it was drawn, CPU of the console and of the server, and
    of the browser's scripts and layout; and the bytes that were sent."""

    wall_ms: float
    console_ms: float
    server_ms: float
    script_ms: float
    sent: float


def make_piece(
    names: Sequence[str], seed: int, number: int, count: int
) -> tuple[int, bytes, bytes]:
    """Return the number and both versions of a piece of curves with noise and four digits."""
    random, first = Random(f"{seed} {number}"), number * PIECE
    steps = range(first, first + count)
    noise = [random.random() * 0.05 for _ in steps]
    columns = [
        [
            round(2 * exp(-3e-6 * (1 + at % 5) * step) + noise[(step + 97 * at) % count], 4)
            for step in steps
        ]
        for at in range(len(names))
    ]
    times = [BEGIN_MS + 10 * step for step in steps]
    made = [Columns(tuple(names), [*map(float, steps)], times, columns)]
    return first, pack(made), shorten(made)


def fill(home: Path, job: str, names: Sequence[str], points: int, seed: int, pool: Any) -> None:
    """Write curves of a job, as they are stored once it has ended."""
    counts = [min(PIECE, points - at) for at in range(0, points, PIECE)]
    work = partial(make_piece, names, seed)
    made = pool.map(work, range(len(counts)), counts)
    sql = "INSERT INTO curves (attempt_id, rank, number, level, rows_count, document, brief) "
    with closing(sqlite3.connect(home / "cavvy.db", timeout=30)) as database, database:
        query = "SELECT id FROM attempts WHERE job_id = ?"
        [[attempt]] = database.execute(query, [job]).fetchall()
        for (number, whole, brief), count in zip(made, counts, strict=True):
            row = (attempt, 0, number, FINAL, count, whole, brief)
            database.execute(sql + "VALUES (?, ?, ?, ?, ?, ?, ?)", row)


class Watcher:
    """Measures steps in the browser."""

    def __init__(self, tab: Tab, pids: Sequence[int]) -> None:
        self._tab, self._pids = tab, pids
        tab.call("Performance.enable")
        tab.call("Network.enable")
        tab.call(
            "Emulation.setDeviceMetricsOverride",
            width=1280,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        tab.call("Page.addScriptToEvaluateOnNewDocument", source=WATCH)

    def script_ms(self) -> float:
        found = {
            each["name"]: each["value"]
            for each in self._tab.call("Performance.getMetrics")["metrics"]
        }
        return 1000 * float(found["TaskDuration"])

    @contextmanager
    def cpu(self) -> Iterator[list[float]]:
        before = [*map(process_cpu_s, self._pids)]
        used: list[float] = []
        yield used
        used += [
            1000 * (process_cpu_s(pid) - was) for pid, was in zip(self._pids, before, strict=True)
        ]

    def open(self, address: str, charts: int) -> Cost:
        """Open a page; measured until the first chart is drawn."""
        tab = self._tab
        tab.open("about:blank")
        before = self.script_ms()
        with self.cpu() as used:
            tab.open(address)
            tab.wait(f"document.querySelectorAll('.curve-chart .u-over').length >= {charts}")
            first = tab.evaluate("drawnAt[0]")
            tab.wait("document.getElementById('curve-charts').dataset.ready === 'true'")
        return Cost(first, used[0], used[1], self.script_ms() - before, tab.evaluate(SENT))

    def zoom(self) -> Cost:
        """Drag over the first chart; measured from the release of the button until it is drawn."""
        tab = self._tab
        tab.evaluate("document.querySelector('.u-over').scrollIntoView({ block: 'center' })")
        box = [tab.evaluate(BOX.format(each)) for each in ("x", "y", "width", "height")]
        sent, before = tab.evaluate(SENT), self.script_ms()
        tab.evaluate("new Promise((done) => setTimeout(done, 300))")
        tab.evaluate(f"(() => {{{RELEASE}}})()")
        left, right, y = box[0] + 0.4 * box[2], box[0] + 0.6 * box[2], box[1] + box[3] / 2
        with self.cpu() as used:
            press = {"button": "left", "buttons": 1, "clickCount": 1}
            tab.call("Input.dispatchMouseEvent", type="mousePressed", x=left, y=y, **press)
            tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=right, y=y, buttons=1)
            tab.call("Input.dispatchMouseEvent", type="mouseReleased", x=right, y=y, **press)
            tab.wait("drawnAt.some((each) => each > releasedAt + 1)")
        took = tab.evaluate("drawnAt.find((each) => each > releasedAt + 1) - releasedAt")
        return Cost(took, used[0], used[1], self.script_ms() - before, tab.evaluate(SENT) - sent)


def middle(costs: Sequence[Cost]) -> Cost:
    return Cost(*map(median, zip(*costs, strict=True)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument("--curves", type=int, default=40)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    names = ["loss", "acc", *(f"layer{each}/value" for each in range(2, options.curves))]
    costs: dict[str, list[Cost]] = {"job": [], "zoom": [], "runs": []}
    with tempfile.TemporaryDirectory() as folder, home_with_jobs(Path(folder) / "home") as home:
        here = Path(folder)
        (here / "browser").mkdir()
        with Client() as client, ProcessPoolExecutor(2) as pool:
            task = Task("true", name="long", resources={"providers": "local"})
            job = client.submit(task)
            job.wait()
            fill(home, job.id, names, options.points, 0, pool)
            runs = []
            if options.runs:
                sweep = {"lr": [each / 1000 for each in range(1, options.runs + 1)]}
                many = Task("true", name="many", resources={"providers": "local", "cpu": 0.02})
                array = client.submit_array(many, sweep=sweep)
                array.wait()
                runs = [array.job(index).id for index in range(options.runs)]
            for seed, each in enumerate(runs):
                fill(home, each, ["loss"], options.points // 10, seed, pool)
        with console(here) as address, chromium(here / "browser") as tab:
            site = f"http://{urlsplit(address).netloc}"
            tab.open(address)
            server = read_server(str(home))
            assert server is not None
            watcher = Watcher(tab, [find_console(here), server.pid])
            for _ in range(options.rounds + 1):
                costs["job"].append(watcher.open(f"{site}/jobs/default/{job.id}", 1))
                costs["zoom"].append(watcher.zoom())
                if runs:
                    query = "&".join(f"job={each}" for each in runs)
                    costs["runs"].append(watcher.open(f"{site}/runs?project=default&{query}", 1))
    return judge_all(options, {name: own[1:] for name, own in costs.items()})


def find_console(folder: Path) -> int:
    """Return the process of the console that logs into a folder."""
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if str((each / "fd/1").readlink()) == str(folder / "console.log"):
                return int(each.name)
        except OSError:
            continue
    raise ProcessLookupError("the console")


def judge_all(options: argparse.Namespace, costs: dict[str, list[Cost]]) -> int:
    job, zoom = middle(costs["job"]), middle(costs["zoom"])
    judged = [
        (f"{options.curves} curves of {options.points:,}: first curve", job.wall_ms, 800.0, "ms"),
        ("a zoom", zoom.wall_ms, 150.0, "ms"),
        ("sent until then", (job.sent + zoom.sent) / 1e6, 1.5, "MB"),
    ]
    if costs["runs"]:
        what = f"{options.runs} runs of {options.points // 10:,} over each other"
        judged.append((what, middle(costs["runs"]).wall_ms, 1200.0, "ms"))
    rows = [
        (what, figure, bar, unit, record(what, figure, bar, unit))
        for what, figure, bar, unit in judged
    ]
    table("Charts in Chromium", ("what", "figure", "bar", "unit", ""), rows)
    columns = ("step", "drawn ms", "console CPU ms", "server CPU ms", "browser ms", "sent KB")
    parts = [
        (name, own.wall_ms, own.console_ms, own.server_ms, own.script_ms, own.sent / 1000)
        for name, own in ((name, middle(each)) for name, each in costs.items() if each)
    ]
    table("Of it", columns, parts)
    for name, own in costs.items():
        print(f"{name}: {', '.join(f'{each.wall_ms:.0f}' for each in own)} ms")
    return 0 if all(row[-1] == "ok" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
