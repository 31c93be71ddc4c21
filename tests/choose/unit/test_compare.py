"""`cavvy compare`: cells against the shipped catalog and the data sheets, charts and reports."""

import csv
import json
import re
import sqlite3
import stat
import xml.etree.ElementTree as ET
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cavvy.capabilities.choose.comparison import compare_offers, list_facts
from cavvy.capabilities.choose.drawing import ChartPoint, draw_bars, draw_points, draw_tornado
from cavvy.capabilities.choose.report import ReportSection, ReportTable, make_page
from cavvy.cli.main import cli
from cavvy.cli.task import market
from cavvy.cli.task.place_runs import name_job
from cavvy.client import ApiError
from cavvy.client.wire import MarketListing
from cavvy.domain.facts import Fact
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.units import parse_rate
from cavvy.domain.values import replace
from cavvy.store.snapshot.choose import SHIPPED


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path / "home"))
    (tmp_path / "empty.toml").touch()
    monkeypatch.setenv("CAVVY_CONFIG", str(tmp_path / "empty.toml"))
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments), prog_name="cavvy")


OFFER = Offer(
    provider="aws",
    region="us-east-1",
    instance_type="p5.48xlarge",
    accelerator="H100",
    accelerator_count=8,
    accelerator_memory_mib=80 * 1024,
    network_mbps=3_200_000,
    rate=parse_rate("80"),
    source="a list",
)


def test_the_lowest_price_of_each_option_is_compared() -> None:
    rows = compare_offers(
        [
            OFFER,
            replace(OFFER, region="eu-west-1", rate=parse_rate("72")),
            replace(OFFER, purchase=Purchase.SPOT, rate=parse_rate("24")),
            replace(OFFER, purchase=Purchase.RESERVED, term_months=12, rate=parse_rate("48")),
            replace(OFFER, provider="ssh", owned=True, rate=parse_rate("1")),
            replace(OFFER, provider="vast", accelerator_part=0.5, accelerator_count=1),
            replace(OFFER, accelerator=None, accelerator_count=0),
            replace(OFFER, provider="free", rate=parse_rate("0")),
        ]
    )
    assert [(row.provider, row.price(Purchase.ON_DEMAND)) for row in rows] == [
        ("aws", 9.0),
        ("vast", 160.0),
    ]
    aws = rows[0]
    assert (aws.price(Purchase.SPOT), aws.price(Purchase.RESERVED, 12)) == (3.0, 6.0)
    assert aws.regions == ["eu-west-1", "us-east-1"]
    facts = {fact.name: fact for fact in list_facts(aws)}
    assert facts["bf16_tflops"].value == 989.4
    assert facts["usd_hr_per_bf16_tflops"].value == pytest.approx(3 / 989.4, abs=1e-6)
    assert facts["usd_hr_per_bf16_tflops"].formula == "spot_usd_hr / bf16_tflops"
    assert facts["usd_hr_per_memory_gib"].value == pytest.approx(3 / 80)
    assert facts["usd_hr_per_bandwidth_gb_s"].value == pytest.approx(3 / 3350, abs=1e-6)
    assert facts["network_gbps"].value == 3200
    assert "aws/us-east-1/p5.48xlarge:8/spot" in facts["spot_usd_hr"].source
    unknown = {fact.name for fact in list_facts(replace(aws, accelerator="Unknown"))}
    assert not any("tflops" in name for name in unknown)


