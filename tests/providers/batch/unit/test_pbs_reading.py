"""What PBS's commands print, read; and what its jobs are asked for."""

from datetime import UTC, datetime, timedelta

import pytest
from tests.records import make_gang_spec

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import TopologyNeed
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.providers.base import (
    AgentEndpoint,
    GangSpec,
    NoCapacity,
    ProviderError,
    Refused,
    TryAgain,
)
from cavvy.providers.batch.commands import BatchPhase, SubmissionUnsure, sort_complaint
from cavvy.providers.batch.login_session import CommandResult
from cavvy.providers.batch.shapes import PartPrices
from cavvy.providers.batch.system import ClusterQueue, JobFiles, JobOptions, list_offers, time_limit
from cavvy.providers.pbs.script import make_options, make_script
from cavvy.providers.pbs.system import DIALECT, read_cluster, read_row, read_size

NOW = datetime(2026, 11, 20, 7, 13, 11, tzinfo=UTC)
OPTIONS = JobOptions()


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("528000000kb", 515625),
        ("64gb", 65536),
        ("1048576", 1),
        ("1tb", 1048576),
        (None, 0),
        ("?", 0),
    ],
)
def test_sizes(text: str | None, mib: int) -> None:
    assert read_size(text) == mib


def test_a_job_that_waits_says_why_and_until_when() -> None:
    estimated = {"start_time": "Fri Nov 20 07:13:11 2026"}
    row = read_row(
        "1.s",
        {"job_state": "Q", "comment": "Not Running: Insufficient\n ngpus", "estimated": estimated},
    )
    assert (row.phase, row.reason, row.start) == (BatchPhase.WAITS, "PBS: Insufficient ngpus", NOW)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "; PBS does not start it before someone runs: qrls 1.s"),
        ({"Hold_Types": "n"}, "; PBS does not start it before someone runs: qrls 1.s"),
        (
            {"Hold_Types": "s", "comment": "job held, too many failed attempts to run"},
            ": job held, too many failed attempts to run; PBS does not start it before someone "
            "runs: qrls -h s 1.s",
        ),
    ],
)
def test_a_held_job_says_why_and_who_can_release_it(more: dict[str, str], words: str) -> None:
    assert read_row("1.s", {"job_state": "H", **more}).reason == f"PBS holds it{words}"


def test_a_job_that_runs_says_where_and_since_when() -> None:
    facts = {"job_state": "R", "exec_host": "n1/0*8+n2/1*8", "stime": "Fri Nov 20 07:13:11 2026"}
    row = read_row("1.s", facts)
    assert (row.phase, row.hosts, row.start) == (BatchPhase.WORKS, ("n1", "n2"), NOW)


@pytest.mark.parametrize(
    ("code", "words", "taken", "broke"),
    [
        (0, "exited", False, False),
        (3, "agents failed", False, True),
        (-29, "walltime", True, False),
        (-27, "memory", False, False),
        (271, "PBS ended the job: gone", False, False),
        (None, "PBS ended the job: gone", False, False),
    ],
)
def test_ends(code: int | None, words: str, taken: bool, broke: bool) -> None:
    facts = {"job_state": "F", "comment": "gone", "history_timestamp": int(NOW.timestamp())}
    row = read_row("1.s", facts if code is None else {**facts, "Exit_status": code})
    assert (row.phase, row.taken, row.broke, row.end) == (BatchPhase.OVER, taken, broke, NOW)
    assert words in row.reason


@pytest.mark.parametrize("spot", [False, True])
@pytest.mark.parametrize("code", [271, None])  # while it ran, and while it waited
def test_a_deleted_job_was_cancelled_unless_its_queue_is_preempted(
    code: int | None, spot: bool
) -> None:
    facts = {"job_state": "F", "substate": 91, "comment": "gone", "Exit_status": code}
    row = read_row("1.s", facts, spot=spot)
    assert (row.cancelled, row.taken) == (not spot, spot)
    assert ("not by Cavvy" in row.reason) == (not spot)


