"""Advice names waste with its dollars and says nothing about healthy jobs."""

import json
import random
from datetime import UTC, datetime, timedelta

import pytest
from click.testing import CliRunner
from msgspec import Raw
from msgspec.json import encode
from scripts.drills.advice import (
    H100,
    OFFERS,
    PERIOD,
    SPOT,
    drill,
    make_healthy,
    make_offer,
    observe,
    plant,
    simulate,
)
from tests.cli.unit.test_cli_jobs import make_entry
from tests.unit.cli_client import FakeClient, at, client, make_attempt, make_job, make_node

from cavvy.cli.advise import describe_remedy
from cavvy.cli.main import cli
from cavvy.client import ApiError
from cavvy.client.ledger_wire import LedgerEntryView
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.planner.advice import ObservedRun, WasteKind, advise
from cavvy.planner.reservations import ReservableType, UsedMachine, advise_reservations

__all__ = ["client"]
T0 = datetime(2026, 11, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
PLAIN = ObservedRun(
    project="default",
    job="train",
    attempt=1,
    nodes=1,
    offer=H100,
    charged=Money(400_000_000),
    hours=100,
    cpu_percent=300,
    gpu_percent=90,
    memory_peak_mib=200_000,
    gpu_memory_peak_mib=70_000,
    measured=100 * HOUR,
)


@pytest.mark.parametrize("seed", [1, 2])
def test_eight_planted_wastes_are_found_among_healthy_jobs(seed: int) -> None:
    errors, wrong = drill(seed)
    assert wrong == []
    assert len(errors) == 8


def found(run: ObservedRun) -> list[tuple[str, int]]:
    told = advise([run], OFFERS, PERIOD)
    assert all(describe_remedy(waste, waste.job) for waste in told)
    return [(str(waste.kind), waste.monthly.micros // 1_000_000) for waste in told]


def test_a_healthy_run_gets_no_advice() -> None:
    assert found(PLAIN) == []
    unmeasured = replace(PLAIN, gpu_percent=None, cpu_percent=None, memory_peak_mib=None)
    assert found(replace(unmeasured, gpu_memory_peak_mib=None, measured=timedelta(0))) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"gpu_percent": 4.9}, [("idle gpu", 398)]),
        ({"nodes": 4, "hours": 400, "idle_ranks": (2,)}, [("idle gpu", 99)]),
        ({"gpu_percent": 5.0, "cpu_percent": 1600}, [("starved by data", 378)]),
        ({"gpu_percent": 4.9, "measured": HOUR / 2}, []),
        ({"gpu_percent": 4.9, "hours": 0.9}, []),
        ({"memory_peak_mib": 30_000}, [("unused memory", 120)]),
        ({"memory_peak_mib": 30_000, "cpu_percent": 1590}, []),
        ({"gpu_percent": 10, "gpu_memory_peak_mib": 19_000}, [("gpu too large", 279)]),
        ({"gpu_percent": 10, "gpu_memory_peak_mib": 20_000}, []),
        ({"kept": Money(90_000_000), "kept_hours": 22.5}, []),
        ({"kept": Money(120_000_000), "kept_hours": 30}, [("idle kept nodes", 119)]),
        ({"unattached": Money(3_000_000)}, [("unattached volume", 3)]),
        ({"unattached": Money(900_000)}, []),
    ],
)
def test_each_waste_has_its_threshold(
    changes: dict[str, object], expected: list[tuple[str, int]]
) -> None:
    assert found(replace(PLAIN, **changes)) == expected


def test_amounts_are_for_a_month_and_attempts_are_added_up() -> None:
    idle = replace(PLAIN, gpu_percent=0.0)
    [waste] = advise([idle, replace(idle, attempt=2)], OFFERS, PERIOD / 2)
    assert waste.amount == Money(2 * 398_000_000)
    assert waste.monthly == Money(4 * 398_000_000)
    assert describe_remedy(replace(waste, unfinished=True), "train") == "cavvy stop train"


def test_the_idle_nodes_of_a_job_are_named() -> None:
    run = replace(PLAIN, nodes=4, hours=400, idle_ranks=(3,), gpu_percent=70.0)
    [waste] = advise([run, replace(run, attempt=2, idle_ranks=(1, 3))], OFFERS, PERIOD)
    assert waste.ranks == (1, 3)
    assert "rank 1, 3 does not use its GPUs" in describe_remedy(waste, "train")
    for runs in ([run, replace(run, gpu_percent=1.0)], [replace(run, gpu_percent=1.0), run]):
        [waste] = advise(runs, OFFERS, PERIOD)
        assert waste.ranks == ()


def test_a_session_is_not_told_to_use_spot() -> None:
    run = simulate(plant(WasteKind.SPOT, random.Random(1)), random.Random(1))
    spot = observe("train", plant(WasteKind.SPOT, random.Random(1)), run)
    assert [name for name, _ in found(spot)] == ["spot possible"]
    assert found(replace(spot, session=True)) == []


def test_healthy_jobs_of_any_size_get_no_advice() -> None:
    dice = random.Random(5)
    for _ in range(30):
        job = replace(make_healthy(dice), gpu_hours=dice.uniform(1.2, 20))
        assert found(observe("train", job, simulate(job, dice))) == []