def test_twenty_cells_are_those_of_the_catalog(home: Path) -> None:
    """The lowest prices are read from the snapshot by SQL, apart from the code that compares."""
    done = run("compare", "H100", "A100:80GB", "L4", "-o", "json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    connection = sqlite3.connect(f"file:{SHIPPED}?mode=ro", uri=True)
    checked = 0
    for row in rows:
        for number, name in ((0, "on_demand_usd_hr"), (2, "spot_usd_hr")):
            lowest = connection.execute(
                "SELECT MIN(rate / (count * part)) FROM offer JOIN shape ON shape.id = shape "
                "JOIN pack ON pack.id = pack WHERE purchase = ? AND provider = ? AND accelerator "
                "= ? AND pack.memory_mib = ?",
                (number, row["provider"], row["accelerator"], row["memory_gib"] * 1024),
            ).fetchone()[0]
            told = row[name]
            assert (told is None) == (lowest is None), (row["provider"], name)
            if told is not None:
                assert told == pytest.approx(lowest / 1e6, abs=1e-6), (row["provider"], name)
                checked += 1
    assert checked >= 20


def test_every_figure_has_a_source_and_a_date(home: Path) -> None:
    rows = json.loads(run("compare", "H100", "TPU-v5e", "Trainium2", "-o", "json").stdout)
    named = {"provider", "accelerator", "interconnect", "regions", "seen", "facts", "tflops"}
    named |= {"usd_hr_per_tflops", "quota_nodes", "time_s", "cost_micros"}
    assert rows
    for row in rows:
        facts = {fact["name"]: fact for fact in row["facts"]}
        for name, value in row.items():
            if name not in named and value is not None:
                assert facts[name]["value"] == value, name
        for fact in facts.values():
            assert fact["source"], fact
            assert re.fullmatch(r"20\d\d-\d\d-\d\d", fact["as_of"]), fact


def test_a_report_has_charts_and_its_sources(home: Path) -> None:
    report, plot, line = (home / name for name in ("r.html", "p.svg", "t.svg"))
    files = ["--report", str(report), "--plot", str(plot), "--timeline", str(line)]
    done = run("compare", "H100", *files)
    assert done.exit_code == 0, done.output
    page = report.read_text()
    assert page.count("<svg") == 2
    assert "Every figure and its source" in page
    assert "skypilot-catalog" in page
    for path in (plot, line):
        root = ET.fromstring(path.read_text())
        assert root.attrib["aria-label"]
        assert "prefers-color-scheme:dark" in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["H1000000"], "H1000000"),
        (["H100", "--plot", "p.png"], "charts are SVG files"),
        (["a.yaml", "H100"], "one task is compared alone"),
        (["missing.yaml"], "missing.yaml"),
        (["H100", "--provider", "nowhere"], "the catalog has no provider 'nowhere'"),
        (["H100", "--provider", "aks"], "clusters of aks are used by the provider kubernetes"),
        (["H100", "--region", "mars"], "nothing to compare"),
        (["H100", "--report", "r.txt"], "reports are HTML or PDF files"),
        (["H100", "--report", "/no/such/folder/r.html"], "cannot be written"),
    ],
)
def test_odd_requests_get_clear_errors(home: Path, arguments: list[str], said: str) -> None:
    done = run("compare", *arguments)
    assert done.exit_code in (1, 2)
    assert said in done.stderr
    assert "bug" not in done.stderr


def test_lists_in_csv_are_names_and_no_python(home: Path) -> None:
    rows = list(csv.DictReader(run("compare", "H100", "-o", "csv").stdout.splitlines()))
    regions = {row["provider"]: row["regions"].split() for row in rows}
    assert "us-central1" in regions["gcp"]
    assert not re.search(r"[\[\]']", "".join(row["regions"] for row in rows))


def test_one_place_is_no_comparison(home: Path) -> None:
    (home / "train.py").write_text("print()\n")
    done = run("compare", "--benchmark", str(home / "train.py"), "--provider", "local")
    assert "two or more places" in done.stderr


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("train.py", "compare-train"),
        ("My Train (1).py", "compare-my-train-1"),
        ("$(reboot).py", "compare-reboot"),
        ("\u00fc.py", "compare-script"),
        (f"{'a' * 80}.py", f"compare-{'a' * 42}"),
    ],
)
def test_a_job_s_name_is_plain(script: str, name: str) -> None:
    assert name_job(Path(script)) == name


