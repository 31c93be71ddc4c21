"""Runs a batch while its nodes are preempted and its server is killed, and compares it with a loop.

    python benchmarks/batch_rows.py                     # 100,000 rows, 4 nodes, about 7 minutes
    python benchmarks/batch_rows.py --rows 8000 --shard 200 --row-ms 2

The nodes are four jobs of the provider `local`. The function waits for each row as for a GPU, and
computes a hash. The bare loop is four processes that read, compute and write a quarter of the
same rows each, without Cavvy. Two preemptions have a notice, and every third kills all processes of
the node at once. Two `kill -9` end the server, which the next request starts again. The overhead is
that of the whole time, from the submission to the end of the last job.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ten_preemptions import find_processes

from cavvy.client import ApiClient, connect
from cavvy.client.array_wire import ArrayDetail, read_array
from cavvy.client.metrics import measure_batch
from cavvy.client.state import read_server

PATIENCE_S = 900.0
BAR_PERCENT = 5.0
CODE = """
import hashlib, json, os, sys, time
ROW_S = float(os.environ["ROW_MS"]) / 1000
def run(rows):
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(f"{rows[0]['id']} {len(rows)}\\n")
    found = []
    while os.path.exists(os.environ["CALLS"] + ".hold"):
        time.sleep(0.02)
    began = time.monotonic()
    for count, row in enumerate(rows, 1):
        found.append({"id": row["id"], "hash": hashlib.sha256(row["text"].encode()).hexdigest()})
        time.sleep(max(0, began + count * ROW_S - time.monotonic()))
    return found
if __name__ == "__main__":
    source, target, shard, first, count = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
    with open(source) as file:
        rows = [json.loads(line) for line in file][first:first + count]
    with open(target, "w") as file:
        for at in range(0, len(rows), shard):
            for result in run(rows[at:at + shard]):
                file.write(json.dumps(result) + "\\n")
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--shard", type=int, default=250)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--row-ms", type=float, default=8.0)
    parser.add_argument("--preemptions", type=int, default=3)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument(
        "--hold",
        action="store_true",
        help="hold the work until each disturbance has had its effect",
    )
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="batch-", dir="/tmp"))
    try:
        found = run(folder, given)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if given.output == "json":
        print(json.dumps(found, indent=1))
    else:
        show(found)
    return 0 if found["exactly_once"] else 1


