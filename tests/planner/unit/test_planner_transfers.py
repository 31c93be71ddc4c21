"""Plans include the copies of inputs and outputs, and buckets must be in the allowed regions."""

import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner

from cavvy.catalog.residency import list_unplaced, say_unplaced
from cavvy.cli.main import cli
from cavvy.cli.task import buckets
from cavvy.cli.task.buckets import with_sizes
from cavvy.domain.jobs import JobRecord
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import ResourceSpec, TaskSpec, Transfer, Workload
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.planner.candidates import Candidates, rank_candidates
from cavvy.planner.placements import Placement, PlanningContext
from cavvy.planner.rank import plan
from cavvy.planner.scoring import egress_price
from cavvy.planner.transfers import estimate_transfers, price_upload
from cavvy.store.objects import locations as listings
from cavvy.store.objects.base import ObjectInfo
from cavvy.store.objects.locations import ObjectLocation

NOW = datetime(2026, 1, 1, tzinfo=UTC)
GB_MIB = 10**9 / (1 << 20)
SIZE = round(100 * GB_MIB)  # 100 GB
PRICES = {"aws": Money(90_000), "gcp": Money(120_000), "gcp/eu": Money(80_000)}
AWS = Offer(provider="aws", region="us-east-1", instance_type="cpu", rate=HourlyRate(1_000_000))
GCP = replace(AWS, provider="gcp", region="eu")
INPUT = Transfer(source="s3://data/", target="data", size_mib=SIZE)
OUTPUT = Transfer(source="out", target="s3://results/", size_mib=SIZE)
WORK = Workload(samples=3600.0, rates={"cpu": 1.0})


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own server, if one runs, answers nothing here."""
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path / "home"))


def cost_of(task: TaskSpec, offer: Offer, starts: float = 1) -> float:
    found = estimate_transfers(task, offer, PRICES, starts)
    assert found is not None
    return round(found.cost.micros / 1e6, 2)


def make_task(*inputs: Transfer, outputs: tuple[Transfer, ...] = (), nodes: int = 1) -> TaskSpec:
    return TaskSpec(name="t", run="true", inputs=inputs, outputs=outputs, nodes=nodes, work=WORK)


def place(task: TaskSpec, *offers: Offer) -> tuple[Placement, ...]:
    return plan(task, offers, now=NOW, situation=PlanningContext(egress=PRICES)).placements


def test_each_node_and_start_pays_for_inputs_that_leave_their_cloud() -> None:
    assert cost_of(make_task(INPUT), GCP) == 9.0
    assert cost_of(make_task(INPUT, nodes=2), GCP, starts=1.5) == 27.0
    assert cost_of(make_task(INPUT), AWS) == 0


@pytest.mark.parametrize("service", ["sagemaker", "aws-batch", "ecs"])
def test_a_managed_service_is_a_part_of_its_cloud(service: str) -> None:
    offer = replace(AWS, provider=service)
    assert cost_of(make_task(INPUT), offer) == 0
    assert cost_of(make_task(outputs=(OUTPUT,)), offer) == 0
    vertex = replace(GCP, provider="vertex")
    assert cost_of(make_task(INPUT), vertex) == 9.0
    assert cost_of(make_task(outputs=(OUTPUT,)), vertex) == 8.0
    known = PlanningContext(egress=PRICES)
    assert egress_price(vertex, known) == egress_price(GCP, known) == Money(80_000)


def test_outputs_pay_the_price_of_the_region_that_they_leave() -> None:
    assert cost_of(make_task(outputs=(OUTPUT,)), GCP) == 8.0
    assert cost_of(make_task(outputs=(OUTPUT,)), replace(GCP, region="us")) == 12.0
    assert cost_of(make_task(outputs=(OUTPUT,)), AWS) == 0
    assert cost_of(make_task(outputs=(OUTPUT,)), replace(GCP, provider="x", shared=True)) == 0


def test_checkpoints_pay_on_their_way_to_the_server_or_to_the_bucket_of_another_cloud() -> None:
    assert price_upload(None, GCP, PRICES) == Money(80_000)
    assert price_upload("gs://b/c", GCP, PRICES) == Money(0)
    assert price_upload("s3://b/c", GCP, PRICES) == Money(80_000)
    assert price_upload("gs://b/c", replace(GCP, provider="vertex"), PRICES) == Money(0)
    assert price_upload(None, replace(GCP, provider="x"), PRICES) is None
    assert price_upload(None, replace(GCP, provider="x", shared=True), PRICES) == Money(0)


def test_copies_without_a_known_price_are_reported() -> None:
    other = make_task(replace(INPUT, region="eu-west-1"))
    web = make_task(replace(INPUT, source="https://example.org/x"))
    for task in (other, web):
        found = estimate_transfers(task, AWS, PRICES, 1)
        assert found is not None
        assert found.unpriced
        assert "has an unknown price" in found.notes()[0]
    assert not estimate_transfers(
        make_task(replace(INPUT, region="us-east-1")), AWS, {}, 1
    ).unpriced  # type: ignore[union-attr] # it has a size
    assert estimate_transfers(make_task(replace(INPUT, size_mib=None)), AWS, PRICES, 1) is None
    assert estimate_transfers(make_task(replace(INPUT, source="/data")), AWS, PRICES, 1) is None


def test_the_time_is_that_of_the_slower_network_and_streams_take_none() -> None:
    found = estimate_transfers(make_task(INPUT), replace(AWS, network_mbps=100_000), PRICES, 1)
    slow = estimate_transfers(make_task(INPUT), replace(AWS, network_mbps=100), PRICES, 1)
    assert found is not None
    assert slow is not None
    assert round(found.time / timedelta(seconds=800), 4) == 1
    assert round(slow.time / timedelta(seconds=8000), 4) == 1
    streamed = estimate_transfers(make_task(replace(INPUT, stream=True)), AWS, PRICES, 1)
    assert streamed is not None
    assert streamed.time == timedelta(0)


def test_the_order_and_the_totals_include_the_copies() -> None:
    cheap = replace(GCP, rate=HourlyRate(100_000))
    assert [each.offer for each in place(make_task(), AWS, cheap)] == [cheap, AWS]
    near, far = place(make_task(INPUT), AWS, cheap)
    assert (near.offer, far.offer) == (AWS, cheap)
    assert far.transfer is not None
    assert round(far.transfer.micros / 1e6, 2) == 9.0
    assert near.transfer == Money(0)
    assert near.wall_time is not None
    assert round(near.wall_time / timedelta(seconds=120 + 3600 + 800), 3) == 1
    assert far.notes[-1].endswith(
        "takes 13m20s for each start (assumes at most 1 Gbit/s) and costs $9.00"
    )
    without = place(make_task(), AWS)[0]
    assert without.transfer is None
    assert without.transfer_time is None


def test_outputs_are_copied_once_however_often_the_gang_starts() -> None:
    found = estimate_transfers(make_task(INPUT, outputs=(OUTPUT,)), GCP, PRICES, 3)
    assert found is not None
    assert round(found.time / timedelta(seconds=1600), 3) == 1
    assert round(found.time_of(3) / timedelta(seconds=3 * 800 + 800), 3) == 1
    assert "takes 13m20s for each start and 13m20s at the end (assumes" in found.notes()[0]


def test_a_copy_that_is_free_only_within_a_region_says_so() -> None:
    found = estimate_transfers(make_task(INPUT), AWS, PRICES, 1)
    assert found is not None
    assert found.notes()[0].endswith(
        "costs nothing, if the buckets of unknown region are in us-east-1"
    )
    stated = estimate_transfers(make_task(replace(INPUT, region="us-east-1")), AWS, PRICES, 1)
    assert stated is not None
    assert stated.notes()[0].endswith("and costs nothing")


def test_alternatives_are_compared_with_their_copies() -> None:
    cheap = replace(GCP, rate=HourlyRate(100_000), instance_type="cpu")
    choices = (ResourceSpec(providers=("aws",)), ResourceSpec(providers=("gcp",)))
    tasks = [replace(make_task(INPUT), resources=each) for each in choices]
    jobs = [
        JobRecord(id="j", project="p", name="n", task=task, submitted_at=NOW, since=NOW)
        for task in tasks
    ]
    found = [
        (job, Candidates(offers=(offer,))) for job, offer in zip(jobs, (AWS, cheap), strict=True)
    ]
    assert [offers for _, offers in rank_candidates(found, egress=PRICES)] == [(AWS,), (cheap,)]


def test_spot_repeats_the_copies_of_inputs() -> None:
    spot = replace(GCP, purchase=Purchase.SPOT)
    (found,) = place(make_task(INPUT), spot)
    assert found.transfer is not None
    assert found.transfer.micros > 9_000_000


class Bucket:
    """A bucket with 1,500 objects of 1 MiB, listed in pages."""

    def head(self, key: str) -> ObjectInfo | None:
        return None

    def list(self, prefix: str, after: str = "", limit: int = 1000) -> tuple[list[ObjectInfo], str]:
        count = 500 if after else 1000
        return [ObjectInfo(key=prefix + "x", size=1 << 20)] * count, "" if after else "next"


def test_inputs_in_buckets_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = ObjectLocation(place=Bucket(), key="train")  # type: ignore[arg-type] # reads only
    monkeypatch.setattr("cavvy.store.objects.locations.open_place", lambda *_: opened)
    task, warnings = with_sizes(make_task(replace(INPUT, size_mib=None)))
    assert (task.inputs[0].size_mib, warnings) == (1500, ())
    monkeypatch.setattr(listings, "_MOST_PAGES", 1)
    task, (warning,) = with_sizes(make_task(replace(INPUT, size_mib=None)))
    assert task.inputs[0].size_mib is None
    assert "the URL has more than 1,000 objects" in warning
    assert with_sizes(make_task(INPUT)) == (make_task(INPUT), ())


class SilentBucket(Bucket):
    def head(self, key: str) -> ObjectInfo | None:
        threading.Event().wait()
        return None


def test_buckets_that_never_answer_do_not_keep_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = ObjectLocation(place=SilentBucket(), key="train")  # type: ignore[arg-type] # reads only
    monkeypatch.setattr("cavvy.store.objects.locations.open_place", lambda *_: opened)
    monkeypatch.setattr(buckets, "_SIZES_S", 0.01)
    before = set(threading.enumerate())
    unsized = [replace(INPUT, source=f"s3://data{n}/", size_mib=None) for n in range(3)]
    local = Transfer(source="/data", target="x")
    task, warnings = with_sizes(make_task(*unsized, local, INPUT))
    assert [each.size_mib for each in task.inputs] == [None, None, None, None, SIZE]
    assert len(warnings) == 3
    assert all("did not answer within 0.01 s" in each for each in warnings)
    left = set(threading.enumerate()) - before
    assert len(left) == 3
    assert all(each.daemon for each in left)  # the process ends without them


FILE = """
name: t
run: "true"
resources: {regions: [eu], cpu: 1}
inputs:
  - {source: "s3://data/", target: data, size: 200GB%s}
"""


def run(path: Path, command: str, region: str) -> tuple[int, str]:
    file = path / "task.yaml"
    file.write_text(FILE % (f", region: {region}" if region else ""))
    done = CliRunner().invoke(cli, [command, str(file)], prog_name="cavvy")
    return done.exit_code, done.output


@pytest.mark.parametrize("command", ["validate", "plan", "run"])
def test_a_bucket_outside_the_allowed_regions_is_refused(tmp_path: Path, command: str) -> None:
    code, shown = run(tmp_path, command, "us-east-1")
    assert code == 2
    assert "s3://data/ is in us-east-1, but `resources.regions` allows only eu" in shown


def test_a_bucket_inside_is_accepted_and_an_unknown_region_is_said(tmp_path: Path) -> None:
    code, shown = run(tmp_path, "validate", "eu-central-1")
    assert code == 0, shown
    assert "does not know whether" not in shown
    code, shown = run(tmp_path, "validate", "")
    assert code == 0
    assert "does not know whether" in " ".join(shown.split())
    task = replace(make_task(INPUT), resources=ResourceSpec(regions=("eu",)))
    assert list_unplaced(task) == ["s3://data/"]
    assert say_unplaced(make_task(INPUT)) == ""
