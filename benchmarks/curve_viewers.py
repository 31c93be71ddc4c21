"""The cost of people who watch the curves of one job that runs: CPU time of the server and of the
console. Each viewer requests what the page's script requests, as often as it does while somebody
moves the mouse. Ends with 1 if the bar is missed.

    python benchmarks/curve_viewers.py [--viewers 200] [--seconds 30]
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
from measure import process_cpu_s, record, table

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.system.server_state import PYTHON, home_with_jobs
from tests.waits import wait_until

from cavvy.client import connect
from cavvy.client.state import read_server

LIVE_S = 2.0  # between two requests, as in curves.js
CURVES = ("loss", "acc", "lr", "norm")
TASK = """
name: fit
run: |
  i=0
  while true; do
    i=$((i+1)); n=$((1000 + i * 7919 % 8999))
    echo "step $i loss=0.$n acc=0.$n lr=0.00$n norm=1.$n"
    sleep 0.1
  done
resources: {providers: local, cpu: 0.1}
"""


async def view(client: httpx.AsyncClient, address: str, begin: float, answered: list[int]) -> None:
    """Request the curves until the task is cancelled, and count the answers."""
    await asyncio.sleep(begin)
    due = time.monotonic()
    while True:
        try:
            answer = await client.get(address)
        except httpx.RemoteProtocolError:  # an unused connection has just been closed
            answer = await client.get(address)  # as browsers do
        answer.raise_for_status()
        answered[0] += 1
        due += LIVE_S
        await asyncio.sleep(max(0.0, due - time.monotonic()))


async def watch(address: str, job: str, options: argparse.Namespace, pids: tuple[int, int]) -> bool:
    """Print the use of a core while viewers watch. Returns whether the bar is met."""
    site = f"http://{urlsplit(address).netloc}"
    limits = httpx.Limits(max_connections=options.viewers)
    asked = "&".join(f"curve={each}" for each in CURVES)
    page = f"/jobs/default/{job}/curves?by=step&{asked}"
    async with httpx.AsyncClient(base_url=site, limits=limits, timeout=60) as client:
        await client.get(address)
        alone = await use_of(pids, options.seconds / 2)
        answered = [0]
        viewers = [
            asyncio.create_task(view(client, page, LIVE_S * number / options.viewers, answered))
            for number in range(options.viewers)
        ]
        await asyncio.sleep(LIVE_S + 2)
        before, began = answered[0], time.monotonic()
        used = await use_of(pids, options.seconds)
        rate = (answered[0] - before) / (time.monotonic() - began)
        for each in viewers:
            each.cancel()
        ended = await asyncio.gather(*viewers, return_exceptions=True)
    failed = [each for each in ended if not isinstance(each, asyncio.CancelledError)]
    judged = (
        ("the server's use of a core, for viewers", used[0] - alone[0], 10.0, "%"),
        ("viewers that failed", float(len(failed)), 0.0, ""),
    )
    wanted = options.viewers / LIVE_S
    print(f"{rate:.0f} of {wanted:.0f} answers a second: a busy machine gives fewer")
    rows = [
        (what, figure, bar, unit, record(what, figure, bar, unit))
        for what, figure, bar, unit in judged
    ]
    table(f"{options.viewers} viewers", ("what", "figure", "bar", "unit", ""), rows)
    print(f"the server without viewers: {alone[0]:.1f} %; the console with them: {used[1]:.1f} %")
    for each in failed[:1]:
        print(f"{type(each).__name__}: {each}")
    return all(row[-1] == "ok" for row in rows)


async def use_of(pids: tuple[int, int], seconds: float) -> tuple[float, float]:
    """Return the use of a core by two processes, in percent."""
    before, began = [*map(process_cpu_s, pids)], time.monotonic()
    await asyncio.sleep(seconds)
    took = time.monotonic() - began
    one, two = (
        100 * (process_cpu_s(pid) - was) / took for pid, was in zip(pids, before, strict=True)
    )
    return one, two


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--viewers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=30)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, home_with_jobs(Path(folder) / "home") as home:
        with connect() as client:
            job = client.submit(TASK).id
            wait_until(lambda: client.nodes())
        server = read_server(str(home))
        assert server is not None
        said = Path(folder) / "said"
        argv = [PYTHON, "-m", "cavvy", "console", "--no-browser", "--port", "0"]
        with said.open("wb") as output, subprocess.Popen(argv, stdout=output) as process:
            wait_until(lambda: re.search(r"http://\S+\n", said.read_text()))
            address = re.findall(r"http://\S+", said.read_text())[0]
            met = asyncio.run(watch(address, job, options, (server.pid, process.pid)))
            process.terminate()
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