def test_a_place_that_fails_keeps_the_runs_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from cavvy.cli.task import place_runs

    at = datetime(2026, 11, 28, tzinfo=UTC)
    jobs = [(place, place_runs._PlaceJob("p", place, place, at)) for place in ("a", "b", "c")]
    stopped = []

    class Connected:
        def __enter__(self) -> "Connected":
            return self

        def __exit__(self, *_: object) -> None: ...

        def job(self, project: str, name: str) -> SimpleNamespace:
            return SimpleNamespace(
                attempts=[],
                submitted_at=at,
                ended_at=at,
                phase="done",
                spent_micros=10,
                project="p",
                name=name,
            )

    def watch(client: Connected, project: str, name: str, seconds: float) -> object:
        if name == "b":
            raise ApiError("not-found", "there is no job b")
        return [(0.0, 0.0), (10.0, 100.0)], client.job(project, name)

    monkeypatch.setattr("cavvy.cli.reach.session.session", Connected)
    monkeypatch.setattr("cavvy.sdk.client.Client", Connected)
    monkeypatch.setattr(place_runs, "_submit_all", lambda *_: jobs)
    monkeypatch.setattr(place_runs, "watch_reports", watch)
    monkeypatch.setattr(
        place_runs, "stop_measured", lambda client, p, name, why: stopped.append(name)
    )
    found = place_runs.run_places(
        Path("train.py"), (), ("a", "b", "c"), seconds=10, samples=None, consent=True
    )
    assert [each.samples_per_s for each in found] == [10.0, None, 10.0]
    assert found[1].outcome == "not measured: there is no job b"
    assert stopped == ["a", "b", "c"]


@pytest.mark.parametrize("ends", [KeyboardInterrupt, ConnectionError])
@pytest.mark.parametrize("when", ["submit", "read"])
def test_no_job_is_left_if_not_all_could_be_submitted(ends: type[BaseException], when: str) -> None:
    from cavvy.cli.task import place_runs

    stopped: list[str] = []
    names = iter("abc")

    def submit(task: object, **_: object) -> SimpleNamespace:
        name = next(names)
        if (name, when) == ("c", "submit"):
            raise ends
        return SimpleNamespace(project="p", name="compare", id=name)

    def read(project: str, name: str) -> SimpleNamespace:
        if (name, when) == ("c", "read") and fuse:
            fuse.clear()
            raise ends
        return SimpleNamespace(phase="queued", submitted_at=datetime(2026, 11, 28, tzinfo=UTC))

    fuse = [True]
    client: Any = SimpleNamespace(job=read, stop=lambda p, name, reason: stopped.append(name))
    submitter: Any = SimpleNamespace(submit=submit)
    places = [(None, "a"), (None, "b"), (None, "c")]
    with pytest.raises(ends):
        place_runs._submit_all(
            client, submitter, places, place_runs._PlaceScript(Path("t.py"), 10.0, True)
        )
    # a job that ends would start the next one
    assert stopped == (["b", "a"] if when == "submit" else ["c", "b", "a"])


