"""`cavvy decide` and `tco` on the shipped catalog: scores, what would change the answer, and odd
files; `cavvy diagram`."""

import json
import xml.etree.ElementTree as ET
from datetime import date
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from cavvy.cli.main import cli
from cavvy.costs.decision import CRITERIA, OptionKind, PlaceOption, WorkNeeds, decide_place
from cavvy.domain.facts import Fact
from cavvy.domain.values import replace


def fact(value: float) -> Fact:
    return Fact(name="a fact", value=value, unit="", source="a test", as_of=date(2026, 11, 20))


def option(name: str, monthly: float, **changes: object) -> PlaceOption:
    made = PlaceOption(
        kind=OptionKind.CLOUD,
        name=name,
        monthly=fact(monthly),
        moves=fact(0),
        round_trip=fact(1),
        repeated=fact(0),
        commits=False,
        elastic=1,
    )
    return replace(made, **changes)


NEEDS = WorkNeeds(
    predictable=fact(0.5), peak=fact(4), skills=frozenset({"cloud"}), skills_source=fact(1)
)


def test_the_turning_points_are_where_the_answer_turns() -> None:
    cheap = option("cheap", 100, repeated=fact(1.0))
    near = option("near", 150)
    made = decide_place([near, cheap], NEEDS, CRITERIA)
    assert made.answer is not None
    assert made.runner_up is not None
    assert (made.answer.option.name, made.runner_up.option.name) == ("cheap", "near")
    found = {each.what: each.at for each in made.turning}
    for factor, name in ((0.99, "cheap"), (1.01, "near")):
        weights = {**CRITERIA, "preemption": found["weight of preemption"] * factor}
        again = decide_place([near, cheap], NEEDS, weights)
        assert again.answer is not None
        assert again.answer.option.name == name
        cost = found["cost of near"] / factor
        again = decide_place([replace(near, monthly=fact(cost)), cheap], NEEDS, CRITERIA)
        assert again.answer is not None
        assert again.answer.option.name == name


def test_an_option_that_breaks_a_requirement_is_never_the_answer() -> None:
    made = decide_place(
        [option("far", 1, excluded=("not in eu",)), option("here", 100)], NEEDS, CRITERIA
    )
    assert made.answer is not None
    assert made.answer.option.name == "here"
    assert made.runner_up is None
    assert made.turning == ()
    assert [each.name for each in made.excluded] == ["far"]
    assert decide_place([], NEEDS, CRITERIA).answer is None


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path / "home"))
    (tmp_path / "empty.toml").touch()
    monkeypatch.setenv("CAVVY_CONFIG", str(tmp_path / "empty.toml"))
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments), prog_name="cavvy")


PLAN = """
machines: 2
gpu: H100:8
use: 50%
owned: {price_usd: 300000}
"""


def test_each_point_names_its_fact_and_date(home: Path) -> None:
    (home / "plan.yaml").write_text(PLAN)
    done = run(
        "decide",
        str(home / "plan.yaml"),
        "--set",
        "data.gb=5000",
        "--set",
        "data.at=aws",
        "-o",
        "json",
    )
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["answer"] != told["runner_up"]
    assert told["runner_up"]
    assert told["turning"]
    for place in told["ranked"]:
        assert {point["criterion"] for point in place["points"]} == set(CRITERIA)
        for point in place["points"]:
            assert 0 <= point["score"] <= 1
            assert point["fact"]["source"]
            assert point["fact"]["as_of"], point


def test_requirements_exclude_places_with_a_reason(home: Path) -> None:
    (home / "plan.yaml").write_text(
        PLAN + "residency: [eu]\npreemption: refused\nstart_within_days: 10\n"
    )
    told = json.loads(run("decide", str(home / "plan.yaml"), "-o", "json").stdout)
    reasons = {each["name"]: "; ".join(each["reasons"]) for each in told["excluded"]}
    assert "delivery takes 56 days" in reasons["own machines"]
    assert any("not in eu" in each for each in reasons.values())
    assert any("does not tolerate preemptions" in each for each in reasons.values())
    assert not any("spot" in place["option"]["name"].split() for place in told["ranked"])


def test_a_task_file_states_what_it_needs(home: Path) -> None:
    file = home / "task.yaml"
    file.write_text("resources: {gpu: A100:1, regions: [eu]}\nrun: python train.py\n")
    missing = run("decide", str(file))
    assert (missing.exit_code, "use is missing" in missing.stderr) == (2, True)
    told = json.loads(run("decide", str(file), "--set", "use=30%", "-o", "json").stdout)
    assert told["answer"]
    reasons = {each["name"]: each["reasons"] for each in told["excluded"]}
    assert reasons["own machines"] == ["no price is stated (owned.price_usd)"]


