"""The key `topology`, and what is wrong with one."""

import pytest

from cavvy.domain.tasks import TopologyNeed
from cavvy.spec import SpecError
from cavvy.spec.describe import describe_task
from cavvy.task_files import parse_task


@pytest.mark.parametrize(
    ("text", "need", "told"),
    [
        ("{same: rack}", TopologyNeed(same="rack"), "in one rack"),
        ("{prefer: rack}", TopologyNeed(prefer="rack"), "in one rack if possible"),
        (
            "{same: nvlink, slice: 4, prefer: example.com/block}",
            TopologyNeed(same="nvlink", slice=4, prefer="example.com/block"),
            "each 4 neighbours in rank in one nvlink, and in one example.com/block if possible",
        ),
    ],
)
def test_a_topology_is_read_and_described(text: str, need: TopologyNeed, told: str) -> None:
    task = parse_task(f"run: x\nnodes: 8\ntopology: {text}")
    assert task.topology == need
    assert dict(describe_task(task))["close"] == told


@pytest.mark.parametrize(
    ("nodes", "text", "told"),
    [
        (8, "{same: rack, slice: 3}", "8 nodes cannot be divided into slices of 3"),
        (8, "{same: rack, slice: 16}", "8 nodes cannot be divided into slices of 16"),
        (1, "{same: rack}", "`topology` has no meaning for a task of one node"),
        (2, "{slice: 2}", "`topology` names no label"),
        (2, "{}", "`topology` names no label"),
        (2, "{rack: r1}", "unknown key 'rack' in `topology`"),
        (2, "{smae: rack}", "did you mean `same`?"),
        (2, "{same: my rack}", "'my rack' cannot be a label"),
        (2, "{same: rack, prefer: rack}", "`same` already requires one rack"),
        (2, "{same: rack, slice: 0}", "0 is too small"),
        (2, "rack", "write, for example, `topology: {same: rack}`"),
    ],
)
def test_a_wrong_topology_is_refused(nodes: int, text: str, told: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_task(f"run: x\nnodes: {nodes}\ntopology: {text}")
    assert told in str(refused.value)
    assert len(refused.value.problems) == 1
