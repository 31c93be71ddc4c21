"""Tests are handed out so that servers are brought up once, and no process is left with a long
file at the end.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests import spread
from tests.spread import Watch, group_of, leaves_out, noted_seconds

ROOT = Path(__file__).resolve().parents[3]
CONFTEST = """
from tests import spread
from tests.shared import GroupEnds

spread.SECONDS = spread.Path(__file__).with_name("seconds.json")

def pytest_configure(config):
    config.addinivalue_line("markers", "system: needs real servers")
    config.pluginmanager.register(GroupEnds())

import pytest
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    spread.arrange(items)

def pytest_runtest_setup(item):
    spread.check_read(item)

def pytest_xdist_make_scheduler(config, log):
    return spread.ByGroup(config, log)
"""


def run(folder: Path, files: dict[str, str], *arguments: str) -> str:
    """The output of a run in two processes."""
    for name, text in {"conftest.py": CONFTEST, **files}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "pytest_timeout", "-rA"]
    command += [
        "-n",
        "2",
        "--dist",
        "loadgroup",
        "--no-loadscope-reorder",
        "-p",
        "no:cacheprovider",
    ]
    ran = subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.parametrize(
    ("file", "group"),
    [
        ("tests/providers/kubernetes/system/test_kubernetes_jobs.py", "kubernetes"),
        ("tests/providers/kubernetes/contract/test_provider_kubernetes.py", "kubernetes"),
        ("tests/providers/kubernetes/unit/test_kubernetes_reading.py", "test_kubernetes_reading"),
        ("tests/providers/ray/contract/test_provider_ray.py", "ray"),
        ("tests/providers/ray/system/test_ray_jobs.py", "ray"),
        ("tests/providers/ray/system/test_gang_ray.py", "test_gang_ray"),  # starts Ray itself
        ("tests/agent/system/test_checkpoints_bucket.py", "storages"),
        ("tests/agent/system/test_data_jobs.py", "storages"),
        ("tests/providers/batch/system/test_slurm_jobs.py", "slurm"),
        ("tests/providers/hosts/system/test_ssh_jobs.py", "test_ssh_jobs"),
    ],
)
def test_files_that_share_servers_are_one_group(file: str, group: str) -> None:
    assert group_of(f"{file}::test_one[a::b]") == group


def test_the_longest_group_goes_first_and_a_file_stays_in_one_process(tmp_path: Path) -> None:
    noted = "import os\n" + "".join(
        f"def test_{name}(): print(os.getpid(), __file__, file=open('noted', 'a'))\n"
        for name in "zab"
    )
    files = {f"test_{number}.py": noted for number in range(6)}
    files["seconds.json"] = json.dumps({f"test_{number}": number for number in range(6)})
    said = run(tmp_path, files)
    assert "18 passed" in said
    lines = [each.split() for each in (tmp_path / "noted").read_text().splitlines()]
    assert len({(process, file) for process, file in lines}) == 6
    first = {file.rsplit("/", 1)[-1] for _, file in lines[:2]}
    assert first <= {"test_5.py", "test_4.py"}


def test_every_note_is_of_a_group_and_all_servers_that_files_share_are_noted() -> None:
    """Files that become a group have no note under its name; without one, hundreds of seconds
    started last.
    """
    groups = {
        group_of(path.relative_to(ROOT).as_posix()) for path in ROOT.glob("tests/**/test_*.py")
    }
    assert noted_seconds().keys() - groups == set()
    assert set(spread.SHARED_SERVERS) - noted_seconds().keys() == set()


def test_a_new_file_goes_before_what_is_known_to_be_short(tmp_path: Path) -> None:
    noted = "def test_it(): print(__file__, file=open('noted', 'a'))\n"
    files = {f"test_{name}.py": noted for name in ("long", "new", "short")}
    files["seconds.json"] = json.dumps({"test_long": 200, "test_short": 5})
    run(tmp_path, files, "-n", "0")
    lines = (tmp_path / "noted").read_text().split()
    assert [Path(each).stem for each in lines] == ["test_long", "test_new", "test_short"]


def test_each_test_belongs_to_one_of_both_runs(tmp_path: Path) -> None:
    empty = "def test_it(): ...\n"
    cases = (
        "import pytest\n@pytest.mark.parametrize('s', ('sqlite', 'postgres'))\ndef test_s(s): ...\n"
    )
    files = {
        **{f"{level}/test_{level}.py": empty for level in ("unit", "sim", "system", "hostile")},
        "contract/test_provider_slurm.py": f"import pytest\n@pytest.mark.system\n{empty}",
        "contract/test_store_jobs.py": cases,
    }
    without, with_servers = (run(tmp_path, files, "-m", mark) for mark in ("not system", "system"))
    assert "3 passed" in without
    assert "4 passed" in with_servers
    assert {each for each in ("test_s[sqlite]", "test_unit", "test_sim") if each in without} == {
        "test_s[sqlite]",
        "test_unit",
        "test_sim",
    }


@pytest.mark.parametrize(
    ("file", "text", "marks", "left_out"),
    [
        ("system", None, "not system", True),
        ("unit", None, "not system", False),
        ("unit", None, "system", False),
        ("unit/test_a.py", "def test_it(): ...", "system", True),
        ("unit/test_a.py", "def test_it(): ...", "not system", False),
        ("unit/test_a.py", "@pytest.mark.system", "system", False),
        ("contract/test_a.py", "def test_it(): ...", "system", True),
        ("contract/test_a.py", "params=('sqlite', 'postgres')", "system", False),
        ("api/test_a.py", "def test_it(api): ...", "system", False),
        ("system/test_a.py", "def test_it(): ...", "system", False),
        ("unit/test_a.py", "def test_it(): ...", "", False),
    ],
)
def test_a_run_reads_only_files_that_may_have_its_tests(
    file: str, text: str | None, marks: str, left_out: bool, tmp_path: Path
) -> None:
    path = tmp_path / file
    if text is None:
        path.mkdir()
    else:
        path.parent.mkdir()
        path.write_text(text)
    assert leaves_out(path, marks) is left_out


def test_a_test_of_servers_in_a_file_that_their_run_leaves_out_fails(tmp_path: Path) -> None:
    """It fails in the run without servers, which would deselect it otherwise."""
    cases = "import pytest\ndef pytest_generate_tests(metafunc):\n"
    cases += "    metafunc.parametrize('s', ('sqlite', 'post' + 'gres'))\ndef test_it(s): ...\n"
    with pytest.raises(AssertionError) as failed:
        run(tmp_path, {"contract/test_a.py": cases}, "-m", "not system")
    assert "test_a.py needs servers: write @pytest.mark.system" in str(failed.value)
    assert "1 passed, 1 error" in str(failed.value)


def test_what_a_group_shares_ends_with_it(tmp_path: Path) -> None:
    shares = """
import os
from tests.shared import when_group_ends
def note(word):
    print(f"{word}-{os.getpid()}", file=open("noted", "a"))
def test_first(): when_group_ends(lambda: note("ends"))
def test_second(): note("runs")
"""
    run(tmp_path, {f"test_{number}.py": shares for number in range(6)})
    noted = (tmp_path / "noted").read_text().split()
    for process in {each.partition("-")[2] for each in noted}:
        words = [each.partition("-")[0] for each in noted if each.endswith(f"-{process}")]
        assert words == ["runs", "ends"] * (len(words) // 2)


def test_what_was_measured_is_written_beside_what_was_known(tmp_path: Path) -> None:
    file = tmp_path / "seconds.json"
    file.write_text(json.dumps({"old": 9.0, "test_x": 50.0}))
    watch = Watch(file)
    for when, seconds in (("setup", 1.0), ("call", 3.25), ("teardown", 0.5)):
        watch.pytest_runtest_logreport(made_report("test_x", when, seconds))
    watch.pytest_sessionfinish()
    assert json.loads(file.read_text()) == {"old": 9.0, "test_x": 4.8}


def test_a_run_names_the_groups_that_took_much_longer_than_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spread, "SECONDS", tmp_path / "seconds.json")
    spread.SECONDS.write_text(
        json.dumps({"test_slow": 34.0, "test_long": 300.0, "test_short": 1.0})
    )
    watch = Watch(None)
    took = {"test_slow": 379.0, "test_long": 400.0, "test_short": 50.0, "test_new": 460.0}
    for name, seconds in took.items():
        watch.pytest_runtest_logreport(made_report(name, "call", seconds))
    assert watch.started_late() == [
        ("test_slow", 379.0, 34.0),
        ("test_new", 460.0, spread.NEW_S),
    ]


def made_report(file: str, when: str, seconds: float) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=f"tests/unit/{file}.py::a",
        location=("", 0, ""),
        keywords={},
        outcome="passed",
        longrepr=None,
        when=when,  # type: ignore[arg-type]  # one of three words
        duration=seconds,
    )
