"""A run fails for a test that was skipped for lack of time, and for more further tries than are
allowed.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.verdict import ALLOWED

ROOT = Path(__file__).resolve().parents[3]
CONFTEST = """
from pathlib import Path
from tests.sent_reports import pytest_report_to_serializable
from tests.states import StateReport
from tests.verdict import Verdict, pytest_runtest_makereport

def pytest_configure(config):
    config.pluginmanager.register(StateReport())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Verdict(Path("reruns.json")))
"""
FLAKY = """
import os
import pytest

@pytest.mark.flaky(reruns=2)
@pytest.mark.parametrize("number", range({count}))
def test_one(number):
    os.open(f"tried{{number}}", os.O_CREAT)
    left = f"again{{number}}"
    if not os.path.exists(left):
        open(left, "x").close()
        raise AssertionError("a busy machine")
"""
GROUP = """
import os
import pytest

@pytest.mark.flaky(reruns=1)
def test_one():
    if not os.path.exists("again"):
        open("again", "x").close()
        raise ExceptionGroup("two faults", [ValueError("the one"), ValueError("the other")])
"""
LATE = """
from tests.verdict import SkippedForTime

def test_one():
    raise SkippedForTime("no server after 600 s")
"""
SKIPPED = """
import pytest

def test_one():
    pytest.skip("this machine has no engine")
"""
BROKEN = """
import pytest

def test_one(request):
    class Breaks:
        def pytest_runtest_logreport(self, report):
            raise OSError("the cause")
    request.config.pluginmanager.register(Breaks())

def test_two():
    pass
"""
HALF = """
import logging
import pytest

def test_one():
    logging.getLogger("one").error("a log \\udc80")
    raise ValueError("an error \\udc81")

def test_two():
    pytest.skip("a skip \\udc82")
"""
COLLECTS = """
import gc

class Told(Exception):
    def __str__(self):
        return f"collects in its report: {gc.isenabled()}"

def test_one():
    raise Told

def test_two():
    assert gc.isenabled(), "never again"
"""
STATES = """
import pytest

class Servers:
    def __init__(self, text):
        self.text = text
    def tell_state(self):
        assert self.text, "no server answers"
        return self.text

@pytest.fixture
def servers():
    return Servers("a node is not ready")

@pytest.fixture
def dead():
    return Servers("")

@pytest.mark.flaky(reruns=1)
def test_one(servers, dead, tmp_path):
    assert "ready" == "not ready"

def test_two(servers):
    pass

def test_three(servers):
    pytest.skip("no")
"""


def run(
    folder: Path, text: str, *arguments: str
) -> tuple[int, str, dict[str, list[dict[str, object]]]]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(folder)]
    command += ["-p", "xdist", "-p", "pytest_rerunfailures"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", *arguments, "."],
        cwd=folder,
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "CAVVY_TEST_RERUNS": "2",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, json.loads((folder / "reruns.json").read_text())


@pytest.mark.parametrize(("count", "code"), [(ALLOWED, 0), (ALLOWED + 1, 1)])
def test_more_tests_that_were_tried_again_than_allowed_fail_the_run(
    count: int, code: int, tmp_path: Path
) -> None:
    returned, said, found = run(tmp_path, FLAKY.format(count=count), "-n", "2")
    assert returned == code, said
    assert len(found["reruns"]) == count
    assert found["reruns"][0]["passed"] is True
    assert "a busy machine" in str(found["reruns"][0]["failures"])
    assert said.count("tried again 1 times") == count
    assert f"{count} tests were tried again; at most {ALLOWED} may be" in said
    assert ("this run fails" in said) is (code == 1)


def test_a_test_that_is_tried_again_names_each_of_its_errors(tmp_path: Path) -> None:
    _, said, found = run(tmp_path, GROUP)
    (tries,) = [str(each["failures"]) for each in found["reruns"]]
    assert "ValueError: the one" in tries, said
    assert "ValueError: the other" in tries, said


def test_a_skip_for_lack_of_time_fails_the_run(tmp_path: Path) -> None:
    returned, said, found = run(tmp_path, LATE)
    assert returned == 1, said
    assert "1 tests were skipped for lack of time" in said
    assert found["skipped_for_time"] == [
        {"test": "test_it.py::test_one", "why": "no server after 600 s"}
    ]


def test_a_skip_of_what_this_machine_lacks_does_not(tmp_path: Path) -> None:
    returned, said, found = run(tmp_path, SKIPPED)
    assert returned == 0, said
    assert found["skipped_for_time"] == []
    assert "0 tests were tried again" in said


def test_a_run_ends_with_the_first_internal_error_of_its_processes(tmp_path: Path) -> None:
    returned, said, found = run(tmp_path, BROKEN, "-n", "2")
    assert returned != 0, said
    last = said[said.index("the first internal error of this run:") :]
    assert "OSError: the cause" in last
    assert "OSError: the cause" in str(found["internal_error"])


def test_a_test_that_fails_shows_the_state_of_its_servers(tmp_path: Path) -> None:
    returned, said, found = run(tmp_path, STATES, "-n", "2")
    assert returned == 1, said
    assert said.count("a node is not ready") == 1, said
    assert "it cannot be told: AssertionError" in said
    (tries,) = [each["failures"] for each in found["reruns"]]
    assert "a node is not ready" in str(tries)


def test_no_garbage_is_collected_while_a_report_is_made(tmp_path: Path) -> None:
    _, said, _ = run(tmp_path, COLLECTS)
    assert "collects in its report: False" in said
    assert "1 failed, 1 passed" in said


def test_reports_with_halves_of_surrogate_pairs_are_sent(tmp_path: Path) -> None:
    returned, said, _ = run(tmp_path, HALF, "-n", "2", "-rs")
    assert returned == 1, said
    assert "1 failed, 1 skipped" in said
    for text in ("a log \\udc80", "an error \\udc81", "a skip \\udc82"):
        assert text in said
