"""`cavvy offers` and `cavvy catalog` as typed, over the catalog that ships."""

import csv
import io
import json
import sqlite3
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import asdict

from cavvy.catalog.tables import list_unlisted_reasons
from cavvy.cli.main import cli
from cavvy.client import wire
from cavvy.domain.offers import Purchase
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.store.snapshot import CatalogSnapshot
from cavvy.store.snapshot.choose import SHIPPED, refreshed_path
from cavvy.store.snapshot.refresh import write_snapshot

LARGE = ("aws", "azure", "gcp", "ibm", "oci", "tpu")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path / "home"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def test_offers_as_json_are_the_cheapest_first_and_what_was_asked_for() -> None:
    answer = run(
        "offers", "--gpu", "H100:8", "--spot", "--max-price", "30", "--region", "eu", "-o", "json"
    )
    assert answer.exit_code == 0, answer.output
    offers = json.loads(answer.stdout)
    assert offers
    prices = [offer["price_usd_hr"] for offer in offers]
    assert prices == sorted(prices)
    assert prices[-1] <= 30
    for offer in offers:
        assert (offer["accelerator_count"], offer["purchase"]) == (8, "spot")
        assert offer["accelerator"].startswith("H100")
        assert offer["source"]
        assert offer["as_of"]
        assert offer["accelerator_price_usd_hr"] == pytest.approx(
            offer["price_usd_hr"] / 8, abs=1e-5
        )


def test_offers_show_what_the_server_has_seen_of_them_in_all_zones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = ("offers", "--gpu", "H100:8", "--spot", "--limit", "1")
    [plain] = json.loads(run(*request, "-o", "json").stdout)
    assert plain["seen"] is None
    place = f"{plain['provider']}/{plain['region']}"
    key = f"{plain['instance_type']}:8/spot"
    rows = [
        wire.MarketListing(
            market=f"{place}/{zone}/{key}",
            granted=3,
            refused=1,
            refused_at=None,
            lives=3,
            taken=taken,
            failed=0,
            node_hours=20.0,
            boots=2,
            boot_s=90.0,
            preemptions_per_hour=0.1,
        )
        for zone, taken in (("a", 1), ("b", 0))
    ]
    other = wire.MarketListing(**{**asdict(rows[0]), "market": f"{place}x/{key}"})
    monkeypatch.setattr(
        "cavvy.cli.task.market.seen_here", lambda: {row.market: row for row in (*rows, other)}
    )
    [seen] = json.loads(run(*request, "-o", "json").stdout)
    assert seen["seen"] == "granted 6 of 8 launches, reclaimed 1 times in 40.0 h, boots in 90 s"
    assert "SEEN HERE" in run(*request).stdout


def test_the_accelerators_can_be_given_without_the_option() -> None:
    asked = ("--limit", "3", "-o", "json")
    assert run("offers", "A100:8", *asked).stdout == run("offers", "--gpu", "A100:8", *asked).stdout
    twice = run("offers", "A100:8", "--gpu", "H100:8")
    assert twice.exit_code == 2
    assert "given twice" in twice.stderr
    assert "'A100:8|H100:8'" in twice.stderr
    unknown = run("offers", "A1000:8")
    assert unknown.exit_code == 2
    assert "unknown accelerator 'A1000'" in unknown.stderr


def test_offers_as_csv_have_the_same_rows() -> None:
    request = ("offers", "--gpu", "A100:80GB:8", "--provider", "azure,gcp", "--limit", "7")
    rows = list(csv.DictReader(io.StringIO(run(*request, "-o", "csv").stdout)))
    objects = json.loads(run(*request, "-o", "json").stdout)
    assert len(rows) == len(objects) == 7
    assert [row["instance_type"] for row in rows] == [item["instance_type"] for item in objects]
    assert {row["accelerator_memory_mib"] for row in rows} == {"81920"}


def test_a_table_says_how_many_more_there_are() -> None:
    answer = run("offers", "--cpus", "8..16", "--memory", "32GB", "--on-demand", "--limit", "3")
    assert answer.exit_code == 0
    assert len(answer.stdout.splitlines()) == 4
    assert "3 of " in answer.stderr
    assert "--limit 0" in answer.stderr


def test_offers_are_sorted_as_asked() -> None:
    answer = run(
        "offers", "--gpu", "nvidia:1..16", "--sort", "gpu-price", "--limit", "0", "-o", "json"
    )
    each = [offer["accelerator_price_usd_hr"] for offer in json.loads(answer.stdout)]
    assert each == sorted(each)
    assert len(each) > 1000