def test_weights_change_the_answer(home: Path) -> None:
    (home / "plan.yaml").write_text(PLAN)
    zero = [f"--set=weights.{name}=0" for name in CRITERIA if name != "cost"]
    told = json.loads(run("decide", str(home / "plan.yaml"), *zero, "-o", "json").stdout)
    costs = [place["option"]["monthly"]["value"] for place in told["ranked"]]
    assert costs == sorted(costs)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("kind: nonsense", "kind: expected training or batch or service"),
        ("peak: 0", "peak: expected 1 to 1000"),
        ("peak: .inf", "peak: expected a number"),
        ("predictable: 140%", "predictable: expected 0 to 1"),
        ("data: {bytes: 3}", "data: expected a table with gb, at"),
        ("data: {gb: -1}", "data.gb: expected 0 to 1e+09"),
        ("skills: [magic]", "there is no skill 'magic'"),
        ("preemption: maybe", "preemption: expected tolerated or refused"),
        ("weights: {cost: -1}", "weights.cost: expected 0 to 1e+06"),
        (
            "weights: {cost: 0, data: 0, burst: 0, predictability: 0, latency: 0, skills: 0, preemption: 0}",
            "expected at least one above 0",
        ),
        ("residency: [{a: 1}]", "residency: expected names"),
        ("nonsense: 3", "there is no value 'nonsense'"),
        ("weigths: {cost: 2}", "did you mean weights?"),
        ("[1,", "this is not YAML"),
    ],
)
def test_odd_files_get_clear_errors(home: Path, line: str, said: str) -> None:
    (home / "plan.yaml").write_text(f"{PLAN}{line}\n")
    done = run("decide", str(home / "plan.yaml"))
    assert done.exit_code == 2, done.output
    assert said in done.stderr


def test_a_change_without_a_value_names_its_option(home: Path) -> None:
    (home / "plan.yaml").write_text(PLAN)
    done = run("decide", str(home / "plan.yaml"), "--set", "use")
    assert "--set use: expected NAME=VALUE" in done.stderr


@pytest.mark.parametrize("command", ["decide", "tco"])
def test_files_that_cannot_be_read_get_clear_errors(home: Path, command: str) -> None:
    (home / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "is not valid UTF-8" in run(command, str(home / "binary.yaml")).stderr
    assert "does not exist" in run(command, str(home / "missing.yaml")).stderr
    assert "is a directory" in run(command, str(home)).stderr
    assert "larger than 4 MiB" in run(command, "/dev/zero").stderr
    (home / "plan.yaml").write_text(PLAN.replace("H100:8", "H100:7"))
    assert run(command, str(home / "plan.yaml")).exit_code in (1, 2)


def test_a_report_of_costs_lists_each_assumption_beside_its_source(home: Path) -> None:
    (home / "plan.yaml").write_text(PLAN)
    report = home / "r.html"
    done = run("tco", str(home / "plan.yaml"), "--runs", "50", "--report", str(report))
    assert done.exit_code == 0, done.output
    told = json.loads(run("tco", str(home / "plan.yaml"), "--runs", "50", "-o", "json").stdout)
    page = report.read_text()
    assert page.count("<svg") == 3
    for each in told["assumptions"]:
        assert each["source"], each["name"]
        assert each["as_of"], each["name"]
        assert each["name"] in page
        assert each["name"] in done.stdout
    assert [each["name"] for each in told["options"]] == ["cloud", "owned", "mixed"]
    assert told["spread"]["runs"] == 50


def test_use_comes_from_a_trace_through_the_queue(home: Path) -> None:
    (home / "jobs.csv").write_text("arrival_s,duration_s,gpus,vc\n0,3600,8,a\n0,3600,4,a\n")
    (home / "pools.csv").write_text("vc,node num\na,1\n")
    use = "use: {jobs: jobs.csv, pools: pools.csv, gpus_per_node: 8}"
    (home / "plan.yaml").write_text(PLAN.replace("use: 50%", use))
    told = json.loads(run("tco", str(home / "plan.yaml"), "--runs", "0", "-o", "json").stdout)
    found = {each["name"]: each for each in told["assumptions"]}["use"]
    assert found["value"] == pytest.approx(0.75)  # 12 GPU-hours in two hours of 8 GPUs
    assert "cavvy simulate fleet" in found["source"]
    (home / "jobs.csv").write_text("arrival_s,duration_s,gpus,vc\n")
    assert "has no job" in run("tco", str(home / "plan.yaml")).stderr


def test_seven_pictures_are_drawn(home: Path) -> None:
    done = run("diagram", "--folder", str(home / "pictures"))
    assert done.exit_code == 0, done.output
    names = ["containers", "costs", "decision", "generations", "hybrid", "regions", "serverless"]
    assert sorted(path.stem for path in (home / "pictures").iterdir()) == names
    texts = {}
    for path in (home / "pictures").iterdir():
        texts[path.stem] = ET.fromstring(path.read_text())
        assert "prefers-color-scheme:dark" in path.read_text()
    said = {name: " ".join(root.itertext()) for name, root in texts.items()}
    assert "H100" in said["generations"]
    assert "kubernetes" in said["hybrid"]
    assert "sagemaker-endpoints" in said["serverless"]
    assert "cost 50%" in said["decision"]
    assert "gcp" in said["regions"]
    wrong = run("diagram", "nothing")
    assert (wrong.exit_code, "known: decision" in wrong.stderr) == (2, True)


def test_a_few_questions_replace_the_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "TASK.YAML is missing" in run("decide").stderr

    answers = iter(["L4:1", "2", "30%", "service", "refused", "eu", "-", "{price_usd: 9000}"])
    monkeypatch.setattr(click, "prompt", lambda text, default: next(answers))
    monkeypatch.setattr("cavvy.cli.task.submission.may_ask", lambda: True)
    told = json.loads(run("decide", "-o", "json").stdout)
    assert told["answer"]
    names = [place["option"]["name"] for place in told["ranked"]]
    assert "own machines" in names
    assert not any(name.endswith(" spot") for name in names)
