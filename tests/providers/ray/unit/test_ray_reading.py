"""What the Ray provider reads out of a dashboard's answers, a driver's log and its settings."""

import hashlib
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.records import make_gang_spec

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.providers.base import AgentEndpoint, GangState, NodeEndpoint, Refused
from cavvy.providers.batch.shapes import AcceleratorRates
from cavvy.providers.ray.actor_supervisor import ActorSupervisor
from cavvy.providers.ray.cluster import (
    list_offers,
    make_bundle,
    name_accelerator,
    promise,
    read_nodes,
)
from cavvy.providers.ray.entry import RayOptions, make_job, make_plan
from cavvy.providers.ray.provider import read_addresses
from cavvy.providers.ray.status import RayGangRecord, as_seen, end, explain_wait, judge, read_log

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
GIB = 1 << 30
RECORD = RayGangRecord(name="rm-1", cluster="lab", nodes=2, intended_at=NOW, launched=True)
GROUP = "5b80796b3a4142e50d1cb95aa23202000000"


def node(name: str, labels: dict[str, str] | None = None, **resources: float) -> dict[str, Any]:
    total = {"CPU": 8.0, "memory": 16.0 * GIB, f"node:{name}": 1.0, **resources}
    return {
        "node_id": name,
        "node_ip": name,
        "state": "ALIVE",
        "resources_total": total,
        "labels": labels or {},
    }


def offers_of(*nodes: dict[str, Any], **more: Any) -> list[Offer]:
    found = read_nodes(nodes, more.get("usage", {}), more.get("groups", []))
    rates = {"gpu_rate": AcceleratorRates("A100=1.5 3"), "node_rate": HourlyRate(0)}
    return list(list_offers(found, region="lab", waits=more.get("waits", False), **rates))


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("A100", "A100"),
        ("H100", "H100"),
        ("A100-80G", "A100"),
        ("AMD-Instinct-MI300X-OAM", "MI300X"),
        ("T4", "T4"),
    ],
)
def test_rays_names_of_accelerators_are_ours(word: str, name: str) -> None:
    assert name_accelerator(word).partition("-")[0] == name


def test_a_size_that_several_kinds_of_nodes_have_is_one_offer_of_all_their_room() -> None:
    """Otherwise the room of one kind hides what is used of the other."""
    kinds = [node("a"), node("b", GPU=1, **{"accelerator_type:A100": 1})]
    free = {offer.instance_type: offer for offer in offers_of(*kinds)}
    held = {
        "state": "CREATED",
        "bundles": [{"node_id": "a", "unit_resources": {"CPU": 1.0, "memory": float(GIB)}}],
    }
    used = {offer.instance_type: offer for offer in offers_of(*kinds, groups=[held])}
    name = next(name for name, offer in free.items() if offer.vcpus == 1)
    assert (free[name].capacity or 0) > 8
    assert (used[name].capacity or 0) == (free[name].capacity or 0) - 1
    assert len({offer.pool for offer in free.values()}) == 1


def test_offers_of_accelerators_by_type_by_label_and_by_a_resource_of_that_name() -> None:
    typed = node("a", GPU=4, **{"accelerator_type:A100": 1})
    labelled = node("b", {"ray.io/accelerator-type": "H100"}, GPU=2)
    named = node("c", H200=8)
    plain = node("d")
    found = {
        (o.accelerator, o.accelerator_count): o for o in offers_of(typed, labelled, named, plain)
    }
    assert {each for each in found if each[0]} == {
        *(("A100", n) for n in (1, 2, 3, 4)),
        *(("H100", n) for n in (1, 2)),
        *(("H200", n) for n in range(1, 9)),
    }
    assert found["A100", 4].rate.micros_per_hour == 6_000_000
    assert found["H100", 1].rate.micros_per_hour == 3_000_000
    assert (found["A100", 2].vcpus, found["A100", 2].memory_mib) == (4, 8192)
    nodes = {each.id: each for each in read_nodes([typed, labelled, named], {}, [])}
    assert make_bundle(found["A100", 2], nodes["a"]) == {
        "CPU": 4,
        "memory": 8 * GIB,
        "GPU": 2,
        "accelerator_type:A100": 0.001,
    }
    assert make_bundle(found["H200", 8], nodes["c"]) == {"CPU": 8, "memory": 16 * GIB, "H200": 8}


def test_dead_nodes_and_nodes_without_cpus_are_not_offered() -> None:
    assert offers_of(replace_in(node("a"), state="DEAD"), node("b", CPU=0)) == []


