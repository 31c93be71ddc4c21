"""Each process of a run collects only the groups that it runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
from tests.groups import ByGroup
from tests.spread import InOrder

def pytest_configure(config):
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(ByGroup())

def pytest_xdist_make_scheduler(config, log):
    return InOrder(config, log)
"""
NOTED = "import os\nprint(os.getpid(), file=open('read', 'a'))\n"


def run(folder: Path, files: dict[str, str], *arguments: str) -> tuple[int, str]:
    """The status and output of a run in two processes."""
    for name, text in {"conftest.py": CONFTEST, **files}.items():
        (folder / name).write_text(text)
    # a run that knows that it is a CI's repeats whole messages in its summary
    kept = {name: value for name, value in os.environ.items() if name not in ("CI", "BUILD_NUMBER")}
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "pytest_timeout", "-rA"]
    ran = subprocess.run(
        [*command, "-n", "2", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    return ran.returncode, ran.stdout + ran.stderr


def test_each_file_is_read_once_and_each_test_runs(tmp_path: Path) -> None:
    cases = "import pytest\n@pytest.mark.parametrize('n', range(3))\ndef test_it(n): ...\n"
    files = {f"test_{number}.py": NOTED + cases for number in range(5)}
    files["test_skips.py"] = "import pytest\npytest.skip('not here', allow_module_level=True)\n"
    status, output = run(tmp_path, files)
    assert status == 0, output
    assert output.count("\nPASSED ") == 15
    assert "15 passed, 1 skipped" in output
    assert "[100%]" in output
    assert len((tmp_path / "read").read_text().split()) == 5


@pytest.mark.parametrize(
    ("arguments", "status", "passed"),
    [
        (["-k", "test_b"], 0, 2),
        (["test_1.py::test_a", "test_2.py::test_b"], 0, 2),
        (["-k", "test_none"], 5, 0),
    ],
)
def test_what_was_asked_for_runs(
    tmp_path: Path, arguments: list[str], status: int, passed: int
) -> None:
    files = dict.fromkeys(("test_1.py", "test_2.py"), "def test_a(): ...\ndef test_b(): ...\n")
    ran, output = run(tmp_path, files, *arguments)
    assert (ran, output.count("\nPASSED ")) == (status, passed), output


def test_what_cannot_be_read_and_what_ends_its_process_fail_the_run(tmp_path: Path) -> None:
    """The group of a test that ends its process is not begun again; other groups run."""
    crash = "import os\ndef test_first(): ...\ndef test_ends(): os._exit(3)\ndef test_last(): ...\n"
    files = {
        "test_1.py": "import there_is_no_such_module\n",
        "test_2.py": crash,
        "test_3.py": "def test_it(): ...\n",
        "test_4.py": "def test_it(): assert 0\n",
    }
    status, output = run(tmp_path, files)
    assert status == 1, output
    assert "ERROR test_1.py" in output
    assert output.count("' crashed while running 'test_2.py', in test_2.py::test_ends") == 1
    assert "PASSED test_3.py::test_it" in output
    assert "FAILED test_4.py::test_it" in output
    assert "2 failed, 2 passed, 1 error" in output


def test_what_a_group_shares_ends_with_it(tmp_path: Path) -> None:
    shares = """
import os
from tests.shared import when_group_ends
def note(word):
    print(f"{word}-{os.getpid()}", file=open("noted", "a"))
def test_first(): when_group_ends(lambda: note("ends"))
def test_second(): note("runs")
"""
    conftest = CONFTEST.replace(
        "import ByGroup", "import ByGroup\nfrom tests.shared import GroupEnds"
    )
    always = "def pytest_configure(config):\n"
    ends = f"{always}    config.pluginmanager.register(GroupEnds())\n"
    files = {f"test_{number}.py": shares for number in range(6)}
    status, output = run(tmp_path, {**files, "conftest.py": conftest.replace(always, ends)})
    assert status == 0, output
    noted = (tmp_path / "noted").read_text().split()
    for process in {each.partition("-")[2] for each in noted}:
        words = [each.partition("-")[0] for each in noted if each.endswith(f"-{process}")]
        assert words == ["runs", "ends"] * (len(words) // 2)


def test_a_fixture_of_the_session_lives_in_all_groups_of_a_process(tmp_path: Path) -> None:
    fixture = (
        "import os, pytest\n"
        "@pytest.fixture(scope='session', autouse=True)\n"
        "def noted():\n"
        "    yield\n"
        "    print(os.getpid(), file=open('ended', 'a'))\n"
    )
    files = {f"test_{number}.py": "def test_it(): ...\n" for number in range(6)}
    status, output = run(tmp_path, {**files, "conftest.py": CONFTEST + fixture})
    assert status == 0, output
    ended = (tmp_path / "ended").read_text().split()
    assert len(ended) == len(set(ended)) <= 2
