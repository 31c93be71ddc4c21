"""Code that the benchmarks share: CPU seconds of commands and processes, medians, bars, a temporary
state folder, and tables.

The benchmarks compare CPU seconds, not wall-clock time, because CPU seconds change little on a busy
machine.
"""

import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
CAVVY = str(Path(sys.executable).with_name("cavvy"))
# environment variable: the file to which each bar is appended, as a line of JSON; see `bars.py`
BARS_FILE = "CAVVY_BENCH_BARS"
_TICK = os.sysconf("SC_CLK_TCK")


def command_cpu_s(command: Sequence[str], env: dict[str, str] | None = None) -> float:
    """The user and system CPU seconds of a command and of all children that it waited for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def process_cpu_s(pid: int) -> float:
    """The CPU seconds of a running process, and of its children that have ended and were waited
    for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return sum(int(field) for field in fields[11:15]) / _TICK


def process_rss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ProcessLookupError(pid)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends (Linux), so that `children_cpu_s`
    includes all descendants.
    """
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0) != 0:  # PR_SET_CHILD_SUBREAPER
        raise OSError(ctypes.get_errno(), "cannot become a subreaper")


def children_cpu_s() -> float:
    """The CPU seconds of all descendants. Waits until those that still run have ended by
    themselves.
    """
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def median_of(measure: Callable[[], float], runs: int = 7, warm: int = 1) -> float:
    for _ in range(warm):
        measure()
    return statistics.median(measure() for _ in range(runs))


def judge(figure: float, bar: float, *, least: bool = False) -> str:
    """Whether a figure is at most its bar; with `least`, whether it is at least its bar."""
    return "ok" if (figure >= bar if least else figure <= bar) else "MISSED"


def record(what: str, figure: float, bar: float, unit: str, *, least: bool = False) -> str:
    """Judge a figure. If `bars.py` runs the benchmark, also hand it the figure and its bar."""
    verdict = judge(figure, bar, least=least)
    if file := os.environ.get(BARS_FILE):
        sign = ">=" if least else "<="
        with Path(file).open("a", encoding="utf-8") as bars:
            bars.write(json.dumps([what, figure, f"{sign} {bar:g}", unit, verdict]) + "\n")
    return verdict


@contextlib.contextmanager
def fresh_home() -> Iterator[dict[str, str]]:
    """An environment with its own state folder and no settings; its server is stopped at the
    end.
    """
    with tempfile.TemporaryDirectory(prefix="cavvy-bench-") as folder:
        Path(folder, "settings.toml").touch()
        env = {
            **os.environ,
            "CAVVY_HOME": f"{folder}/home",
            "CAVVY_CONFIG": f"{folder}/settings.toml",
        }
        os.environ.update(CAVVY_HOME=env["CAVVY_HOME"], CAVVY_CONFIG=env["CAVVY_CONFIG"])
        try:
            yield env
        finally:
            subprocess.run(
                [CAVVY, "down", "--all", "--yes"], env=env, capture_output=True, check=False
            )
            subprocess.run([CAVVY, "server", "stop"], env=env, capture_output=True, check=False)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table."""
    texts = [
        [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(columns, *texts, strict=True)]
    print(f"\n{title}")
    for line in [columns, ["-" * width for width in widths], *texts]:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )
