"""Tests are handed out so that servers are brought up once, and no process is left with a long
file at the end.
"""

import json
from pathlib import Path

import pytest
from tests import spread
from tests.spread import Watch, group_of, in_order, next_group


@pytest.mark.parametrize(
    ("file", "group"),
    [
        ("tests/system/test_kubernetes_jobs.py", "kubernetes"),
        ("tests/contract/test_provider_kubernetes.py", "kubernetes"),
        ("tests/unit/test_kubernetes_reading.py", "tests/unit/test_kubernetes_reading.py"),
        ("tests/contract/test_provider_ray.py", "ray"),
        ("tests/system/test_ray_jobs.py", "ray"),
        ("tests/system/test_gang_ray.py", "tests/system/test_gang_ray.py"),  # starts Ray itself
        ("tests/system/test_checkpoints_bucket.py", "storages"),
        ("tests/system/test_data_jobs.py", "storages"),
        ("tests/system/test_slurm_jobs.py", "tests/system/test_slurm_jobs.py"),
        ("tests/system/test_ssh_jobs.py", "tests/system/test_ssh_jobs.py"),
    ],
)
def test_files_that_share_servers_are_one_group(file: str, group: str) -> None:
    assert group_of(f"{file}::test_one[a::b]") == group


def test_long_groups_are_handed_out_before_short_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(spread, "SECONDS", tmp_path / "seconds.json")
    monkeypatch.setattr(spread, "BUILT", tmp_path / "bin")
    times = {
        "tests/system/test_b.py": 30,
        "tests/system/test_c.py": 90,
        "tests/unit/test_y.py": 20,
    }  # others are new
    spread.SECONDS.write_text(json.dumps(times))
    (tmp_path / "two.py").write_text("def test_a(): ...\nasync def test_b(): ...\n")
    names = [
        "ray",
        "storages",
        *(f"tests/system/test_{file}.py" for file in ("b", "c", "new")),
        *(f"tests/unit/test_{file}.py" for file in ("x", "y")),
    ]
    assert in_order({name: [tmp_path / "two.py"] for name in names}) == [
        "ray",
        *(f"tests/unit/test_{file}.py" for file in ("y", "x")),
        "storages",
        *(f"tests/system/test_{file}.py" for file in ("c", "b", "new")),
    ]


def test_kubernetes_goes_first_where_it_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(spread, "SECONDS", tmp_path / "none")
    names = ["tests/unit/test_a.py", "kubernetes"]
    for built, expected in ((tmp_path / "none", names), (tmp_path, names[::-1])):
        monkeypatch.setattr(spread, "BUILT", built)
        assert in_order({name: [] for name in names}) == expected


@pytest.mark.parametrize(
    ("waiting", "running", "expected"),
    [
        (["kubernetes", "b"], ["ray"], "kubernetes"),
        (["kubernetes", "b"], ["ray", "tests/system/test_slurm_jobs.py"], "b"),
        (["tests/system/test_slurm_jobs.py", "b"], ["ray", "kubernetes"], "b"),
        (["tests/system/test_gang_ray.py", "b"], ["ray", "kubernetes"], "b"),
        (["kubernetes"], ["ray", "tests/system/test_slurm_jobs.py"], "kubernetes"),
        (
            ["tests/unit/test_slurm_reading.py"],
            ["ray", "kubernetes"],
            "tests/unit/test_slurm_reading.py",
        ),
    ],
)
def test_no_more_than_two_heavy_groups_run_unless_only_heavy_ones_are_left(
    waiting: list[str], running: list[str], expected: str
) -> None:
    assert next_group(waiting, running, 2) == expected


PURE, TRAINED = "tests/unit/test_a.py", "tests/train/test_a.py"
SERVED, ATTACKED = "tests/system/test_a.py", "tests/hostile/test_a.py"


@pytest.mark.parametrize(
    ("waiting", "running", "expected"),
    [
        ([PURE, SERVED], [], PURE),
        ([SERVED, PURE], [TRAINED], PURE),
        ([SERVED, "tests/api/test_a.py"], [TRAINED], "tests/api/test_a.py"),
        ([PURE, SERVED], [TRAINED, "ray"], SERVED),
        ([PURE, "storages"], [TRAINED, "tests/sim/test_a.py"], "storages"),
        ([TRAINED, PURE], ["ray", "kubernetes"], TRAINED),  # nothing else is left
        ([SERVED, ATTACKED], [SERVED], SERVED),
        (["kubernetes", SERVED, PURE], ["ray", "kubernetes"], SERVED),
    ],
)
def test_as_many_groups_as_there_are_cores_keep_one_busy_beside_those_that_wait(
    waiting: list[str], running: list[str], expected: str
) -> None:
    assert next_group(waiting, running, 2) == expected


def test_what_was_measured_is_written_beside_what_was_known(tmp_path: Path) -> None:
    file = tmp_path / "seconds.json"
    file.write_text(json.dumps({"old": 9.0, "tests/unit/test_x.py": 50.0}))
    watch = Watch(file)
    for when, seconds in (("setup", 1.0), ("call", 3.25), ("teardown", 0.5)):
        watch.pytest_runtest_logreport(
            pytest.TestReport(
                nodeid="tests/unit/test_x.py::a",
                location=("", 0, ""),
                keywords={},
                outcome="passed",
                longrepr=None,
                when=when,
                duration=seconds,  # type: ignore[arg-type]  # one of three words
            )
        )
    watch.pytest_sessionfinish()
    assert json.loads(file.read_text()) == {"old": 9.0, "tests/unit/test_x.py": 4.8}