def test_what_is_reserved_now_and_what_was_used_are_not_free() -> None:
    """The usage report still holds an old group's two CPUs, and two of a plain task; a new group
    holds three.
    """
    usage = {
        "a": {
            "CPU": [4.0, 8.0],
            f"CPUGroup{GROUP.upper()}": [2.0, 2.0],
            f"CPUGroup0{GROUP.upper()}": [0.0, 2.0],
        }
    }
    bundle = {"node_id": "a", "unit_resources": {"CPU": 3.0, "memory": 1.0 * GIB}}
    groups = [
        {"state": "CREATED", "bundles": [bundle]},
        {"state": "REMOVED", "bundles": [bundle] * 9},
    ]
    (found,) = read_nodes([node("a")], usage, groups)
    assert (found.cpus, found.memory_mib) == (3, 15 * 1024)
    capacities = {o.vcpus: o.capacity for o in offers_of(node("a"), usage=usage, groups=groups)}
    assert capacities == {1: 3, 2: 1, 4: 0, 8: 0}
    assert {o.capacity for o in offers_of(node("a"), usage=usage, groups=groups, waits=True)} == {
        None
    }


def test_what_is_promised_is_not_free() -> None:
    nodes = read_nodes([node("a"), node("b")], {}, [])
    four = next(offer for offer in offers_of(node("a")) if offer.vcpus == 4)
    left = promise(nodes, four, 3)
    assert [each.cpus for each in left] == [0, 4]