def test_nothing_found_says_what_would_have_to_change_and_that_is_enough() -> None:
    request = ["offers", "--gpu", "H100:8", "--region", "eu", "--on-demand"]
    answer = run(*request, "--max-price", "15")
    assert answer.exit_code == 1
    assert answer.stdout == ""
    assert "your limit is $15.00/h" in answer.stderr
    limit = answer.stderr.split("[--max-price ")[1].split("]")[0]
    assert run(*request, "--max-price", limit).exit_code == 0
    assert json.loads(run(*request, "--max-price", "15", "-o", "json").stdout) == []


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--gpu", "H1000:8"], 2, "did you mean H100?"),
        (["--max-price", "cheap"], 2, "expected an amount of dollars"),
        (["--cpus", "8..4"], 2, "--cpus: expected a size or a range"),
        (["--cpus", "many"], 2, "'many' is not a number"),
        (["--memory", "1 pound"], 2, "expected memory such as"),
        (["--spot", "--on-demand"], 2, "cannot be used together"),
        (["--provider", "asw"], 1, "did you mean aws?"),
        (["--region", "us-east-11"], 1, "did you mean us-east-1?"),
        (["--instance", "p4d.24xlage"], 1, "did you mean p4d.24xlarge?"),
        (["--instance", "Standard_NC6"], 1, "its successor is Standard_NC4as_T4_v3"),
    ],
)
def test_a_wrong_wish_is_told_what_may_be_meant(arguments: list[str], code: int, said: str) -> None:
    answer = run("offers", *arguments)
    assert answer.exit_code == code
    assert said in answer.stderr


def test_accelerators_of_every_kind_are_listed() -> None:
    rows = json.loads(run("offers", "--accelerators", "-o", "json").stdout)
    assert {row["kind"] for row in rows} == {"gpu", "tpu", "asic", "fpga"}
    assert {row["vendor"] for row in rows} >= {"nvidia", "amd", "intel", "google", "aws"}
    assert next(row for row in rows if row["name"] == "H100")["bf16_flops"] == 989.4e12


def test_info_tells_what_ships() -> None:
    told = json.loads(run("catalog", "info", "-o", "json").stdout)
    assert told["path"] == str(SHIPPED)
    assert told["shipped"] is True
    assert told["rows"] >= 60_000
    assert told["rows_with_accelerator"] >= 1_500
    assert (
        sum(provider["with_accelerator"] for provider in told["providers"])
        == told["rows_with_accelerator"]
    )
    assert sum(source["rows"] for source in told["sources"]) == told["rows"]
    assert "shipped with Cavvy" in run("catalog", "info").stdout


def test_diff_tells_a_refresh_and_info_a_broken_one(tmp_path: Path) -> None:
    assert "the same offers and prices" in run("catalog", "diff").stdout
    dearer = tmp_path / "dearer.db"
    dearer.write_bytes(SHIPPED.read_bytes())
    with sqlite3.connect(dearer) as connection:
        connection.execute("UPDATE offer SET rate = rate * 2 WHERE rate = 55040000")
    connection.close()
    refreshed = run("catalog", "refresh", "--from", str(dearer))
    assert refreshed.exit_code == 0, refreshed.output
    assert "the catalog now has" in refreshed.stdout
    changes = json.loads(run("catalog", "diff", "-o", "json").stdout)
    assert {(change["change"], change["ratio"]) for change in changes} == {("dearer", 2.0)}
    assert "+100.0 %" in run("catalog", "diff").stdout
    refreshed_path().write_bytes(b"broken")
    assert "Not used" in run("catalog", "info").stdout
    assert run("offers", "--gpu", "A100:8").exit_code == 0
    failed = run("catalog", "refresh", "--from", str(refreshed_path()))
    assert failed.exit_code == 1
    assert "not a usable catalog" in failed.stderr
    assert failed.stderr.endswith("; the catalog in use was kept\n")
    assert ".new" not in failed.stderr


def test_sources_are_honest_about_every_provider_that_ships() -> None:
    listed = {
        row["provider"]: row for row in json.loads(run("catalog", "sources", "-o", "json").stdout)
    }
    shipped = {
        provider["provider"]
        for provider in json.loads(run("catalog", "info", "-o", "json").stdout)["providers"]
    }
    assert listed.keys() >= shipped
    assert all(row["how"] for row in listed.values())
    refused = run("catalog", "refresh", "--provider", "lambda")
    assert refused.exit_code == 1
    assert "needs an API key" in refused.stderr


