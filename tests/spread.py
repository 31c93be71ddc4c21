"""Which tests need real servers, which share them, and in which order a run takes its tests.

Plain pytest and pytest-xdist run them. All tests of a group go to one process: a group is a file,
or the files that use servers which are brought up once. The longest groups go first, so that no
process is left with one at the end. `tests/seconds.json` says how long each took; it is written
anew by `CAVVY_TEST_SECONDS=tests/seconds.json make test`, and need not be exact.

`--dist loadgroup` would say the same by marks, but pytest-xdist 3.8 adds a group to a test's name by
an attribute that pytest 9 no longer reads.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# The folders of tests that start servers, agents and jobs as processes of their own, or attack them.
PROCESSES = ("system", "hostile")
# The folders most of whose tests need no servers, and what a file says of which some do: the mark,
# or a fixture with a case for PostgreSQL.
ALONE = dict.fromkeys(("unit", "sim", "torch"), ("mark.system",))
SERVER_WORDS = {**ALONE, "contract": ("mark.system", "postgres", "store: Store", "api: Api")}
# Files of real servers with one of these in their names use some that are brought up once, and stay
# in one process.
SHARED_SERVERS = {
    "ray": ("_provider_ray", "test_ray_"),
    "storages": ("_data_", "_bucket"),
    "images": ("_image", "_container"),  # one engine, and images of one name in it
    "kubernetes": ("_kubernetes",),
    "slurm": ("_slurm",),
}
SECONDS = Path(__file__).with_name("seconds.json")
# What a group that is not noted is taken for. A short one that starts early costs nothing; a long one
# that starts at the end leaves the other processes idle.
NEW_S = 100.0
# A run names the groups that took as long as this, and so many times as long as noted.
LONG_S, TIMES = 60.0, 3


def noted_seconds() -> dict[str, float]:
    """How long each group took when it was last measured."""
    noted: dict[str, float] = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    return noted


def needs_servers(item: pytest.Item) -> bool:
    """Whether a test belongs to `make test-servers`, not to `make test`: by its mark, by its folder,
    or since one of its cases is PostgreSQL.
    """
    level, marked = level_of(item.nodeid), item.get_closest_marker("system") is not None
    return marked or level in PROCESSES or (level not in ALONE and "postgres" in item.nodeid)


def leaves_out(path: Path, marks: str) -> bool:
    """Whether a run of the tests with these marks need not read a folder or a file. Each process
    of a run imports all files that it reads, with what they import.
    """
    if marks == "not system":
        return path.name in PROCESSES and path.is_dir()
    if marks != "system" or path.suffix != ".py":
        return False
    words = SERVER_WORDS.get(path.parent.name, ())
    return bool(words) and not any(word in path.read_text() for word in words)


def level_of(nodeid: str) -> str:
    """The folder of a test's file, such as unit, contract or system."""
    folders = nodeid.split("::", 1)[0].split("/")[:-1]
    return folders[-1] if folders else ""


def group_of(nodeid: str) -> str:
    """The group of a test: the name of its file, or the servers that its file shares with others."""
    name = nodeid.split("::", 1)[0].rsplit("/", 1)[-1]
    if level_of(nodeid) in ("system", "api") or name.startswith("test_provider_"):
        for group, marks in SHARED_SERVERS.items():
            if any(mark in name for mark in marks):
                return group
    return name.removesuffix(".py")


def check_read(item: pytest.Item) -> None:
    """Fail a test that needs servers, and whose file the run of such tests would not read."""
    if needs_servers(item) and leaves_out(item.path, "system"):
        pytest.fail(f"{item.path.name} needs servers: write @pytest.mark.system", pytrace=False)


def arrange(items: list[pytest.Item]) -> None:
    """Mark with `system` what needs servers; the longest group goes first, and a file's tests stay
    in their order.
    """
    known = noted_seconds()
    groups = {item: group_of(item.nodeid) for item in items}
    for item in items:
        if needs_servers(item) and not leaves_out(item.path, "system"):
            item.add_marker(pytest.mark.system)
    items.sort(key=lambda item: (-known.get(groups[item], NEW_S), groups[item]))


class ByGroup(LoadScopeScheduling):
    """Gives the groups to the processes in the order of the tests."""

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
        seconds: Any = report.duration  # a Counter's values are typed as whole numbers
        self._processes[getattr(report, "worker_id", "")] += seconds
        self._groups[group_of(report.nodeid)] += seconds

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self._processes) > 1:
            told = ", ".join(
                f"{name} {seconds:,.0f} s" for name, seconds in sorted(self._processes.items())
            )
            longest = ", ".join(
                f"{group} {seconds:,.0f} s" for group, seconds in self._groups.most_common(8)
            )
            terminalreporter.write_line(f"tests of each process: {told}; longest: {longest}")
        for group, seconds, noted in self.started_late():
            terminalreporter.write_line(
                f"{group} took {seconds:,.0f} s and is noted with {noted:,.0f} s, so it may have started "
                f"too late: note it in {SECONDS.name}"
            )

    def started_late(self) -> list[tuple[str, float, float]]:
        """The groups that took much longer than noted, with both."""
        noted = noted_seconds()
        found = ((name, took, noted.get(name, NEW_S)) for name, took in self._groups.items())
        return [each for each in found if each[1] > max(LONG_S, TIMES * each[2])]

    def pytest_sessionfinish(self) -> None:
        if self._file is not None:
            known = json.loads(self._file.read_text()) if self._file.exists() else {}
            known |= {group: round(seconds, 1) for group, seconds in self._groups.items()}
            self._file.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")