def test_a_queue_has_its_own_nodes_or_those_of_no_queue() -> None:
    def node(state: str = "free", **more: object) -> dict[str, object]:
        return {"state": state, "resources_available": {"ncpus": 4, "mem": "8gb"}, **more}

    queue = {"queue_type": "Execution", "enabled": "True", "started": "True"}
    queues = {
        "own": queue,
        "any": queue,
        "route": {**queue, "queue_type": "Route"},
        "off": {**queue, "started": "False"},
    }
    nodes = {"a": node(), "b": node(queue="own"), "d": node("down,offline"), "e": node("job-busy")}
    cluster = read_cluster(("s.x", {}), queues, nodes)
    assert [each.name for each in cluster.queues] == ["own", "any"]
    assert [[node.name for node in each.nodes] for each in cluster.queues] == [
        ["b"],
        ["a", "d", "e"],
    ]
    free = PartPrices(gpu=HourlyRate(0), node=HourlyRate(0))
    offers = list_offers(cluster, free, provider="pbs", title="PBS", queue=False)
    assert {(o.zone, o.vcpus): o.capacity for o in offers if o.vcpus == 4} == {
        ("own", 4): 1,
        ("any", 4): 2,
    }


def queue_of(longest: timedelta | None) -> ClusterQueue:
    return ClusterQueue(name="q", nodes=(), longest=longest, taken=False, reclaim_s=10)


def spec(longest: timedelta | None = None, nodes: int = 1) -> GangSpec:
    kind = {"instance_type": "4xh100-16cpu-64gb", "accelerator": "H100", "accelerator_count": 2}
    offer = Offer(
        provider="pbs", region="s", zone="q", vcpus=8, memory_mib=32768, rate=HourlyRate(0), **kind
    )  # type: ignore[arg-type]
    agent_endpoint = AgentEndpoint(address="", token="")
    lease = timedelta(hours=1)
    return make_gang_spec(
        offer, name="g", nodes=nodes, agent_endpoint=agent_endpoint, lease=lease, longest=longest
    )


def test_what_is_asked_for() -> None:
    options = " ".join(make_options(spec(nodes=3), queue_of(None), "cavvy:x", OPTIONS, "gpu_type"))
    assert "-l select=3:ncpus=8:mem=32768mb:ngpus=2:gpu_type=h100 -l place=scatter" in options
    assert "-r n" in options
    assert "-v CAVVY_MARK=cavvy:x" in options
    assert "walltime" not in options


def test_a_rack_is_a_resource_of_which_all_nodes_have_one_value() -> None:
    named = replace(OPTIONS, topology={"rack": "rack_id"})
    for need, place in (
        (TopologyNeed(same="rack"), "place=scatter:group=rack_id"),
        (TopologyNeed(prefer="rack"), "place=scatter"),
    ):
        gang = replace(spec(nodes=3), topology=need)
        options = make_options(gang, queue_of(None), "cavvy:x", named, "gpu_type")
        assert place in options


def test_the_walltime_is_the_works_or_the_queues() -> None:
    day = queue_of(timedelta(days=1))
    assert time_limit(spec(), day) == timedelta(days=1)
    assert time_limit(spec(timedelta(hours=2)), day) == timedelta(hours=3, seconds=10)
    assert time_limit(spec(timedelta(days=2)), day) == timedelta(days=1)
    assert time_limit(spec(), queue_of(None)) is None


def files(agent: str, folder: str) -> JobFiles:
    return JobFiles(mark="cavvy:x", folder=folder, agent=agent)


def test_the_script_watches_the_walltime_where_there_is_one() -> None:
    with_limit = make_script(spec(), queue_of(timedelta(hours=1)), files("/a b", "/f'g"), OPTIONS)
    assert "sleep 3540 " in with_limit
    assert "'/a b'/start.py" in with_limit
    assert "pbsdsh" not in with_limit
    without = make_script(spec(nodes=2), queue_of(None), files("/a", "/f"), OPTIONS)
    assert "sleep" not in without
    assert "pbsdsh" in without


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("qsub: Unknown queue", NoCapacity),
        ("qsub: Job exceeds queue and/or server resource limits", NoCapacity),
        ("qsub: Unauthorized Request", Refused),
        ("qsub: cannot connect to server s (errno=111)", TryAgain),
        ("qsub: End of File", SubmissionUnsure),
    ],
)
def test_complaints_of_qsub(said: str, kind: type[ProviderError]) -> None:
    assert type(sort_complaint(CommandResult(code=1, out="", err=said), DIALECT)) is kind
