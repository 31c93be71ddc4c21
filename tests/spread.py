"""Which process gets which tests: what uses the same servers together, what takes longest first,
and what keeps a core busy beside what waits.

`tests/seconds.json` says how long each group of tests took when it was last measured; it is written
anew by `CAVVY_TEST_SECONDS=tests/seconds.json make test`, and need not be exact. A run's summary
says how even it was.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

REAL_SERVERS = ("tests/system/", "tests/contract/test_provider_", "tests/api/")
# What waits for processes for most of its time; other tests compute.
WAITING = (
    *("tests/system/", "tests/hostile/"),
    *(f"tests/contract/test_provider_{name}" for name in ("join", "pbs", "slurm", "ssh")),
)
# Files of real servers with one of these in their names use some that are brought up once, and stay
# in one process.
SHARED_SERVERS = {
    "ray": ("_provider_ray", "test_ray_"),
    "storages": ("_data_", "_bucket"),
    "images": ("_image", "_container"),  # one engine, and images of one name in it
    "kubernetes": ("_kubernetes",),
}
# Groups whose servers keep a core busy by themselves: no more than HEAVY_AT_ONCE run side by side.
HEAVY = ("ray", "kubernetes")
HEAVY_FILES = ("_slurm", "_gang_ray")  # such files outside of these groups have this in their names
HEAVY_AT_ONCE = 2
SECONDS = Path(__file__).with_name("seconds.json")
BUILT = Path("~/.cache/cavvy/kubernetes-1.20.2/bin").expanduser()
SERVED_S, PURE_S = (
    5.0,
    0.1,
)  # what a test is taken for, with a real server and without, in a group that is not noted


def group_of(nodeid: str) -> str:
    """The group of a test: its file, or the servers that its file shares with others."""
    file = nodeid.split("::", 1)[0]
    name = file.rsplit("/", 1)[-1]
    if file.startswith(REAL_SERVERS):
        for group, marks in SHARED_SERVERS.items():
            if any(mark in name for mark in marks):
                return group
    return file


def put_in_order(items: list[pytest.Item]) -> None:
    """What is to be handed out first goes first.

    First the long groups of Ray, which is installed soon, and of Kubernetes where it is built
    already, beside what needs no server. Then other groups that share servers, then files with
    servers of their own, each the longest first: a process that is done early takes the next short
    one.
    """
    seconds = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    for group, count in Counter(group_of(item.nodeid) for item in items).items():
        seconds.setdefault(group, count * (SERVED_S if group.startswith(REAL_SERVERS) else PURE_S))

    soon = {"ray", "kubernetes"} if BUILT.exists() else {"ray"}

    def place(item: pytest.Item) -> tuple[int, float, str]:
        group = group_of(item.nodeid)
        if group in SHARED_SERVERS:
            return 0 if group in soon else 2, -seconds[group], group
        return 3 if group.startswith(REAL_SERVERS) else 1, -seconds[group], group

    items.sort(key=place)


def is_heavy(group: str) -> bool:
    in_file = group.startswith(REAL_SERVERS) and any(mark in group for mark in HEAVY_FILES)
    return group in HEAVY or in_file


def is_busy(group: str) -> bool:
    """Whether it takes a core for most of its time. What waits does so for four fifths of it."""
    return is_heavy(group) or (not group.startswith(WAITING) and group not in SHARED_SERVERS)


def next_group(waiting: Iterable[str], running: Iterable[str], cores: int) -> str:
    """The first group that fits beside those that run: a busy one while fewer of them run than
    there are cores, otherwise one that waits, and no heavy one while enough of these run. Where
    none fits, the first light one, or else the first.
    """
    waiting, running = list(waiting), list(running)
    full = sum(map(is_heavy, running)) >= HEAVY_AT_ONCE
    light = [group for group in waiting if not (full and is_heavy(group))]
    wanted = sum(map(is_busy, running)) < cores
    fitting = (group for group in light if is_busy(group) == wanted)
    return next(fitting, light[0] if light else waiting[0])


class InOrder(LoadScopeScheduling):
    """Hands out whole groups in the order in which they were put, but for those that have to wait
    until fewer of their kind run.
    """

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = (
            False  # by the number of tests, which says nothing of their length
        )
        super().__init__(config, log)

    def _assign_work_unit(self, node: Any) -> None:
        running = [
            group
            for work in self.assigned_work.values()
            for group, done in work.items()
            if not all(done.values())
        ]
        chosen = next_group(self.workqueue, running, os.cpu_count() or 1)
        self.workqueue.move_to_end(chosen, last=False)
        super()._assign_work_unit(node)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


class Watch:
    """Adds up how long each process and each group took, tells it at the end, and writes it
    where that is asked for.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._processes: Counter[str] = Counter()
        self._groups: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._processes[getattr(report, "worker_id", "")] += report.duration  # type: ignore[assignment]  # no int
        self._groups[group_of(report.nodeid)] += report.duration  # type: ignore[assignment]  # as above

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self._processes) > 1:
            told = ", ".join(
                f"{name} {seconds:,.0f} s" for name, seconds in sorted(self._processes.items())
            )
            longest = ", ".join(
                f"{group} {seconds:,.0f} s" for group, seconds in self._groups.most_common(8)
            )
            terminalreporter.write_line(f"tests of each process: {told}; longest: {longest}")

    def pytest_sessionfinish(self) -> None:
        if self._file is not None:
            known = json.loads(self._file.read_text()) if self._file.exists() else {}
            known |= {group: round(seconds, 1) for group, seconds in self._groups.items()}
            kept = {
                name: known[name]
                for name in sorted(known)
                if name in SHARED_SERVERS or group_of(name) == name
            }
            self._file.write_text(json.dumps(kept, indent=0) + "\n")