def run(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    work, home = folder / "work", folder / "home"
    work.mkdir()
    (work / "own_code.py").write_text(CODE)
    lines = (json.dumps({"id": each, "text": f"row {each} " * 8}) for each in range(given.rows))
    (work / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "settings.toml").write_text("[providers.local]\nprice_usd_hr = 3.6\n")
    os.environ |= {
        "CAVVY_HOME": str(home),
        "CAVVY_CONFIG": str(folder / "settings.toml"),
        "XDG_RUNTIME_DIR": str(folder),
        "ROW_MS": str(given.row_ms),
        "CALLS": str(folder / "bare-calls"),
    }
    bare_s = run_bare(work, folder, given)
    task = f"""
name: rows
batch:
  input: rows.jsonl
  output: {folder}/results
  function: own_code:run
  rows: {given.shard}
  workers: {given.nodes}
resources: {{cpu: 0.1, memory: 100MB}}
env: {{ROW_MS: "{given.row_ms}", CALLS: "{folder}/calls"}}
retry: {{node: unlimited}}
limits: {{budget: 5}}
"""
    (work / "task.yaml").write_text(task)
    with connect() as client:  # the server runs already when people submit
        began = time.monotonic()
        cavvy("batch", "-d", "-y", str(work / "task.yaml"))
        try:
            disturb(client, home, folder, given)
            until(lambda: ended(read_array(client, "default", "rows")), "the end of the jobs")
            batch_s = time.monotonic() - began
            array = read_array(client, "default", "rows")
        finally:
            client.down()
            until(lambda: not client.nodes(), "the end of all nodes")
    cavvy("server", "stop")
    return {
        **judge(folder, array, given),
        "bare_s": round(bare_s, 2),
        "batch_s": round(batch_s, 2),
        "overhead_percent": round((batch_s / bare_s - 1) * 100, 2),
    }


def run_bare(work: Path, folder: Path, given: argparse.Namespace) -> float:
    part = -(-given.rows // given.nodes)
    began = time.monotonic()
    loops = [
        subprocess.Popen(
            [
                *(sys.executable, "own_code.py", "rows.jsonl", str(folder / f"bare-{number}")),
                *map(str, (given.shard, number * part, part)),
            ],
            cwd=work,
        )
        for number in range(given.nodes)
    ]
    assert [each.wait(PATIENCE_S) for each in loops] == [0] * given.nodes
    return time.monotonic() - began


def disturb(client: ApiClient, home: Path, folder: Path, given: argparse.Namespace) -> None:
    """Preempt a node or kill the server, in turn, each time after more rows are done."""
    events = [f"preempt {number}" for number in range(given.preemptions)]
    for number in range(given.kills):
        events.insert(min(len(events), 2 * number + 1), "kill the server")
    hold = folder / "calls.hold"
    for number, event in enumerate(events, 1):
        goal = given.rows * number // (len(events) + 1)
        until(lambda goal=goal: count_rows(folder, given.shard) >= goal, f"{goal} rows")
        if given.hold:
            hold.touch()
        if event == "kill the server":
            server = read_server(str(home))
            assert server is not None
            os.kill(server.pid, signal.SIGKILL)
        else:
            preempt(client, home, int(event.split()[1]), given.nodes, wait=given.hold)
        hold.unlink(missing_ok=True)


def preempt(client: ApiClient, home: Path, at: int, nodes: int, *, wait: bool) -> None:
    """Preempt the node of a job, every third one without a notice."""
    name = f"rows.{at % nodes}"
    if wait:
        until(lambda: client.job("default", name).phase == "running", f"{name} to run")
    attempt = client.job("default", name).attempt
    if at % 3 == 2:
        gang = client.job("default", name).attempts[-1].gang
        record = home / "providers/local/agents" / gang / "0/agent.json"
        for pid in find_processes(json.loads(record.read_text())["pid"]):
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(pid, signal.SIGKILL)
    else:
        client.drill_preempt("default", name, notice_s=2)
    if wait:
        until(lambda: client.job("default", name).attempt > attempt, "the next attempt")


def count_rows(folder: Path, shard: int) -> int:
    return shard * len([*folder.glob("results/part-*.jsonl")])


def ended(array: ArrayDetail) -> bool:
    return all(job.phase in ("done", "failed", "stopped") for job in array.jobs)


def judge(folder: Path, array: ArrayDetail, given: argparse.Namespace) -> dict[str, Any]:
    """Compare the results with the rows, and count what was done more than once."""
    seen = Counter[int]()
    for part in folder.glob("results/part-*.jsonl"):
        seen.update(json.loads(line)["id"] for line in part.read_text().splitlines())
    called = sum(int(line.split()[1]) for line in (folder / "calls").read_text().splitlines())
    progress = measure_batch(array)
    assert progress is not None
    once = seen == Counter(range(given.rows)) and all(job.phase == "done" for job in array.jobs)
    return {
        "rows": given.rows,
        "nodes": given.nodes,
        "preemptions": given.preemptions,
        "server_kills": given.kills,
        "attempts": sum(job.attempt for job in array.jobs),
        "exactly_once": once,
        "missing": given.rows - len(seen),
        "repeated": sum(seen.values()) - len(seen),
        "begun_again": called - given.rows,
        "micros_per_million_rows": progress.micros_per_million,
    }


def cavvy(*arguments: str) -> None:
    command = [sys.executable, "-c", "from cavvy.cli.main import main; main()", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=PATIENCE_S)


def until(true: Callable[[], object], what: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > give_up:
            raise TimeoutError(f"waited {PATIENCE_S:.0f} s in vain for {what}")
        time.sleep(0.1)


def show(found: dict[str, Any]) -> None:
    print(f"{found['rows']:,} rows on {found['nodes']} nodes, {found['preemptions']} preemptions,")
    print(f"{found['server_kills']} kills of the server, {found['attempts']} attempts")
    rows = {
        "each row once": "yes" if found["exactly_once"] else "NO",
        "rows missing": found["missing"],
        "rows twice in the results": found["repeated"],
        "rows begun again": found["begun_again"],
        "bare loop": f"{found['bare_s']:.1f} s",
        "batch": f"{found['batch_s']:.1f} s",
        "overhead": f"{found['overhead_percent']:.1f} % (bar {BAR_PERCENT:.0f} %)",
    }
    for name, value in rows.items():
        print(f"  {name:<26} {value}")


if __name__ == "__main__":
    sys.exit(main())