def test_a_pdf_is_printed_by_a_browser(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = home / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    if not Path("/usr/bin/chromium").exists():
        done = run("compare", "H100", "--report", str(home / "r.pdf"))
        assert "needs Chromium or Chrome" in done.stderr
    browser = folder / "chromium"
    browser.write_text(
        "#!/bin/sh\nfor each; do case $each in --print-to-pdf=*) printf %%PDF-1.4 "
        '> "${each#*=}";; esac; done\n'
    )
    browser.chmod(browser.stat().st_mode | stat.S_IXUSR)
    assert run("compare", "H100", "--report", str(home / "r.pdf")).exit_code == 0
    assert (home / "r.pdf").read_bytes() == b"%PDF-1.4"
    browser.write_text("#!/bin/sh\necho no display >&2\n")
    assert "no display" in run("compare", "H100", "--report", str(home / "s.pdf")).stderr


def test_pictures_and_pages_escape_texts_and_survive_odd_values() -> None:
    evil = '<script>alert("x")</script>'
    points = [
        ChartPoint(1.0, 2.0, evil, evil, evil),
        ChartPoint(float("nan"), 1.0, "nan", "a"),
        ChartPoint(0.0, -1.0, "zero", "a"),
    ]
    pictures = [
        draw_points(evil, points, evil, evil),
        draw_points("empty", [], "x", "y"),
        draw_points(
            "one", [ChartPoint(3.0, 0.0, "a", "a")], "x", "y", scales=("range", "from-zero")
        ),
        draw_bars(evil, [(evil, {evil: 1.0, "b": -1.0}), ("none", {})], evil),
        draw_bars("empty", [], "USD"),
        draw_tornado(evil, [(evil, -5.0, 5.0)], 1.0, evil),
    ]
    for picture in pictures:
        ET.fromstring(picture)
        assert "<script" not in picture
    section = ReportSection(
        title=evil, texts=[evil], table=ReportTable(heads=[evil], rows=[[evil, 1.5, None]])
    )
    fact = Fact(name=evil, value=1.0, unit=evil, source=evil, formula=evil)
    assert "<script" not in make_page(evil, [section], [fact])


def test_what_this_installation_has_seen_is_shown(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = MarketListing(
        market="aws/us-east-2/use2-az1/p5.48xlarge:8/spot",
        granted=3,
        refused=1,
        refused_at=None,
        lives=3,
        taken=2,
        failed=0,
        node_hours=100.0,
        boots=0,
        boot_s=0.0,
        preemptions_per_hour=0.5,
    )
    monkeypatch.setattr(market, "seen_here", lambda: {seen.market: seen})
    rows = json.loads(run("compare", "H100", "L4", "-o", "json").stdout)
    told = {(row["provider"], row["accelerator"]): row["seen"] for row in rows if row["seen"]}
    assert told == {("aws", "H100"): "granted 3 of 4 launches, reclaimed 2 times in 100.0 h"}
    (home / "plan.yaml").write_text(
        "machines: 1\nuse: 50%\ngpu: H100:8\nowned: {price_usd: 300000}\ncloud: {providers: aws}\n"
    )
    done = run("tco", str(home / "plan.yaml"), "--runs", "0", "-o", "json")
    assumed = {each["name"]: each for each in json.loads(done.stdout)["assumptions"]}
    overhead = assumed["cloud.spot_overhead"]
    assert overhead["value"] == pytest.approx(0.5 * (900 + 300) / 3600, abs=1e-4)
    assert "2 preemptions in 100 node-hours here" in overhead["source"]


def test_json_divides_by_the_precision_that_was_asked_for(home: Path) -> None:
    """It was always bf16."""
    rows = json.loads(run("compare", "H100", "--precision", "fp8", "-o", "json").stdout)
    facts = [{fact["name"]: fact["value"] for fact in row["facts"]} for row in rows]
    assert rows
    assert [row["tflops"] for row in rows] == [each["fp8_tflops"] for each in facts]


def test_points_name_their_providers_and_stay_out_of_the_legend(home: Path) -> None:
    run("compare", "H100", "--plot", str(home / "p.svg"))
    texts = [each for each in ET.parse(home / "p.svg").iter() if each.tag.endswith("text")]
    labels = [each for each in texts if each.get("class") == "small" and each.text]
    assert {each.text for each in labels} >= {"H100 azure", "H100 lambda"}
    ends = {
        each.text: float(each.get("x", 0)) for each in labels if each.get("text-anchor") == "end"
    }
    assert "H100 azure" in ends  # the H100 is at the right edge
    assert max(ends.values()) < 600


def test_a_limit_shows_some_of_each_accelerator_that_was_asked_for(home: Path) -> None:
    def list_names(*arguments: str) -> list[str]:
        told = json.loads(run("compare", *arguments, "-o", "json").stdout)
        return [row["accelerator"] for row in told]

    assert set(list_names("H100", "L40S", "--limit", "2")) == {"H100", "L40S"}
    whole = list_names("H100", "L40S")
    some = [name.partition("-")[0] for name in list_names("H100", "L40S", "--limit", "4")]
    assert sorted(some) == ["H100", "H100", "L40S", "L40S"]
    assert list_names("H100", "--limit", "3") == list_names("H100")[:3]
    assert list_names("--limit", "3") == list_names()[:3]
    assert len(list_names("H100", "L40S", "--limit", "0")) == len(whole)


def test_prices_that_the_catalog_lacks_are_said(home: Path) -> None:
    told = CliRunner().invoke(cli, ["compare", "A100", "--provider", "azure"]).stderr
    assert "azure: 20 of 26 accelerated instance types have no spot price in the catalog" in told
    assert "azure: 26 of 26 accelerated instance types have no reserved price" in told
    assert "aws:" not in told
    told = CliRunner().invoke(cli, ["compare", "A100", "--provider", "seeweb"]).stderr
    assert "The price tables have no spot prices of seeweb." in told
    assert not CliRunner().invoke(cli, ["compare", "A100", "-o", "csv"]).stderr
