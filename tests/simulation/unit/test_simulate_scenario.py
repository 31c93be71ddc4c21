"""A scenario file: what the guide shows runs, what is wrong is named, and its figures can be
worked out by hand.
"""

import csv
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cavvy.capabilities.simulation.command import command
from cavvy.capabilities.simulation.traces.readers import TraceError
from cavvy.capabilities.simulation.traces.scenario import read_scenario

GUIDE = Path(__file__).resolve().parents[3] / "docs/guides/simulate.md"
ONE = """
policies: [greedy, on-demand]
markets:
  - {name: us-east-1a, on_demand: 2, spot: [[0h, 0.5], [4h, 1]], available: [[0h, 3h], [4h, 20h]]}
jobs:
  - {name: train, work: 5h, deadline: 10h, nodes: 3}
"""


def simulate(tmp_path: Path, text: str, *arguments: str) -> Result:
    path = tmp_path / "scenario.yaml"
    path.write_text(text)
    return CliRunner().invoke(command, ["--scenario", str(path), *arguments])


def test_the_guides_scenario(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.S)
    ran = simulate(tmp_path, text, "-o", "json", "--segments", "--plot", str(tmp_path / "p.svg"))
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.output)
    assert {each["trace"] for each in found["runs"]} == {"train", "tune"}
    assert all(score["missed_deadlines"] == 0 for score in found["policies"].values())
    assert found["policies"]["auto"]["mean_usd"] < found["policies"]["on-demand"]["mean_usd"]
    assert found["policies"]["auto"]["cost_over_optimum"]["mean"] >= 1
    assert found["fleet"]["jobs"] == 7
    assert (tmp_path / "p.svg").stat().st_size > 1000
    table = simulate(tmp_path, text)
    assert "train" in table.output
    assert "GPU use" in table.output
    assert "makespan_s" not in table.output


def test_costs_are_those_of_a_calculation_by_hand(tmp_path: Path) -> None:
    ran = simulate(tmp_path, ONE, "-o", "json", "--segments")
    assert ran.exit_code == 0, ran.output
    runs = {each["policy"]: each for each in json.loads(ran.output)["runs"]}
    assert runs["greedy"]["usd"] == pytest.approx(
        3 * (3 * 0.5 + 2 * 1)
    )  # three nodes; an hour without spot
    assert runs["greedy"]["end_s"] == pytest.approx(6 * 3600)
    assert runs["on-demand"]["usd"] == pytest.approx(3 * 5 * 2)
    assert runs["greedy"]["optimum_usd"] == pytest.approx(runs["greedy"]["usd"])
    stays = runs["greedy"]["segments"]
    assert sum(each["usd"] for each in stays) == pytest.approx(runs["greedy"]["usd"])
    assert sum(each["work_s"] for each in stays) == pytest.approx(5 * 3600)


def test_a_queue_alone(tmp_path: Path) -> None:
    text = """
fleet:
  pools: {a: 1}
  jobs: [{pool: a, gpus: 8, duration: 2h, count: 3}, {pool: a, gpus: 9, duration: 1h}]
"""
    found = json.loads(simulate(tmp_path, text, "-o", "json").output)["fleet"]
    assert (found["jobs"], found["left_out"], found["makespan_s"], found["mean_wait_s"]) == (
        3,
        1,
        21600,
        7200,
    )
    assert (found["median_wait_s"], found["p95_wait_s"]) == (7200, 14400)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("work: 5h", "work: 50h"), "is longer than `deadline`"),
        (("work: 5h", "work: soon"), r"jobs\[0\]\.work: expected a length of time"),
        (("nodes: 3", "node: 3"), "unknown key 'node'"),
        (("greedy", "clever"), "policies: expected one of"),
        (("on_demand: 2,", ""), r"markets\[0\]\.on_demand: expected a number"),
        (("[[0h, 3h], [4h, 20h]]", "[3h]"), r"available\[0\]: expected \[from, to\]"),
        (("[[0h, 0.5], [4h, 1]]", "[[0h]]"), r"spot: expected \[since, price\]"),
        (("jobs:", "tasks:"), "unknown key 'tasks'"),
        (
            ("available: [[0h, 3h], [4h, 20h]]", "trace: nowhere.json"),
            "the file cannot be read: No such file",
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(ONE.replace(*change))
    with pytest.raises(TraceError, match=words):
        read_scenario(path)


def test_a_queues_jobs_as_files(tmp_path: Path) -> None:
    jobs, pools = tmp_path / "jobs.csv", tmp_path / "pools.csv"
    jobs.write_text("arrival_s,duration_s,gpus,vc\n0,100,8,a\n10,50,4,a\n")
    pools.write_text("vc,node num\na,1\n")
    out, plot = tmp_path / "out.csv", tmp_path / "q.svg"
    arguments = [
        "fleet",
        "--jobs",
        str(jobs),
        "--pools",
        str(pools),
        "--csv",
        str(out),
        "--plot",
        str(plot),
    ]
    ran = CliRunner().invoke(command, [*arguments, "--parquet", str(tmp_path / "out.parquet")])
    assert ran.exit_code == 0, ran.output
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [(row["start_s"], row["end_s"]) for row in rows] == [
        ("0.0", "100.0"),
        ("100.0", "150.0"),
    ]
    assert plot.stat().st_size > 1000
    assert (tmp_path / "out.parquet").stat().st_size > 100
