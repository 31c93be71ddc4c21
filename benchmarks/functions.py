"""Measures calls of functions on this machine: an empty call, a `map` of short calls against
`concurrent.futures`, and the first result without a running job.

    python benchmarks/functions.py [--calls 10000] [--folder FOLDER]

A server of its own is started below FOLDER and stopped at the end. Prints lines of JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

_APP = """
import time

import cavvy

app = cavvy.App("measured")


@app.function(max_replicas=1)
def empty():
    return None


@app.function(max_replicas=2)
def work(seconds):
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass
    return seconds


@app.function(max_replicas=1)
def large(size):
    return bytes(size)
"""


def work(seconds: float) -> float:
    """Compute for this time."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass
    return seconds


def say(what: str, **figures: object) -> None:
    print(json.dumps({"what": what, "load": round(os.getloadavg()[0], 1), **figures}), flush=True)


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile in milliseconds."""
    return round(sorted(values)[int(len(values) * share)] * 1000, 3)


def read_cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def read_memory_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def read_peak_mib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024


def measure(calls: int, home: str) -> None:
    import measured  # type: ignore[import-not-found]  # written below

    from cavvy.client.connection import connect
    from cavvy.client.state import read_server

    connect().close()
    server = read_server(home)
    assert server is not None
    for _ in range(3):
        begin = time.perf_counter()
        with measured.app.run(quiet=True):
            measured.empty.remote()
            say("cold", first_result_ms=round((time.perf_counter() - begin) * 1000))
    with measured.app.run(quiet=True):
        measured.empty.remote()
        spent_s, times = read_cpu_s(server.pid), []
        for _ in range(2000):
            begin = time.perf_counter()
            measured.empty.remote()
            times.append(time.perf_counter() - begin)
        spent_s = read_cpu_s(server.pid) - spent_s
        say(
            "warm",
            p50_ms=percentile(times, 0.5),
            p99_ms=percentile(times, 0.99),
            server_cpu_ms_per_call=round(spent_s / len(times) * 1000, 4),
        )
        list(measured.work.map([0.2, 0.2]))
        for _ in range(3):
            begin = time.perf_counter()
            done = sum(1 for _ in measured.work.map([0.001] * calls, order_outputs=False))
            ours_s = time.perf_counter() - begin
            assert done == calls
            with ProcessPoolExecutor(2) as pool:
                list(pool.map(work, [0.2, 0.2]))
                begin = time.perf_counter()
                done = sum(1 for _ in pool.map(work, [0.001] * calls))
                bare_s = time.perf_counter() - begin
            say("map", calls=calls, ours_s=round(ours_s, 2), bare_s=round(bare_s, 2),
                ratio=round(ours_s / bare_s, 2))  # fmt: skip
        before = read_memory_mib()
        after = []
        for value in measured.large.map([100_000_000] * 10):
            assert len(value) == 100_000_000
            del value  # what stays is the caller's
            after.append(round(read_memory_mib() - before))
        say("large", results_mb=100, count=10, caller_mib_after=after, peak_mib=read_peak_mib())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--folder", default=None)
    args = parser.parse_args()
    if args.folder:
        Path(args.folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        home = f"{folder}/home"
        os.environ |= {"CAVVY_HOME": home, "CAVVY_CONFIG": f"{folder}/config.yaml"}
        (Path(folder) / "config.yaml").touch()
        (Path(folder) / "app").mkdir()
        (Path(folder) / "app" / "measured.py").write_text(_APP)
        sys.path.insert(0, f"{folder}/app")
        try:
            measure(args.calls, home)
        finally:
            subprocess.run([sys.executable, "-m", "cavvy", "server", "stop"], check=False)


if __name__ == "__main__":
    main()
