"""The cost of open consoles: CPU time and memory of `cavvy console` while readers watch jobs.

Each reader requests what the page's script requests: the job's page and the new part of its log, as
often as the script does without input (`idle`), or of a reader who works (`active`). Ends with 1 if
a bar is missed.

    python benchmarks/consoles.py [--readers 200] [--jobs 50] [--seconds 60] [--pace idle|active]
"""

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from measure import process_cpu_s, process_rss_mib, record, table

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.system.server_state import PYTHON, home_with_jobs
from tests.waits import wait_until

from cavvy.client import connect

# seconds between two updates of the page and of the log, in console.js
PACES = {"idle": (60.0, 15.0), "active": (3.0, 1.0)}
TASK = """
name: log-{number}
run: while true; do date; sleep 1; done
resources: {{providers: local, cpu: 0.02}}
"""


async def read(client: httpx.AsyncClient, job: str, pace: tuple[float, float], begin: float) -> int:
    """Watch a job until the task is cancelled. Returns never."""
    page, count = f"/jobs/default/{job}", 0
    await asyncio.sleep(begin)
    while not (found := re.findall(r'data-offset="(\d+)"', (await client.get(page)).text)):
        await asyncio.sleep(1)  # the machine is busy with the start of the jobs
    offset = int(found[0])
    due_page = due_log = time.monotonic()
    update = {"sec-fetch-dest": "empty", "sec-fetch-site": "same-origin"}
    while True:
        now = time.monotonic()
        if now >= due_page:
            due_page = now + pace[0]
            assert (await client.get(page, headers=update)).status_code == 200
        if now >= due_log:
            due_log = now + pace[1]
            where = f"{page}/log?rank=0&attempt=1&offset={offset}"
            offset = (await client.get(where, headers=update)).json()["offset"]
            count += 1
        await asyncio.sleep(max(0.01, min(due_page, due_log) - time.monotonic()))


async def watch(address: str, jobs: list[str], options: argparse.Namespace, pid: int) -> bool:
    """Print the console's use while readers watch. Returns whether all bars are met."""
    pace = PACES[options.pace]
    site = f"http://{urlsplit(address).netloc}"
    limits = httpx.Limits(max_connections=options.readers)
    async with httpx.AsyncClient(base_url=site, limits=limits, timeout=60) as client:
        await client.get(address)
        readers = [
            asyncio.create_task(
                read(client, jobs[number % len(jobs)], pace, pace[0] * number / options.readers)
            )
            for number in range(options.readers)
        ]
        await asyncio.sleep(pace[0] + 5)
        before, began = process_cpu_s(pid), time.monotonic()
        await asyncio.sleep(options.seconds)
        share = (process_cpu_s(pid) - before) / (time.monotonic() - began)
        mib = process_rss_mib(pid)
        for each in readers:
            each.cancel()
        failed = [
            each
            for each in await asyncio.gather(*readers, return_exceptions=True)
            if not isinstance(each, asyncio.CancelledError)
        ]
    most = 5.0 if options.pace == "idle" else 100.0
    judged = (
        ("the console's use of a core", 100 * share, most, "%"),
        ("the console's memory", mib, 150.0, "MiB"),
        ("readers that failed", float(len(failed)), 0.0, ""),
    )
    rows = [
        (what, figure, bar, unit, record(what, figure, bar, unit))
        for what, figure, bar, unit in judged
    ]
    title = f"{options.readers} {options.pace} readers, {len(jobs)} jobs that log"
    table(title, ("what", "figure", "bar", "unit", ""), rows)
    for each in failed[:1]:
        print(f"{type(each).__name__}: {each}")
    return all(row[-1] == "ok" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--readers", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--pace", choices=PACES, default="idle")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, home_with_jobs(Path(folder) / "home"):
        with connect() as client:
            texts = [TASK.format(number=number) for number in range(options.jobs)]
            jobs = [client.submit(text).id for text in texts]
            wait_until(lambda: len(client.nodes()) == options.jobs)
        said = Path(folder) / "said"
        argv = [PYTHON, "-m", "cavvy", "console", "--no-browser", "--port", "0"]
        with said.open("wb") as output, subprocess.Popen(argv, stdout=output) as process:
            wait_until(lambda: re.search(r"http://\S+\n", said.read_text()))
            address = re.findall(r"http://\S+", said.read_text())[0]
            met = asyncio.run(watch(address, jobs, options, process.pid))
            process.terminate()
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