def test_help_imports_nothing_heavy() -> None:
    for arguments in (
        ["offers", "--help"],
        ["catalog", "--help"],
        ["catalog", "refresh", "--help"],
    ):
        code = (
            "import sys\nfrom cavvy.cli.main import cli\n"
            f"try: cli({arguments!r})\nexcept SystemExit: pass\n"
            "heavy = ('sqlite3', 'json', 'cavvy.catalog', 'rich', 'urllib.request')\n"
            "print([name for name in heavy if name in sys.modules])"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout.splitlines()[-1] == "[]", arguments


def test_offers_that_a_job_can_use_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "settings.toml"
    config.write_text("[providers.fake]\n[providers.local]\nenabled = false\n")
    monkeypatch.setenv("CAVVY_CONFIG", str(config))
    rows = json.loads(run("offers", "--ready", "--gpu", "H100", "-o", "json").stdout)
    assert [(row["provider"], row["readiness"]) for row in rows] == [("fake", "ready")]
    config.write_text("[providers.local]\nenabled = false\n")
    assert "No configured provider has an offer" in run("offers", "--ready").output
    rows = json.loads(run("offers", "--gpu", "H100:8", "-o", "json").stdout)
    assert {row["readiness"] for row in rows} == {"configurable", "price-only"}


def test_a_configured_provider_that_the_catalog_does_not_know_is_asked_where_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "settings.toml"
    config.write_text("[providers.fake]\n")
    monkeypatch.setenv("CAVVY_CONFIG", str(config))
    answer = run("offers", "--provider", "fake", "-o", "json")
    assert answer.exit_code == 0, answer.output
    rows = json.loads(answer.stdout)
    assert [(row["provider"], row["instance_type"]) for row in rows] == [
        ("fake", "cpu8"),
        ("fake", "h100x1"),
        ("fake", "h100x8"),
    ]
    both = json.loads(
        run(
            "offers",
            "--provider",
            "fake,aws",
            "--gpu",
            "H100:8",
            "--sort",
            "provider",
            "-o",
            "json",
        ).stdout
    )
    assert {row["provider"] for row in both} == {"aws", "fake"}
    none = run("offers", "--provider", "fake", "--gpu", "A100:8")
    assert (none.exit_code, none.stdout) == (1, "")
    assert "Of 3 offers 3 have other accelerators or none" in none.stderr
    config.write_text("")
    for name in ("fake", "ray"):  # neither is in the settings
        said = run("offers", "--provider", name).stderr
        assert f"no provider '{name}'" in said
        assert f"`cavvy check {name}`" in said
        assert f"[providers.{name}]" in said


def test_offers_with_a_commitment_of_one_or_of_three_years(tmp_path: Path) -> None:
    with CatalogSnapshot.open(SHIPPED) as shipped:
        offers = list(shipped.all_offers())
    plain = next(each for each in offers if each.instance_type == "Standard_NC24ads_A100_v4")
    reserved = [
        replace(
            plain,
            purchase=Purchase.RESERVED,
            term_months=months,
            rate=HourlyRate(plain.rate.micros_per_hour * share // 100),
        )
        for months, share in ((12, 70), (36, 45))
    ]
    path = tmp_path / "reserved.db"
    write_snapshot(path, [*offers, *reserved], as_of=date(2027, 1, 2))
    assert run("catalog", "refresh", "--from", str(path)).exit_code == 0
    wanted = ("offers", "--instance", plain.instance_type, "--region", plain.region, "-o", "json")
    found = {
        choice: [each["term_months"] for each in json.loads(run(*wanted, *choice).stdout)]
        for choice in ((), ("--reserved",), ("--reserved", "1y"), ("--reserved", "3y"))
    }
    assert set(found.pop(())) == {None}  # no commitment without being asked
    assert found == {
        ("--reserved",): [36, 12],
        ("--reserved", "1y"): [12],
        ("--reserved", "3y"): [36],
    }
    table = run(*wanted[:-2], "--reserved").stdout
    assert "MONTHS" in table
    for other in ("--spot", "--on-demand", "--ready"):
        refused = run("offers", "--reserved", other)
        assert (refused.exit_code, "cannot be used together" in refused.stderr) == (2, True)
    nothing = run("offers", "B200:8", "--reserved", "--provider", "aws")
    assert nothing.exit_code == 1
    assert "you asked for on-demand" not in nothing.stderr


def test_a_part_of_a_gpu_is_shown_as_one() -> None:
    found = json.loads(run("offers", "--gpu", "A10:1/6", "--limit", "1", "-o", "json").stdout)
    assert found[0]["accelerators"] == "1/6 x A10 4GB"
    assert found[0]["accelerator_price_usd_hr"] == pytest.approx(6 * found[0]["price_usd_hr"])


def test_info_says_why_a_price_of_a_large_cloud_is_missing() -> None:
    with CatalogSnapshot.open(SHIPPED) as shipped:
        missing = shipped.unpriced()
    large = {key: counts for key, counts in missing.items() if key[0] in LARGE}
    assert large.keys() == list_unlisted_reasons().keys(), (
        "every gap has a reason, and no other has"
    )
    told = json.loads(run("catalog", "info", "-o", "json").stdout)["unlisted"]
    assert {(each["provider"], each["purchase"]): (each["types"], each["of"]) for each in told} == {
        (provider, str(purchase)): counts for (provider, purchase), counts in large.items()
    }
    assert "OCI has no commitment to a machine" in " ".join(run("catalog", "info").stdout.split())


def test_offers_say_why_prices_that_were_asked_for_are_missing() -> None:
    spot = run("offers", "--gpu", "A100:8", "--spot", "--provider", "azure")
    assert spot.exit_code == 1
    told = " ".join(spot.output.split())
    assert (
        "accelerated instance types have no spot price in the catalog: the price tables have only placeholders"
        in told
    )
    held = run("offers", "--gpu", "H100:8", "--reserved", "1y").output
    for cloud in ("aws", "azure", "gcp", "oci", "tpu"):
        assert f"{cloud}: " in held
    assert "no reserved price" not in run("offers", "--gpu", "H100:8").output
