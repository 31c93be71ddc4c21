"""Whether an agent that was lost with its work counts as a failure of the node or of the work."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from cavvy.agent import ends


def start(**changes: object) -> dict[str, Any]:
    config: Any = SimpleNamespace(
        home="/h", private="/p", taken=None, separates=False, covers=True, alone=False, kept="/k"
    )
    work: Any = SimpleNamespace(image=None)
    for name, value in changes.items():
        setattr(work if name == "image" else config, name, value)
    return dict(json.loads(ends.describe_start(config, work)))


def test_on_a_node_that_ran_on_the_work_is_to_blame() -> None:
    assert ends.judge_lost(json.dumps(start()))[:2] == ("exit", 137)


@pytest.mark.parametrize(
    "changes",
    [
        {"private": "/h"},
        {"taken": SimpleNamespace(unless=None)},
        {"separates": True},
        {"alone": True},
        {"image": "alpine"},
    ],
    ids=["batch system", "provider", "separated", "own processes", "container"],
)
def test_where_the_work_cannot_reach_its_agent_the_node_is_to_blame(changes: Any) -> None:
    assert ends.judge_lost(json.dumps(start(**changes)))[0] == "node"


@pytest.mark.parametrize(
    "changes", [{"boot": "earlier"}, {"oom_kills": -1}], ids=["boot", "memory"]
)
def test_after_a_restart_or_without_memory_the_node_is_to_blame(changes: Any) -> None:
    assert ends.judge_lost(json.dumps({**start(), **changes}))[0] == "node"


@pytest.mark.parametrize("record", ["", "[]", "{}", "x", '{"reachable": true, "boot": ""}'])
def test_a_record_of_an_older_agent_blames_the_node(record: str) -> None:
    assert ends.judge_lost(record)[0] == "node"


def test_on_a_machine_that_may_leave_the_work_is_to_blame() -> None:
    taken = SimpleNamespace(unless="/p/removing.json")
    assert ends.judge_lost(json.dumps(start(taken=taken)))[0] == "exit"
