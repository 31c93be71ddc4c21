"""Pools as node groups of the cluster autoscaler, which speaks the published protocol."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.autoscaler_protocol import call, make, read
from tests.cli.unit.test_cli_layout import POOL

from cavvy.capabilities.clusters.kubernetes import GroupProblem, NodeGroups
from cavvy.capabilities.clusters.wire import ClusterNodesAsk, ClusterNodeView, PoolShapeView
from cavvy.domain.values import replace

SHAPE = PoolShapeView(
    cpus=64,
    memory_mib=512_000,
    gpus=8,
    gpu="H100",
    architecture="x86_64",
    labels={"cavvy/pool": "burst", "cavvy/gpu": "H100"},
    rate_micros_per_hour=16_000_000,
)


class PoolServer:
    """What the server answers about one pool: a client of it in memory."""

    def __init__(self) -> None:
        self.nodes: dict[str, ClusterNodeView] = {}

    def ask(self, path: str, kind: object, body: ClusterNodesAsk | None = None) -> Any:
        assert path.startswith("/v1/projects/default/pools/burst")
        match path.removeprefix("/v1/projects/default/pools/burst"):
            case "":
                return replace(POOL, name="burst", project="default", min=0, max=4, join="x")
            case "/shape":
                return SHAPE
            case "/nodes" if body is not None:
                for name in body.nodes:
                    self.add(name, "waiting")
            case "/nodes/release" if body is not None:
                for name in body.nodes:
                    self.nodes.pop(name, None)
        return list(self.nodes.values())

    def add(self, name: str, state: str, reason: str = "") -> None:
        self.nodes.setdefault(
            name,
            ClusterNodeView(
                name=name,
                provider_id=f"cavvy://default/burst/{name}",
                job=name,
                state=state,
                reason=reason,
                offer="",
                rate_micros_per_hour=20_000_000 if state == "running" else 0,
            ),
        )


def serve(*states: str) -> tuple[PoolServer, Callable[..., Any]]:
    server = PoolServer()
    for at, state in enumerate(states):
        server.add(f"burst-{at}", state, "join failed" if state == "ended" else "")
    groups = NodeGroups(server, "default", ["burst"])  # type: ignore[arg-type]
    return server, lambda method, **fields: call(groups.answer, method, **fields)


def node(at: int | str, **fields: Any) -> Any:
    return make("ExternalGrpcNode", providerID=f"cavvy://default/burst/burst-{at}", **fields)


def test_a_pool_is_a_node_group() -> None:
    _, ask = serve("running", "waiting")
    [group] = ask("NodeGroups").nodeGroups
    assert (group.id, group.minSize, group.maxSize) == ("burst", 0, 4)
    assert ask("NodeGroupTargetSize", id="burst").targetSize == 2
    assert ask("NodeGroupForNode", node=node(0)).nodeGroup.id == "burst"
    assert ask("NodeGroupForNode", node=make("ExternalGrpcNode", name="burst-1")).nodeGroup.id
    for other in (
        {"name": "x"},
        {"providerID": "aws:///i-1", "name": "burst-0"},
        {"providerID": "cavvy://default/burst-2/burst-0"},
    ):
        found = ask("NodeGroupForNode", node=make("ExternalGrpcNode", **other))
        assert found.nodeGroup.id == ""
    assert ask("GPULabel").label == "cavvy/gpu"
    assert list(ask("GetAvailableGPUTypes").gpuTypes) == ["H100"]
    assert not ask("NodeGroupGetOptions", id="burst").HasField("nodeGroupAutoscalingOptions")
    for method in ("Refresh", "Cleanup"):
        ask(method)


def test_the_states_of_instances() -> None:
    _, ask = serve("running", "starting", "waiting", "leaving", "ended")
    found = ask("NodeGroupNodes", id="burst").instances
    assert [each.id for each in found] == [f"cavvy://default/burst/burst-{at}" for at in range(5)]
    assert [each.status.instanceState for each in found] == [1, 2, 2, 3, 2]
    errors = [each.status.errorInfo for each in found]
    assert [bool(each.errorCode) for each in errors] == [False, False, False, False, True]
    assert (errors[4].errorMessage, errors[4].instanceErrorClass) == ("join failed", 99)


def test_the_template_is_a_node_of_kubernetes() -> None:
    _, ask = serve()
    answer = ask("NodeGroupTemplateNodeInfo", id="burst")
    for found in (answer.nodeInfo, read("Node", answer.nodeBytes)):
        assert {"cavvy/pool", "cavvy/gpu", "kubernetes.io/os"} <= {*found.metadata.labels}
        status = found.status
        capacity = {name: each.string for name, each in status.capacity.items()}
        assert capacity == {
            "cpu": "64",
            "memory": "512000Mi",
            "pods": "110",
            "nvidia.com/gpu": "8",
        }
        assert status.allocatable["memory"].string == "471040Mi"
        assert [(each.type, each.status) for each in status.conditions] == [("Ready", "True")]


@pytest.mark.parametrize("times", [("startTime", "endTime"), ("startTimestamp", "endTimestamp")])
def test_the_price_of_a_node(times: tuple[str, str]) -> None:
    _, ask = serve("running", "waiting")
    start, end = make("Time", seconds=1_000_000), make("Time", seconds=1_001_800)

    def price(of: Any) -> float:
        return float(ask("PricingNodePrice", node=of, **{times[0]: start, times[1]: end}).price)

    assert price(node(0)) == 10.0
    assert price(node(1)) == 8.0
    assert price(make("ExternalGrpcNode", name="t", labels={"cavvy/pool": "burst"})) == 8.0
    with pytest.raises(GroupProblem, match="belongs to no pool"):
        price(make("ExternalGrpcNode", name="t"))


def test_a_group_grows_and_shrinks_by_what_is_asked() -> None:
    server, ask = serve("running")
    ask("NodeGroupIncreaseSize", id="burst", delta=3)
    assert ask("NodeGroupTargetSize", id="burst").targetSize == 4
    assert len({*server.nodes}) == 4
    for wrong in (1, 0, -1):
        with pytest.raises(GroupProblem) as problem:
            ask("NodeGroupIncreaseSize", id="burst", delta=wrong)
        assert problem.value.code in ("OUT_OF_RANGE", "INVALID_ARGUMENT")
    ask("NodeGroupDecreaseTargetSize", id="burst", delta=-2)
    assert len(server.nodes) == 2
    for wrong in (-2, 0, 1):
        with pytest.raises(GroupProblem):
            ask("NodeGroupDecreaseTargetSize", id="burst", delta=wrong)
    assert "burst-0" in server.nodes, "a node that exists is not removed by a smaller size"
    nodes = [node(0), make("ExternalGrpcNode", name="other")]
    with pytest.raises(GroupProblem, match="has no node other"):
        ask("NodeGroupDeleteNodes", id="burst", nodes=nodes)
    assert "burst-0" in server.nodes
    ask("NodeGroupDeleteNodes", id="burst", nodes=[node(0)])
    # the autoscaler names an instance that has never registered by its ID only
    [left] = ask("NodeGroupNodes", id="burst").instances
    ask(
        "NodeGroupDeleteNodes",
        id="burst",
        nodes=[make("ExternalGrpcNode", providerID=left.id, name=left.id)],
    )
    assert server.nodes == {}


def test_a_smaller_size_cancels_the_newest_orders_that_have_no_machine() -> None:
    server, ask = serve("waiting", "starting", "waiting")
    ask("NodeGroupDecreaseTargetSize", id="burst", delta=-1)
    assert [*server.nodes] == ["burst-0", "burst-1"]
    with pytest.raises(GroupProblem, match="only 1 nodes"):
        ask("NodeGroupDecreaseTargetSize", id="burst", delta=-2)


@pytest.mark.parametrize(
    "method", ["NodeGroupTargetSize", "NodeGroupNodes", "NodeGroupTemplateNodeInfo"]
)
def test_an_unknown_group_is_not_found(method: str) -> None:
    _, ask = serve()
    with pytest.raises(GroupProblem, match="no node group 'other'") as problem:
        ask(method, id="other")
    assert problem.value.code == "NOT_FOUND"
    with pytest.raises(GroupProblem) as problem:
        ask("PricingPodPrice")
    assert problem.value.code == "UNIMPLEMENTED"


@given(st.binary(max_size=60))
def test_no_message_is_an_error_of_another_kind(data: bytes) -> None:
    groups = NodeGroups(PoolServer(), "default", ["burst"])  # type: ignore[arg-type]
    for method in ("NodeGroupForNode", "NodeGroupDeleteNodes", "NodeGroupIncreaseSize"):
        with suppress(GroupProblem, ValueError):
            assert isinstance(groups.answer(method, data), bytes)


def test_messages_are_read_as_the_protobuf_runtime_writes_them() -> None:
    server, _ = serve()
    deltas: Sequence[int] = (-(2**31), -1, 2**31 - 1)
    for delta in deltas:
        sent = make("NodeGroupIncreaseSizeRequest", id="burst", delta=delta).SerializeToString()
        with pytest.raises(GroupProblem, match=f"{delta:d}"):
            NodeGroups(server, "default", ["burst"]).answer("NodeGroupIncreaseSize", sent)  # type: ignore[arg-type]
