"""What makes a run fail although no test failed: tests skipped for lack of time, too many tests
that needed a further try, and internal errors.

A test with processes of its own may be tried again, because a busy machine disturbs it; a test
that needs it is a defect all the same. A run says how many there were, also where there were none,
lists them, writes them and the failed ones to a file as it goes, and fails when there are more than
ALLOWED of them.

An internal error in one of a run's processes fails the run, too: pytest-xdist itself goes on and
succeeds, or ends with another internal error. The last lines of the run are those of the first one.

Python 3.11 may raise SystemError when the source of a failure is parsed while the garbage collector
runs code that parses, too (github.com/python/cpython/issues/106905): a report is made without it.
"""

import gc
import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from tests.states import states_of

ALLOWED = 3
BROKEN_LINES = 20
_MOST_GROUP = 4000  # characters of the end of a group of errors
LATE = "skipped for lack of time"  # the name of the property that a report carries


class SkippedForTime(pytest.skip.Exception):
    """The test could run here, but a server or an installation was not ready in time."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    collects = gc.isenabled()
    gc.disable()
    try:
        report = yield
    finally:
        if collects:
            gc.enable()
    if call.excinfo is not None and isinstance(call.excinfo.value, SkippedForTime):
        report.user_properties.append((LATE, str(call.excinfo.value)))
    return report


class Verdict:
    """Counts both kinds over a run. It runs in the process that has all reports."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._reruns: dict[str, list[str]] = {}  # why each failed try failed
        self._late: dict[str, str] = {}
        self._failed: dict[str, None] = {}
        self._broken = ""  # the first internal error

    def faults(self) -> list[str]:
        """Why the run is not to be trusted, a sentence each."""
        told = []
        if self._broken:
            told.append("a process of it had an internal error")
        if len(self._reruns) > ALLOWED:
            told.append(f"{len(self._reruns)} tests needed a further try; at most {ALLOWED} may")
        if self._late:
            told.append(f"{len(self._late)} tests were skipped for lack of time")
        return told

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "rerun":  # type: ignore[comparison-overlap]  # of pytest-rerunfailures
            crash = getattr(report.longrepr, "reprcrash", None)
            why = str(crash.message if crash is not None else report.longrepr)
            # a group of errors names none of them in its message
            group = str(report.longrepr)[-_MOST_GROUP:] if "sub-exception" in why else ""
            whole = "\n".join([why[:500], *filter(None, [group]), *states_of(report)])
            self._reruns.setdefault(report.nodeid, []).append(whole)
        if report.failed:
            self._failed.setdefault(report.nodeid)
        for name, why in report.user_properties:
            if name == LATE:
                self._late[report.nodeid] = str(why)
        if report.outcome not in ("passed", "skipped"):
            self._write()

    def pytest_internalerror(self, excrepr: object) -> None:
        self._broken = self._broken or str(excrepr)
        self._write()

    def pytest_unconfigure(self) -> None:
        if self._broken:
            lines = self._broken.rstrip().splitlines()[-BROKEN_LINES:]
            print("the first internal error of this run:", *lines, sep="\n")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._write()
        if self.faults() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if os.environ.get("CAVVY_TEST_RERUNS", "0") != "0":
            told = f"{len(self._reruns)} tests were tried again; at most {ALLOWED} may be"
            terminalreporter.write_line(told, yellow=bool(self._reruns))
        for nodeid, why in self._reruns.items():
            terminalreporter.write_line(
                f"tried again {len(why)} times: {nodeid}: {why[0].splitlines()[0]}"
            )
        for nodeid, reason in self._late.items():
            terminalreporter.write_line(f"{LATE}: {nodeid}: {reason}")
        for fault in self.faults():
            terminalreporter.write_line(f"this run fails: {fault}", red=True)

    def _write(self) -> None:
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps(self._found(), indent=1) + "\n")

    def _found(self) -> dict[str, Any]:
        return {
            "allowed": ALLOWED,
            "internal_error": self._broken,
            "failed": list(self._failed),
            "reruns": [
                {"test": nodeid, "passed": nodeid not in self._failed, "failures": why}
                for nodeid, why in self._reruns.items()
            ],
            "skipped_for_time": [
                {"test": nodeid, "why": why} for nodeid, why in self._late.items()
            ],
        }
