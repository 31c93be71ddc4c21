"""Cells of `cavvy compare` against the tables that they come from, which are read here without any
code of the catalog."""

import csv
import json
import re
from collections.abc import Mapping
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner
from tests.public_data import data

from cavvy.cli.main import cli

NAMES = ("H100", "H200", "A100:80GB", "L4", "L40S", "MI300X", "T4", "V100", "B200", "TPU-v5e")
# the price list of each provider, with the columns of its type, region and prices
LISTS = {
    "aws": ("aws_vms.csv", "InstanceType", "Region", "Price", "SpotPrice"),
    "gcp": ("gcp_vms.csv", "InstanceType", "Region", "Price", "SpotPrice"),
    "azure": ("azure_vms.csv", "InstanceType", "Region", "Price", "SpotPrice"),
    "nebius": ("nebius_vms.csv", "InstanceType", "Region", "Price", "SpotPrice"),
    "verda": ("verda_vms.csv", "InstanceType", "Region", "Price", "SpotPrice"),
}
SMALL = ("small_clouds.csv", "instance_type", "region", "on_demand_usd_hr", "spot_usd_hr")
ZONES = ("aws_spot_by_zone.csv", "instance_type", "zone_id", "on_demand_usd_hr", "spot_usd_hr")
# products of the tables of peak rates and bandwidths (stas00/ml-engineering)
SHEETS = {
    "NVIDIA B200 SXM": "B200",
    "NVIDIA H200 SXM": "H200",
    "NVIDIA H100 SXM": "H100",
    "AMD MI300X": "MI300X",
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    folder = tmp_path_factory.mktemp("home")
    (folder / "empty.toml").touch()
    variables = {"CAVVY_HOME": str(folder), "CAVVY_CONFIG": str(folder / "empty.toml")}
    done = CliRunner().invoke(cli, ["compare", *NAMES, "-o", "json"], env=variables)
    assert done.exit_code == 0, done.output
    told: list[dict[str, object]] = json.loads(done.stdout)
    return told


def list_prices(path: Path, key: str, place: str, price: str) -> Mapping[tuple[str, str], set[str]]:
    found: dict[tuple[str, str], set[str]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found.setdefault((row[key].lower(), row[place].lower()), set()).add(row[price])
    return found


def test_twenty_prices_are_those_of_the_lists(rows: list[dict[str, object]]) -> None:
    cells = []
    for row in rows:
        for fact in row["facts"]:  # type: ignore[attr-defined] # JSON
            found = re.search(r": (\w+)/(\S+)/([^/]+):(\d+)/(on-demand|spot)$", fact["source"])
            listed = not re.search(r"read (in|20)|huggingface|shadeform|vantage", fact["source"])
            if fact["name"] in ("on_demand_usd_hr", "spot_usd_hr") and found and listed:
                cells.append((fact["value"], *found.groups()))
    assert len(cells) >= 40
    checked = []
    for value, provider, place, kind, count, purchase in Random(44).sample(cells, len(cells)):
        spot = purchase == "spot"
        table = ZONES if (provider, spot) == ("aws", True) else LISTS.get(provider, SMALL)
        prices = list_prices(
            data(f"prices/{table[0]}"), table[1], table[2], table[4 if spot else 3]
        )
        known = prices.get((kind.lower(), place.rpartition("/")[2].lower()))
        if known is None:
            continue  # a table whose names the snapshot does not keep
        assert any(abs(float(each) / int(count) - value) < 2e-6 for each in known if each), (
            provider,
            place,
            kind,
            purchase,
            value,
            known,
        )
        checked.append(kind)
        if len(checked) == 20:
            break
    assert len(checked) == 20


def test_peaks_and_bandwidths_are_those_of_another_table(rows: list[dict[str, object]]) -> None:
    facts: dict[str, dict[str, float]] = {}
    for row in rows:
        named = {each["name"]: each["value"] for each in row["facts"]}  # type: ignore[attr-defined] # JSON
        facts.setdefault(str(row["accelerator"]), {}).update(named)
    checked = 0
    with data("performance/stas_peak_tflops.csv").open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            name = SHEETS.get(line["Accelerator \\ TFLOPS"])
            for precision in ("tf32", "fp16", "bf16", "fp8"):
                told = facts.get(name or "", {}).get(f"{precision}_tflops")
                if told is not None and re.fullmatch(r"[\d.]+", line[precision]):
                    assert told == pytest.approx(float(line[precision]), rel=0.01), (
                        name,
                        precision,
                    )
                    checked += 1
    with data("performance/stas_memory_bw.csv").open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            if name := SHEETS.get(line["Accelerator"]):
                bandwidth = float(line["Peak Bandwidth (TBps)"]) * 1000
                assert facts[name]["bandwidth_gb_s"] == pytest.approx(bandwidth, rel=0.01), name
                checked += 1
    assert checked >= 16
