"""`cavvy plan` over a small snapshot and without any server."""

import csv
import io
import json
import re
from datetime import date
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests import records

from cavvy.cli.main import cli
from cavvy.cli.offers import command as offers
from cavvy.cli.plan import command
from cavvy.cli.task import available, market
from cavvy.cli.task.load import read_any_task
from cavvy.domain.allocations import VolumeLocation
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.providers.abilities import HOLDS_VOLUMES
from cavvy.providers.base import Manifest, Refused, TryAgain
from cavvy.store.snapshot import choose
from cavvy.store.snapshot.refresh import EgressPrice, write_snapshot

TODAY = date(2026, 1, 1)
WORK = "work: {samples: 36000, rates: {L4: 1, H100: 8}}\n"


def make_offer(
    gpu: str, usd: float, zone: str = "a", purchase: Purchase = Purchase.ON_DEMAND
) -> Offer:
    return Offer(
        provider="aws",
        region="us-east-1",
        zone=f"us-east-1{zone}",
        instance_type=f"{gpu.lower()}.big",
        accelerator=gpu,
        accelerator_count=1,
        accelerator_memory_mib={"L4": 24576, "H100": 81920}[gpu],
        vcpus=8,
        memory_mib=32768,
        rate=HourlyRate(round(usd * 1e6)),
        purchase=purchase,
        source="a test",
        as_of=TODAY,
    )


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a catalog in use, and settings that turn every provider off."""
    offers = [
        make_offer("L4", 0.5),
        make_offer("L4", 0.6, "b"),
        make_offer("L4", 0.2, purchase=Purchase.SPOT),
        make_offer("H100", 3.0),
        make_offer("H100", 3.0, "b"),
    ]
    egress = [EgressPrice(provider="aws", per_gb=Money(90_000), source="a test", as_of=TODAY)]
    write_snapshot(tmp_path / "catalog.db", offers, egress, as_of=TODAY)
    (tmp_path / "settings.toml").write_text("[providers.local]\nenabled = false\n")
    monkeypatch.setattr(choose, "SHIPPED", tmp_path / "catalog.db")
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CAVVY_CONFIG", str(tmp_path / "settings.toml"))
    return tmp_path


def run(folder: Path, text: str, *options: str) -> Result:
    file = folder / "task.yaml"
    file.write_text("name: t\nrun: 'true'\n" + text)
    return CliRunner().invoke(command, [str(file), *options])


def plan_of(folder: Path, text: str, *options: str) -> dict[str, object]:
    result = run(folder, text, "-o", "json", *options)
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def types(found: dict[str, object], key: str = "instance_type") -> list[object]:
    placements = found["placements"]
    assert isinstance(placements, list)
    return [placement[key] for placement in placements]


def test_the_cheapest_total_and_the_earliest_finish(planned: Path) -> None:
    text = "resources: {gpu: [L4, H100]}\n" + WORK
    assert types(plan_of(planned, text)) == [
        "h100.big",
        "l4.big",
    ]  # 8 times as fast for 6 times the price
    assert types(plan_of(planned, "resources: {gpu: [L4, H100]}\n")) == ["l4.big", "h100.big"]
    dear = "resources: {gpu: [L4, H100]}\nwork: {samples: 36000, rates: {L4: 1, H100: 2}}\n"
    assert types(plan_of(planned, dear)) == ["l4.big", "h100.big"]
    assert types(plan_of(planned, dear, "--by", "time")) == ["h100.big", "l4.big"]


def test_every_place_is_shown_on_request_and_the_best_of_each_machine_else(planned: Path) -> None:
    text = "resources: {gpu: L4}\n"
    assert types(plan_of(planned, text), "location") == ["us-east-1a"]
    assert types(plan_of(planned, text, "--all-locations"), "location") == [
        "us-east-1a",
        "us-east-1b",
    ]
    one = plan_of(planned, text, "--all-locations", "--limit", "1")
    assert types(one, "location") == ["us-east-1a"]
    every = plan_of(planned, text, "--all-locations", "--limit", "0")
    assert types(every, "location") == ["us-east-1a", "us-east-1b"]


def test_the_source_and_the_date_of_each_price_are_shown(planned: Path) -> None:
    found = plan_of(planned, "resources: {gpu: [L4, H100]}\n")
    assert types(found, "source") == ["a test", "a test"]
    assert types(found, "as_of") == [str(TODAY)] * 2
    shown = run(planned, "resources: {gpu: [L4, H100]}\n").stdout
    assert f"prices: a test, {TODAY}\n" in shown


def test_the_plan_of_a_service_names_the_command_that_starts_it(planned: Path) -> None:
    shown = run(planned, "resources: {gpu: L4}\nservice: {port: 80}\n").stdout
    assert "`cavvy serve` can use none" in shown
    spare = "replicas are added so that enough replicas are ready for"
    assert spare not in shown
    on_spot = "resources: {gpu: L4, spot: auto}\nservice: {port: 80, slo: {availability: 99.9%}}\n"
    told = " ".join(run(planned, on_spot).stdout.split())
    assert f"on spot: spare and on-demand {spare} 99.9% of the time" in told


def test_every_offer_is_accounted_for(planned: Path) -> None:
    found = plan_of(planned, "resources: {gpu: [L4, H100]}\nlimits: {duration: 2h}\n" + WORK)
    assert found["considered"] == 5
    assert found["kept"] == 2
    assert found["rejected"] == [
        {"reason": "purchase", "count": 1, "field": "resources.spot"},
        {"reason": "duration", "count": 2, "field": "limits.duration"},
    ]


def test_the_table_says_what_it_rests_on_and_why_others_do_not_fit(planned: Path) -> None:
    result = run(
        planned, "resources: {gpu: L4, spot: auto}\ncheckpoint: {path: c, every: 10m}\n" + WORK
    )
    assert result.exit_code == 0
    assert "by expected total" in result.stdout
    assert "[1] preempted about every 5h00m (assumed)" in result.stdout
    assert (
        "3 fitting offers; list prices from 2026-01-01; `cavvy run` can use none" in result.stdout
    )
    assert "2 of 5 offers do not fit" in result.stdout
    assert "accept H100:1 of 80 GiB in resources.gpu" in result.stdout


def test_memory_asked_for_by_the_cpu_is_told_by_the_cpu(planned: Path) -> None:
    result = run(planned, "resources: {gpu: L4, memory: 1000x}\n" + WORK)
    assert "accept 4 GiB for each CPU in resources.memory" in result.stdout  # 32 GiB for 8 CPUs


def test_spot_is_dearer_than_its_price_by_the_expected_loss(planned: Path) -> None:
    text = "resources: {gpu: L4, spot: only}\ncheckpoint: {path: c, every: 10m}\n" + WORK
    placements = plan_of(planned, text)["placements"]
    assert isinstance(placements, list)
    (spot,) = placements
    assert spot["wall_time_s"] == pytest.approx(36000 + 120 + spot["spot_loss_s"])
    assert spot["cost_micros"] == pytest.approx(spot["wall_time_s"] / 3600 * 200_000, abs=1)


def test_spot_alone_that_costs_more_than_machines_that_stay_is_said_with_its_cause(
    planned: Path,
) -> None:
    text = "resources: {gpu: L4, spot: only}\n" + WORK  # ten hours, begun anew at each preemption
    assert cost_of(planned, text) > cost_of(planned, text.replace("only", "never"))
    (warning,) = warnings_of(planned, text)
    assert re.search(
        r"spot is expected to cost more than on-demand: \$6\.\d\d at "
        r"aws/us-east-1/us-east-1a/l4\.big.*, "
        r"of which \$4\.\d\d is for repeated work and 6\.4 new starts, compared with \$5\.02 at "
        r".*l4\.big.*; "
        "write a `checkpoint`, or let `spot: auto` choose",
        warning,
    )
    assert warnings_of(planned, text + "checkpoint: {path: c, every: 10m}\n") == []
    assert warnings_of(planned, text.replace("only", "auto")) == []
    assert warnings_of(planned, text.replace("only", "never")) == []
    assert (
        warnings_of(planned, "resources: {gpu: L4, spot: only}\n") == []
    )  # nobody knows how long it takes


def cost_of(folder: Path, text: str) -> int:
    placements = plan_of(folder, text)["placements"]
    assert isinstance(placements, list)
    return int(placements[0]["cost_micros"])


def warnings_of(folder: Path, text: str) -> object:
    return plan_of(folder, text)["warnings"]


def test_no_offer_says_what_would_have_to_change(planned: Path) -> None:
    result = run(planned, "resources: {gpu: H100, max_price: 2}\n")
    assert result.exit_code == 1
    assert (
        "No offer: the cheapest H100:1 is $3.00/h, but your limit is $2.00/h; raise "
        "resources.max_price to $3.00\n" in result.stderr
    )
    assert plan_of(planned, "resources: {gpu: H100, max_price: 2}\n")["placements"] == []


def test_data_that_leaves_is_priced_where_its_size_is_given(planned: Path) -> None:
    found = plan_of(planned, "resources: {gpu: L4}\n" + WORK, "--output-size", "1000MB")
    assert types(found, "egress_micros") == [94_372]  # 1000 MiB are 1.048576 GB
    assert run(planned, "", "--output-size", "much").exit_code == 2


def test_a_wrong_file_is_refused_with_its_line(planned: Path) -> None:
    result = run(planned, "resorces: {gpu: L4}\n")
    assert result.exit_code == 2
    assert "task.yaml:3" in result.stderr
    assert "resources" in result.stderr


def test_here_leaves_the_catalog_out(planned: Path) -> None:
    result = run(planned, "", "--here")
    assert result.exit_code == 1
    assert "`cavvy setup PROVIDER`" in result.stderr


def test_this_machine_is_offered_where_it_is_on(
    planned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (planned / "settings.toml").write_text("[providers.local]\nprice_usd_hr = 3.60\n")
    found = plan_of(planned, "", "--here")
    assert types(found, "provider") == ["local"]
    assert types(found, "rate_micros_per_hour") == [3_600_000]


def test_what_a_provider_refuses_is_counted_with_its_reason(planned: Path) -> None:
    (planned / "settings.toml").write_text("[providers.local]\nenabled = true\n")
    found = plan_of(planned, "resources: {disk: {size: 1GB, type: gp3}}\n", "--here")
    assert found["placements"] == []
    assert isinstance(found["rejected"], list)
    (rejected,) = found["rejected"]
    assert rejected["field"] == "resources.disk.type"
    assert rejected["reason"].startswith("local: ")
    assert str(found["message"]).startswith("No offer: some offers fit, but are refused by local: ")
    assert str(found["message"]).endswith("; change resources.disk.type")


def test_settings_that_are_wrong_are_said(planned: Path) -> None:
    (planned / "settings.toml").write_text("[providers.lokal]\n")
    result = run(planned, "")
    assert result.exit_code == 2
    assert "Did you mean 'local'?" in result.stderr


def test_names_that_nobody_knows_are_told_instead_of_far_misses(planned: Path) -> None:
    wrong = run(planned, "resources: {providers: [awss], regions: [mars], instance: h100.bigg}\n")
    assert wrong.exit_code == 1
    assert "No offer: the catalog has no provider 'awss'; did you mean aws?" in wrong.stderr
    function = run(planned, "resources: {providers: [aws-lambda], gpu: T4}\n")
    assert function.exit_code == 1
    assert "aws-lambda runs functions, which have no GPUs (https://docs.aws" in function.stderr
    assert "the catalog has no region 'mars'; `cavvy offers -o wide` lists regions" in wrong.stderr
    assert "no instance type 'h100.bigg'; did you mean h100.big?" in wrong.stderr


def test_any_node_is_called_so(planned: Path) -> None:
    assert run(planned, "").stdout.startswith("t: any node; ")
    assert run(planned, "nodes: 2\n").stdout.startswith("t: 2 nodes of any kind; ")
    assert run(planned, "nodes: 2\nresources: {cpu: 2}\n").stdout.startswith(
        "t: 2 nodes with 2 CPUs; "
    )


def test_a_disk_type_that_the_catalog_does_not_know_is_said_to_be_unchecked(planned: Path) -> None:
    assert (
        "resources.disk.type was not checked"
        in run(planned, "resources: {disk: {type: gp3}}\n").stderr
    )
    assert "not checked" not in run(planned, "resources: {disk: 10GB}\n").stderr


def test_several_wishes_are_one_table_of_csv_that_says_of_which_wish_each_row_is(
    planned: Path,
) -> None:
    shown = run(planned, "resources:\n  any_of: [{gpu: L4}, {gpu: H100}]\n", "-o", "csv")
    assert shown.exit_code == 0, shown.output
    rows = list(csv.DictReader(io.StringIO(shown.stdout)))
    assert {(row["alternative"], row["accelerators"]) for row in rows} == {
        ("1", "1 x L4"),
        ("2", "1 x H100"),
    }


def test_the_page_on_planning_tells_every_key_of_the_json(planned: Path) -> None:
    page = (
        (Path(__file__).resolve().parents[3] / "docs/concepts/planning.md")
        .read_text()
        .partition("## As JSON")[2]
    )
    one = plan_of(planned, "resources: {gpu: L4, spot: auto}\nlimits: {deadline: 40h}\n" + WORK)
    several = plan_of(planned, "resources:\n  any_of: [{gpu: L4}, {gpu: H100, max_price: 2}]\n")
    assert list(several) == ["task", "ordered", "any_of"]
    assert [list(each) for each in several["any_of"]] == [list(one)] * 2  # type: ignore[attr-defined]  # a list
    rows = [
        several,
        one,
        *(row for key in ("placements", "rejected", "misses", "forecast") for row in one[key]),
    ]  # type: ignore[attr-defined]  # lists
    assert {
        key for row in rows for key in row if f"`{key}`" not in page and f'"{key}"' not in page
    } == set()


def test_why_no_wish_can_be_had_is_one_sentence(planned: Path) -> None:
    shown = run(
        planned,
        "resources:\n  any_of: [{gpu: L4, max_price: 0.01}, {gpu: H100, max_price: 0.01}]\n",
    )
    assert shown.exit_code != 0
    told = f"{shown.output} {shown.exception}"
    assert "; or No offer" in told
    assert ".; or" not in told


class Farm:
    """A place that is configured here and has CPUs only; where its volumes are it cannot say."""

    manifest = Manifest(name="farm", title="Farm", docs="", abilities=(HOLDS_VOLUMES,))

    def __init__(self, blind: bool = False) -> None:
        self._blind = blind

    async def offers(self) -> list[Offer]:
        return [records.make_offer("farm/r/cpu", 0, vcpus=4, memory_mib=4096)]

    async def launch(self, gang: object) -> None:
        raise AssertionError("a plan starts nothing")

    async def gangs(self, name: str | None = None) -> list[object]:
        return []

    async def remove(self, gang: str) -> None:
        raise AssertionError("a plan removes nothing")

    async def volumes(self) -> list[VolumeLocation]:
        if self._blind:
            raise Refused("its policy does not allow it")
        return []


@pytest.fixture
def farm(planned: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(market, "load_providers", lambda *_: {"farm": Farm(blind=True)})
    return planned


def test_a_plan_names_only_configured_places_that_have_what_the_wish_needs(farm: Path) -> None:
    assert (
        "`cavvy run` can use none of them: no offer of farm fits"
        in run(farm, "resources: {gpu: L4}\n").stdout
    )
    shown = run(farm, "resources:\n  any_of: [{gpu: L4}, {cpu: 1}]\n").stdout
    assert ["none" in line for line in shown.splitlines() if "`cavvy run` can use" in line] == [
        True,
        False,
    ]
    late = run(
        farm,
        "resources: {cpu: 1}\nwork: {samples: 36000, rates: {cpu: 1}}\nlimits: {deadline: 1h}\n",
    ).stdout
    assert "can use farm" not in late


def test_a_place_that_cannot_say_where_its_volumes_are_is_planned_for_without_them(
    farm: Path,
) -> None:
    plain = run(farm, "resources: {cpu: 1}\n", "--here")
    assert "can use farm" in plain.stdout
    assert (
        "note: the volumes of farm could not be read: its policy does not allow it" in plain.stderr
    )
    named = run(farm, "resources: {cpu: 1}\nvolumes: [data:/d]\n", "--here")
    assert named.exit_code == 1
    assert "the location of data is currently unknown" in named.stdout


class SilentFarm(Farm):
    """A place with volumes that does not answer."""

    async def offers(self) -> list[Offer]:
        raise TryAgain("cannot be reached")


@pytest.mark.parametrize("silent", [Farm(blind=True), SilentFarm()])
def test_a_plan_makes_no_volume_that_a_silent_place_may_have(
    planned: Path, monkeypatch: pytest.MonkeyPatch, silent: Farm
) -> None:
    here = Farm()
    here.manifest = replace(Farm.manifest, makes_volumes=True)
    places = {"far": silent, "farm": here}
    monkeypatch.setattr(market, "load_providers", lambda *_: places)
    named = "resources: {cpu: 1}\nvolumes: [data:/d]\n"
    assert "the location of data is currently unknown" in run(planned, named, "--here").stdout
    alone = "resources: {cpu: 1, providers: farm}\nvolumes: [data:/d]\n"
    assert "can use farm" in run(planned, alone, "--here").stdout
    far = Farm()
    far.manifest = replace(Farm.manifest, name="far", abilities=())
    places["far"] = far
    assert "data may be a volume of far" in run(planned, named, "--here").stdout


def test_a_duration_is_scaled_and_shown_with_its_range(planned: Path) -> None:
    text = "resources: {gpu: [L4, H100]}\nwork: {duration: 10h, measured_on: L4}\n"
    h100, l4 = plan_of(planned, text)["placements"]  # type: ignore[misc]  # a list of two rows
    assert (l4["run_time_s"], l4["run_time_range_s"]) == (36000, None)
    low, high = h100["run_time_range_s"]
    assert low < h100["run_time_s"] < high < 36000
    assert " to " in run(planned, text).stdout
    assert "RANGE" not in run(planned, "resources: {gpu: L4}\nwork: {duration: 10h}\n").stdout


class Cloud(Farm):
    """A cloud of the catalog that is configured for one of its regions, at prices of its own."""

    manifest = Manifest(name="aws", title="Cloud", docs="")

    async def offers(self) -> list[Offer]:
        return [make_offer("L4", 0.7)]


def write_three_kinds(folder: Path) -> None:
    """A catalog with offers of two regions of a provider with a driver, and of one without."""
    rows = [
        make_offer("L4", 0.5),
        replace(make_offer("L4", 0.6), region="us-west-2", zone=None),
        replace(make_offer("L4", 0.1), provider="nodriver", region="eu", zone=None),
    ]
    (folder / "catalog.db").unlink()
    write_snapshot(folder / "catalog.db", rows, [], as_of=TODAY)


def test_offers_are_ready_configurable_or_only_prices(
    planned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def readiness(*options: str) -> list[tuple[object, ...]]:
        rows = plan_of(planned, "resources: {gpu: L4}\n", "--all-locations", *options)["placements"]
        assert isinstance(rows, list)
        return [(row["provider"], row["location"], row["readiness"]) for row in rows]

    write_three_kinds(planned)
    assert readiness() == [
        ("nodriver", "eu", "price-only"),
        ("aws", "us-east-1a", "configurable"),
        ("aws", "us-west-2", "configurable"),
    ]
    monkeypatch.setattr(market, "load_providers", lambda *_: {"aws": Cloud()})
    assert readiness() == [
        ("nodriver", "eu", "price-only"),
        ("aws", "us-west-2", "configurable"),
        ("aws", "us-east-1a", "ready"),  # the provider's own price, without the catalog's row
    ]
    assert readiness("--ready") == [("aws", "us-east-1a", "ready")]


def test_offers_and_plan_show_the_same_prices(
    planned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed(*options: str) -> list[tuple[object, ...]]:
        shown = CliRunner().invoke(offers, ["L4", "-o", "json", *options])
        assert shown.exit_code == 0, shown.output
        return [
            (row["provider"], row["region"], row["price_usd_hr"], row["readiness"])
            for row in json.loads(shown.stdout)
        ]

    write_three_kinds(planned)
    elsewhere = [
        ("nodriver", "eu", 0.1, "price-only"),
        ("aws", "us-west-2", 0.6, "configurable"),
    ]
    assert listed() == [
        elsewhere[0],
        ("aws", "us-east-1", 0.5, "configurable"),
        elsewhere[1],
    ]
    monkeypatch.setattr(market, "load_providers", lambda *_: {"aws": Cloud()})
    own = ("aws", "us-east-1", 0.7, "ready")
    assert listed() == [*elsewhere, own]
    assert listed("--limit", "2") == elsewhere
    assert listed("--ready") == [own]
    plan = plan_of(planned, "resources: {gpu: L4}\n", "--all-locations")["placements"]
    assert isinstance(plan, list)
    assert [row["rate_micros_per_hour"] for row in plan] == [
        round(1e6 * row[2])  # type: ignore[call-overload]  # a number
        for row in listed()
    ]


def test_nodes_that_wait_for_a_server_that_is_away_are_announced(
    planned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "resources: {gpu: L4}\nlimits: {unattended: 2h}\n"
    assert "server.results_url" not in run(planned, text).stderr  # no such provider is configured
    monkeypatch.setattr(market, "load_providers", lambda *_: {"aws": Cloud()})
    assert "warning: aws: if nodes cannot reach the server" in run(planned, text).stderr
    assert "wait for up to 2h" in run(planned, text).stderr
    stored = "checkpoint: {path: state, storage: 's3://b/c'}\n"
    assert "server.results_url" not in run(planned, text + stored).stderr
    monkeypatch.setenv("CAVVY_SERVER_RESULTS_URL", "s3://b/c")
    assert "server.results_url" not in run(planned, text).stderr


def test_the_nearest_misses_are_those_that_a_job_could_use(planned: Path) -> None:
    write_three_kinds(planned)
    misses = plan_of(planned, "resources: {gpu: L4, max_price: 0.01}\n")["misses"]
    assert isinstance(misses, list)
    assert [miss["readiness"] for miss in misses][-1] == "price-only"


def test_a_provider_that_is_not_configured_is_named_instead_of_its_regions(planned: Path) -> None:
    write_three_kinds(planned)
    wrong = run(planned, "resources: {providers: [slurm], regions: [gpu]}\n")
    assert (
        "No offer: the catalog has no provider 'slurm': its offers come from your own"
        in wrong.stderr
    )
    assert "no region" not in wrong.stderr
    wrong = run(planned, "resources: {providers: [aws], regions: [mars]}\n")
    assert "the catalog has no region 'mars'; " in wrong.stderr


def test_an_alternative_at_a_provider_that_is_not_configured_is_not_needed(planned: Path) -> None:
    write_three_kinds(planned)
    file = planned / "task.yaml"

    def validate(*choices: str) -> str:
        file.write_text(f"run: x\nresources: {{any_of: [{', '.join(choices)}]}}\n")
        return CliRunner().invoke(cli, ["validate", str(file)]).output

    silent = "{providers: slurm, regions: gpu}"
    known = "{providers: aws, regions: us-east-1}"
    assert " is valid." in validate(silent, known)
    assert "no region 'mars'" in validate(silent, "{providers: aws, regions: mars}")
    assert "no provider 'slurm'" in validate(silent, "{providers: slurm, regions: cpu}")


def test_a_gap_in_the_price_list_of_a_provider_is_a_note(
    planned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        make_offer("L4", 0.5),
        replace(make_offer("H100", 3.0), provider="nodriver", region="eu", zone=None),
    ]
    (planned / "catalog.db").unlink()
    write_snapshot(planned / "catalog.db", rows, [], as_of=TODAY)
    file = planned / "task.yaml"

    def validate(resources: str) -> tuple[int, str]:
        file.write_text(f"run: x\nresources: {resources}\n")
        done = CliRunner().invoke(cli, ["validate", str(file)])
        return done.exit_code, done.output

    note = "note: the price list has no H100:1 at aws, but it is a part of what is sold there"
    code, said = validate("{gpu: H100:1, providers: aws}")
    assert (code, note in said) == (0, True)
    file.write_text("run: x\nresources: {gpu: H100:1, providers: aws}\n")
    done = CliRunner().invoke(cli, ["validate", str(file), "-o", "json"])
    assert done.exit_code == 0
    assert note.removeprefix("note: ") in " ".join(json.loads(done.stdout)[0]["notes"])
    code, said = validate("{any_of: [{gpu: H100:1, providers: aws}, {gpu: L4:1}]}")
    assert (code, "price list" in said) == (0, False), "the alternative needs no note"
    code, said = validate("{gpu: L4:1, providers: aws, spot: only}")
    assert (code, "has no L4:1 on spot capacity at aws, but it is a part" in said) == (0, True)
    code, said = validate("{gpu: L4:1, providers: aws, regions: mx-central-1}")
    assert (code, "has no region mx-central-1 at aws, but it is a part" in said) == (0, True)
    code, said = validate("{instance: q9.48xlarge, providers: aws}")
    assert (code, "has no instance type q9.48xlarge at aws" in said) == (0, True)
    code, said = validate("{gpu: L4:1, providers: aws, regions: us-esat-1}")
    assert (code, "no region 'us-esat-1'; did you mean us-east-1?" in said) == (2, True)
    assert validate("{gpu: H100:4, providers: aws}")[0] == 2, "nobody sells it"
    assert validate("{gpu: L4:1, providers: aws, memory: 9000}")[0] == 2, "that GPU is listed"
    monkeypatch.setattr(market, "load_providers", lambda *_: {"aws": Cloud()})
    code, said = validate("{gpu: H100:1, providers: aws}")
    assert (code, "No offer" in said) == (2, True), "its own answer counts"


def test_a_hint_names_only_files_that_exist(planned: Path) -> None:
    write_three_kinds(planned)
    (planned / "task.yaml").write_text("name: t\nrun: 'true'\nresources: {gpu: 'L4:7'}\n")
    task = read_any_task(str(planned / "task.yaml"), {})
    assert available.suggest_offer(task, "true", is_file=False) == (
        "`cavvy plan` with the same arguments shows the nearest misses"
    )
    slurm = replace(task, resources=replace(task.resources, providers=("slurm",)))
    assert available.suggest_offer(slurm, "true") == (
        "slurm: not configured; `cavvy setup slurm` sets it up"
    )


def test_only_offers_of_providers_with_a_driver_are_suggested(planned: Path) -> None:
    write_three_kinds(planned)
    file = planned / "settings.toml"

    def hint(text: str) -> str:
        (planned / "task.yaml").write_text(f"name: t\nrun: 'true'\n{text}")
        return available.suggest_offer(read_any_task(str(planned / "task.yaml"), {}), "task.yaml")

    assert hint("resources: {gpu: L4}\n") == (
        "the cheapest offer of a provider that you can set up is l4.big at aws (us-east-1) for "
        "$0.50/h: cavvy setup aws --set regions=us-east-1"
    )
    assert "no provider that Cavvy can use" in hint("resources: {gpu: L4, providers: nodriver}\n")
    assert "nearest misses" in hint("resources: {gpu: L4:7}\n")
    assert "did you mean" in hint("resources: {gpu: L4, providers: nodrivr}\n")
    file.write_text("[providers.aws]\n")
    assert hint("resources: {gpu: L4}\n").endswith(
        "`cavvy check aws` shows why the provider cannot be used"
    )
