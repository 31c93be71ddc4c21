"""Which process gets which tests: what uses the same servers together, what takes longest first,
and what keeps a core busy beside what waits.

`tests/seconds.json` says how long each group of tests took when it was last measured; it is written
anew by `CAVVY_TEST_SECONDS=tests/seconds.json make test`, and need not be exact. A run's summary
says how even it was.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
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


def end_of(group: str) -> str:
    """The item that stands for the end of a group."""
    return f"{group}::end"


def in_order(groups: Mapping[str, Iterable[Path]]) -> list[str]:
    """The groups, given with their files, in the order in which they are to be handed out.

    First the long groups of Ray, which is installed soon, and of Kubernetes where it is built
    already, beside what needs no server. Then other groups that share servers, then files with
    servers of their own, each the longest first: a process that is done early takes the next short
    one.
    """
    seconds = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    for group, files in groups.items():
        if group not in seconds:
            count = sum(file.read_text(encoding="utf-8").count("def test_") for file in files)
            seconds[group] = count * (SERVED_S if group.startswith(REAL_SERVERS) else PURE_S)

    soon = {"ray", "kubernetes"} if BUILT.exists() else {"ray"}

    def place(group: str) -> tuple[int, float, str]:
        if group in SHARED_SERVERS:
            return 0 if group in soon else 2, -seconds[group], group
        return 3 if group.startswith(REAL_SERVERS) else 1, -seconds[group], group

    return sorted(groups, key=place)


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

    A process says of a group that it is complete, not how many tests it had (`tests/groups.py`), so
    the percentages of the run are of the groups' expected time.
    """

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = (
            False  # by the number of tests, which says nothing of their length
        )
        super().__init__(config, log)
        self._session: Any = config.pluginmanager.get_plugin("session")
        self._known: dict[str, float] = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
        self._begun: dict[str, str] = {}  # by group, the test that began last
        self._reported: set[str] = set()
        self._whole_s = self._done_s = 0.0
        config.pluginmanager.register(self)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._begun[group_of(nodeid)] = nodeid

    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        test = self._begun.get(crashitem)
        if test is not None:
            report.nodeid = test
            report.longrepr = f"{report.longrepr}, in {test}; what follows in the group did not run"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call":
            self._reported.add(report.nodeid)
            self._tell_progress()

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        name = self.registered_collections[node][item_index]
        self._done_s += self._known.get(name, 0.0)
        super().mark_test_complete(node, item_index, duration)
        self._tell_progress()

    def _tell_progress(self) -> None:
        """Make pytest expect as many tests as there are if the other groups have as many an hour."""
        count = len(self._reported)
        if self.tests_finished:
            self._session.testscollected = count
            return
        if not self._whole_s:
            self._whole_s = sum(self._known.get(name, 0.0) for name in self.collection or ())
        share = self._done_s / self._whole_s if self._whole_s else 0.0
        self._session.testscollected = max(round(count / max(share, 0.001)), count + 1)

    def remove_node(self, node: Any) -> str | None:
        """A group whose process crashed is not begun again: it would end the next process, too. Nor
        are those that were complete: a process that got one would wait for ever, with nothing to run.
        """
        left = [work for work in self.assigned_work.pop(node).items() if not all(work[1].values())]
        if not left:
            return None
        (_, crashed), *others = left
        self.workqueue.update(others)
        for each in self.assigned_work:
            self._reschedule(each)
        return next(item for item, done in crashed.items() if not done)

    def _reschedule(self, node: Any) -> None:
        if node not in self.registered_collections:
            return  # it takes the place of one that crashed, and has not begun yet
        # a process that runs a group waits in its second item until it gets the next one
        if not self.workqueue or self._pending_of(self.assigned_work[node]) <= 1:
            super()._reschedule(node)

    def _assign_work_unit(self, node: Any) -> None:
        running = [
            group
            for work in self.assigned_work.values()
            for group, done in work.items()
            if not done.get(group, True)
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