def test_nodes_that_may_be_taken_back_are_spot() -> None:
    found = offers_of(
        node("a", {"ray.io/market-type": "spot"}), node("b", {"ray.io/market-type": "on-demand"})
    )
    assert {offer.purchase for offer in found} == {Purchase.SPOT, Purchase.ON_DEMAND}
    assert all(offer.capacity == 8 // offer.vcpus for offer in found)


def log(*events: dict[str, Any]) -> str:
    lines = [
        "Running entrypoint for job x",
        *("cavvy " + json.dumps({"at": NOW.timestamp(), **e}) for e in events),
    ]
    return "\n".join([*lines, 'cavvy {"event": "ended", "ra'])  # the last one is being written


def up(rank: int) -> dict[str, Any]:
    return {"event": "up", "rank": rank, "node": f"n{rank}", "address": f"10.0.0.{rank}"}


def test_a_gang_is_running_when_all_ranks_are_up() -> None:
    job = {"status": "RUNNING"}
    states = [
        as_seen(judge(RECORD, job, read_log(log(*events)), NOW)).state
        for events in (
            [],
            [{"event": "placed"}],
            [{"event": "placed"}, up(0)],
            [{"event": "placed"}, up(0), up(1)],
        )
    ]
    assert states == [GangState.QUEUED, GangState.STARTING, GangState.STARTING, GangState.RUNNING]


LOST = {"event": "lost", "rank": 1, "reason": "the node is lost: gone", "preempted": False}
TAKEN = {
    "event": "lost",
    "rank": 1,
    "reason": "Ray reclaimed the node: the node was preempted",
    "preempted": True,
}
BAD = {"event": "ended", "rank": 1, "code": 0, "exit": {"exit_code": 3, "reason": "exit code 3"}}


@pytest.mark.parametrize(
    ("status", "events", "reason", "preempted"),
    [
        ("SUCCEEDED", [], "the agents exited", False),
        ("SUCCEEDED", [LOST], "the node is lost: gone", False),
        ("SUCCEEDED", [TAKEN], "Ray reclaimed the node: the node was preempted", True),
        ("SUCCEEDED", [BAD], "exit code 3", False),
        ("STOPPED", [], "the Ray job was stopped in Ray, not by Cavvy", True),
        ("FAILED", [], "the Ray job failed: the head said so", False),
        (
            "FAILED",
            [{"event": "refused", "why": "taken"}],
            "Ray could not place all nodes: taken",
            False,
        ),
    ],
)
def test_why_a_gang_ended(
    status: str, events: list[dict[str, Any]], reason: str, preempted: bool
) -> None:
    job = {
        "status": status,
        "end_time": (NOW + timedelta(hours=1)).timestamp() * 1000,
        "message": "x\nthe head said so",
    }
    ended = judge(RECORD, job, read_log(log(up(0), up(1), *events)), NOW)
    assert (ended.reason, ended.preempted) == (reason, preempted)
    assert all(rank.ended_at and rank.ended_at >= rank.started_at for rank in ended.ranks)
    assert judge(ended, {"status": "STOPPED"}, read_log(""), NOW + timedelta(days=1)) == ended
    removed = judge(replace(RECORD, removed=True), job, read_log(log(up(0), up(1), *events)), NOW)
    assert not removed.preempted


def test_what_was_seen_is_kept_where_the_log_is_lost() -> None:
    seen = judge(RECORD, {"status": "RUNNING"}, read_log(log(up(0), up(1))), NOW)
    assert as_seen(judge(seen, {"status": "RUNNING"}, read_log(""), NOW)).state is GangState.RUNNING
    over = end(seen, NOW + timedelta(minutes=1), "the head is gone", True)
    assert [rank.ended_at for rank in over.ranks] == [NOW + timedelta(minutes=1)] * 2
    assert as_seen(over).preempted


def test_a_job_holds_no_secret() -> None:
    shelved: list[bytes] = []
    node_endpoint = NodeEndpoint(
        address="https://192.0.2.1:7443",
        pin="0" * 64,
        key_pin="",
        agent=lambda: "1" * 64,
        pythons=dict,
        # type: ignore[func-returns-value]
        publish=lambda content: shelved.append(content) or "2" * 64,
        claim_token=lambda gang, rank: f"claim-{rank}",
    )
    (ray_node,) = read_nodes([node("a", GPU=4, **{"accelerator_type:A100": 1})], {}, [])
    offer = next(
        o
        for o in offers_of(node("a", GPU=4, **{"accelerator_type:A100": 1}))
        if o.accelerator_count == 2
    )
    gang = make_gang_spec(
        offer,
        nodes=2,
        agent_endpoint=AgentEndpoint(address="unix:/x", token="secret"),
        labels={"team": "a b"},
    )
    options = RayOptions(
        namespace="cavvy", python="python", folder="~/.cavvy-ray", spread=True, wait=False
    )
    made = make_plan(gang, "mark", ray_node, node_endpoint, options, cache="p-1", mixed=True)
    job = make_job(gang, "mark", made, node_endpoint, options.python)
    assert "claim-" not in json.dumps(job)
    assert "secret" not in json.dumps(job) + shelved[0].decode()
    plan = json.loads(shelved[0])
    assert plan["tokens"] == ["claim-0", "claim-1"]
    assert plan["boot"]["config"]["own_cache"] == "p-1"
    assert (plan["strategy"], plan["vendor"], plan["resource"]) == (
        "STRICT_SPREAD",
        "nvidia",
        "GPU",
    )
    assert plan["selector"] == {"ray.io/market-type": "!spot"}
    compile(plan["driver"], "driver.py", "exec")
    compile(plan["hold"], "actor_supervisor.py", "exec")


def test_addresses() -> None:
    found = read_addresses(
        "main=http://10.0.0.5:8265/ https://ray.example, x=https://a/b?c=d", dict, ""
    )
    assert [(each.name, each.url) for each in found] == [
        ("main", "http://10.0.0.5:8265"),
        ("ray.example", "https://ray.example"),
        ("x", "https://a/b?c=d"),
    ]
    for wrong in ("10.0.0.5:8265", "ray://10.0.0.5:10001", "a b=http://x", "ä/=http://x", "main="):
        with pytest.raises(Refused, match="addresses"):
            read_addresses(wrong, dict, "")
    with pytest.raises(Refused, match="headers_file") as told:
        read_addresses("main=https://ann:hunter2@ray.example", dict, "")
    assert "hunter2" not in str(told.value)


def replace_in(raw: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**raw, **changes}


def test_a_gang_says_what_it_waits_for() -> None:
    pending = {"status": "PENDING", "message": "waiting for the\n runtime environment"}
    assert explain_wait(pending, read_log("")) == "Ray: waiting for the runtime environment"
    assert explain_wait({"status": "PENDING"}, read_log("")) == ""
    running = {"status": "RUNNING", "message": "Job is currently running."}
    assert explain_wait(running, read_log("")) == ""
    waits = log({"event": "waits", "why": "no room"})
    assert explain_wait(running, read_log(waits)) == "no room"
    seen = as_seen(judge(RECORD, running, read_log(log({"event": "placed"})), NOW))
    assert (seen.state, seen.reason) == (
        GangState.STARTING,
        f"Ray has started 0 of {RECORD.nodes} agents",
    )


def test_a_changed_agent_is_fetched_again(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"the agent").hexdigest()
    boot = {"folder": str(tmp_path), "agent": digest, "rank": 0, "config": {"gang": "g"}}
    supervisor = ActorSupervisor(boot)
    assert not supervisor.has_agent()
    Path(supervisor.agent).write_bytes(b"the agent")
    assert supervisor.has_agent()
    Path(supervisor.agent).write_bytes(b"another program")
    assert not supervisor.has_agent()
