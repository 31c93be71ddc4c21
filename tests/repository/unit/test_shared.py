"""Servers that tests share are up from the first of their group to its last."""

from types import SimpleNamespace
from typing import Any

import pytest
from tests.shared import GroupEnds, once_in_group, when_group_ends

KUBERNETES = (
    "tests/providers/kubernetes/contract/test_provider_kubernetes.py::a",
    "tests/system/test_kubernetes_x.py",
)


def tear_down(nodeid: str, following: str | None) -> None:
    """What pytest does after a test."""
    item: Any = SimpleNamespace(nodeid=nodeid)
    nextitem: Any = following and SimpleNamespace(nodeid=following)
    end = GroupEnds().pytest_runtest_teardown(item, nextitem)
    next(end)
    with pytest.raises(StopIteration):
        end.send(None)


def test_a_server_ends_after_the_last_test_of_its_group_and_can_be_started_again() -> None:
    said: list[str] = []

    @once_in_group
    def server() -> str:
        said.append("starts")
        when_group_ends(lambda: said.append("ends"))
        return "up"

    assert (server(), server()) == ("up", "up")
    tear_down(*KUBERNETES)
    assert said == ["starts"]
    tear_down(KUBERNETES[1], "tests/providers/hosts/system/test_ssh_jobs.py::a")
    assert said == ["starts", "ends"]
    server()
    tear_down(KUBERNETES[1], None)
    assert said == ["starts", "ends"] * 2


def test_a_start_that_is_skipped_is_not_tried_again_in_its_group() -> None:
    tries = []

    @once_in_group
    def server() -> None:
        tries.append(1)
        pytest.skip("there is no room")

    for _ in range(3):
        with pytest.raises(pytest.skip.Exception, match="no room"):
            server()
    assert len(tries) == 1
    tear_down("tests/providers/ray/contract/test_provider_ray.py::a", None)
