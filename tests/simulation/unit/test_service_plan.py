"""`cavvy plan` with recorded requests: ways to run a service, with the source of each price."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from cavvy.cli.main import cli

SERVICE = "{name: chat, run: s, resources: {gpu: L4}, service: {port: 80, replicas: {max: 4}}}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CAVVY_CONFIG", str(tmp_path / "settings.toml"))
    (tmp_path / "settings.toml").touch()
    (tmp_path / "service.yaml").write_text(SERVICE)
    (tmp_path / "job.yaml").write_text("{name: job, run: s}")
    (tmp_path / "day.csv").write_text("start_s,requests\n0,8\n600,2\n1200,0\n")
    return tmp_path


def plan(folder: Path, *arguments: str, file: str = "service.yaml") -> tuple[int, str]:
    load = ["--load", str(folder / "day.csv"), *arguments]
    found = CliRunner().invoke(cli, ["plan", str(folder / file), *load])
    return found.exit_code, found.output


def test_ways_are_compared_with_prices_of_the_catalog(folder: Path) -> None:
    plot = folder / "ways.svg"
    code, text = plan(folder, "--serverless-price", "3", "--plot", str(plot), "-o", "json")
    assert code == 0, text
    found = json.loads(text[text.index("{") :])
    ways = {each["way"]: each for each in found["ways"]}
    assert ways["always on"]["source"].startswith("skypilot-catalog")
    assert ways["always on"]["as_of"] is not None
    assert ways["to zero"]["usd_month"] < ways["always on"]["usd_month"]
    assert ways["managed endpoint"]["usd_month"] is None
    assert "the catalog has no price for it" in ways["managed endpoint"]["price"]
    assert ways["serverless"]["source"] == "stated by --serverless-price"
    assert found["requests_per_day"] == 10
    assert not any(each["limited"] for each in found["ways"])
    assert plot.stat().st_size > 1000
    code, text = plan(folder)
    assert "for 10 requests a day, and a month of 730.5 hours" in text
    assert "assumes that spot replicas are never lost" in text


def test_a_maximum_that_makes_requests_late_is_told(folder: Path) -> None:
    (folder / "service.yaml").write_text(SERVICE.replace("max: 4", "max: 1"))
    (folder / "day.csv").write_text("arrival_s,service_s\n" + "1,30\n2,30\n3,30\n" * 3)
    code, text = plan(folder)
    assert code == 0
    assert "note: with `replicas.max: 1`, more requests are late than with more replicas" in text
    assert "(always on, one kept, to zero, spot mix)" in text


def test_mistakes_are_told(folder: Path) -> None:
    assert "the file describes a job" in str(plan(folder, file="job.yaml"))
    assert "ends in .svg" in str(plan(folder, "--plot", "a.txt"))
    (folder / "day.csv").write_text("a,b\n1,2\n")
    assert "day.csv: the columns a, b belong to no known format" in str(plan(folder))
    (folder / "day.csv").write_text("")
    assert "day.csv: the file has no requests" in str(plan(folder))


def test_each_objective_of_a_language_model_has_its_price(folder: Path) -> None:
    goals = "models: [m], concurrency: 16, slo: {ttft: {p95: 2s}, token_gap: {p90: 60ms}}"
    service = SERVICE.replace("port: 80, replicas: {max: 4}", f"{goals}, replicas: {{max: 40}}")
    (folder / "service.yaml").write_text(service)
    rows = [
        f"{number / 3},{500 + number % 7 * 300},{50 + number % 5 * 40}" for number in range(900)
    ]
    (folder / "day.csv").write_text("arrival_s,prompt_tokens,answer_tokens\n" + "\n".join(rows))
    code, text = plan(folder, "-o", "json")
    assert code == 0, text
    found = json.loads(text[text.index("{") :])["objectives"]
    assert [each["factor"] for each in found] == [0.5, 0.75, 1.0, 1.5, 2.0]
    assert [each["ttft"]["limit_s"] for each in found] == [1.0, 1.5, 2.0, 3.0, 4.0]
    hours = [each["replica_hours"] for each in found]
    assert hours == sorted(hours, reverse=True)
    assert hours[0] > hours[-1]
    stated = found[2]
    assert stated["ttft_s"] <= 2.0
    assert stated["gap_s"] <= 0.066
    assert stated["usd_month"] == pytest.approx(730.5 * stated["usd_hr"])
    assert stated["history"]
    (folder / "service.yaml").write_text(service.replace("60ms", "20ms"))
    rows = [f"{number / 3},500,50" for number in range(150)]
    (folder / "day.csv").write_text("arrival_s,prompt_tokens,answer_tokens\n" + "\n".join(rows))
    code, text = plan(folder)
    assert "90% 0.02s" in text
    assert "no number of replicas meets token_gap, 90% 0.02s: the best is 0.02" in text
    (folder / "day.csv").write_text("start_s,requests\n0,8\n600,2\n1200,0\n")
    assert "the requests state no tokens, which `slo.ttft` needs" in str(plan(folder))
    (folder / "day.csv").write_text("arrival_s,prompt_tokens,answer_tokens\n1,-5,2\n")
    assert "are not numbers of tokens" in str(plan(folder))


def test_groups_on_the_same_nodes_are_planned_once(folder: Path) -> None:
    groups = "router: {run: r, resources: {cpu: 2}}, prefill: {replicas: 2}, more: {role: decode}"
    (folder / "service.yaml").write_text(
        f"{{name: chat, run: s, resources: {{gpu: L4}}, service: {{groups: {{{groups}}}}}}}"
    )
    words = ["plan", str(folder / "service.yaml"), "--limit", "1"]
    text = CliRunner().invoke(cli, words).output
    titles = [line for line in text.splitlines() if line.startswith("group")]
    assert titles == [
        "group router (1): each replica on one of these",
        "groups prefill (2), more (decode, 1): each replica on one of these",
    ]
    assert text.count("by price per hour") == 2
    assert "TOTAL" not in text
    (folder / "service.yaml").write_text(
        "{name: chat, run: s, service: {groups: {router: {}, worker: {}}}}"
    )
    said = CliRunner().invoke(cli, [*words, "-o", "json"]).output
    assert "has 2 groups of replicas; use -o table" in said


def test_each_group_of_replicas_and_the_whole_service_have_costs(folder: Path) -> None:
    groups = (
        "router: {run: r, resources: {cpu: 2}}, prefill: {replicas: {min: 1, max: 2}}, "
        "decode: {resources: {gpu: A100}, replicas: {min: 1, max: 9}}"
    )
    (folder / "service.yaml").write_text(
        "{name: chat, run: s, resources: {gpu: L4}, service: {models: [m], concurrency: 32, "
        f"slo: {{ttft: {{p95: 300ms}}, token_gap: {{p95: 60ms}}}}, groups: {{{groups}}}}}}}"
    )
    rows = [f"{number / 8},{900 + number % 7 * 100},60" for number in range(800)]
    (folder / "day.csv").write_text("arrival_s,prompt_tokens,answer_tokens\n" + "\n".join(rows))
    code, text = plan(folder, "-o", "json")
    assert code == 0, text
    found = json.loads(text[text.index("{") :])
    prefill, decode = found["groups"]
    assert [each["name"] for each in found["groups"]] == ["prefill", "decode"]
    stated = [each["objectives"][2] for each in (prefill, decode, found)]
    assert [each["ttft"] is None for each in stated] == [False, True, False]
    assert [each["token_gap"] is None for each in stated] == [True, False, False]
    # prompts take more than two replicas have; the answers, computed elsewhere, only one
    assert stated[0]["limited"] > 0.5
    assert stated[0]["late"] > 0.5
    assert (stated[1]["limited"], stated[1]["replicas"][2]) == (0.0, 1)
    assert stated[1]["gap_s"] <= 0.06
    parts = [each["usd_hr"] for each in stated]
    assert 0 < parts[2] - parts[0] - parts[1] < 0.2  # the router
    ways = [{e["way"]: e["usd_month"] for e in each["ways"]} for each in (prefill, decode, found)]
    assert ways[2]["always on"] > ways[0]["always on"] + ways[1]["always on"]
    assert ways[2]["serverless"] is ways[2]["spot mix"] is None
    code, text = plan(folder)
    assert "note: group prefill: with `replicas.max: 2`, more requests are late" in text
    assert "spot mix" not in text
    assert "prices: skypilot-catalog" in text
    code, text = plan(folder, "--serverless-price", "3")
    assert (code, "--serverless-price does not apply" in text) == (2, True)


def test_the_options_of_services_are_not_between_those_of_jobs() -> None:
    text = CliRunner().invoke(cli, ["plan", "--help"]).output
    part = text.split("A service on recorded requests:")[1].split("\n\n")[0]
    flags = re.findall(r"^  (--[\w-]+)", part, re.MULTILINE)
    rest = text.replace(part, "")
    assert len(flags) == 10
    assert not [flag for flag in flags if re.search(rf"^  {flag}\b", rest, re.MULTILINE)]
