"""Tests are handed out so that servers are brought up once, and no process is left with a long
file at the end.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests import spread
from tests.spread import InOrder, Watch, end_of, group_of, in_order, next_group


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


def test_after_a_crash_what_was_complete_is_not_handed_out_again() -> None:
    """A process that gets a group without anything to run has no more to say, and waits."""

    class Process(SimpleNamespace):
        shutting_down = False
        __hash__ = object.__hash__

        def send_runtest_some(self, items: list[int]) -> None:
            self.got += items

    plugins = SimpleNamespace(get_plugin=lambda _: SimpleNamespace(), register=lambda _: None)
    config: Any = SimpleNamespace(
        option=SimpleNamespace(), pluginmanager=plugins, getvalue=lambda _: ["2*popen"]
    )
    order, processes = (
        InOrder(config, None),
        [Process(got=[], gateway=SimpleNamespace(id=n)) for n in "ab"],
    )
    items = [each for n in range(6) for each in (f"g{n}", end_of(f"g{n}"))]
    for each in processes:
        order.add_node(each)  # type: ignore[arg-type]  # what it uses of one
        order.add_node_collection(each, items)  # type: ignore[arg-type]
    order.schedule()
    crashes, other = processes
    for item in (0, 1, 4, 5):
        order.mark_test_complete(crashes, item)
    assert (crashes.got, other.got) == ([0, 1, 4, 5, 6, 7], [2, 3])
    order.mark_test_complete(crashes, 6)
    assert crashes.got[6:] == [8, 9]
    order.mark_test_complete(crashes, 7)
    assert order.remove_node(crashes) == "g4"  # type: ignore[arg-type]
    assert list(order.workqueue) == ["g5"]
    order.mark_test_complete(other, 2)
    assert other.got == [2, 3, 10, 11]


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