def test_a_commitment_pays_for_machines_that_run_often_enough() -> None:
    kind = ReservableType("aws", "here", "h100")

    def use(first: float, last: float) -> UsedMachine:
        times = T0 + first * HOUR, T0 + last * HOUR
        return UsedMachine(kind=kind, since=times[0], until=times[1], rate=HourlyRate(4_000_000))

    offers = [
        replace(H100, term_months=12, rate=HourlyRate(2_400_000)),
        replace(H100, term_months=36, rate=HourlyRate(1_600_000)),
        replace(H100, term_months=36, rate=HourlyRate(1_000_000), region="elsewhere"),
        make_offer("l4", "L4", 0.2, term_months=12),
        SPOT,
    ]
    until = T0 + 100 * HOUR
    used = [use(0, 100), use(-20, 70.5), use(10, 45), use(50, 54)]
    [advice] = advise_reservations(used, offers, T0, until)
    assert (advice.offer.term_months, advice.machines) == (36, 2)
    assert advice.on_demand == HourlyRate(4_000_000)
    # an independent count: the second machine runs in 70.5 hours, the third in 39, less than 40
    saved = 100 * 4 - 100 * 1.6 + 70.5 * 4 - 100 * 1.6
    assert advice.monthly == Money(round(saved * 7.2 * 1_000_000))
    assert advice.used == pytest.approx(170.5 / 200)
    assert advise_reservations([use(0, 39)], offers, T0, until) == []
    assert advise_reservations([], offers, T0, until) == []


def test_volumes_and_machines_are_judged_by_the_ledger(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.now(UTC)

    def entry(begin: float, end: float, cost: int, **fields: object) -> LedgerEntryView:
        given = {
            "project": "default",
            "job": "",
            "job_id": "",
            "provider": "aws",
            "region": "us-east-1",
            "line_since": now - begin * HOUR,
            "since": now - begin * HOUR,
            "until": now - end * HOUR,
            "quantity": round((begin - end) * 3_600_000_000),
            "amount_micros": cost,
            "corrects": None,
            **fields,
        }
        return replace(make_entry(micros=cost), **given)

    storage: dict[str, object] = {"kind": "storage", "line": "storage"}
    machine = {"machine": "dev", "job_id": "gone", "job": "train"}
    lines = [
        entry(700, 0, 9_000_000, **storage, volume="old", id="volume:aws:vol-1/0/1"),
        entry(700, 300, 9_000_000, **storage, volume="used", id="volume:aws:vol-2/0/1"),
        entry(700, 500, 9_000_000, **storage, volume="gone", id="volume:aws:vol-3/0/1"),
        entry(20, 10, 10_000_000, **machine, kind="node", line="node", id="a-1/0/1"),
        entry(10, 0, 10_000_000, **machine, kind="idle", line="kept", id="a-1/0/2"),
    ]
    monkeypatch.setattr("cavvy.client.ledger_wire.list_entries", lambda *_, **__: lines)

    def no_job(project: str, name: str) -> None:
        raise ApiError("job-not-found", "there is no such job")

    monkeypatch.setattr(client, "job", no_job)
    told = CliRunner().invoke(cli, ["advise", "-o", "json"])
    assert told.exit_code == 0, told.output
    rows = [(row["job"], row["waste"], row["remedy"]) for row in json.loads(told.stdout)]
    assert rows == [
        ("dev", "idle kept nodes", "cavvy machines stop dev"),
        (
            "old",
            "unattached volume",
            "aws ec2 delete-volume --region us-east-1 --volume-id vol-1",
        ),
    ]
    amounts = [row["amount_micros"] for row in json.loads(told.stdout)]
    assert amounts == [pytest.approx(10_000_000 * (1 - 1 / 60)), 9_000_000]


def test_the_commands_read_the_ledger_and_the_telemetry(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.now(UTC)
    lines = [
        replace(
            make_entry(micros=0),
            project="default",
            job="train",
            job_id="id-of-train",
            id="x-1/0/1",
            provider="aws",
            region="here",
            instance_type="h100",
            purchase="on-demand",
            line_since=now - 720 * HOUR,
            since=now - 720 * HOUR,
            until=now,
            quantity=720 * 3_600_000_000,
            amount_micros=720 * 4_000_000,
            rate_micros_per_hour=4_000_000,
        )
    ]
    monkeypatch.setattr("cavvy.client.ledger_wire.list_entries", lambda *_, **__: lines)
    monkeypatch.setattr(
        "cavvy.cli.reach.usage.list_offers_of",
        lambda _: [*OFFERS, replace(H100, term_months=12, rate=HourlyRate(2_000_000))],
    )
    used = {"gpu_mean_percent": 1.0, "cpu_mean_percent": 100.0, "measured_s": 2_592_000.0}
    node = make_node(telemetry={**used, "memory_peak_mib": 200_000.0})
    attempt = make_attempt(offer=Raw(encode(H100)), nodes=[node], running_at=at(2))
    job = make_job("train", "running", attempts=[attempt], id="id-of-train")
    monkeypatch.setattr(client, "job", lambda project, name: job)
    told = CliRunner().invoke(cli, ["advise", "-o", "json"])
    assert told.exit_code == 0, told.output
    [row] = json.loads(told.stdout)
    assert (row["job"], row["waste"], row["remedy"]) == ("train", "idle gpu", "cavvy stop train")
    assert row["monthly_micros"] == pytest.approx(719.5 * 4_000_000, rel=1e-3)
    assert "total $2,878" in CliRunner().invoke(cli, ["advise"]).stdout
    told = CliRunner().invoke(cli, ["reserve", "advise", "-o", "json"])
    assert told.exit_code == 0, told.output
    [row] = json.loads(told.stdout)
    assert (row["machines"], row["months"], row["used"]) == (1, 12, pytest.approx(1, abs=0.01))
    assert row["monthly_micros"] == pytest.approx(720 * 2_000_000, rel=0.01)
