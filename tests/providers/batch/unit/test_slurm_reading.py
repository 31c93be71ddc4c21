"""What Slurm's commands print, read: host lists, lengths, nodes, partitions, ends of jobs."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta

import pytest

from cavvy.catalog.fit import match_offers
from cavvy.domain.host_lists import expand
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.units import HourlyRate
from cavvy.planner.shared_hosts import object_to_share
from cavvy.providers.base import GangState, NoCapacity, ProviderError, Refused, TryAgain
from cavvy.providers.batch.commands import BatchJobRow, BatchPhase, SubmissionUnsure, sort_complaint
from cavvy.providers.batch.gangs import judge, judge_forgotten, see
from cavvy.providers.batch.login_session import CommandResult
from cavvy.providers.batch.shapes import AcceleratorRates, PartPrices
from cavvy.providers.batch.system import BatchCluster, list_offers
from cavvy.providers.batch.workspace import AgentExit, BatchGangRecord, BatchIntent, GangStart
from cavvy.providers.slurm.script import format_length, gres_of
from cavvy.providers.slurm.system import (
    DIALECT,
    Facts,
    explain_accounts,
    parse_length,
    parse_pairs,
    read_cluster,
    read_row,
)
from cavvy.task_files import parse_task

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
FREE = PartPrices(gpu=HourlyRate(0), node=HourlyRate(0))


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("login", ["login"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("r[1-2]n[8-10]", ["r1n8", "r1n9", "r1n10", "r2n8", "r2n9", "r2n10"]),
        ("a-b[009-010]-ib", ["a-b009-ib", "a-b010-ib"]),
    ],
)
def test_host_lists(text: str, hosts: list[str]) -> None:
    assert list(expand(text)) == hosts


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("UNLIMITED", None),
        ("INFINITE", None),
        ("30", timedelta(minutes=30)),
        ("30:15", timedelta(minutes=30, seconds=15)),
        ("12:30:00", timedelta(hours=12, minutes=30)),
        ("2-00:00:00", timedelta(days=2)),
        ("2-12", timedelta(days=2, hours=12)),
    ],
)
def test_lengths(text: str, length: timedelta | None) -> None:
    assert parse_length(text) == length


def test_a_length_is_written_as_it_is_read() -> None:
    for length in (timedelta(minutes=1), timedelta(hours=25, minutes=7), timedelta(days=40)):
        assert parse_length(format_length(length)) == length
    assert format_length(None) == "UNLIMITED"


def test_pairs_may_have_blanks_in_their_values() -> None:
    line = (
        "NodeName=n1 OS=Linux 6.1 #1 SMP State=IDLE+CLOUD CfgTRES=cpu=64,mem=500G,billing=64 "
        "Reason=bad disk [root]"
    )
    assert parse_pairs(line) == {
        "NodeName": "n1",
        "OS": "Linux 6.1 #1 SMP",
        "State": "IDLE+CLOUD",
        "CfgTRES": "cpu=64,mem=500G,billing=64",
        "Reason": "bad disk [root]",
    }


def node(
    name: str, partitions: str, state: str = "IDLE", gres: str = "(null)", used: str = ""
) -> dict[str, str]:
    numbers = {"CPUTot": "8", "CPUAlloc": "0", "RealMemory": "32768", "AllocMem": "0"}
    return {
        "NodeName": name,
        "Partitions": partitions,
        "State": state,
        "Gres": gres,
        "GresUsed": used,
        **numbers,
    }


def partition(name: str, tier: int, mode: str = "OFF", state: str = "UP") -> dict[str, str]:
    return {
        "PartitionName": name,
        "State": state,
        "PriorityTier": str(tier),
        "PreemptMode": mode,
        "MaxTime": "UNLIMITED",
    }


def offers_of(cluster: BatchCluster, *, queue: bool) -> Sequence[Offer]:
    return list_offers(cluster, FREE, provider="slurm", title="Slurm", queue=queue)


CONFIG = {"ClusterName": "c", "PreemptType": "preempt/partition_prio", "KillWait": "12 sec"}


def test_a_partition_is_spot_only_where_a_higher_one_shares_its_nodes() -> None:
    nodes = [node("a", "low,high"), node("b", "alone"), node("d", "off,high")]
    rows = [
        partition("low", 1, "REQUEUE"),
        partition("high", 5),
        partition("alone", 1, "CANCEL"),
        partition("off", 1),
    ]
    cluster = read_cluster(CONFIG, [*rows, partition("down", 1, "REQUEUE", "DOWN")], nodes)
    assert {each.name: each.taken for each in cluster.queues} == {
        "low": True,
        "high": False,
        "alone": False,
        "off": False,
    }
    assert {each.reclaim_s for each in cluster.queues} == {12}
    by_qos = read_cluster({**CONFIG, "PreemptType": "preempt/qos"}, rows, nodes)
    assert not any(each.taken for each in by_qos.queues)


def test_what_overlaps_is_one_pool() -> None:
    gpus = "gpu:h100:8(S:0-1)"
    nodes = [
        node("a", "one", gres=gpus),
        node("b", "one,two", gres=gpus),
        node("d", "two", gres=gpus),
    ]
    nodes += [node("c", "one"), node("e", "three", gres=gpus)]
    cluster = read_cluster(CONFIG, [partition(name, 1) for name in ("one", "two", "three")], nodes)
    pools = {(o.zone, bool(o.accelerator_count), o.pool) for o in offers_of(cluster, queue=False)}
    assert {(zone, pool) for zone, gpu, pool in pools if gpu} == {
        ("one", "a"),
        ("two", "a"),
        ("three", "e"),
    }


@pytest.mark.parametrize(
    ("state", "idle"),
    [("IDLE", 1), ("IDLE+CLOUD+POWERED_DOWN", 1), ("MIXED+PLANNED", 1)]
    + [
        (state, None)
        for state in ("DOWN*", "IDLE+DRAIN", "IDLE*", "IDLE+MAINT", "DOWN+NOT_RESPONDING", "FUTURE")
    ],
)
def test_only_nodes_that_can_run_are_offered(state: str, idle: int | None) -> None:
    cluster = read_cluster(
        CONFIG, [partition("p", 1)], [node("a", "p", state, "gpu:tesla_t4:2(S:0-1)")]
    )
    offers = offers_of(cluster, queue=False)
    assert [o.capacity for o in offers if o.accelerator_count == 2] == (
        [] if idle is None else [idle]
    )


def test_accelerators_have_their_canonical_names_and_are_asked_for_by_slurms() -> None:
    kinds = {
        "gpu:tesla_t4:2": ("T4", 16384),
        "gpu:frobnicator-x2:2": ("frobnicator-x2", 0),
        "gpu:2": ("gpu", 0),
    }
    for gres, (name, memory) in kinds.items():
        cluster = read_cluster(CONFIG, [partition("p", 1)], [node("a", "p", "IDLE", gres)])
        (both,) = [o for o in offers_of(cluster, queue=True) if o.accelerator_count == 2]
        assert (both.accelerator, both.accelerator_memory_mib, gres_of(both)) == (
            name,
            memory,
            gres,
        )
        assert both.purchase is Purchase.ON_DEMAND


def read_node(gres: str, used: str = "", features: str = "") -> BatchCluster:
    row = {**node("a", "p", gres=gres, used=used), "AvailableFeatures": features}
    return read_cluster(CONFIG, [partition("p", 1)], [row])


@pytest.mark.parametrize(
    ("used", "whole", "shared"),
    [
        ("gpu:a100-80gb:0(IDX:N/A),shard:a100-80gb:0(IDX:N/A)", 2, 3),
        ("gpu:a100-80gb:1(IDX:0),shard:a100-80gb:1(IDX:1)", 0, 3),  # Slurm 22: GPUs, not shards
        ("gpu:a100-80gb:0(IDX:N/A),shard:a100-80gb:3(3/4,0/4)", 1, 3),
        ("gpu:a100-80gb:1(IDX:0),shard:a100-80gb:2(0/4,2/4)", 0, 2),
        ("gpu:a100-80gb:2(IDX:0-1),shard:a100-80gb:0(0/4,0/4)", 0, 0),
    ],
)
def test_a_gpu_with_shards_is_offered_whole_and_in_parts(
    used: str, whole: int, shared: int
) -> None:
    cluster = read_node("gpu:a100-80gb:2(S:0),shard:a100-80gb:8(S:0)", used)
    prices = PartPrices(gpu=HourlyRate(4_000_000), node=HourlyRate(0))
    found = list_offers(cluster, prices, provider="slurm", title="Slurm", queue=False)
    parts = [each for each in found if each.accelerator_part < 1]
    assert [
        (each.accelerator_part, each.accelerator_memory_mib, each.rate, gres_of(each))
        for each in parts
    ] == [(n / 4, n * 20480, HourlyRate(n * 1_000_000), f"shard:a100-80gb:{n}") for n in (1, 2, 3)]
    assert len({each.key for each in found}) == len(found)
    assert [each.vcpus for each in parts] == [1, 2, 3]
    assert max((n for n, each in enumerate(parts, 1) if each.capacity), default=0) == shared
    idle = [o.accelerator_count for o in found if o.accelerator_part == 1 and o.capacity]
    assert max(idle) == whole
    quarter = parse_task("run: x\nresources: {gpu: 'A100:0.25'}")
    assert match_offers(parts, quarter.resources).matched == 3
    memory = parse_task("run: x\nresources: {gpu: 'A100:share=30GB'}")
    assert match_offers(parts, memory.resources).matched == 2
    isolated = parse_task("run: x\nresources: {gpu: {name: A100, share: 0.5, isolation: required}}")
    assert all("isolation" in object_to_share(isolated, each) for each in parts)


@pytest.mark.parametrize(
    ("gres", "features", "names"),
    [
        ("gpu:a100:6,gpu:1g.5gb:7,gpu:3g.20gb:2", "r1", {"1g.5gb": "A100", "3g.20gb": "A100"}),
        ("gpu:1g.10gb:7(S:0)", "r1,h100", {"1g.10gb": "H100"}),
        ("gpu:1g.18gb:2", "", {"1g.18gb": "gpu"}),  # H200 or GH200
        ("gpu:1g.6gb:4", "", {"1g.6gb": "A30"}),
        ("gpu:a100_3g.20gb:2", "", {"3g.20gb": "A100"}),
        ("gpu:nvidia_h200_4g.71gb:1", "", {"4g.71gb": "H200"}),
        ("gpu:nvidia_a100-sxm4-80gb_mig_1g.10gb+me:1", "", {"1g.10gb+me": "A100"}),
    ],
)
def test_mig_instances_have_the_names_of_own_hosts(
    gres: str, features: str, names: dict[str, str]
) -> None:
    cluster = read_node(gres, features=features)
    found = [o for o in offers_of(cluster, queue=True) if "MIG" in (o.accelerator or "")]
    assert {each.accelerator for each in found} == {
        f"{model}-MIG-{profile}" for profile, model in names.items()
    }
    assert {each.accelerator_count for each in found} == {1}
    assert {gres_of(each) for each in found} == {
        f"{part.partition('(')[0].rpartition(':')[0]}:1" for part in gres.split(",") if "g." in part
    }


def test_the_price_of_an_instance_is_its_part_of_the_gpu() -> None:
    rates = AcceleratorRates("A100=8 1")
    assert rates("nvidia_a100_1g.5gb") == HourlyRate(1_000_000)
    assert rates("NVIDIA-A100-SXM4-80GB-MIG-3g.40gb") == HourlyRate(4_000_000)
    assert rates("a100_1g.10gb") == rates("NVIDIA-A100-SXM4-80GB-MIG-1g.10gb")
    assert rates("NVIDIA-A100-SXM4-40GB-MIG-1g.10gb") == HourlyRate(2_000_000)
    assert rates("h100") == HourlyRate(1_000_000)


def row(state: str, reason: str = "None", nodes: str = "n[1-2]") -> BatchJobRow:
    seconds = str(int(NOW.timestamp()))
    return read_row(["7", "g", state, reason, nodes, seconds, seconds, "cavvy:x"])


def record(**more: object) -> BatchGangRecord:
    return BatchGangRecord(
        name="g", intent=BatchIntent(name="g", nodes=2, asked_at=NOW), job="7", **more
    )  # type: ignore[arg-type]


def test_states_of_jobs_that_are_not_over() -> None:
    waits = see(row("PENDING", reason="QOSGrpGRES", nodes=""), record())
    assert (waits.state, waits.reason, waits.eta, list(waits.nodes)) == (
        GangState.QUEUED,
        "Slurm: QOSGrpGRES",
        NOW,
        [],
    )
    runs = see(row("RUNNING"), record())
    assert (runs.state, [each.address for each in runs.nodes]) == (GangState.RUNNING, ["n1", "n2"])
    assert see(row("CONFIGURING"), record()).state is GangState.STARTING
    assert see(row("SUSPENDED"), record()).reason == "Slurm: suspended"


@pytest.mark.parametrize(
    ("state", "reason", "words"),
    [
        ("PENDING", "JobHeldUser", "Slurm: JobHeldUser"),
        ("PENDING", "launch failed requeued held", "Slurm: launch failed requeued held"),
        ("REQUEUE_HOLD", "None", "waits in Slurm's queue"),
    ],
)
def test_a_held_job_says_who_can_release_it(state: str, reason: str, words: str) -> None:
    told = row(state, reason=reason, nodes="").reason
    assert told == f"{words}; Slurm does not start it before someone runs: scontrol release 7"


@pytest.mark.parametrize(
    ("state", "preempted", "words"),
    [
        ("PREEMPTED", True, "with higher priority"),
        ("TIMEOUT", True, "time limit"),
        ("NODE_FAIL", False, "a node failed"),
        ("CANCELLED", False, "not by Cavvy"),
        ("OUT_OF_MEMORY", False, "more memory"),
        ("COMPLETED", False, "exited"),
    ],
)
def test_ends_of_jobs(state: str, preempted: bool, words: str) -> None:
    assert row(state).phase is BatchPhase.OVER
    over = judge(row(state), record(), "", NOW)
    assert (over.preempted, words in over.reason) == (preempted, True)
    assert over.cancelled == (state == "CANCELLED")
    removed = judge(row(state), record(removing=True), "", NOW)
    assert (removed.preempted, removed.cancelled, removed.reason) == (False, False, "removed")
    assert judge(row(state), record(refusal="no python"), "", NOW).reason == "no python"


def test_what_slurm_forgot_is_told_by_the_job_itself() -> None:
    times = (NOW, NOW + timedelta(minutes=1))
    written = record(begun="1 n[1-2]", end="0 2")
    assert (
        judge_forgotten(written, [AgentExit(outcome="succeeded", exit_code=0)] * 2, *times).reason
        == "the agents exited"
    )
    failed = judge_forgotten(
        written, [AgentExit(outcome="exit", exit_code=3, reason="code 3")], *times
    )
    assert (failed.reason, failed.preempted) == ("code 3", False)
    assert judge_forgotten(
        written, [AgentExit(outcome="preempted", exit_code=143)], *times
    ).preempted
    assert "did not record" in judge_forgotten(record(begun="1 n[1-2]"), (), *times).reason
    assert "agents failed" in judge_forgotten(record(end="137 2"), (), *times).reason
    seen = GangStart(at=NOW - timedelta(seconds=1), nodes=("n1", "n2"))
    assert judge_forgotten(record(end="0 2", seen=seen), (), *times).began == seen


KEPT = {
    "AccountingStorageType": "accounting_storage/slurmdbd",
    "AccountingStorageEnforce": "associations,limits",
}
MINE = [("account vision", "no limits; QOS normal"), ("account Speech", "jobs 4; QOS normal")]


def say_account(
    account: str, config: Mapping[str, str] = KEPT, limits: Facts = MINE
) -> Mapping[str, str]:
    return dict(explain_accounts(account, "ann", config, ("sbatch", "sacctmgr"), limits))


def test_an_account_that_nobody_can_check_is_said_to_be_unchecked() -> None:
    """Without slurmdbd Slurm itself does not know which accounts there are, and takes any."""
    why = "the cluster stores no accounting data (slurmdbd)"
    facts = say_account("vison", {"AccountingStorageType": "accounting_storage/none"}, ())
    assert facts == {"account": f"vison: could not be checked: {why}", "limits": why}
    assert "account" not in say_account("", {}, ())
    told = say_account("vision", KEPT, ())
    assert (
        told["account"]
        == "vision: could not be checked: the cluster's accounting does not list ann"
    )
    untold = dict(explain_accounts("vision", "ann", KEPT, ("sbatch",), ()))
    assert untold["account"] == "vision: could not be checked: the login node has no sacctmgr"
    others = say_account(
        "vision", KEPT, [("QOS few", "group gres/gpu=4")]
    )  # which says nothing of ann
    assert others["account"] == told["account"]
    assert others["QOS few"] == "group gres/gpu=4"


def test_an_account_that_slurm_would_refuse_is_told_before_a_job_finds_it() -> None:
    with pytest.raises(
        Refused, match=r"is vison, which is not an account of ann, .* use one of vision, Speech"
    ):
        say_account("vison", limits=[*MINE, *MINE])  # one row for each partition
    assert say_account("speech")["account"] == "speech"
    assert say_account("")["limits"] == "known to the cluster's accounting"
    lax = {**KEPT, "AccountingStorageEnforce": "none"}  # any name is taken
    assert say_account("vison", lax)["account"] == "vison"


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("Batch job submission failed: Requested node configuration is not available", NoCapacity),
        (
            "Batch job submission failed: Invalid account or account/partition combination "
            "specified",
            Refused,
        ),
        ("Batch job submission failed: Job violates accounting/QOS policy", Refused),
        (
            "Batch job submission failed: Unable to contact slurm controller (connect failure)",
            TryAgain,
        ),
        ("Batch job submission failed: Socket timed out on send/recv operation", SubmissionUnsure),
    ],
)
def test_complaints_of_sbatch(said: str, kind: type[ProviderError]) -> None:
    done = CommandResult(code=1, out="", err=f"sbatch: error: {said}")
    assert type(sort_complaint(done, DIALECT)) is kind
